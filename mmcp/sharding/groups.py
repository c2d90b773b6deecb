"""Units by group of pictures, and layouts to start from that respect these groups.

Whoever shows a late unit of a group decodes the frames of all before it, so early units of a group cost little where a
late one is, and a group that is split costs its frames several times.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.evenness import DECODE, SCALE, Evenness

DEAR = SCALE // 40
"""Groups that cost less than this part of an even share stay at home."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Units sorted by group, then by the frames they need; what needs no frames of another is a group of its own."""

    costs: RowCosts

    @cached_property
    def order(self) -> np.ndarray:
        """[u] int64: the units, sorted."""
        return np.lexsort((self.costs.spans[:, 1], *self._key[::-1]))

    @cached_property
    def number(self) -> np.ndarray:
        """[u] int64: the group of each entry of `order`, ascending from 0."""
        sorted_key = np.stack(self._key, axis=1)[self.order]
        return np.cumsum((np.diff(sorted_key, axis=0, prepend=-1) != 0).any(axis=1)) - 1

    @cached_property
    def first(self) -> np.ndarray:
        """[groups + 1] int64: first entry of each group in `order`, then the number of units."""
        return np.searchsorted(self.number, np.arange(self.number.max(initial=-1) + 2))

    @property
    def _key(self) -> tuple[np.ndarray, ...]:
        starts, stops = self.costs.spans.T
        is_alone = starts == stops
        return self.costs.streams, is_alone, np.where(is_alone, np.arange(len(starts)), starts)


def whole_groups(evenness: Evenness, groups: Groups, holders: np.ndarray) -> np.ndarray:
    """Return [u] int64: each group whole on one rank, the dearest first, at home where there is room.

    holders: [u] int64  the rank that holds the first token of each unit
    """
    work = _work(evenness, groups)
    owners = holders[groups.order[(groups.first[:-1] + groups.first[1:]) // 2]]
    loads = np.zeros((evenness.num_ranks, 3), dtype=np.int64)
    dearness = work.max(axis=1)
    dear = np.flatnonzero(dearness > DEAR)
    for group in dear[np.argsort(-dearness[dear], kind="stable")].tolist():
        rank = owners[group]
        if (loads[rank] + work[group] > evenness.even).any():
            rank = int((loads + work[group]).max(axis=1).argmin())
        owners[group] = rank
        loads[rank] += work[group]
    ranks = np.empty_like(groups.order)
    ranks[groups.order] = owners[groups.number]
    return ranks


def latest_first(evenness: Evenness, groups: Groups) -> np.ndarray | None:
    """Return [u] int64: ranks filled with the last units of the groups longer than a rank's share; None: there is none.

    Filled ranks decode such a group once each, and as few as can are filled; all other units go to the ranks left.
    """
    is_long = _work(evenness, groups)[:, DECODE] > SCALE
    ranks, cap = evenness.num_ranks, int(evenness.even[0])
    flops = evenness.scale(np.stack([evenness.costs.flops] * 3, axis=1))[groups.order, 0]
    parts = np.full(len(flops), -1)
    filled = 0
    for group in np.flatnonzero(is_long).tolist():
        units = np.arange(groups.first[group], groups.first[group + 1])[::-1]
        turn = (np.cumsum(flops[units]) - 1) // max(1, cap - int(flops[units].max()))
        full = min(int(turn[-1]), ranks - 1 - filled)
        parts[units[turn < full]] = filled + turn[turn < full]
        filled += full
    if not filled:
        return None
    rest = np.flatnonzero(parts < 0)
    before = np.cumsum(flops[rest]) - flops[rest]
    parts[rest] = filled + np.minimum(before * (ranks - filled) // max(1, int(flops[rest].sum())), ranks - filled - 1)
    placed = np.empty_like(parts)
    placed[groups.order] = parts
    return placed


def _work(evenness: Evenness, groups: Groups) -> np.ndarray:
    """Load of each group on one rank: [groups, 3] int64."""
    costs = evenness.costs
    number = len(groups.first) - 1
    work = np.zeros((number, 3), dtype=np.int64)
    np.add.at(work, groups.number, np.stack([costs.flops, costs.output_ns, costs.bytes], axis=1)[groups.order])
    frames = ((costs.spans[:, 1] - costs.spans[:, 0]) * costs.frame_ns)[groups.order]
    reach = np.zeros(number, dtype=np.int64)
    np.maximum.at(reach, groups.number, frames)
    work[:, DECODE] += reach
    return evenness.scale(work)
