"""The order of samples: a pure function of seed, data and weights, the same on every rank, from any place on.

Each source of data is gone through in permutations, one an epoch. Several sources are mixed by their weights: of any
first p samples, source i has given p x weight / sum of weights, to within one or two. Samples are dealt to groups of
ranks later, by the plan; nothing here depends on how many ranks, workers or groups there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

import numpy as np

MOST_WEIGHT = 100_000  # sum of the weights as whole numbers: length of the pattern in which sources take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """Where a run is in the order. These integers are all that a resume needs."""

    seed: int
    sizes: tuple[int, ...]
    """Samples of each source."""
    weights: tuple[int, ...]
    """Of each source, without a common divisor."""
    taken: int = 0
    """Samples taken since the start."""

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes={list(self.sizes)}: there is nothing to order; check the data's path")
        if len(self.weights) != len(self.sizes) or min(self.weights) < 1 or self.seed < 0 or self.taken < 0:
            raise ValueError(f"{self} is no state of an order: one weight a source, all numbers at least 0")

    @classmethod
    def of(cls, values: dict) -> "OrderState":
        """Read what `dataclasses.asdict` gave, also after JSON. Raises ValueError for what is no state of ours."""
        missing = [name for name in ("seed", "sizes", "weights", "taken") if name not in values]
        if missing:
            known = ", ".join(values)
            raise ValueError(
                f"the saved order names {known} but not {', '.join(missing)}: another version wrote it; "
                "finish the run with that version, or begin a new one from its weights with start_from"
            )
        return cls(
            seed=values["seed"],
            sizes=tuple(values["sizes"]),
            weights=tuple(values["weights"]),
            taken=values["taken"],
        )


class Order:
    """Sample numbers without end; those of the second source follow those of the first, and so on.

    sizes:   samples of each source, or of the only one
    weights: of each source; empty: as many as it has samples
    """

    def __init__(self, seed: int, sizes: int | Sequence[int], weights: Sequence[float] = ()):
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        whole = whole_weights(weights or [max(1, size) for size in sizes])
        self.state = OrderState(seed=seed, sizes=sizes, weights=whole)
        self._turns, self._before = _pattern(whole)
        self._first = np.cumsum([0, *sizes[:-1]])

    def take(self, count: int) -> list[int]:
        """Return the next `count` sample numbers."""
        state = self.state
        taken = self.samples(state.taken, count)
        self.state = OrderState(seed=state.seed, sizes=state.sizes, weights=state.weights, taken=state.taken + count)
        return taken

    def samples(self, first: int, count: int) -> list[int]:
        """Return the sample numbers at places first .. first + count - 1 of the order."""
        rounds, turn = np.divmod(np.arange(first, first + count), len(self._turns))
        sources = self._turns[turn]
        drawn = rounds * np.array(self.state.weights)[sources] + self._before[turn]
        epochs, places = np.divmod(drawn, np.array(self.state.sizes)[sources])
        return [
            int(
                self._first[source]
                + permutation(self.state.seed, epoch, self.state.sizes[source], source=source)[place]
            )
            for source, epoch, place in zip(sources.tolist(), epochs.tolist(), places.tolist(), strict=True)
        ]

    def restore(self, state: OrderState) -> None:
        """Go to where `state` was. Raises ValueError when it belongs to other data, weights or another seed."""
        now = self.state
        if (state.seed, state.sizes, state.weights) != (now.seed, now.sizes, now.weights):
            raise ValueError(
                f"the saved order has seed {state.seed}, {_words(state)}, this run has seed {now.seed}, {_words(now)}; "
                "resume with the same data and seed"
            )
        self.state = state


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights, read as the decimal numbers written, as whole numbers in lowest terms: 0.5, 0.25 -> 2, 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    if min(exact) <= 0:
        raise ValueError(f"weights {list(weights)}: each must be above 0; leave a source out instead")
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if len(whole) > 1 and sum(whole) > MOST_WEIGHT:
        raise ValueError(f"weights {list(weights)} are as uneven as {whole}; write them with fewer digits")
    return tuple(whole)


@lru_cache(maxsize=4)
def _pattern(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[turns] the source of each turn, and how many turns it had before: each turn goes to the one furthest behind.

    weights 2, 1 -> sources 0 1 0, before 0 0 1
    """
    if len(weights) == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    total, credit = sum(weights), np.zeros(len(weights), np.int64)
    counts, turns, before = [0] * len(weights), [], []
    for _ in range(total):
        credit += weights
        source = int(credit.argmax())
        credit[source] -= total
        turns.append(source)
        before.append(counts[source])
        counts[source] += 1
    return np.array(turns), np.array(before)


@lru_cache(maxsize=16)
def permutation(seed: int, epoch: int, num_samples: int, *, source: int = 0) -> np.ndarray:
    """[num_samples] int64: the order of one epoch of one source.

    Sorts the raw output of the counter-based generator Philox, keyed by (seed, epoch, source): unlike `shuffle`, its
    stream is fixed across versions of numpy. Equal keys, which are rare, stay in ascending order.
    """
    keys = np.random.Philox(key=np.array([seed, epoch + (source << 40)], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def _words(state: OrderState) -> str:
    counts = " + ".join(map(str, state.sizes))
    weights = f" with weights {', '.join(map(str, state.weights))}" if len(state.sizes) > 1 else ""
    return f"{counts} samples{weights}"
