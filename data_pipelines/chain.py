"""One fixed chain of upgrades, of which a budget of tokens takes a prefix: index algebra, no file and no pixel.

A part of a sample (the pictures of a video, a sound, an image) covers its leaves, the shortest stretches that it can be
cut into. A cell of level l stands for 2**l leaves by one unit; a unit has one of the part's sizes. A part begins as one
cell, the coarsest it can be, and its stages, one after the other, halve every cell or give every cell the next size.
An upgrade is one stage for one cell:

    halved, then one half of it again     | 0 1 2 3 4 5 6 7 |    | 0 1 2 3 | 4 5 6 7 |    | 0 1 | 2 3 | 4 5 6 7 |

The upgrades of all parts are put into one order, by the key of their stage and, within a stage, spread evenly over
time; a cell that leads comes earlier. The order does not depend on the budget and no upgrade takes anything away, so
more tokens never give less of anything, and what is left over is less than the next upgrade.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ABSENT = -1  # number of the size of a cell that is not there yet
SCALE = 64  # steps of a key for one doubling of detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Something that is done to every cell of a part."""

    key: int
    """When, on the scale that all parts share."""
    level: int
    """Of the cells before it."""
    size: int
    """Number of their size before it, ABSENT when the stage makes them appear."""
    splits: bool
    """Whether a cell becomes two; otherwise it gets the next size."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of a part that is one unit."""

    first: int
    """Its first leaf."""
    level: int
    """It stands for 2**level leaves, fewer at the end of the part."""
    size: int
    """Number of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What can be seen or heard more or less finely."""

    leaves: int
    level: int
    """Of its cells before any stage."""
    size: int
    """Number of their size before any stage; ABSENT: the part can be left out."""
    stages: tuple[Stage, ...]
    tokens: Callable[[int, int], np.ndarray]
    """(level, size) -> [cells] int64: tokens of each cell of that level, its stamp included; size is never ABSENT."""
    lead: Callable[[int], np.ndarray] | None = None
    """level -> [cells] int64: by how much of a key each cell comes earlier; None: all in step."""

    def num_cells(self, level: int) -> int:
        """Count the cells of a level."""
        return -(-self.leaves >> level) if self.leaves else 0

    def cost(self, level: int, size: int) -> np.ndarray:
        """[cells] int64: tokens of each cell; 0 while it is absent."""
        return np.zeros(self.num_cells(level), np.int64) if size == ABSENT else self.tokens(level, size)


class Chain:
    """The upgrades of some parts in their order."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.least = sum(int(part.cost(part.level, part.size).sum()) for part in parts)
        columns = [_upgrades(part, number) for number, part in enumerate(parts)]
        keys, owners, stages, ranks, costs = np.concatenate([np.zeros((5, 0), np.int64), *columns], axis=1)
        self.order = np.lexsort((ranks, stages, owners, keys))
        self.running = self.least + np.cumsum(costs[self.order])

    @property
    def full(self) -> int:
        """Tokens when every upgrade is taken."""
        return int(self.running[-1]) if len(self.running) else self.least

    @cached_property
    def largest_step(self) -> int:
        """Tokens of the dearest upgrade."""
        return int(np.diff(self.running, prepend=self.least).max(initial=0))

    @cached_property
    def places(self) -> np.ndarray:
        """[upgrades] int64: where in the order each upgrade comes, part by part, stage by stage, cell by cell."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    def count(self, room: int) -> int:
        """Count the upgrades that fit into `room` tokens."""
        return int(np.searchsorted(np.maximum.accumulate(self.running), room, side="right"))

    def following(self, number: int, cell: Cell) -> tuple[int, int] | None:
        """Return place in the order and tokens of what would refine a cell of part `number`; None for the finest."""
        first = sum(part.num_cells(stage.level) for part in self.parts[:number] for stage in part.stages)
        for stage in self.parts[number].stages:
            if (stage.level, stage.size) == (cell.level, cell.size):
                place = int(self.places[first + (cell.first >> cell.level)])
                before = int(self.running[place - 1]) if place else self.least
                return place, int(self.running[place]) - before
            first += self.parts[number].num_cells(stage.level)
        return None

    def take(self, room: int) -> tuple[list[list[Cell]], int]:
        """Take upgrades while they fit into `room` tokens; return the cells of each part in order, and the tokens.

        The least that there is stays, even where it does not fit.
        """
        count = self.count(room)
        taken = np.zeros(len(self.order), bool)
        taken[self.order[:count]] = True
        cells, start = [], 0
        for part in self.parts:
            length = sum(part.num_cells(stage.level) for stage in part.stages)
            cells.append(_cells(part, taken[start : start + length]))
            start += length
        return cells, int(self.running[count - 1]) if count else self.least


def _upgrades(part: Part, number: int) -> np.ndarray:
    """[5, upgrades] int64: key, number of the part, of the stage, place within the stage, and tokens."""
    columns = [np.zeros((5, 0), np.int64)]
    key: np.ndarray | None = None
    for i, stage in enumerate(part.stages):
        cells = part.num_cells(stage.level)
        own = stage.key - (part.lead(stage.level) if part.lead else np.zeros(cells, np.int64))
        key = own if key is None else np.maximum(own, key)
        before = part.cost(stage.level, stage.size)
        if stage.splits:
            after = np.add.reduceat(
                part.cost(stage.level - 1, stage.size), np.arange(0, part.num_cells(stage.level - 1), 2)
            )
        else:
            after = part.cost(stage.level, stage.size + 1)
        filled = np.full(cells, number), np.full(cells, i)
        columns.append(np.stack([key, *filled, _spread(cells), after - before]))
        if stage.splits:
            key = np.repeat(key, 2)[: part.num_cells(stage.level - 1)]
    return np.concatenate(columns, axis=1)


def _cells(part: Part, taken: np.ndarray) -> list[Cell]:
    """List the cells of a part in order of time, given which of its upgrades are taken, stage by stage."""
    found: list[Cell] = []
    level, size, start = part.level, part.size, 0
    reached = np.ones(part.num_cells(level), bool)
    for stage in part.stages:
        mask = taken[start : start + len(reached)]
        assert not (mask & ~reached).any(), "an upgrade was taken before the one it builds on"
        start += len(reached)
        if size != ABSENT:
            found += [Cell(cell << level, level, size) for cell in np.flatnonzero(reached & ~mask).tolist()]
        if stage.splits:
            level -= 1
            reached = np.repeat(mask, 2)[: part.num_cells(level)]
        else:
            size, reached = size + 1, mask
    if size != ABSENT:
        found += [Cell(cell << level, level, size) for cell in np.flatnonzero(reached).tolist()]
    return sorted(found, key=lambda cell: cell.first)


def _spread(count: int) -> np.ndarray:
    """[count] int64: places in an order that fills time evenly, numbers read with their bits reversed.

    _spread(8) -> 0 4 2 6 1 5 3 7
    """
    numbers, bits = np.arange(count), max(0, count - 1).bit_length()
    places = np.zeros(count, np.int64)
    for bit in range(bits):
        places |= (numbers >> bit & 1) << (bits - 1 - bit)
    return places
