"""How many (query, key) pairs a row's mask allows between sets of tokens: closed forms on ranges, no matrix.

A mask is given as disjoint slices (see Mask.slices): rectangles of queries and keys, between two diagonals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmcp.sharding.ranges import Ranges, overlapping, pieces


def group_pairs(slices: np.ndarray, groups: Sequence[Ranges]) -> np.ndarray:
    """Count pairs between groups of tokens: [groups, groups] int64, entry (i, j) with queries of i and keys of j.

    slices: [slices, 6] int64
    A query q of a slice reads keys k0 <= k < min(k1, q + high + 1) less those k < q + low. The keys of a group before a
    position grow linearly inside its ranges, so their sum over the queries of a range is a difference of two values of
    a piecewise quadratic: work grows with the number of ranges, not with its square.
    """
    keys = _KeysBefore.of(groups)
    q0, q1, k0, k1, low, high = slices.T
    piece, query = overlapping(keys.starts, keys.stops, q0, q1)
    first = np.maximum(q0[piece], keys.starts[query])
    last = np.minimum(q1[piece], keys.stops[query])
    bounds = k0[piece], k1[piece]
    read = keys.summed(first + high[piece] + 1, last + high[piece] + 1, *bounds)
    read -= keys.summed(first + low[piece], last + low[piece], *bounds)
    counts = np.zeros((len(groups), len(groups)), dtype=np.int64)
    np.add.at(counts, keys.owners[query], read)
    return counts


def slowest_hops(counts: np.ndarray) -> int:
    """Sum over hops of the most pairs of any group; at hop j, group i has the keys of group i - j.

    counts: [ring, ring] int64  what `group_pairs` gives
    """
    groups = np.arange(len(counts))
    return sum(int(counts[groups, (groups - hop) % len(counts)].max()) for hop in range(len(counts)))


@dataclass(frozen=True, eq=False)
class _KeysBefore:
    """How many tokens of each group come before a position."""

    starts: np.ndarray
    """[pieces] int64, as `stops` and `owners`: all ranges, ascending, with the group of each."""
    stops: np.ndarray
    owners: np.ndarray
    counts: np.ndarray
    """[pieces, groups] int64: tokens of each group before a piece."""
    sums: np.ndarray
    """[pieces, groups] int64: `counts` summed over all positions before a piece."""

    @staticmethod
    def of(groups: Sequence[Ranges]) -> "_KeysBefore":
        starts, stops, owners = pieces(groups)
        is_own = owners[:, None] == np.arange(len(groups))
        lengths = (stops - starts)[:, None] * is_own
        counts = np.cumsum(lengths, axis=0) - lengths
        steps = np.diff(starts, append=starts[-1:])[:, None]
        grown = counts * steps + _ramp(steps, lengths)
        return _KeysBefore(starts, stops, owners, counts, np.cumsum(grown, axis=0) - grown)

    def summed(self, first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Sum the counts at positions first..last, each moved into low..high: [entries, groups] int64."""
        at_low, at_high = self._at(low)[0], self._at(high)[0]

        def running(x: np.ndarray) -> np.ndarray:
            beyond, short = np.maximum(x - high, 0)[:, None], np.minimum(x - low, 0)[:, None]
            return self._at(np.clip(x, low, high))[1] + at_high * beyond + at_low * short

        return running(last) - running(first)

    def _at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `counts` and `sums` at any positions from the first piece on."""
        piece = np.searchsorted(self.starts, positions, side="right") - 1
        into = (positions - self.starts[piece])[:, None]
        is_own = self.owners[piece][:, None] == np.arange(self.counts.shape[1])
        lengths = (self.stops - self.starts)[piece][:, None] * is_own
        counts = self.counts[piece]
        return counts + np.minimum(into, lengths), self.sums[piece] + counts * into + _ramp(into, lengths)


def _ramp(x: np.ndarray, height: np.ndarray) -> np.ndarray:
    """Sum of min(max(t, 0), height) over t < x."""
    risen = np.clip(x, 0, height)
    return risen * (risen - 1) // 2 + height * np.maximum(x - height, 0)
