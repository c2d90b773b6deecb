"""Move single units from ranks above even to ranks below: the grain that chunks of many units are too coarse for.

A rank that encodes too much gives the first units of its groups of pictures, which cost the receiver few frames, and
windows of sound; one that decodes too much gives last units, whose frames nobody else on it needs.
"""

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.evenness import DECODE, Evenness

ROUNDS = 8
MOST_TRIED = 48
"""Units that one rank offers in one round."""


def donate(evenness: Evenness, ranks: np.ndarray) -> np.ndarray:
    """Return [u] int64: the rank of each unit after moves that each lower the squared loads above even."""
    ranks, costs = ranks.copy(), evenness.costs
    alone = (costs.spans[:, 1] - costs.spans[:, 0]) * costs.frame_ns + costs.output_ns + costs.model.rates.seek_ns
    added = evenness.scale(np.stack([costs.flops, alone, costs.bytes], axis=1)) + 1
    for _ in range(ROUNDS):
        loads = evenness.loads(ranks, evenness.num_ranks)
        is_even = not (loads > evenness.even).any()
        if is_even or not _round(evenness.even, loads, ranks, added=added, relief=_relief(evenness, ranks)):
            break
    return ranks


def _round(even: np.ndarray, loads: np.ndarray, ranks: np.ndarray, *, added: np.ndarray, relief: np.ndarray) -> bool:
    """Let each rank above even give units, the most relief for what they add first; say if any moved."""
    has_moved = False
    for rank in np.flatnonzero((loads > even).any(axis=1)).tolist():
        cost = int((loads[rank] - even).argmax())
        own = np.flatnonzero((ranks == rank) & (relief[:, cost] > 0))
        price = added[own, DECODE if cost != DECODE else 0] * 64 // relief[own, cost]
        for unit in own[np.argsort(price, kind="stable")][:MOST_TRIED].tolist():
            if loads[rank, cost] <= even[cost]:
                break
            before = _badness(loads[rank], even) + _badness(loads, even)
            gain = before - _badness(loads[rank] - relief[unit], even) - _badness(loads + added[unit], even)
            gain[rank] = 0
            receiver = int(np.lexsort((loads[:, cost], -gain))[0])
            if gain[receiver] > 0:
                loads[rank] -= relief[unit]
                loads[receiver] += added[unit]
                ranks[unit], has_moved = receiver, True
    return has_moved


def _badness(loads: np.ndarray, even: np.ndarray) -> np.ndarray:
    return np.square(np.maximum(loads - even, 0)).sum(axis=-1)


def _relief(evenness: Evenness, ranks: np.ndarray) -> np.ndarray:
    """What each unit's rank would at least be rid of without it: [u, 3] int64, scaled."""
    costs = evenness.costs
    table = np.stack([costs.flops, costs.output_ns + _own_frames(costs, ranks) * costs.frame_ns, costs.bytes], axis=1)
    return evenness.scale(table)


def _own_frames(costs: RowCosts, ranks: np.ndarray) -> np.ndarray:
    """Frames that only this unit needs of all on its rank, [u] int64: what reaches beyond the units before it, up to
    the start of the one after it."""
    order = np.lexsort((costs.spans[:, 1], costs.spans[:, 0], costs.streams, ranks))
    starts, stops = costs.spans[order].T
    reader = np.cumsum((np.diff(ranks[order], prepend=-1) != 0) | (np.diff(costs.streams[order], prepend=-1) != 0))
    shift = reader * (int(stops.max(initial=0)) + 1)
    reached = np.concatenate([[0], np.maximum.accumulate(stops + shift)[:-1]])
    following = np.append((starts + shift)[1:], shift[-1:] + stops.max(initial=0) + 1)
    frames = np.empty_like(starts)
    frames[order] = np.maximum(np.minimum(stops + shift, following) - np.maximum(starts + shift, reached), 0)
    return frames
