"""Drawn steps for the exactness tests: rows with every kind of segment, random media, and a tiny model."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from encoders import AudioWindows, ImagePatches, VideoPatches
from experiments.base import ModelConfig, Planner, ShardingConfig, cost_model
from experiments.runtime import make_runner
from experiments.verify import Outcome, measure
from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from mmcp.model.backbone import BackboneConfig
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.sequence import Segment, TokenSequence, Unit, pack
from mmcp.sharding.cost import Rates
from mmcp.training.step import StepWork

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


def tiny_model(*, heads: int = 4, kv_heads: int = 2, pattern: str = "mix", **changes) -> ModelConfig:
    """Two layers, width 16."""
    backbone = BackboneConfig(
        width=16, layers=2, heads=heads, kv_heads=kv_heads, head_dim=8, mlp_width=24, pattern=PATTERNS[pattern]
    )
    return ModelConfig(backbone=replace(backbone, **changes), **ENCODERS)


def draw_document(rng: np.random.Generator, kinds: str, *, has_labels: bool = True) -> TokenSequence:
    """Draw one document, a segment for each letter of `kinds`: t text, i image, v video, a sound."""
    segments = []
    for i, letter in enumerate(kinds):
        if letter == "t":
            ids = tuple(rng.integers(0, VOCABULARY, int(rng.integers(2, 8))).tolist())
            is_answer = i == len(kinds) - 1 or bool(rng.integers(2))
            segments.append(Segment(kind="text", ids=ids, loss=has_labels and is_answer))
            continue
        kind = {"i": "image", "v": "video", "a": "audio"}[letter]
        units = tuple(_draw_unit(rng, kind) for _ in range(int(rng.integers(1, 4))))
        segments.append(Segment(kind=kind, units=units, source=f"clip{rng.integers(3)}"))
    return TokenSequence(tuple(segments))


def _draw_unit(rng: np.random.Generator, kind: str) -> Unit:
    side = 8 * int(rng.integers(1, 3))
    size = {"image": (8, side), "video": (2, 8, side), "audio": (4 * int(rng.integers(1, 6)),)}[kind]
    grid = ENCODERS[kind].grid(size)
    return Unit(
        num_tokens=grid[0] * grid[1] * grid[2], start=Fraction(0), end=Fraction(1), grid=grid, size=size, items=()
    )


def draw_rows(seed: int, rows: list[list[str]], *, has_labels: bool = True) -> list[TokenSequence]:
    """Draw rows of packed documents: [["tvt", "t"], ["ta"]] is two rows, of two documents and of one."""
    rng = np.random.default_rng(seed)
    return [pack([draw_document(rng, kinds, has_labels=has_labels) for kinds in row]) for row in rows]


def draw_media(seed: int, rows: list[TokenSequence]) -> dict[int, dict[int, np.ndarray]]:
    """Draw pixels and log-mel for every unit, the same on every rank."""
    rng = np.random.default_rng(seed)  # in the order of the global batch, however it is cut into rows
    return {
        i: {number: _draw_array(rng, row.unit_segment(number).kind, unit.size) for number, unit in enumerate(row.units)}
        for i, row in enumerate(rows)
    }


def _draw_array(rng: np.random.Generator, kind: str, size: tuple[int, ...]) -> np.ndarray:
    if kind == "audio":
        return rng.uniform(-10, 1, (80, *size)).astype(np.float32)
    return rng.integers(0, 256, (*size, 3), dtype=np.uint8)


def run_case(
    model: ModelConfig,
    mesh_config: MeshConfig,
    rows: list[TokenSequence],
    strategy: str = "balanced",
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """Compute one step on this rank of the mesh."""
    mesh = build_mesh(mesh_config)
    costs = cost_model(model, vocabulary=VOCABULARY, dtype=dtype, call_tokens=8, rates=Rates())
    plan = Planner(mesh_config, ShardingConfig(strategy=strategy), costs).step(rows)
    runner = make_runner(model, mesh, vocabulary=VOCABULARY, seed=0, dtype=dtype)
    return measure(runner, StepWork(plan, draw_media(1, rows)))
