"""What every job shares: the config of a run, and the model and plans that it describes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from encoders import ENCODERS, AudioWindows, Encoder, ImagePatches, VideoPatches
from mmcp.config import OneOf, config
from mmcp.model.backbone import BackboneConfig
from mmcp.model.vlm import VideoLM
from mmcp.parallel.mesh import MeshConfig
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import CostModel, LayerCost, Rates, row_costs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.step import StepPlan, plan_step
from mmcp.sharding.strategies import STRATEGIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@config
class ModelConfig:
    """Encoders and backbone."""

    backbone: BackboneConfig
    image: Annotated[Any, OneOf(ENCODERS)] = ImagePatches()
    video: Annotated[Any, OneOf(ENCODERS)] = VideoPatches()
    audio: Annotated[Any, OneOf(ENCODERS)] = AudioWindows()

    def __post_init__(self):
        for kind, encoder in self.encoders.items():
            if encoder.kind != kind:
                raise ValueError(f"{kind}: encoder '{encoder.name}' encodes {encoder.kind}; choose one for {kind}")

    @property
    def encoders(self) -> dict[str, Encoder]:
        """By segment kind."""
        return {"audio": self.audio, "image": self.image, "video": self.video}


@config
class ShardingConfig:
    """How a row is split over the ranks of a group."""

    strategy: str = "balanced"
    """Name of a registered sharding strategy."""
    call_tokens: int = 4096
    """Most rows that one encoder call makes (one unit at least)."""

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            known = ", ".join(sorted(STRATEGIES))
            raise ValueError(f"sharding strategy '{self.strategy}' is unknown; use one of {known}")
        if self.call_tokens < 1:
            raise ValueError(f"call_tokens={self.call_tokens} rows; use at least 1")


def build_model(model: ModelConfig, *, vocabulary: int, seed: int, dtype: torch.dtype) -> VideoLM:
    """Make the model with new weights, the same on every rank."""
    width = model.backbone.width
    torch.manual_seed(seed)
    encoders = {kind: encoder.build(width) for kind, encoder in model.encoders.items()}
    return VideoLM(model.backbone.build(), encoders, vocabulary=vocabulary, width=width).to(dtype)


def cost_model(model: ModelConfig, *, vocabulary: int, dtype: torch.dtype, call_tokens: int, rates: Rates) -> CostModel:
    """Price the model's parts by the methods of their configs."""
    backbone, width, size = model.backbone, model.backbone.width, dtype.itemsize
    return CostModel(
        encoder_flops={kind: partial(encoder.flops, width=width) for kind, encoder in model.encoders.items()},
        encoder_bytes={
            kind: partial(encoder.activation_bytes, element_size=size, width=width)
            for kind, encoder in model.encoders.items()
        },
        linear_flops=backbone.flops_per_token(),
        layers=_layer_costs(backbone),
        label_flops=2 * width * vocabulary,
        token_bytes=backbone.activation_bytes_per_token(size),
        label_bytes=2 * width * size,
        row_bytes=width * size,
        call_tokens=call_tokens,
        rates=rates,
    )


def _layer_costs(backbone: BackboneConfig) -> tuple[LayerCost, ...]:
    """Group equal layers and price their attention."""
    counts: dict[Any, int] = {}
    for variant in backbone.variants:
        counts[variant] = counts.get(variant, 0) + 1
    return tuple(
        LayerCost(
            count=count,
            heads=backbone.heads,
            pair_flops=variant.pair_flops(backbone.head_dim),
            token_flops=variant.token_flops(backbone.head_dim),
            window=variant.window,
        )
        for variant, count in counts.items()
    )


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans rows and steps for a mesh: a pure function of the rows, the config and the rates."""

    mesh: MeshConfig
    sharding: ShardingConfig
    costs: CostModel

    def row(self, row: TokenSequence) -> ShardPlan:
        """Plan one row over the context-parallel ranks of a group."""
        strategy = STRATEGIES[self.sharding.strategy]
        return strategy(row, (self.mesh.ring, self.mesh.ulysses), row_costs(row, self.costs))

    def step(self, rows: Sequence[TokenSequence]) -> StepPlan:
        """Plan an optimizer step of these rows."""
        return plan_step(rows, groups=self.mesh.data, plan_row=self.row, cost=self._cost)

    def _cost(self, row: TokenSequence) -> int:
        return row_costs(row, self.costs).total_flops
