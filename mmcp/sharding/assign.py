"""Which rank decodes and encodes each unit: cut the row where cutting is cheap, then exchange chunks until even.

A cut alone evens out one cost. Where the others follow it (a steady clip), the cut is the answer and every rank reads
one span. Where they do not (resolution that follows the scene: dear units, cheap frames), ranks exchange chunks of
their spans until decoding, encoding and memory are even at once. Integers throughout, ties by index.
"""

from itertools import product

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.evenness import Evenness
from mmcp.sharding.exchange import Exchange
from mmcp.sharding.ranges import even_bounds

CHUNKINGS = ((0, True), (12, True), (16, False))
"""What is tried in turn: chunks per rank (0: whole streams), and whether chunks keep groups of pictures whole."""
FEW_MOVES = 256
"""Rows with at most this many (unit, rank) pairs are improved unit by unit at the end."""


def assign_units(costs: RowCosts, num_ranks: int) -> np.ndarray:
    """Return [u] int64: the rank of each unit."""
    home = best = _cut(costs, num_ranks)
    if num_ranks == 1 or not costs.num_units:
        return home
    evenness = Evenness(costs, num_ranks)
    least = evenness.score(best)
    for chunks_per_rank, is_whole in CHUNKINGS:
        if least[1] == 0:
            return best
        chunks = _chunks(costs, num_ranks, chunks_per_rank, is_whole=is_whole)
        ranks = _exchange(evenness, chunks, home)
        score = evenness.score(ranks)
        if score < least:
            best, least = ranks, score
    return _polish(evenness, best) if costs.num_units * num_ranks <= FEW_MOVES else best


def cut_costs(costs: RowCosts) -> np.ndarray:
    """Price a cut before each unit: [u + 1] int64 nanoseconds of decoding that both sides would do.

    A clip with key frames at 0 and 10, its units showing frames 0, 5, 10: cutting before the second decodes frames
    0..4 twice, cutting before the third nothing.
    """
    order = np.argsort(costs.streams, kind="stable")
    shared = _shared(costs, order)
    price = np.zeros(costs.num_units + 1, dtype=np.int64)
    np.add.at(price, order[:-1] + 1, shared[1:])
    np.add.at(price, order[1:] + 1, -shared[1:])
    return np.cumsum(price)


def _shared(costs: RowCosts, order: np.ndarray) -> np.ndarray:
    """Decoding, in nanoseconds, that each unit shares with the unit before it in `order`; 0 between streams."""
    shared = np.zeros(len(order), dtype=np.int64)
    before, after = order[:-1], order[1:]
    starts = np.maximum(costs.spans[before, 0], costs.spans[after, 0])
    frames = np.maximum(np.minimum(costs.spans[before, 1], costs.spans[after, 1]) - starts, 0)
    shared[1:] = np.where(costs.streams[before] == costs.streams[after], frames * costs.frame_ns[after], 0)
    return shared


def _cut(costs: RowCosts, num_ranks: int) -> np.ndarray:
    """Cut the units, in token order, into one run per rank of about equal encoding (or decoding, where that is 0)."""
    weight = _running(costs.flops if costs.flops.any() else np.maximum(costs.output_ns, 1))
    slack = int(weight[-1]) // num_ranks // 100
    cuts = _snap(weight, _cheap(costs, cut_costs(costs), num_ranks), parts=num_ranks, slack=slack)
    return np.repeat(np.arange(num_ranks), np.diff(cuts, prepend=0, append=costs.num_units))


def _cheap(costs: RowCosts, prices: np.ndarray, parts: int) -> np.ndarray:
    """Places where a cut costs at most a hundredth of an even share of decoding."""
    return np.flatnonzero(prices <= costs.least_decoding[0] // (100 * parts))


def _snap(weight: np.ndarray, cheap: np.ndarray, *, parts: int, slack: int) -> np.ndarray:
    """Cut into parts as equal as units allow; up to `slack` off where a cheap place is that near.

    weight: [u + 1] int64, ascending  the weight before each unit, then the total
    returns [parts - 1] int64, ascending: the unit before which each cut goes
    """
    targets = np.array(even_bounds(int(weight[-1]), parts)[1:-1], dtype=np.int64)
    nearest = _nearest(weight, targets)
    cheap = cheap[_nearest(weight[cheap], targets)]
    return np.maximum.accumulate(np.where(np.abs(weight[cheap] - targets) <= slack, cheap, nearest))


def _nearest(ascending: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Index of the entry of `ascending` nearest to each target; the lower one on ties."""
    above = np.searchsorted(ascending, targets).clip(0, len(ascending) - 1)
    below = np.maximum(above - 1, 0)
    return np.where(targets - ascending[below] <= ascending[above] - targets, below, above)


def _running(weights: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(weights)])


def _chunks(costs: RowCosts, num_ranks: int, chunks_per_rank: int, *, is_whole: bool) -> np.ndarray:
    """Number the units [u] by chunk: runs of one stream, of about equal cost.

    is_whole: cut only where no frame is decoded twice, however uneven the chunks
    """
    order = np.argsort(costs.streams, kind="stable")
    shared = _shared(costs, order)
    frames = costs.spans[order, 1] - costs.spans[order, 0]
    decoding = costs.output_ns[order] + np.maximum(frames * costs.frame_ns[order] - shared, 0)
    table = Evenness(costs, 1).scale(np.stack([costs.flops[order], decoding, costs.bytes[order]], axis=1))
    weight = _running(table.sum(axis=1))
    parts = max(1, num_ranks * chunks_per_rank)
    slack = int(weight[-1]) if is_whole else int(weight[-1]) // parts // 2
    cuts = _snap(weight, _cheap(costs, np.append(shared, 0), num_ranks), parts=parts, slack=slack)
    starts = np.diff(costs.streams[order], prepend=-1) != 0
    starts[cuts[cuts < len(starts)]] = True
    chunks = np.empty_like(order)
    chunks[order] = np.cumsum(starts) - 1
    return chunks


def _exchange(evenness: Evenness, chunks: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Start each chunk on the rank of its middle unit and exchange chunks; return the rank of each unit."""
    units = np.argsort(chunks, kind="stable")
    counts = np.bincount(chunks)
    middle = units[np.cumsum(counts) - counts + counts // 2]
    weights = evenness.loads(chunks)
    return Exchange(weights, home[middle], evenness.num_ranks, even=evenness.even).run()[chunks]


def _polish(evenness: Evenness, ranks: np.ndarray) -> np.ndarray:
    """Move single units, at what each move truly costs, while one helps: in a row of few units seeks weigh much."""
    best, least = ranks, evenness.score(ranks)
    improved = True
    while improved and least[1]:
        improved = False
        for unit, rank in product(range(len(ranks)), range(evenness.num_ranks)):
            moved = best.copy()
            moved[unit] = rank
            score = evenness.score(moved)
            if score < least:
                best, least, improved = moved, score, True
    return best
