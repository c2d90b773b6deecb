"""Which rows of the global batch go to which data-parallel group, and in which micro-batch: by cost."""

from collections.abc import Sequence

import numpy as np


def deal(row_costs: Sequence[int], groups: int) -> list[list[int | None]]:
    """Deal rows to groups so that the rows of one micro-batch cost about the same and groups end up even.

    Groups meet in every micro-batch (sharded parameters are gathered in each forward), so a step takes the sum over
    micro-batches of the dearest row. Sorting by cost and cutting into micro-batches makes that sum least; within a
    micro-batch the dearest row goes to the group that has done least.

    row_costs: cost of each row of the global batch, in its order
    returns per group the row of each micro-batch, None where it has none: deal([5, 1, 4, 2, 3], 2)
        -> [[0, 3, 1], [2, 4, None]]
    Raises ValueError when there is no group.
    """
    if groups < 1:
        raise ValueError(f"rows cannot be dealt to {groups} data-parallel groups; use at least 1")
    dealt: list[list[int | None]] = [[] for _ in range(groups)]
    loads = [0] * groups
    dearest_first = np.argsort(-np.asarray(row_costs, dtype=np.int64), kind="stable").tolist()
    for start in range(0, len(dearest_first), groups):
        rows = dearest_first[start : start + groups]
        least_loaded = sorted(range(groups), key=lambda group: (loads[group], group))
        for group, row in zip(least_loaded, rows + [None] * (groups - len(rows)), strict=True):
            dealt[group].append(row)
            loads[group] += int(row_costs[row]) if row is not None else 0
    return dealt
