"""Cut the units of a row, in token order, into one run per rank: as even in every cost as runs can be.

A run decodes what its units add to the frames before them, and again the frames that its first unit shares with the
run before. So the end of the longest run from a place that stays within given loads is found by bisection in running
sums, and a chain of longest runs says whether the loads can be met at all. The least loads that can are found by
bisection in turn; among the chains within them, each cut goes as near as it can to where the tokens are cut.
"""

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.evenness import DECODE, SCALE, Evenness

FINEST = SCALE // 256
"""Loads are bisected down to this."""


def cut_runs(evenness: Evenness, targets: np.ndarray) -> np.ndarray:
    """Return [u] int64: the run of each unit, ascending.

    targets: [ranks - 1] int64, ascending  the unit before which each cut would best be
    """
    runs = _Runs(evenness)
    low, high = -1, 0
    while not runs.fit(high):
        low, high = high, max(FINEST, 2 * high)
    while high - max(low, 0) > FINEST:
        middle = (low + high) // 2
        low, high = (low, middle) if runs.fit(middle) else (middle, high)
    return np.repeat(np.arange(evenness.num_ranks), np.diff(runs.cut(high, targets), prepend=0, append=runs.units))


def shared_decoding(costs: RowCosts, order: np.ndarray) -> np.ndarray:
    """Decoding, in nanoseconds, that each unit shares with the unit before it in `order`; 0 between streams."""
    shared = np.zeros(len(order), dtype=np.int64)
    before, after = order[:-1], order[1:]
    starts = np.maximum(costs.spans[before, 0], costs.spans[after, 0])
    frames = np.maximum(np.minimum(costs.spans[before, 1], costs.spans[after, 1]) - starts, 0)
    shared[1:] = np.where(costs.streams[before] == costs.streams[after], frames * costs.frame_ns[after], 0)
    return shared


def cut_costs(costs: RowCosts) -> np.ndarray:
    """Price a cut before each unit: [u + 1] int64 nanoseconds of decoding that both sides would do.

    A clip with key frames at 0 and 10, its units showing frames 0, 5, 10: cutting before the second decodes frames
    0..4 twice, cutting before the third nothing.
    """
    order = np.argsort(costs.streams, kind="stable")
    shared = shared_decoding(costs, order)
    price = np.zeros(costs.num_units + 1, dtype=np.int64)
    np.add.at(price, order[:-1] + 1, shared[1:])
    np.add.at(price, order[1:] + 1, -shared[1:])
    return np.cumsum(price)


class _Runs:
    """Running sums of the units' loads, and the chains of runs within given loads."""

    def __init__(self, evenness: Evenness):
        costs = evenness.costs
        self.units, self.parts, self.even = costs.num_units, evenness.num_ranks, evenness.even
        order = np.argsort(costs.streams, kind="stable")
        alone = (costs.spans[:, 1] - costs.spans[:, 0]) * costs.frame_ns + costs.output_ns
        decoding = np.empty_like(alone)
        decoding[order] = np.maximum(alone[order] - shared_decoding(costs, order), 0)
        each = np.stack([costs.flops, decoding, costs.bytes], axis=1)
        self.before = evenness.scale(np.concatenate([np.zeros((1, 3), dtype=np.int64), np.cumsum(each, axis=0)]))
        again = np.zeros_like(self.before)
        again[:, DECODE] = cut_costs(costs)
        self.again = evenness.scale(again)

    def fit(self, more: int) -> bool:
        """Whether runs exist in which no load is above even by `more`."""
        return self._chain(self._reach(more))[-1] == 0

    def cut(self, more: int, targets: np.ndarray) -> np.ndarray:
        """Return [parts - 1] int64: cuts within those loads, each near its target."""
        reach = self._reach(more)
        latest = self._chain(reach)
        cuts, start = [], 0
        for part, target in enumerate(targets.tolist()):
            places = np.arange(start, reach[start] + 1)
            rest = latest[max(self.parts - part - 2, 0)]
            fitting = places[reach[places] >= rest]
            start = int(fitting[np.abs(fitting - target).argmin()] if len(fitting) else places[-1])
            cuts.append(start)
        return np.array(cuts, dtype=np.int64)

    def _reach(self, more: int) -> np.ndarray:
        """[u + 1] int64: the last end of a run from each place on, not before that place."""
        reach = np.full(self.units + 1, self.units)
        for column, limit in enumerate((self.even + more).tolist()):
            before = self.before[:, column]
            end = np.searchsorted(before, before + limit - self.again[:, column], side="right") - 1
            reach = np.minimum(reach, end)
        return np.maximum(reach, np.arange(self.units + 1))

    def _chain(self, reach: np.ndarray) -> list[int]:
        """Return the first place from which k runs reach the end, for k from 0 to the number of parts."""
        furthest = np.maximum.accumulate(reach)
        chain = [self.units]
        for _ in range(self.parts):
            chain.append(int(np.searchsorted(furthest, chain[-1])))
        return chain
