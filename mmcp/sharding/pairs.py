"""How many (query, key) pairs a row's mask allows between sets of tokens: closed forms on ranges, no matrix.

The mask is a list of bands, no pair in two of them. A band allows query q and key k when

    q0 <= q < q1    k0 <= k < k1    low <= k - q <= high

Two documents of 2 and 3 tokens, the last two tokens one image whose patches see each other both ways:

    key     0 1 2 3 4
    query 0 x . . . .     bands (0, 2, 0, 2, -inf, 0)   causal, first document
          1 x x . . .           (2, 5, 2, 5, -inf, 0)   causal, second document
          2 . . x . .           (3, 5, 3, 5,  1, inf)   the image, forwards
          3 . . x x x
          4 . . x x x
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmcp.sequence import TokenSequence
from mmcp.sharding.ranges import Ranges, overlapping, pieces

FAR = 1 << 40  # further than any two tokens are apart


def bands(sequence: TokenSequence) -> np.ndarray:
    """Describe the mask of a row: [bands, 6] int64, each (q0, q1, k0, k1, low, high)."""
    bounds = sequence.document_bounds
    causal = _squares(bounds[:-1], bounds[1:], -FAR, 0)
    attends = np.array([segment.attends == "both" for segment in sequence.segments], dtype=bool)
    both = sequence.unit_ranges[attends[sequence.unit_segments]] if len(sequence.units) else sequence.unit_ranges
    prefixes = np.array(_prefixes(sequence), dtype=np.int64).reshape(-1, 2)
    forward = np.concatenate([both, prefixes])
    forward = forward[forward[:, 1] - forward[:, 0] > 1]
    return np.concatenate([causal, _squares(forward[:, 0], forward[:, 1], 1, FAR)])


def within_window(mask: np.ndarray, window: int) -> np.ndarray:
    """Keep of each band the keys among the `window` last ones of a query, itself included; 0: all."""
    if not window:
        return mask
    return np.concatenate([mask[:, :4], np.maximum(mask[:, 4:5], 1 - window), mask[:, 5:]], axis=1)


def total_pairs(mask: np.ndarray) -> int:
    """Count the allowed pairs."""
    return int(_count(*mask.T).sum())


def group_pairs(mask: np.ndarray, groups: Sequence[Ranges]) -> np.ndarray:
    """Count pairs between groups of tokens: [groups, groups] int64, entry (i, j) with queries of i and keys of j.

    A query q of a band reads keys k0 <= k < min(k1, q + high + 1) less those k < q + low. The keys of a group before a
    position grow linearly inside its ranges, so their sum over the queries of a range is a difference of two values of
    a piecewise quadratic: work grows with the number of ranges, not with its square.
    """
    keys = _KeysBefore.of(groups)
    q0, q1, k0, k1, low, high = mask.T
    band, query = overlapping(keys.starts, keys.stops, q0, q1)
    first = np.maximum(q0[band], keys.starts[query])
    last = np.minimum(q1[band], keys.stops[query])
    bounds = k0[band], k1[band]
    read = keys.summed(first + high[band] + 1, last + high[band] + 1, *bounds)
    read -= keys.summed(first + low[band], last + low[band], *bounds)
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


def _squares(starts: np.ndarray, stops: np.ndarray, low: int, high: int) -> np.ndarray:
    diagonals = np.broadcast_to(np.array([low, high], dtype=np.int64), (len(starts), 2))
    return np.concatenate([np.stack([starts, stops, starts, stops], axis=1), diagonals], axis=1)


def _prefixes(sequence: TokenSequence) -> list[tuple[int, int]]:
    """Return the tokens of each document's leading prefix segments."""
    prefixes: dict[int, tuple[int, int]] = {}
    open_documents: dict[int, bool] = {}
    for segment, start in zip(sequence.segments, sequence.offsets.tolist(), strict=False):
        document, stop = segment.document, start + segment.num_tokens
        if open_documents.setdefault(document, True) and segment.attends == "prefix":
            prefixes[document] = (prefixes.get(document, (start, start))[0], stop)
        else:
            open_documents[document] = False
    return list(prefixes.values())


def _count(
    q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Count the pairs of each band: those up to `high` less those below `low`."""
    keys = k1 - k0
    upper = _ramp(q1 + high + 1 - k0, keys) - _ramp(q0 + high + 1 - k0, keys)
    lower = _ramp(q1 + low - k0, keys) - _ramp(q0 + low - k0, keys)
    return upper - lower


def _ramp(x: np.ndarray, height: np.ndarray) -> np.ndarray:
    """Sum of min(max(t, 0), height) over t < x."""
    risen = np.clip(x, 0, height)
    return risen * (risen - 1) // 2 + height * np.maximum(x - height, 0)
