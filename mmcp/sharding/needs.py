"""What the layers of a backbone ask of a layout of tokens; the strictest layer decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmcp.sharding.cost import LayerCost

FEW_RANGES, STATE_RANGES = 4, 2


@dataclass(frozen=True, kw_only=True)
class Needs:
    """How a backbone wants tokens to lie.

    Softmax attention under Ulysses asks nothing, in a ring even work at each hop (its pairs say so in the costs).
    Passing recurrent state composes one state for each range, and a convolution fetches a halo for each.
    """

    max_ranges: int = FEW_RANGES
    """Ranges of tokens that a rank should hold at most; at least 1."""

    def __post_init__(self):
        if self.max_ranges < 1:
            raise ValueError(f"max_ranges={self.max_ranges} leaves a rank no tokens; use at least 1")


FREE = Needs()


def layer_needs(layers: Sequence[LayerCost]) -> Needs:
    """Return what all layers together ask: two ranges a rank, as in zigzag, when any passes state; else four."""
    return Needs(max_ranges=STATE_RANGES if any(layer.mode in ("state", "scan") for layer in layers) else FEW_RANGES)
