"""Drawn steps on a tiny model: what one rank of a mesh computes, and how it trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from encoders import AudioWindows, ImagePatches, VideoPatches
from experiments.base import ModelConfig, Planner, ShardingConfig, cost_model
from experiments.exactness import Computed, measure
from experiments.runtime import make_runner
from experiments.synthetic_rows import draw_media, draw_rows
from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from mmcp.model.backbone import BackboneConfig
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import Rates
from mmcp.training.optim import OptimConfig
from mmcp.training.parts import PartsConfig, part_of
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork
from mmcp.training.train import Counters, LoadedStep, TrainConfig, Trainer

VOCABULARY = 40
ENCODERS = {
    "image": ImagePatches(patch=4, channels=8, layers=1, heads=2),
    "video": VideoPatches(patch=4, channels=8, layers=1, heads=2),
    "audio": AudioWindows(bins=80, window=20, frames_per_row=4, channels=8, layers=1, heads=2),
}
PATTERNS = {
    "softmax": (SoftmaxConfig(),),
    "linear": (LinearConfig(chunk=8),),
    "delta": (GatedDeltaConfig(chunk=8), GatedDeltaConfig(chunk=8, value_heads=6, key_heads=3, head_dim=4)),
    "mix": (LinearConfig(chunk=8), SoftmaxConfig()),
}


def tiny_model(*, heads: int = 4, kv_heads: int = 2, pattern: Any = "mix", **changes) -> ModelConfig:
    """Two layers, width 16; pattern: a name above, or variants."""
    pattern = PATTERNS[pattern] if isinstance(pattern, str) else pattern
    backbone = BackboneConfig(
        width=16, layers=2, heads=heads, kv_heads=kv_heads, head_dim=8, mlp_width=24, pattern=pattern
    )
    return ModelConfig(backbone=replace(backbone, **changes), **ENCODERS)


def drawn(seed: int, rows: list[list[str]]) -> list[TokenSequence]:
    """Draw rows for the tiny model, as `experiments.synthetic_rows` does."""
    return draw_rows(rows, seed=seed, encoders=ENCODERS, vocabulary=VOCABULARY)


ONE_RANK = MeshConfig()
EVERYTHING = PartsConfig()


@dataclass(frozen=True)
class Layout:
    """What decides how a step is computed, and must not decide what it computes."""

    mesh: MeshConfig = ONE_RANK
    strategy: str = "balanced"
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    parts: PartsConfig = EVERYTHING

    def planner(self, model: ModelConfig) -> Planner:
        costs = cost_model(model, vocabulary=VOCABULARY, dtype=self.dtype, call_tokens=8, rates=Rates())
        return Planner(self.mesh, ShardingConfig(strategy=self.strategy), costs)

    def runner(self, model: ModelConfig, mesh: Mesh) -> StepRunner:
        return make_runner(
            model,
            mesh,
            vocabulary=VOCABULARY,
            seed=0,
            dtype=self.dtype,
            compute_dtype=self.compute_dtype,
            parts=self.parts,
        )

    def work(self, model: ModelConfig, rows: list[TokenSequence]) -> StepWork:
        return StepWork(self.planner(model).step(rows), draw_media(rows, seed=1, encoders=ENCODERS))


def run_case(model: ModelConfig, layout: Layout, rows: list[TokenSequence]) -> Computed:
    """Compute one step on this rank of the mesh."""
    return measure(layout.runner(model, build_mesh(layout.mesh)), layout.work(model, rows))


@dataclass(frozen=True, eq=False)
class Trained:
    """What a drawn training run left."""

    metrics: list[dict[str, Any]]
    """Per step."""
    counters: Counters
    scores: list[float]
    """Mean token loss of the held-out rows before the first step and after the last."""
    parameters: dict[str, torch.Tensor]


def train_case(
    model: ModelConfig,
    layout: Layout,
    steps: Sequence[list[TokenSequence]],
    optim: OptimConfig,
    held_out: Sequence[TokenSequence] = (),
    sgd: bool = False,
) -> Trained:
    """Train the tiny model with the real loop, one optimizer step for each list of rows."""
    runner = layout.runner(model, build_mesh(layout.mesh))
    rates = {name: layout.parts.rate(part_of(name)) for name, _ in runner.model.named_parameters()}
    adamw = optim.build(runner.model, rate_of=rates.__getitem__)
    optimizer = torch.optim.SGD(runner.model.parameters()) if sgd else adamw
    metrics: list[dict[str, Any]] = []
    trainer = Trainer(
        runner=runner,
        optimizer=optimizer,
        optim=optim,
        parts=layout.parts,
        settings=TrainConfig(),
        counters=Counters(),
        on_step=(lambda found, _: metrics.append(found),),
        save=lambda _: None,
        held_out_loss=lambda: 0.0,
        stop_requested=lambda: False,
    )

    def score() -> float:
        work = layout.work(model, list(held_out))
        return runner.score(work, StageClock(runner.device))[0].item() / max(1, work.label_tokens)

    before = score()
    trainer.run(loaded_step(number, layout.work(model, rows)) for number, rows in enumerate(steps))
    parameters = {name: whole(parameter) for name, parameter in runner.model.named_parameters()}
    return Trained(metrics, trainer.counters, [before, score()], parameters)


def loaded_step(number: int, work: StepWork) -> LoadedStep:
    """Hand a step over as a loader that lost nothing."""
    return LoadedStep(
        step=number, work=work, faults={}, refused=(), notes=(), decode_s=0.0, waited_s=0.0, frames_decoded=0
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a parameter from all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
