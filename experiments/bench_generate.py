"""What does an answer to a long prompt cost: reading it, each new token, and memory of each rank, by number of ranks?

Run:     mmcp bench generate [--json] [key=value ...]      (two idle cores, about two minutes)
Smoke:   mmcp bench generate smoke=true
Expect:  what a rank keeps, and what its resident memory grows by, fall with the ranks; the ids are the same.
Result:  experiments/LOG.md, entry "generation"
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from pydantic import PositiveInt
from rich.table import Table
from torch import Tensor

from experiments.base import ModelConfig, Planner, ShardingConfig, cost_model
from experiments.runtime import make_runner
from mmcp.attention import GatedDeltaConfig, SoftmaxConfig
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.generate import generate
from mmcp.model.backbone import BackboneConfig
from mmcp.model.vlm import RankRow, RowExchange, VideoLM
from mmcp.parallel.cached_attention import CachedAttention
from mmcp.parallel.collectives import all_gather_json
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import MeshConfig, build_mesh, process_group
from mmcp.report.outcome import Outcome
from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.cost import Rates
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepWork

VOCABULARY = 512
PATTERNS: dict[str, tuple[Any, ...]] = {
    "softmax": (SoftmaxConfig(),),
    "window 1024, sink 4": (SoftmaxConfig(window=1024, sink=4),),
    "gated delta": (GatedDeltaConfig(),),
    "hybrid 3:1": (*(GatedDeltaConfig(),) * 3, SoftmaxConfig()),
}


@config
class GenerateBench:
    """What is measured."""

    ranks: tuple[PositiveInt, ...] = (1, 2)
    tokens: PositiveInt = 16384
    """Of the prompt."""
    room: PositiveInt = 32
    """New tokens."""
    width: PositiveInt = 256
    layers: PositiveInt = 4
    heads: PositiveInt = 8
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    smoke: bool = False
    """A short prompt: shows that it works."""

    def model(self, pattern: tuple[Any, ...]) -> ModelConfig:
        """Describe a model whose logits are far apart."""
        return ModelConfig(
            backbone=BackboneConfig(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                mlp_width=2 * self.width,
                pattern=pattern,
                init_std=0.1,
            )
        )


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure every pattern on every number of ranks."""
    settings = build(GenerateBench, Source(), overrides)
    if settings.smoke:
        settings = replace(settings, tokens=256, room=4, width=32, head_dim=8)
    rows = [row for ranks in settings.ranks for row in launch(measure, ranks, settings, ranks)]
    return Outcome(record={"rows": rows}, tables=[_table(rows, settings)])


def measure(settings: GenerateBench, ranks: int) -> list[dict[str, Any]]:
    """Measure on this rank of several."""
    with process_group("cpu"):
        return [measure_pattern(settings, name, MeshConfig(ulysses=ranks)) for name in PATTERNS]


def measure_pattern(settings: GenerateBench, name: str, mesh_config: MeshConfig) -> dict[str, Any]:
    """Answer one prompt; times and memory are those of the slowest and of the fullest rank."""
    mesh, model = build_mesh(mesh_config), settings.model(PATTERNS[name])
    runner = make_runner(model, mesh, vocabulary=VOCABULARY, seed=0, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, settings.tokens).tolist()
    prompt = TokenSequence((Segment(kind="text", ids=tuple(ids)),))
    costs = cost_model(model, vocabulary=VOCABULARY, dtype=torch.float32, call_tokens=4096, rates=Rates())
    work = StepWork(Planner(mesh_config, ShardingConfig(), costs).step([prompt]), {})
    watch = Watch(runner.model)
    runner.model.predict = watch.predict  # type: ignore[method-assign]
    (answer,) = generate(runner, work, room=settings.room, end=-1, clock=StageClock(runner.device))[0]
    found = {
        "read_s": watch.seconds[0],
        "token_ms": 1e3 * median(watch.seconds[1:]),
        "kept_mb": watch.kept_mb,
        "grown_mb": watch.grown_mb,
    }
    by_rank = all_gather_json(found, group=mesh.world, name="measured")
    worst = {key: max(rank[key] for rank in by_rank) for key in found}
    return {"pattern": name, "ranks": mesh_config.world, **worst, "answer": answer}


class Watch:
    """Times the calls of a model's `predict`, and looks at memory after the first, which reads the prompt."""

    def __init__(self, model: VideoLM):
        self.model, self.own = model, model.predict
        self.seconds: list[float] = []
        self.kept_mb = self.grown_mb = 0.0
        self.start_mb = resident_mb()

    def predict(self, row: RankRow, calls: Sequence[tuple], exchange: RowExchange) -> Tensor:
        """Do what the model does."""
        began = time.monotonic()
        logits = self.own(row, calls, exchange)
        self.seconds.append(time.monotonic() - began)
        if len(self.seconds) == 1:
            cache = next(x.cache for x in self.model.modules() if isinstance(x, CachedAttention))
            self.kept_mb, self.grown_mb = cache.nbytes / 2**20, resident_mb() - self.start_mb
        return logits


def resident_mb() -> float:
    """Return the MiB that this process holds, after what is free was given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def _table(rows: list[dict[str, Any]], settings: GenerateBench) -> Table:
    table = Table(title=f"a prompt of {settings.tokens} tokens, {settings.room} new ones")
    for name in ("layers", "ranks", "read, s", "a token, ms", "kept, MB", "resident, MB", "ids as the first"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for row in rows:
        first = next(other["answer"] for other in rows if other["pattern"] == row["pattern"])
        same = sum(a == b for a, b in zip(row["answer"], first, strict=True))
        numbers = (f"{row[name]:.2f}" for name in ("read_s", "token_ms", "kept_mb", "grown_mb"))
        table.add_row(row["pattern"], str(row["ranks"]), *numbers, f"{same} of {len(first)}")
    return table
