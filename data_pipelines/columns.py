"""Long columns of integers in little memory: time stamps, sizes and numbers of the packets of hours.

Most columns of a media file advance by equal steps over long stretches; such a column keeps its runs only. Any other
keeps its values in the narrowest type that holds them. Both answer like a numpy array that cannot be written. A window
keeps part of a column under the same numbers.

    0 512 1024 1536 1537   ->   runs (first 0, step 512, 4 values), (first 1537, step 1, 1 value)
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np

PIECE = 8192  # values that a builder holds as they came
NOTHING = np.zeros(0, dtype=np.int64)
TYPES = (np.int8, np.int16, np.int32, np.int64)


class Column:
    """Integers by number. Make one with `Column.of`, or value by value with a ColumnBuilder."""

    __slots__ = ("counts", "first", "has_runs", "starts", "steps", "values")

    def __init__(
        self, values: np.ndarray, steps: np.ndarray | None = None, counts: np.ndarray | None = None, *, first: int = 0
    ):
        """values: [n], or with steps and counts [r]: the first value of each run; first: number of the first value."""
        self.values, self.first, self.has_runs = values, first, counts is not None
        self.steps, self.counts = NOTHING if steps is None else steps, NOTHING if counts is None else counts
        self.starts = first + np.cumsum(self.counts) - self.counts

    @classmethod
    def of(cls, values: "Iterable[int] | Column") -> "Column":
        """Store integers; a Column is returned as it is."""
        if isinstance(values, Column):
            return values
        exact = np.asarray(values, dtype=np.int64).reshape(-1)
        if len(exact) > 1:
            steps = np.diff(exact)
            starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            if 2 * len(starts) <= len(exact):
                return cls._of_steps(int(exact[0]), steps[starts], np.diff(starts, append=len(steps)))
        return cls(_narrow(exact))

    def __len__(self) -> int:
        """One more than the number of the last value."""
        return self.first + len(self.values) if not self.has_runs else int(self.starts[-1] + self.counts[-1])

    def window(self, first: int, stop: int) -> "Column":
        """Keep the values first..stop - 1, under their numbers; asking for one before these is an IndexError."""
        if not self.has_runs:
            return Column(self.values[first - self.first : stop - self.first].copy(), first=first)
        low = int(np.searchsorted(self.starts, first, side="right")) - 1
        runs = slice(low, int(np.searchsorted(self.starts, stop, side="left")))
        values, steps, counts = self.values[runs].copy(), self.steps[runs].copy(), self.counts[runs].copy()
        skipped = first - int(self.starts[low])
        values[0], counts[0] = values[0] + skipped * steps[0], counts[0] - skipped
        counts[-1] = stop - first - counts[:-1].sum()
        return Column(values, steps, counts, first=first)

    @overload
    def __getitem__(self, at: int | np.integer) -> int: ...
    @overload
    def __getitem__(self, at: slice | np.ndarray | list[int]) -> np.ndarray: ...
    def __getitem__(self, at: Any) -> Any:
        """One value as an int, or several as an int64 array of the shape of `at`."""
        if isinstance(at, int | np.integer):
            number = int(at) + len(self) * (at < 0)
            if not self.first <= number < len(self):
                raise IndexError(f"number {at}, known are {self.first} to {len(self) - 1}")
            if not self.has_runs:
                return int(self.values[number - self.first])
            run = int(np.searchsorted(self.starts, number, side="right")) - 1
            return int(self.values[run] + (number - self.starts[run]) * self.steps[run])
        numbers = np.arange(*at.indices(len(self))) if isinstance(at, slice) else np.asarray(at)
        if numbers.dtype == bool or (numbers.size and not self.first <= numbers.min() <= numbers.max() < len(self)):
            raise IndexError(f"numbers {numbers}, known are {self.first} to {len(self) - 1}")
        if not self.has_runs:
            return self.values[numbers.astype(np.int64) - self.first].astype(np.int64)
        runs = np.searchsorted(self.starts, numbers, side="right") - 1
        return self.values[runs] + (numbers - self.starts[runs]) * self.steps[runs]

    def __iter__(self) -> Iterator[int]:
        for first in range(self.first, len(self), PIECE):
            yield from self[first : first + PIECE].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All values that are stored."""
        if not self.has_runs:
            return self.values.astype(dtype or np.int64)
        within = np.empty(len(self) - self.first, dtype=np.int64)
        within[0], within[1:] = self.values[0], np.repeat(self.steps, self._step_counts())
        return np.cumsum(within, out=within).astype(dtype or np.int64, copy=False)

    def tolist(self) -> list[int]:
        return np.asarray(self).tolist()

    def searchsorted(self, value: Any, side: str = "left", sorter: None = None) -> Any:
        """Where values would be put into a column that does not decrease; as numpy's."""
        assert sorter is None, "a column is searched as it is"
        if not self.has_runs:
            return self.first + np.searchsorted(self.values, value, side=side)  # type: ignore[call-overload]
        run = np.searchsorted(self.values, value, side=side) - 1  # type: ignore[call-overload]
        at = np.maximum(run, 0)
        gap, step, count = value - self.values[at], self.steps[at], self.counts[at]
        whole = np.maximum(step, 1)
        inside = gap // whole + 1 if side == "right" else -(-gap // whole)
        inside = np.where(step == 0, count, np.minimum(inside, count))
        return np.where(run < 0, self.first, self.starts[at] + inside)[()]

    def index(self, value: int) -> int | None:
        """The first number at which a value stands; None when it does not."""
        if not self.has_runs:
            found = np.flatnonzero(self.values == value)
            return self.first + int(found[0]) if len(found) else None
        gap, step = value - self.values, np.where(self.steps == 0, 1, self.steps)
        inside = gap // step
        is_there = (gap == inside * self.steps) & (inside >= 0) & (inside < self.counts)
        runs = np.flatnonzero(is_there)
        return int(self.starts[runs[0]] + inside[runs[0]]) if len(runs) else None

    def to_json(self) -> dict[str, Any]:
        """Values, or the first value and [step, number of steps] of each run, the step to the next run included."""
        if not self.has_runs:
            return {"values": self.values.tolist()}
        return {"first": int(self.values[0]), "runs": np.stack([self.steps, self._step_counts()], axis=1).tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Column":
        """Read what `to_json` wrote."""
        if "values" in data:
            return cls(_narrow(np.array(data["values"], dtype=np.int64)))
        steps, counts = np.array(data["runs"], dtype=np.int64).T
        return cls._of_steps(data["first"], steps.copy(), counts.copy())

    @classmethod
    def _of_steps(cls, first: int, steps: np.ndarray, counts: np.ndarray) -> "Column":
        """Make a column of its first value, and of how often it makes each step."""
        values = first + np.cumsum(steps * counts) - steps * counts
        counts[-1] += 1  # the last run has the value that its last step leads to
        return cls(values, steps, counts)

    def _step_counts(self) -> np.ndarray:
        counts = self.counts.copy()
        counts[-1] -= 1
        return counts


class ColumnBuilder:
    """Collects integers, a piece of which at most is held as it came."""

    def __init__(self) -> None:
        self._pieces: list[Column] = []
        self._last = array("q")

    def append(self, value: int) -> None:
        self._last.append(value)
        if len(self._last) == PIECE:
            self._pieces.append(Column.of(np.frombuffer(self._last, dtype=np.int64)))
            self._last = array("q")

    def build(self) -> Column:
        """Return the column of what was appended."""
        if self._last:
            self._pieces.append(Column.of(np.frombuffer(self._last, dtype=np.int64)))
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1:
            return pieces[0]
        if pieces and all(piece.has_runs or len(piece) == 1 for piece in pieces):
            return _join_runs(pieces)
        if pieces and all(not piece.has_runs for piece in pieces):
            return Column(np.concatenate([piece.values for piece in pieces]))
        return Column.of(np.concatenate([np.asarray(piece) for piece in pieces]) if pieces else ())


def _join_runs(pieces: list[Column]) -> Column:
    """Join columns of runs, none of which is unrolled."""
    first, steps, counts = pieces[0][0], list[int](), list[int]()
    for number, piece in enumerate(pieces):
        inner = [] if not piece.has_runs else piece.to_json()["runs"]
        joint = [(piece[0] - pieces[number - 1][-1], 1)] if number else []
        for step, count in (*joint, *inner):
            if steps and steps[-1] == step:
                counts[-1] += count
            else:
                steps.append(step)
                counts.append(count)
    return Column._of_steps(first, np.array(steps), np.array(counts))


def _narrow(values: np.ndarray) -> np.ndarray:
    """The same values in the narrowest type."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    kind = next(kind for kind in TYPES if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return values.astype(kind)
