"""Ulysses in groups of heads: the exchange of one group travels under the attention to another.

All groups leave at the start and each is attended to as it arrives; outputs leave as they are made and land together.
Autograd runs the nodes of a forward in reverse, so backward overlaps the same way: the gradients of all outputs leave
first, and those of the inputs leave group by group. Bytes are those of one exchange of all heads: a key-value head
that several groups read travels with the first.

Two groups of a rank with query heads 0 1 2 over one key-value head K:   group 0 moves 0 K, group 1 moves 1 2
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, HeadTensor
from mmcp.parallel.collectives import Flight
from mmcp.parallel.head_exchange import HeadExchange, sum_heads
from mmcp.sharding.ranges import even_bounds

Attend = Callable[[dict[str, Tensor], HeadShare], Tensor]


@dataclass(frozen=True)
class HeadGroup:
    """The heads that one exchange moves: of each rank its next query heads, and the key-value heads new to them."""

    shares: tuple[HeadShare, ...]
    """Per rank: the heads that its attention to this group reads."""
    new_kv: tuple[tuple[int, int], ...]
    """Per rank: first and last + 1 key-value head that travels with this group."""

    @property
    def query(self) -> tuple[tuple[int, int], ...]:
        """Per rank: first and last + 1 query head."""
        return tuple((share.query_heads[0], share.query_heads[-1] + 1) for share in self.shares)


def head_groups(shares: Sequence[HeadShare], chunks: int) -> tuple[HeadGroup, ...]:
    """Cut the heads of every rank into `chunks` groups. Raises ValueError when some rank has fewer heads."""
    fewest = min(len(share.query_heads) for share in shares)
    if chunks > fewest:
        raise ValueError(f"chunks={chunks} groups of heads, but some rank has {fewest}; use at most {fewest}")
    cuts = [_cut(share, chunks) for share in shares]
    groups = []
    for number in range(chunks):
        parts = tuple(cut[number] for cut in cuts)
        seen = [cut[number - 1].kv_heads[-1] + 1 if number else 0 for cut in cuts]
        new = tuple(
            (max(part.kv_heads[0], start), max(part.kv_heads[-1] + 1, start))
            for part, start in zip(parts, seen, strict=True)
        )
        groups.append(HeadGroup(parts, new))
    return tuple(groups)


def _cut(share: HeadShare, chunks: int) -> list[HeadShare]:
    parts = []
    for start, stop in pairwise(even_bounds(len(share.query_heads), chunks)):
        first, last = share.kv_of_query[start], share.kv_of_query[stop - 1]
        parts.append(
            HeadShare(
                share.query_heads[start:stop],
                share.kv_heads[first : last + 1],
                tuple(kv - first for kv in share.kv_of_query[start:stop]),
            )
        )
    return parts


@dataclass(frozen=True, eq=False)
class GroupedExchange:
    """The exchanges of all groups of one layer and row."""

    tensors: tuple[HeadTensor, ...]
    inputs: tuple[HeadExchange, ...]
    """Per group."""
    outputs: tuple[HeadExchange, ...]
    """Per group."""
    shares: tuple[HeadShare, ...]
    """Per group: the heads this rank attends with."""

    def run(self, inputs: Sequence[Tensor], attend: Attend) -> Tensor:
        """Attend group by group.

        inputs: one [s/cp, heads, dim] for each tensor   attend: from a group's tensors and heads to [s, heads, out_dim]
        returns [s/cp, h, out_dim]
        """
        trip = _Trip(self, [None] * len(self.inputs), [None] * len(self.inputs))
        tokens = _Depart.apply(trip, *inputs)
        landing = []
        kept: dict[str, Tensor] = {}
        for number, (token, share) in enumerate(zip(tokens, self.shares, strict=True)):
            arrived = dict(zip([t.name for t in self.tensors], _Arrive.apply(trip, number, token), strict=True))
            kept = {t.name: _joined(kept.get(t.name), arrived[t.name], t, share) for t in self.tensors}
            landing.append(_Leave.apply(trip, number, attend(kept, share)))
        return _Land.apply(trip, *landing)


def _joined(before: Tensor | None, new: Tensor, tensor: HeadTensor, share: HeadShare) -> Tensor:
    """Return the heads a group reads: the new ones, after the last of the group before where both read it."""
    if tensor.heads == "query" or new.shape[1] == len(share.kv_heads):
        return new
    assert before is not None
    last = before[:, -1:]
    return last if not new.shape[1] else torch.cat([last, new], dim=1)


@dataclass(frozen=True, eq=False)
class _Trip:
    """What is on its way in one forward and its backward, per group."""

    plan: GroupedExchange
    inputs: list[Any]
    """(received, flight) of the inputs in forward, of their gradients in backward."""
    outputs: list[Any]
    """(received, flight) of the outputs in forward, of their gradients in backward."""


def _take(way: list[Any], number: int) -> Tensor:
    """Wait for what group `number` has under way and return it."""
    (received, flight), way[number] = way[number], None
    assert isinstance(flight, Flight)
    flight.wait()
    return received


def _assemble(exchanges: Sequence[HeadExchange], way: list[Any]) -> tuple[Tensor, ...]:
    """Wait for all groups and put the tensors they move together: each [s/cp, heads, dim]."""
    pieces = [exchange.finish_gather(_take(way, number)) for number, exchange in enumerate(exchanges)]
    specs = zip(*(exchange.tensors for exchange in exchanges), strict=True)
    whole = []
    for number, of_groups in enumerate(specs):
        ranges = tuple(bounds for spec in of_groups for bounds in spec.ranges)
        whole.append(sum_heads(replace(of_groups[0], ranges=ranges), [x for group in pieces for x in group[number]]))
    return tuple(whole)


class _Depart(torch.autograd.Function):
    """Inputs -> one scalar for each group, which orders the nodes; the data are in the trip."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        for number, exchange in enumerate(trip.plan.inputs):
            trip.inputs[number] = exchange.start_scatter(tensors, backward=False)
        return tuple(tensors[0].new_zeros(()) for _ in trip.plan.inputs)

    @staticmethod
    def backward(ctx: Any, *_tokens: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_assemble(ctx.trip.plan.inputs, ctx.trip.inputs)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, number: int, _token: Tensor) -> tuple[Tensor, ...]:
        ctx.trip, ctx.number = trip, number
        return trip.plan.inputs[number].finish_scatter(_take(trip.inputs, number))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.trip.plan.inputs[ctx.number]
        ctx.trip.inputs[ctx.number] = exchange.start_gather(grads, backward=True)
        return None, None, grads[0].new_zeros(())


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, number: int, out: Tensor) -> Tensor:
        ctx.trip, ctx.number = trip, number
        trip.outputs[number] = trip.plan.outputs[number].start_gather((out,), backward=False)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.trip.plan.outputs[ctx.number].finish_scatter(_take(ctx.trip.outputs, ctx.number))
        return None, None, grad


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, *_tokens: Tensor) -> Tensor:
        ctx.trip = trip
        (whole,) = _assemble(trip.plan.outputs, trip.outputs)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for number, exchange in reversed(list(enumerate(ctx.trip.plan.outputs))):
            ctx.trip.outputs[number] = exchange.start_scatter((grad,), backward=True)
        return None, *(grad.new_zeros(()) for _ in ctx.trip.plan.outputs)
