"""Which rank decodes and encodes each unit: one run of units a rank where that is even, else units move.

A run alone evens out costs that follow each other (a steady clip): every rank then reads one span beside its tokens.
Where they do not (dear units with cheap frames, groups of pictures as long as a rank's share), units move between ranks
from several starts until decoding, encoding and memory are even at once. Integers throughout, ties by index.
"""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.cut import cut_runs
from mmcp.sharding.dear import dear_apart
from mmcp.sharding.evenness import Evenness
from mmcp.sharding.groups import Groups, latest_first, whole_groups
from mmcp.sharding.ranges import Ranges, part_of
from mmcp.sharding.refine import Refine

FEW_ROUTED = 25
"""Percent of the rows that may be routed before other layouts are tried."""
FEW_MOVES = 256
"""Rows with at most this many (unit, rank) pairs are improved unit by unit at the end."""
MOST_PAIRS = 1024
"""Pairs of (unit, rank) pairs up to which two units are moved at once."""


def assign_units(
    costs: RowCosts, tokens: tuple[Ranges, ...], starts: np.ndarray, *, unit_cap: int = 0, uneven_ns: int = 0
) -> np.ndarray:
    """Return [u] int64: the rank of each unit, near its tokens where that keeps the work even.

    tokens: per rank, the global positions it holds
    starts: [u] int64  first token of each unit
    unit_cap: most resident bytes of the units of one rank; 0: any number
    uneven_ns: what attention adds to the step over its even share
    """
    holders, ranks = part_of(tokens, starts), len(tokens)
    if ranks == 1 or not costs.num_units:
        return holders
    evenness = Evenness(costs, ranks, unit_cap, uneven_ns)
    order = _in_token_order(holders, ranks)
    turns = np.argsort(order)[holders]
    targets = np.cumsum(np.bincount(turns, minlength=ranks))[:-1]
    parts = _evened(evenness, order[cut_runs(evenness, targets)], holders)
    return _nearest_ranks(parts, holders, costs.rows, ranks)[parts]


def _evened(evenness: Evenness, runs: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """Move units until every cost is even, from runs or from layouts that keep groups of pictures whole."""
    costs = evenness.costs
    best, least = runs, (evenness.score(runs), routed_percent(costs, runs, holders))
    if not any(least[0]):
        return best
    groups = Groups(costs)
    for start in _starts(evenness, groups, runs, holders):
        parts = Refine(evenness, groups, start, holders).run()
        score = evenness.score(parts), routed_percent(costs, parts, holders)
        if score < least:
            best, least = parts, score
        if not any(least[0]) and least[1] <= FEW_ROUTED:
            break
    return _polish(evenness, best) if evenness.costs.num_units * evenness.num_ranks <= FEW_MOVES else best


def _starts(evenness: Evenness, groups: Groups, runs: np.ndarray, holders: np.ndarray) -> Iterator[np.ndarray]:
    """Yield layouts to start from, those that fit any row first."""
    yield whole_groups(evenness, groups, holders)
    yield runs
    for layout in (latest_first, dear_apart):
        start = layout(evenness, groups)
        if start is not None:
            yield start


def routed_percent(costs: RowCosts, ranks: np.ndarray, holders: np.ndarray) -> int:
    """Percent of the embedding rows that leave the rank that makes them, units taken to lie where they start."""
    return int(costs.rows[ranks != holders].sum()) * 100 // max(1, int(costs.rows.sum()))


def _in_token_order(holders: np.ndarray, ranks: int) -> np.ndarray:
    """Sort the ranks by the place, in token order, of the middle unit that each holds; those without units last."""
    units = np.argsort(holders, kind="stable")
    counts = np.bincount(holders, minlength=ranks)
    middle = np.minimum(np.cumsum(counts) - counts + counts // 2, len(units) - 1)
    return np.argsort(np.where(counts > 0, units[middle], len(units)), kind="stable")


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


def _polish(evenness: Evenness, ranks: np.ndarray) -> np.ndarray:
    """Move few units, at what each move truly costs, while one helps: in a row of few units seeks weigh much."""
    best, least = ranks, evenness.score(ranks)
    improved = True
    while improved and any(least):
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
