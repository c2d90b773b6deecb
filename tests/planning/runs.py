"""Real forward and backward passes on gloo ranks, watched: tensors kept for backward, and what is exchanged."""

from dataclasses import dataclass, field
from typing import Any

import torch

from encoders import AudioWindows, ImagePatches, VideoPatches
from experiments.base import ModelConfig, Planner, ShardingConfig, build_model, cost_model
from experiments.synthetic_rows import draw_media
from mmcp.attention import SoftmaxConfig
from mmcp.model.backbone import BackboneConfig
from mmcp.parallel.apply import wrap_attention
from mmcp.parallel.collectives import Traffic, all_reduce, record
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.planning.architecture import Architecture
from mmcp.planning.memory import KeptBytes, Numbers, kept_bytes
from mmcp.planning.share import share_of
from mmcp.planning.simulate import kept_tensors
from mmcp.planning.step_traffic import row_traffic
from mmcp.sequence import TokenSequence, pack
from mmcp.sharding.cost import Rates, row_costs
from mmcp.training.media import MediaInputs
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork
from tests.planning.rows import media_row

VOCABULARY = 80
ENCODERS = {
    "image": ImagePatches(patch=4, channels=32, layers=2, heads=2),
    "video": VideoPatches(patch=4, channels=32, layers=2, heads=2),
    "audio": AudioWindows(bins=80, window=20, frames_per_row=4, channels=32, layers=2, heads=2),
}
UNIT_BYTES: dict[str, Any] = {
    "image": lambda size: 3 * size[0] * size[1],
    "video": lambda size: 3 * size[0] * size[1] * size[2],
    "audio": lambda size: 4 * 80 * size[0],
}


@dataclass(frozen=True)
class Run:
    """One forward and backward of one row."""

    pattern: tuple[Any, ...] = (SoftmaxConfig(),)
    ring: int = 1
    ulysses: int = 1
    heads: int = 6
    kv_heads: int = 3
    documents: tuple[int, ...] = (700, 500)
    """Text tokens of each packed document, around its media."""
    media: int = 12
    """Units of each kind in each document."""
    strategy: str = "balanced"
    dtype: torch.dtype = torch.float32
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the backbone."""

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def model(self) -> ModelConfig:
        settings = {"width": 48, "layers": 3, "head_dim": 16, "mlp_width": 128, **self.changes}
        backbone = BackboneConfig(heads=self.heads, kv_heads=self.kv_heads, pattern=self.pattern, **settings)
        return ModelConfig(backbone=backbone, **ENCODERS)

    def row(self) -> TokenSequence:
        return pack([media_row(tokens, self.media, seed=seed) for seed, tokens in enumerate(self.documents)])


@dataclass(frozen=True)
class Watched:
    """What one rank did, and what was predicted of it."""

    kept: int
    predicted: KeptBytes
    counted: dict[tuple[str, str], Traffic]
    expected: dict[tuple[str, str], Traffic]


def watch(run: Run) -> Watched:
    """Run on this rank."""
    mesh = build_mesh(MeshConfig(ring=run.ring, ulysses=run.ulysses))
    model = build_model(run.model, vocabulary=VOCABULARY, seed=0, dtype=run.dtype)
    wrap_attention(model, mesh)
    costs = cost_model(run.model, vocabulary=VOCABULARY, dtype=run.dtype, call_tokens=64, rates=Rates())
    planner = Planner(mesh.config, ShardingConfig(strategy=run.strategy), costs)
    row = run.row()
    work = StepWork(planner.step([row]), draw_media([row], seed=1, encoders=ENCODERS))
    media = MediaInputs(
        dict(model.encoders.items()),
        finish=lambda raw, loudest: raw,
        silence=-10.0,
        reduce_max=lambda values: all_reduce(values, "max", group=mesh.cp, name="loudest sound"),
        device=mesh.device,
    )
    runner = StepRunner(model, mesh, media=media, positions=run.model.backbone.positions_of, device=mesh.device)
    with record(mesh.world) as recorder:
        (batch,) = runner.micro_batches(work, StageClock(mesh.device))
        with kept_tensors(*model.parameters()) as kept:
            loss = model(batch.row, batch.calls, batch.exchange)[0]
        kept_now = kept()
        loss.backward()
    plan, priced = work.plan.plans[0], row_costs(row, costs)
    architecture = Architecture(name="run", backbone=run.model.backbone, vocabulary=VOCABULARY)
    share = share_of(row, plan, priced, rank=mesh.cp.index, unit_bytes=UNIT_BYTES)
    numbers = Numbers(master=run.dtype.itemsize, compute=run.dtype.itemsize)
    checkpointing = run.model.backbone.checkpointing
    return Watched(
        kept=kept_now,
        predicted=kept_bytes(architecture, share, numbers, checkpointing=checkpointing),
        counted=recorder.traffic,
        expected=row_traffic(architecture, row, plan, rank=mesh.cp.index, dtype=run.dtype, checkpointing=checkpointing),
    )
