"""Which rank decodes and encodes each unit: one run of units a rank where that is even, else ranks exchange chunks.

A run alone evens out costs that follow each other (a steady clip): every rank then reads one span beside its tokens.
Where they do not (resolution that follows the scene: dear units, cheap frames), ranks exchange chunks of their spans
until decoding, encoding and memory are even at once. Integers throughout, ties by index.
"""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.cut import cut_runs, shared_decoding
from mmcp.sharding.donate import donate
from mmcp.sharding.evenness import Evenness
from mmcp.sharding.exchange import SCALE, Exchange
from mmcp.sharding.ranges import Ranges, even_bounds, part_of

CHUNKINGS = ((0, True), (12, True), (16, False))
"""What is tried in turn: chunks per rank (0: whole streams), and whether chunks keep groups of pictures whole."""
FEW_MOVES = 256
"""Rows with at most this many (unit, rank) pairs are improved unit by unit at the end."""
MOST_PAIRS = 1024
"""Pairs of (unit, rank) pairs up to which two units are moved at once."""


def assign_units(costs: RowCosts, tokens: tuple[Ranges, ...], starts: np.ndarray, *, unit_cap: int = 0) -> np.ndarray:
    """Return [u] int64: the rank of each unit, near its tokens where that keeps the work even.

    tokens: per rank, the global positions it holds
    starts: [u] int64  first token of each unit
    unit_cap: most resident bytes of the units of one rank; 0: any number
    """
    holders, ranks = part_of(tokens, starts), len(tokens)
    if ranks == 1 or not costs.num_units:
        return holders
    evenness = Evenness(costs, ranks, unit_cap)
    order = _in_token_order(holders, ranks)
    turns = np.argsort(order)[holders]
    targets = np.cumsum(np.bincount(turns, minlength=ranks))[:-1]
    parts = _exchanged(evenness, donate(evenness, order[cut_runs(evenness, targets)]))
    return _nearest_ranks(parts, holders, costs.rows, ranks)[parts]


def _in_token_order(holders: np.ndarray, ranks: int) -> np.ndarray:
    """Sort the ranks by the place, in token order, of the middle unit that each holds; those without units last."""
    units = np.argsort(holders, kind="stable")
    counts = np.bincount(holders, minlength=ranks)
    middle = np.minimum(np.cumsum(counts) - counts + counts // 2, len(units) - 1)
    return np.argsort(np.where(counts > 0, units[middle], len(units)), kind="stable")


def _exchanged(evenness: Evenness, home: np.ndarray) -> np.ndarray:
    """Exchange chunks from `home` on until every cost is even, or as even as found."""
    costs, ranks = evenness.costs, evenness.num_ranks
    best, least = home, evenness.score(home)
    for chunks_per_rank, is_whole in CHUNKINGS:
        if least[1] == 0:
            return best
        chunks = _chunks(costs, ranks, chunks_per_rank, is_whole=is_whole)
        parts = donate(evenness, _exchange(evenness, chunks, home))
        score = evenness.score(parts)
        if score < least:
            best, least = parts, score
    return _polish(evenness, best) if costs.num_units * ranks <= FEW_MOVES else best


def _nearest_ranks(parts: np.ndarray, holders: np.ndarray, rows: np.ndarray, ranks: int) -> np.ndarray:
    """Give each part the rank that holds most of its rows, the largest overlaps first: [parts] int64."""
    pairs, pair = np.unique(parts * ranks + holders, return_inverse=True)
    overlap = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(overlap, pair, rows)
    chosen, taken = np.full(ranks, -1), np.zeros(ranks, dtype=bool)
    for number in pairs[np.argsort(-overlap, kind="stable")].tolist():
        part, rank = divmod(number, ranks)
        if chosen[part] < 0 and not taken[rank]:
            chosen[part], taken[rank] = rank, True
    chosen[chosen < 0] = np.flatnonzero(~taken)
    return chosen


def _chunks(costs: RowCosts, num_ranks: int, chunks_per_rank: int, *, is_whole: bool) -> np.ndarray:
    """Number the units [u] by chunk: runs of one stream, of about equal cost.

    is_whole: cut only where no frame is decoded twice, however uneven the chunks
    """
    order = np.argsort(costs.streams, kind="stable")
    shared = shared_decoding(costs, order)
    frames = costs.spans[order, 1] - costs.spans[order, 0]
    decoding = costs.output_ns[order] + np.maximum(frames * costs.frame_ns[order] - shared, 0)
    table = Evenness(costs, 1).scale(np.stack([costs.flops[order], decoding, costs.bytes[order]], axis=1))
    weight = np.concatenate([[0], np.cumsum(table.sum(axis=1))])
    parts = max(1, num_ranks * chunks_per_rank)
    slack = int(weight[-1]) if is_whole else int(weight[-1]) // parts // 2
    cuts = _snap(weight, _cheap(costs, np.append(shared, 0), num_ranks), parts=parts, slack=slack)
    starts = np.diff(costs.streams[order], prepend=-1) != 0
    starts[cuts[cuts < len(starts)]] = True
    chunks = np.empty_like(order)
    chunks[order] = np.cumsum(starts) - 1
    return chunks


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


def _exchange(evenness: Evenness, chunks: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Start each chunk on the rank of its middle unit and exchange chunks; return the rank of each unit."""
    units = np.argsort(chunks, kind="stable")
    counts = np.bincount(chunks)
    middle = units[np.cumsum(counts) - counts + counts // 2]
    rows = np.zeros(len(counts), dtype=np.int64)
    np.add.at(rows, chunks, evenness.costs.rows)
    rows = rows * evenness.num_ranks * SCALE // max(1, int(rows.sum()))
    weights = evenness.loads(chunks, len(counts))
    return Exchange(weights, home[middle], evenness.num_ranks, even=evenness.even, rows=rows).run()[chunks]


def _polish(evenness: Evenness, ranks: np.ndarray) -> np.ndarray:
    """Move few units, at what each move truly costs, while one helps: in a row of few units seeks weigh much."""
    best, least = ranks, evenness.score(ranks)
    improved = True
    while improved and least[1]:
        improved = False
        for moved in _moves(best, evenness.num_ranks):
            score = evenness.score(moved)
            if score < least:
                best, least, improved = moved, score, True
                break
    return best


def _moves(ranks: np.ndarray, num_ranks: int) -> Iterator[np.ndarray]:
    """Yield every layout in which one unit is elsewhere, then those in which two are."""
    units = len(ranks)
    for count in (1, 2) if (units * num_ranks) ** 2 <= MOST_PAIRS else (1,):
        for chosen in combinations(range(units), count):
            for targets in product(range(num_ranks), repeat=count):
                moved = ranks.copy()
                moved[list(chosen)] = targets
                yield moved
