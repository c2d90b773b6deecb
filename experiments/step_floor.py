"""The least time of a training step: its FLOPs at the rates that products and attention reach on this machine alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MATRIX_SHAPES = ("qproj", "up", "down", "wgrad_up")
ALL_TO_ALL_RATE = ALL_REDUCE_RATE = 1.7e9  # bytes a second that gloo sends from each of two ranks


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the peers' drivers train, split over ranks."""

    tokens: int
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    mlp_width: int = 688
    vocabulary: int = 8192
    label_share: float = 0.1
    """Part of the tokens that carry a label."""
    ranks: int = 2

    @property
    def block_weights(self) -> int:
        """Numbers in the matrices of all blocks."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.width * self.mlp_width)


@dataclass(frozen=True, eq=False)
class Ceilings:
    """The highest rates seen, in GFLOP/s of one of the ranks while all are busy."""

    best: dict[str, float] = field(default_factory=dict)

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take in one measurement: the mean over the ranks, kept where it is higher than before.

        lines: of ceil_local.py, `what` = gemm (with a name) or sdpa_causal
        """
        found: dict[str, list[float]] = {}
        for line in lines:
            is_product = line["what"] == "gemm"
            rate = line["gflops"] if is_product else line["fwdbwd_gflops"]
            found.setdefault(line["name"] if is_product else "attention", []).append(rate)
        for name, rates in found.items():
            self.best[name] = max(self.best.get(name, 0.0), sum(rates) / len(rates))

    def mean(self, *names: str) -> float:
        """Mean of some rates, FLOP/s."""
        return 1e9 * sum(self.best[name] for name in names) / len(names)


def floor_seconds(shape: StepShape, ceilings: Ceilings, element_size: int = 4) -> float:
    """Sum the least seconds of attention, products, head (where labels are) and exchanges of one step.

    Attention counts causal pairs, backward 2.5 times forward, as scores are made again; a product twice.
    """
    s, ranks = shape.tokens, shape.ranks
    attention = 3.5 * 2 * s * s * shape.head_dim * shape.heads * shape.layers
    head = 2 * shape.width * shape.vocabulary * s * shape.label_share
    moved = shape.layers * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    exchanged = 2 * moved * s / ranks * element_size * (ranks - 1) / ranks
    weights = shape.block_weights + 2 * shape.width * shape.vocabulary
    reduced = 2 * weights * element_size * (ranks - 1) / ranks
    return (
        attention / ranks / ceilings.mean("attention")
        + 6 * shape.block_weights * s / ranks / ceilings.mean(*MATRIX_SHAPES)
        + head / ranks / ceilings.mean("lm_head")
        + 2 * head / ranks / ceilings.mean("wgrad_head")
        + exchanged / ALL_TO_ALL_RATE
        + reduced / ALL_REDUCE_RATE
    )
