"""The order of samples: one permutation an epoch, a pure function of seed and epoch, the same on every rank.

Samples are dealt to groups of ranks later, by the plan; nothing here depends on how many ranks, workers or groups
there are.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """Where a run is in the order. These integers are all that a resume needs."""

    seed: int
    num_samples: int
    epoch: int = 0
    position: int = 0
    """Samples of the epoch already taken."""

    def __post_init__(self):
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: there is nothing to order; check the data's path")
        if self.seed < 0 or self.epoch < 0 or not 0 <= self.position < self.num_samples:
            raise ValueError(f"{self} is no state of an order: seed, epoch and position start at 0")


class Order:
    """Sample numbers without end: every sample once an epoch, each epoch in its own order."""

    def __init__(self, seed: int, num_samples: int):
        self.state = OrderState(seed=seed, num_samples=num_samples)

    def take(self, count: int) -> list[int]:
        """Return the next `count` sample numbers; goes on into the next epoch."""
        taken: list[int] = []
        while len(taken) < count:
            state = self.state
            part = permutation(state.seed, state.epoch, state.num_samples)[state.position :][: count - len(taken)]
            taken += part.tolist()
            epoch, position = divmod(state.position + len(part), state.num_samples)
            self.state = OrderState(
                seed=state.seed, num_samples=state.num_samples, epoch=state.epoch + epoch, position=position
            )
        return taken

    def restore(self, state: OrderState) -> None:
        """Go to where `state` was. Raises ValueError when it belongs to other data or another seed."""
        if (state.seed, state.num_samples) != (self.state.seed, self.state.num_samples):
            raise ValueError(
                f"the saved order has seed {state.seed} and {state.num_samples} samples, this run has seed "
                f"{self.state.seed} and {self.state.num_samples}; resume with the same data and seed"
            )
        self.state = state


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """[num_samples] int64: the order of one epoch.

    Sorts the raw output of the counter-based generator Philox, keyed by (seed, epoch): unlike `shuffle`, its stream
    is fixed across versions of numpy. Equal keys, which are rare, stay in ascending order.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
