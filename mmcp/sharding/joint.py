"""What no plan can beat in one cost while another is even: decoding beside encoding.

A rank that decodes whole groups of pictures must still encode about its share, and what it encodes is decoded first;
and where few dear units fill a share (slides beside sound), their number fixes how much else a rank can take.
"""

from fractions import Fraction

import numpy as np

from mmcp.sequence import KINDS
from mmcp.sharding.cost import RowCosts

EVEN_ENCODING = (105, 100)
"""What a rank may encode over its even share, as a fraction, ..."""
OVER_BOUND = (103, 100)
"""... or over the bound of encoding, where that is more."""
FINEST = 2048
"""Bounds that are searched for are found to this part of an even share."""
MOST_DEAR = 24
"""Dear units that fit on a rank, up to which their number is worth a bound."""
GRAIN = 720_720
"""Grain of a frame's share; a multiple of every number up to 16."""


def allowed_flops(costs: RowCosts, ranks: int) -> int:
    """Return the most FLOPs of encoding that a rank may have to count as even."""
    total = int(costs.flops.sum())
    even = -(-total // ranks) * EVEN_ENCODING[0] // EVEN_ENCODING[1]
    return max(even, busiest(costs.flops, total, ranks) * OVER_BOUND[0] // OVER_BOUND[1])


def busiest(items: np.ndarray, total: int, ranks: int) -> int:
    """Bound the largest sum of a partition of indivisible items: busiest([4, 4, 4], 12, 2) -> 8.

    items: [n] int64  what cannot be divided; total: all work, at least their sum
    Of the k ranks + 1 largest items some rank has k + 1, and these are at least the k + 1 smallest of them.
    """
    largest_first = np.sort(items)[::-1]
    before = np.concatenate([[0], np.cumsum(largest_first)])
    turns = np.arange(0, -(-len(items) // ranks))
    pigeons = before[turns * ranks + 1] - before[turns * ranks - turns]
    return max(-(-total // ranks), int(pigeons.max(initial=0)))


def decoding_beside_encoding(costs: RowCosts, ranks: int) -> int:
    """Bound the nanoseconds that the busiest rank decodes when none encodes more than `allowed_flops`."""
    if not costs.num_units:
        return 0
    limit = allowed_flops(costs, ranks)
    least = busiest(whole_groups(costs), costs.least_decoding[0], ranks)
    least = max(least, _groups_and_their_share(costs, ranks, limit))
    return max(least, _few_dear_units(costs, ranks, limit, least))


def whole_groups(costs: RowCosts) -> np.ndarray:
    """Price what one rank decodes at least for each group of pictures: [groups] int64 nanoseconds.

    Whoever shows the last unit of a group runs through all of it. Spans that overlap count as one group.
    """
    order, group = groups_of_pictures(costs)
    dearest = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(dearest, group, (_alone(costs) + costs.output_ns)[order])
    return dearest


def groups_of_pictures(costs: RowCosts) -> tuple[np.ndarray, np.ndarray]:
    """Number the groups of overlapping spans: units in decode order [u], and the group of each of these [u]."""
    order = np.lexsort((costs.spans[:, 1], costs.spans[:, 0], costs.streams))
    starts, stops = costs.spans[order].T
    shift = costs.streams[order] * (int(stops.max(initial=0)) + 1)
    reached = np.concatenate([[-1], np.maximum.accumulate(stops + shift)[:-1]]) if len(order) else shift
    return order, np.cumsum((starts + shift >= reached) | (starts == stops)) - 1


def _groups_and_their_share(costs: RowCosts, ranks: int, limit: int) -> int:
    """Bound the busiest rank by the groups of pictures whose last units it shows, and by what else it must encode.

    Of the k dearest groups, m = ceil(k / ranks) a rank: either some rank has m + 1, or at least h = k - (m - 1) ranks
    of them have m. The other ranks encode at most `limit` each, so one of these h encodes an h-th of what is left, at
    the price of what makes it from frames, and decodes all frames of m groups. Either way it seeks once.
    """
    order, group = groups_of_pictures(costs)
    is_video = costs.kinds == KINDS.index("video")
    dearest = np.zeros(int(group[-1]) + 1, dtype=np.int64)
    np.maximum.at(dearest, group, np.where(is_video, _alone(costs), 0)[order])
    dearest = np.sort(dearest[dearest > 0])[::-1]
    if not len(dearest):
        return 0
    sums = np.concatenate([[0], np.cumsum(dearest)])
    number = np.arange(1, len(dearest) + 1)
    each = -(-number // ranks)
    holders = number - (each - 1) * ranks
    left = int(costs.flops.sum()) - (ranks - holders) * limit
    beside = costs.output_ns + np.where(is_video, 0, _share_of_frames(costs))
    with_each = sums[number] - sums[number - each] + _cheapest(costs.flops, beside, np.maximum(left, 0) // holders)
    with_more = np.where(number > each, sums[number] - sums[np.maximum(number - each - 1, 0)], with_each)
    return int(np.minimum(with_each, with_more).max()) + costs.model.rates.seek_ns


def _few_dear_units(costs: RowCosts, ranks: int, limit: int, mean: int) -> int:
    """Bound the busiest rank by the number of dear units that ranks hold: the least level that all units fit under.

    Call the units of more than half the FLOPs of the dearest dear, each of at least I FLOPs and D nanoseconds. A rank
    with n of them has room for limit - n I FLOPs of the others, as many as whole units of them have, and for
    (level - n D) / r, as they need at least r nanoseconds a FLOP. All ranks together have at most their number times
    the concave envelope of that room at the mean n.
    """
    own = costs.output_ns + _share_of_frames(costs)
    is_dear = 2 * costs.flops > int(costs.flops.max())
    others, others_ns = costs.flops[~is_dear], own[~is_dear]
    least_flops, least_ns = int(costs.flops[is_dear].min()), int(own[is_dear].min())
    if not len(others) or not int(others.min()) or not int(others_ns.min()) or limit // least_flops > MOST_DEAR:
        return 0
    cheapest = int((others_ns / others).argmin())
    ratio = Fraction(int(others_ns[cheapest]), int(others[cheapest])) * (1 - Fraction(1, 1 << 40))
    rooms = []
    for count in range(limit // least_flops + 1):
        room = limit - count * least_flops
        rooms.append(min(room, room // int(others.min()) * int(others.max())))

    def fits(level: int) -> bool:
        held = [min(Fraction(room), (level - count * least_ns) / ratio) for count, room in enumerate(rooms)]
        held = [room for room in held if room >= 0]
        return ranks * _envelope(held, Fraction(int(is_dear.sum()), ranks)) >= int(others.sum())

    low, high, step = mean, mean, max(1, mean // FINEST)
    while not fits(high):
        if high > ranks * mean:
            return 0
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _envelope(values: list[Fraction], place: Fraction) -> Fraction:
    """Return the least concave function above values[0], values[1], .. at a place; -1 beyond the last."""
    best = Fraction(-1)
    for low in range(min(len(values) - 1, int(place)) + 1):
        for high in range(-int(-place // 1), len(values)):
            part = (place - low) / (high - low) if high > low else Fraction(0)
            best = max(best, values[low] + part * (values[high] - values[low]))
    return best


def _cheapest(flops: np.ndarray, beside: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the least sum of `beside` over units that have `least` FLOPs together, but for the last one: [n] int64."""
    order = np.argsort(beside / np.maximum(flops, 1), kind="stable")
    filled = np.cumsum(flops[order])
    prices = np.concatenate([[0], np.cumsum(beside[order])])
    return prices[np.searchsorted(filled, least, side="right")]


def _alone(costs: RowCosts) -> np.ndarray:
    """Nanoseconds of the frames of each unit: [u] int64."""
    return (costs.spans[:, 1] - costs.spans[:, 0]) * costs.frame_ns


def _share_of_frames(costs: RowCosts) -> np.ndarray:
    """Nanoseconds of the frames of each unit, those that several units need shared evenly among them: [u] int64.

    Units that need frames 0..3, 2..5: 3 frames each. Whoever decodes some of the units decodes their shares at least.
    """
    shift = costs.streams[:, None] * (int(costs.spans.max(initial=0)) + 1)
    edges, place = np.unique(costs.spans + shift, return_inverse=True)
    place = place.reshape(-1, 2)
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, place[:, 0], 1)
    np.add.at(change, place[:, 1], -1)
    needed_by = np.maximum(np.cumsum(change)[:-1], 1)
    before = np.concatenate([[0], np.cumsum(np.diff(edges) * (GRAIN // needed_by))])
    return (before[place[:, 1]] - before[place[:, 0]]) * costs.frame_ns // GRAIN
