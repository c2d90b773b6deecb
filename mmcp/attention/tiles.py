"""Cut mask slices into the shapes a plain attention kernel knows: full rectangles and causal triangles.

A triangle above the diagonal is a causal one read backwards, so a tile may ask for its queries and keys reversed:

    lower slice        = full      + causal        upper slice  = reversed   + full
    1 1 1 . .            1 1 . . .   . . 1 . .     1 1 1 1 1      1 1 1 . .    . . . 1 1
    1 1 1 1 .            1 1 . . .   . . 1 1 .     . 1 1 1 1      . 1 1 . .    . . . 1 1
    1 1 1 1 1            1 1 . . .   . . 1 1 1     . . 1 1 1      . . 1 . .    . . . 1 1

A band is cut into rows of its own width, each a reversed triangle beside a causal one. The cost of the tiles is the
number of pairs; there is no dense mask in any of them.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Tile(NamedTuple):
    """One kernel call: queries q0..q1 read keys k0..k1."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    """Query q0 + i reads keys up to k0 + i only (aligned at the top left)."""
    reversed: bool
    """Reverse queries and keys before the call and the results after it."""

    @property
    def pairs(self) -> int:
        """Queries times keys; of a causal tile about half are read."""
        return (self.q1 - self.q0) * (self.k1 - self.k0)


@dataclass(frozen=True)
class Tiling:
    """Tiles that cover a mask, each pair once; every query of a tile reads at least one of its keys."""

    tiles: tuple[Tile, ...]

    @cached_property
    def is_disjoint(self) -> bool:
        """Whether no query and no key is in two tiles: nothing has to be merged."""
        return _disjoint([(tile.q0, tile.q1) for tile in self.tiles]) and _disjoint(
            [(tile.k0, tile.k1) for tile in self.tiles]
        )


def tile(slices: np.ndarray) -> Tiling:
    """Cut slices ([slices, 6] int64, as `Mask.slices` gives them) into tiles."""
    return Tiling(tuple(tile for piece in slices.tolist() for tile in _tiles(*piece)))


def _tiles(q0: int, q1: int, k0: int, k1: int, lowest: int, highest: int) -> list[Tile]:
    # rows that have a key, then keys that have a row
    q0, q1 = max(q0, k0 - highest), min(q1, k1 - lowest)
    k0, k1 = max(k0, q0 + lowest), min(k1, q1 + highest)
    if q0 >= q1 or k0 >= k1:
        return []
    cut_above, cut_below = q0 + highest < k1 - 1, q1 - 1 + lowest > k0
    if cut_above and cut_below:
        return _band(q0, q1, k0, k1, lowest, highest)
    if cut_above:
        return [*_full(q0, q1, k0, q0 + highest), Tile(q0, q1, q0 + highest, k1, True, False)]
    if cut_below:
        corner = q1 + lowest  # keys from here on are read by every query
        return [Tile(q0, q1, k0, corner, True, True), *_full(q0, q1, corner, k1)]
    return _full(q0, q1, k0, k1)


def _band(q0: int, q1: int, k0: int, k1: int, lowest: int, highest: int) -> list[Tile]:
    width, tiles = highest - lowest + 1, []
    for start in range(q0, q1, width):
        stop, middle = min(start + width, q1), start + highest
        tiles += _tiles(start, stop, k0, min(k1, middle), lowest, highest)
        tiles += _tiles(start, stop, max(k0, middle), k1, lowest, highest)
    return tiles


def _full(q0: int, q1: int, k0: int, k1: int) -> list[Tile]:
    return [Tile(q0, q1, k0, k1, False, False)] if k0 < k1 else []


def _disjoint(ranges: list[tuple[int, int]]) -> bool:
    return all(before[1] <= after[0] for before, after in pairwise(sorted(ranges)))
