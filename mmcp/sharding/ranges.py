"""Sets of integers as ascending, disjoint, half-open ranges: what a plan stores instead of index tensors."""

from collections.abc import Iterable

import numpy as np

Ranges = tuple[tuple[int, int], ...]


def as_ranges(indices: Iterable[int] | np.ndarray) -> Ranges:
    """Compress distinct integers, in any order: [3, 0, 1, 2, 7] -> ((0, 4), (7, 8))."""
    ordered = np.unique(np.asarray(list(indices) if not isinstance(indices, np.ndarray) else indices, dtype=np.int64))
    if not len(ordered):
        return ()
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = ordered[np.concatenate([[0], breaks])]
    stops = ordered[np.concatenate([breaks - 1, [len(ordered) - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def as_indices(ranges: Ranges) -> np.ndarray:
    """Expand: ((0, 3), (7, 8)) -> [0, 1, 2, 7], int64."""
    if not ranges:
        return np.zeros(0, dtype=np.int64)
    bounds = np.asarray(ranges, dtype=np.int64)
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
