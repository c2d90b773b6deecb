"""Which of some queries read which of some keys of a row, in every form that a kernel needs: made once, then kept."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from mmcp.attention.tiles import Tiling, tile
from mmcp.masks import Mask, join, renumber, restrict
from mmcp.sharding.ranges import Ranges, size

Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class Pairs:
    """The part of a row's mask that lies between some queries and some keys, both counted from 0 inside their sets.

    A causal row of 6 tokens, queries 2 3 5, keys 0 3:

        1 .        `slices`: (0, 2, 0, 1, -1, 2) and (1, 3, 1, 2, -1, 2), with joined rectangles
        1 1        `tiling`: what the CPU's kernel takes
        1 1
    """

    mask: Mask
    """Of the whole row, narrowed to what the variant sees."""
    queries: Ranges
    """Positions of the queries, ascending."""
    keys: Ranges
    """Positions of the keys, ascending."""
    memo: dict[Hashable, Any] = field(default_factory=dict)
    """What `once` has made."""

    @staticmethod
    def whole(mask: Mask) -> "Pairs":
        """Describe a row of which every token is here."""
        tokens = ((0, mask.num_tokens),) if mask.num_tokens else ()
        return Pairs(mask, tokens, tokens)

    @cached_property
    def slices(self) -> np.ndarray:
        """[slices, 6] int64, disjoint and tight: every query of a slice reads one of its keys, every key is read."""
        return join(renumber(restrict(self.mask.slices, self.queries, self.keys), self.queries, self.keys))

    @cached_property
    def tiling(self) -> Tiling:
        """The same pairs as tiles."""
        return tile(self.slices)

    @property
    def num_queries(self) -> int:
        return size(self.queries)

    @property
    def num_keys(self) -> int:
        return size(self.keys)

    @property
    def is_empty(self) -> bool:
        """Whether no query reads any key."""
        return not len(self.slices)

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return what `make` derives, made for the first layer that asks and kept for the next.

        key: names the consumer and all that the result depends on beside these pairs
        """
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]
