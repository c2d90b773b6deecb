"""How the tokens of a ring group are cut over the ranks of the group: attention does not mind, the other costs do.

In turn, as they come, unless that routes many rows (a long text before the media: then each rank gets a part of both)
or leaves a rank with dear media more bytes than others (then it gets fewer tokens).
"""

from itertools import accumulate, pairwise

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.ranges import Ranges, size, slice_ranges, split, union

EVEN_BYTES = (104, 100)
"""Resident bytes of a rank over its even share up to which it counts as even, as a fraction."""
MOST_TOKENS = (49, 1000)
"""What a rank may hold over its even share at most, as a fraction."""
MOST_TIME = (1, 40)
"""What this may add to the step, as a fraction."""


def head_and_body(groups: tuple[Ranges, ...], members: int, start: int) -> tuple[Ranges, ...]:
    """Give each rank a part of its group's tokens before `start`, and one of those from there on.

    One group of 8 tokens, two members, media from 4 on: 0 1 4 5 | 2 3 6 7
    """
    parts = []
    for group in groups:
        head = tuple((low, min(high, start)) for low, high in group if low < start)
        body = tuple((max(low, start), high) for low, high in group if high > start)
        pieces = zip(split(head, members), reversed(split(body, members)), strict=True)
        parts += [union(pair) for pair in pieces]
    return tuple(parts)


def lighten(costs: RowCosts, tokens: tuple[Ranges, ...], units: np.ndarray, members: int) -> tuple[Ranges, ...]:
    """Cut the tokens of each group anew so that ranks whose units take many bytes hold fewer tokens; others take them.

    No more move than brings all below EVEN_BYTES, where that can be.
    units: [ranks] int64  resident bytes of the units of each rank
    """
    share = max(map(size, tokens))
    room, target = _room(costs, share, len(tokens)), even_bytes(costs, len(tokens))
    parts: list[Ranges] = []
    for first in range(0, len(tokens), members):
        group = union(tokens[first : first + members])
        own, total = units[first : first + members], size(group)
        low, high = 0, room
        while low < high:
            middle = (low + high) // 2
            shares = _fill(own, total, share + middle, costs.model.token_bytes)
            is_light = int((own + np.array(shares) * costs.model.token_bytes).max()) <= target
            low, high = (low, middle) if is_light else (middle + 1, high)
        shares = _fill(own, total, share + low, costs.model.token_bytes)
        bounds = [0, *accumulate(shares)]
        parts += [slice_ranges(group, low, high) for low, high in pairwise(bounds)]
    return tuple(parts)


def even_bytes(costs: RowCosts, ranks: int) -> int:
    """Bytes of units and tokens that one rank may hold to count as even."""
    labels = costs.num_labels * costs.model.label_bytes
    return (costs.total_bytes * EVEN_BYTES[0] // EVEN_BYTES[1] - labels) // ranks


def _room(costs: RowCosts, share: int, ranks: int) -> int:
    """Tokens over the even share that lengthen the step by MOST_TIME at most."""
    bound = share * MOST_TOKENS[0] // MOST_TOKENS[1]
    busiest = max(int(costs.flops.max(initial=0)), int(costs.flops.sum()) // ranks)
    step = busiest + (costs.total_flops - int(costs.flops.sum())) // ranks
    return min(bound, step * MOST_TIME[0] // MOST_TIME[1] // max(1, costs.model.linear_flops))


def _fill(units: np.ndarray, total: int, most: int, token_bytes: int) -> list[int]:
    """Share out tokens so that the rank with the most bytes has as few as can be: [members] ints, none above `most`."""

    def shares(level: int) -> np.ndarray:
        return np.clip((level - units) // max(1, token_bytes), 0, most)

    low, high = 0, int(units.max()) + (total + 1) * max(1, token_bytes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(shares(middle).sum()) >= total else (middle + 1, high)
    given = shares(low)
    for rank in np.flatnonzero(given > 0).tolist()[::-1]:
        over = int(given.sum()) - total
        given[rank] -= min(over, 1, int(given[rank]))
    assert int(given.sum()) == total, f"shares {given.tolist()} of {total} tokens"
    return given.tolist()
