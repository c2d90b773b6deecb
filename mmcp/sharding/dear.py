"""A layout to start from when few units are dear: these are dealt one by one, and runs of the others fill the ranks.

Slides over sound: a slide is most of a rank's share of encoding, so the sound beside it is what still fits, in one run,
and ranks without a slide take longer runs. The run of a rank need not be the sound of its slide.
"""

import numpy as np

from mmcp.sharding.evenness import SCALE, Evenness
from mmcp.sharding.groups import Groups
from mmcp.sharding.joint import MOST_DEAR


def dear_apart(evenness: Evenness, groups: Groups) -> np.ndarray | None:
    """Return [u] int64: a rank for each unit; None where there are no dear units, many, or nothing beside them."""
    costs, ranks = evenness.costs, evenness.num_ranks
    flops = costs.flops
    limit = int(flops.sum()) // ranks * int(evenness.even[0]) // SCALE
    is_dear = 2 * flops > int(flops.max())
    smallest = int(flops[~is_dear].min(initial=limit + 1))
    if not 0 < smallest <= limit or limit // int(flops[is_dear].min()) > MOST_DEAR:
        return None
    parts = np.empty_like(flops)
    number = int(is_dear.sum())
    parts[is_dear] = np.arange(number) * ranks // number
    held = np.zeros(ranks, dtype=np.int64)
    np.add.at(held, parts[is_dear], flops[is_dear])
    shares = _fill(np.maximum(limit - held, 0) // smallest * smallest, int(flops[~is_dear].sum()))
    others = groups.order[~is_dear[groups.order]]
    middle = np.cumsum(flops[others]) - flops[others] // 2
    parts[others] = np.minimum(np.searchsorted(np.cumsum(shares), middle), ranks - 1)
    return parts


def _fill(rooms: np.ndarray, total: int) -> np.ndarray:
    """Share out `total` over rooms, none taking more than another unless that is full: [ranks] int64.

    _fill([1, 5, 5], 7) -> [1, 3, 3]; where all rooms are full, less is shared out
    """
    low, high = 0, int(rooms.max(initial=0))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(np.minimum(rooms, middle).sum()) >= total else (middle + 1, high)
    return np.minimum(rooms, low)
