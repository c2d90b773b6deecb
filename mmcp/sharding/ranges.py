"""Sets of integers as ascending, disjoint, half-open ranges: what a plan stores instead of index tensors."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

Ranges = tuple[tuple[int, int], ...]


def as_ranges(indices: Iterable[int] | np.ndarray) -> Ranges:
    """Compress distinct integers, in any order: [3, 0, 1, 2, 7] -> ((0, 4), (7, 8))."""
    ordered = np.asarray(list(indices) if not isinstance(indices, np.ndarray) else indices, dtype=np.int64)
    if not len(ordered):
        return ()
    if (np.diff(ordered) <= 0).any():
        ordered = np.sort(ordered)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = ordered[np.concatenate([[0], breaks])]
    stops = ordered[np.concatenate([breaks - 1, [len(ordered) - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def as_indices(ranges: Ranges) -> np.ndarray:
    """Expand: ((0, 3), (7, 8)) -> [0, 1, 2, 7], int64."""
    return expand(np.array(ranges, dtype=np.int64).reshape(-1, 2))


def expand(bounds: np.ndarray) -> np.ndarray:
    """Expand ranges [ranges, 2], in the order given: [[5, 7], [0, 1]] -> [5, 6, 0], int64."""
    lengths = bounds[:, 1] - bounds[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.repeat(bounds[:, 0] - before, lengths) + np.arange(int(lengths.sum()))


def size(ranges: Ranges) -> int:
    """Count the integers: ((0, 3), (7, 8)) -> 4."""
    return sum(stop - start for start, stop in ranges)


def union(parts: Iterable[Ranges]) -> Ranges:
    """Merge sets that may overlap or touch: [((0, 2),), ((2, 4),)] -> ((0, 4),)."""
    merged: list[list[int]] = []
    for start, stop in sorted(bounds for part in parts for bounds in part if bounds[0] < bounds[1]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return tuple((start, stop) for start, stop in merged)


def cut(total: int, lengths: Iterable[int]) -> tuple[Ranges, ...]:
    """Cut 0..total into consecutive pieces: cut(5, [2, 0, 3]) -> (((0, 2),), (), ((2, 5),))."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(((start, start + length),) if length else ())
        start += length
    assert start == total, f"pieces end at {start}, expected {total}"
    return tuple(pieces)


def even_bounds(total: int, parts: int) -> list[int]:
    """Bounds of `parts` consecutive pieces of 0..total that differ by at most 1: even_bounds(5, 2) -> [0, 2, 5]."""
    return [part * total // parts for part in range(parts + 1)]


def by_rank(ranks: np.ndarray, num_ranks: int) -> tuple[Ranges, ...]:
    """Group indices by the rank of each: by_rank([1, 0, 1, 1], 2) -> (((1, 2),), ((0, 1), (2, 4)))."""
    order = np.argsort(ranks, kind="stable")
    stops = np.cumsum(np.bincount(ranks, minlength=num_ranks))
    return tuple(as_ranges(indices) for indices in np.split(order, stops[:-1]))


def flat(parts: Sequence[Ranges]) -> tuple[np.ndarray, np.ndarray]:
    """List the integers of all parts and the part of each: flat([((0, 2),), ((1, 2),)]) -> [0, 1, 1], [0, 0, 1]."""
    listed = [as_indices(part) for part in parts]
    return np.concatenate(listed), np.repeat(np.arange(len(parts)), [len(part) for part in listed])


def split(ranges: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Cut a set, in order, into even parts: split(((0, 2), (6, 9)), 2) -> (((0, 2),), ((6, 9),))."""
    bounds = even_bounds(size(ranges), parts)
    return tuple(slice_ranges(ranges, low, high) for low, high in pairwise(bounds))


def slice_ranges(ranges: Ranges, low: int, high: int) -> Ranges:
    """Keep the low-th to (high - 1)-th integer of a set: slice_ranges(((0, 2), (6, 9)), 1, 4) -> ((1, 2), (6, 8))."""
    kept, before = [], 0
    for start, stop in ranges:
        first, last = max(low - before, 0), min(high - before, stop - start)
        if first < last:
            kept.append((start + first, start + last))
        before += stop - start
    return tuple(kept)


def part_of(parts: Sequence[Ranges], indices: np.ndarray) -> np.ndarray:
    """Number of the part that holds each index; parts do not overlap and cover the indices."""
    starts, _, owners = pieces(parts)
    return owners[np.searchsorted(starts, indices, side="right") - 1] if len(owners) else np.zeros_like(indices)


def pieces(parts: Sequence[Ranges]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List all ranges of parts that do not overlap, ascending: starts, stops and part of each, [pieces] int64."""
    listed = sorted((start, stop, part) for part, ranges in enumerate(parts) for start, stop in ranges)
    starts, stops, owners = np.array(listed, dtype=np.int64).reshape(-1, 3).T
    return starts, stops, owners


def overlapping(
    starts: np.ndarray, stops: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pair intervals with the pieces they meet: [pairs] interval numbers and [pairs] piece numbers, both ascending.

    Pieces starts[i]..stops[i] ascend without overlap; interval i is lows[i]..highs[i].
    overlapping([0, 4], [4, 8], [3, 5], [6, 7]) -> [0, 0, 1], [0, 1, 1]
    """
    first = np.searchsorted(stops, lows, side="right")
    last = np.searchsorted(starts, highs, side="left")
    counts = np.maximum(last - first, 0)
    interval = np.repeat(np.arange(len(lows)), counts)
    return interval, np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - first, counts)
