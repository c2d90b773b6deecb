"""How an attention layer works over several ranks: one entry for each mode that a variant's config may name.

A row lies on ring x ulysses ranks. Heads are shared out inside a group of ranks, whose tokens one all-to-all joins;
what a mode adds is how a group attends to tokens of other groups:

    ulysses     one group of all ranks: there are no others
    ring        the ranks of one ring index; keys and values travel from group to group, point to point
    allgather   the same groups; each gathers the keys and values of all
    state       the same groups; each gathers what all tokens do to the state of a recurrent variant
    scan        the same groups; the same in a parallel scan over runs of tokens, in about log2 as many messages

With ulysses=1 a group is one rank and no heads are traded; with ring=1 all modes are Ulysses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import (
    Attention,
    HeadShape,
    HeadShare,
    RecurrentAttention,
    RowInfo,
    SoftmaxAttention,
    Variant,
    split_heads,
)
from mmcp.parallel.collectives import Group
from mmcp.parallel.head_groups import HeadGroup, head_groups
from mmcp.parallel.kv_gather import gathered_attention
from mmcp.parallel.ring import ring_attention
from mmcp.parallel.state_passing import gathered_states, state_attention
from mmcp.parallel.state_scan import scanned_states
from mmcp.registry import Registry

MODES = Registry("attention mode")


@dataclass(frozen=True)
class Mode:
    """One way to attend over several ranks."""

    name: str
    carries: type
    """Variants that it can carry."""
    needs: str
    """What it needs of a variant, for the error."""
    is_flat: bool
    """Whether all ranks of the row are one group."""
    attend: Callable[[Any, dict[str, Tensor], RowInfo, HeadShare, Group], Tensor]
    """(core, inputs, info, heads, ring group) -> output: attention of a group's tokens to the whole row."""

    def check(self, core: Attention) -> None:
        """Raise ValueError when this mode cannot carry `core`."""
        if not isinstance(core, self.carries):
            possible = ", ".join(f"'{mode.name}'" for mode in MODES.values() if isinstance(core, mode.carries))
            raise ValueError(
                f"mode '{self.name}' needs {self.needs}, which {type(core).__name__} is not; use one of {possible}"
            )

    def groups(self, heads: int, kv_heads: int, chunks: int, *, ring: int, ulysses: int) -> tuple[HeadGroup, ...]:
        """Share out heads inside a group of ranks, in `chunks` exchanges.

        Raises ValueError when some rank would get no head, or fewer than chunks.
        """
        return head_groups(split_heads(heads, kv_heads, ring * ulysses if self.is_flat else ulysses), chunks)


def check_layer(variant: Variant, shape: HeadShape, *, ring: int, ulysses: int) -> None:
    """Raise ValueError when a layer cannot work over ring x ulysses ranks; what a layer does when it is wrapped.

    shape: all heads of the layer
    """
    with torch.device("meta"):
        core = variant.build(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    mode = MODES[variant.mode]
    mode.check(core)
    mode.groups(shape.heads, shape.kv_heads, variant.chunks, ring=ring, ulysses=ulysses)


def _attend_whole(core: Attention, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, _ring: Group) -> Tensor:
    return core(inputs, info, heads)


_MERGES, _HANDS_ON = "answers that merge by log-sum-exp", "a state that runs of tokens hand on"
MODES.register("ulysses")(Mode("ulysses", Attention, "any variant", True, _attend_whole))
MODES.register("ring")(Mode("ring", SoftmaxAttention, _MERGES, False, ring_attention))
MODES.register("allgather")(Mode("allgather", SoftmaxAttention, _MERGES, False, gathered_attention))
MODES.register("state")(
    Mode("state", RecurrentAttention, _HANDS_ON, False, partial(state_attention, exchange=gathered_states))
)
MODES.register("scan")(
    Mode("scan", RecurrentAttention, _HANDS_ON, False, partial(state_attention, exchange=scanned_states))
)
