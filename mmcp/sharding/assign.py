"""Which rank decodes and encodes each unit: cut the row where cutting is cheap, then exchange chunks until even.

A cut alone evens out one cost. Where the others follow it (a steady clip), the cut is the answer and every rank reads
one span. Where they do not (resolution that follows the scene: dear units, cheap frames), ranks exchange chunks of
their spans until decoding, encoding and memory are even at once. Integers throughout, ties by index.
"""

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.ranges import even_bounds

SCALE = 1 << 20  # the mean load of a rank, in every cost, after scaling
TOLERANCE = SCALE // 64  # a load is even when at most this much above the mean
CHUNKS_PER_RANK = (8, 32)  # coarse exchanges first: fewer, larger moves
CANDIDATES = 64  # ranks considered as partners of the one exchange


def assign_units(costs: RowCosts, num_ranks: int) -> np.ndarray:
    """Return [u] int64: the rank of each unit."""
    ranks = _cut(costs, num_ranks)
    for chunks_per_rank in CHUNKS_PER_RANK:
        if num_ranks > 1 and _uneven(costs, ranks, num_ranks):
            ranks = _exchange(costs, ranks, num_ranks, chunks_per_rank)
    return ranks


def cut_costs(costs: RowCosts) -> np.ndarray:
    """Price a cut before each unit: [u + 1] int64 nanoseconds of decoding that both sides would do.

    A clip with key frames at 0 and 10, its units showing frames 0, 5, 10: cutting before the second decodes frames
    0..4 twice, cutting before the third nothing.
    """
    price = np.zeros(costs.num_units + 1, dtype=np.int64)
    order = np.argsort(costs.streams, kind="stable")
    before, after = order[:-1], order[1:]
    same = costs.streams[before] == costs.streams[after]
    before, after = before[same], after[same]
    starts = np.maximum(costs.spans[before, 0], costs.spans[after, 0])
    shared = np.maximum(np.minimum(costs.spans[before, 1], costs.spans[after, 1]) - starts, 0)
    np.add.at(price, before + 1, shared * costs.frame_ns[after])
    np.add.at(price, after + 1, -shared * costs.frame_ns[after])
    return np.cumsum(price)


def _cut(costs: RowCosts, num_ranks: int) -> np.ndarray:
    """Cut the units, in token order, into one run per rank of about equal encoding (or decoding, where that is 0)."""
    weight = _running(_leading_cost(costs))
    total = int(weight[-1])
    cuts = _snap(costs, weight, parts=num_ranks, slack=total // num_ranks // 100)
    lengths = np.diff(cuts, prepend=0, append=costs.num_units)
    return np.repeat(np.arange(num_ranks), lengths)


def _leading_cost(costs: RowCosts) -> np.ndarray:
    if costs.flops.any():
        return costs.flops
    return np.maximum(_alone(costs, np.arange(costs.num_units))[:, 1], 1)


def _snap(costs: RowCosts, weight: np.ndarray, *, parts: int, slack: int) -> np.ndarray:
    """Cut into parts as equal as units allow; up to `slack` off where that saves decoding frames twice.

    weight: [u + 1] int64, ascending  the weight before each unit, then the total
    returns [parts - 1] int64, ascending: the unit before which each cut goes
    """
    targets = np.array(even_bounds(int(weight[-1]), parts)[1:-1], dtype=np.int64)
    nearest = _nearest(weight, targets)
    cheap = np.flatnonzero(cut_costs(costs) <= costs.least_decoding[0] // (100 * parts))
    cheap = cheap[_nearest(weight[cheap], targets)]
    return np.maximum.accumulate(np.where(np.abs(weight[cheap] - targets) <= slack, cheap, nearest))


def _nearest(ascending: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Index of the entry of `ascending` nearest to each target; the lower one on ties."""
    above = np.searchsorted(ascending, targets).clip(0, len(ascending) - 1)
    below = np.maximum(above - 1, 0)
    return np.where(targets - ascending[below] <= ascending[above] - targets, below, above)


def _running(weights: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(weights)])


def _alone(costs: RowCosts, chunks: np.ndarray) -> np.ndarray:
    """Costs of each chunk by itself: [chunks, 3] int64 encoding FLOPs, decoding nanoseconds, bytes.

    chunks: [u] int64  the chunk of each unit, 0, 1, ...
    """
    number = int(chunks.max(initial=-1)) + 1
    table = np.zeros((number, 3), dtype=np.int64)
    np.add.at(table[:, 0], chunks, costs.flops)
    table[:, 1] = costs.decoding(np.arange(costs.num_units), chunks, number)[0]
    np.add.at(table[:, 2], chunks, costs.bytes)
    return table


def _scaled(table: np.ndarray, num_ranks: int) -> np.ndarray:
    """Scale each column so that an even share of it is SCALE; a column without work stays 0."""
    totals = table.sum(axis=0)
    coarse = np.maximum(totals >> 30, 1)  # keeps the product below in 64 bits
    return table // coarse * (num_ranks * SCALE) // np.maximum(totals // coarse, 1)


def _uneven(costs: RowCosts, ranks: np.ndarray, num_ranks: int) -> bool:
    return bool((_scaled(_alone(costs, ranks), num_ranks) > SCALE + TOLERANCE).any())


def _exchange(costs: RowCosts, ranks: np.ndarray, num_ranks: int, chunks_per_rank: int) -> np.ndarray:
    """Exchange chunks between ranks while that brings an overloaded one nearer to its share."""
    chunks = _chunks(costs, ranks, num_ranks * chunks_per_rank)
    first = np.flatnonzero(np.diff(chunks, prepend=-1))
    return Exchange(_scaled(_alone(costs, chunks), num_ranks), ranks[first], num_ranks).run()[chunks]


def _chunks(costs: RowCosts, ranks: np.ndarray, number: int) -> np.ndarray:
    """Number the units [u] by chunk: about `number` chunks of equal cost that keep to one rank each."""
    weight = _running(_scaled(_alone(costs, np.arange(costs.num_units)), 1).sum(axis=1))
    total = int(weight[-1])
    cuts = _snap(costs, weight, parts=number, slack=total // number // 2)
    starts = np.diff(ranks, prepend=-1) != 0
    starts[cuts[cuts < len(starts)]] = True
    return np.cumsum(starts) - 1


class Exchange:
    """Chunks on ranks, exchanged to lower the sum over ranks and costs of squared load above the target."""

    def __init__(self, weights: np.ndarray, owners: np.ndarray, num_ranks: int):
        """weights: [chunks, costs] int64, scaled; owners: [chunks] int64."""
        self.weights, self.owners = weights, owners.copy()
        self.target = np.maximum(SCALE + TOLERANCE, weights.max(axis=0, initial=0))
        self.loads = np.zeros((num_ranks, weights.shape[1]), dtype=np.int64)
        np.add.at(self.loads, owners, weights)

    def run(self) -> np.ndarray:
        """Exchange until no rank above its target gains by it; return [chunks] owners."""
        stuck = np.zeros(len(self.loads), dtype=bool)
        while True:
            excess = np.where(stuck[:, None], 0, self.loads - self.target)
            worst, cost = np.unravel_index(int(excess.argmax()), excess.shape)
            if excess[worst, cost] <= 0:
                return self.owners
            partner = self._improve(int(worst), int(cost))
            stuck[[worst, partner]] = partner == worst

    def _improve(self, rank: int, cost: int) -> int:
        """Make the best exchange of one chunk of `rank` for one chunk, or none, of another; return that rank.

        Returns `rank` itself when no exchange helps.
        """
        partners = np.argsort(self.loads[:, cost], kind="stable")
        partners = partners[partners != rank][:CANDIDATES]
        is_partner = np.zeros(len(self.loads), dtype=bool)
        is_partner[partners] = True
        mine, theirs = np.flatnonzero(self.owners == rank), np.flatnonzero(is_partner[self.owners])
        others = np.concatenate([self.owners[theirs], partners])
        returned = np.concatenate([self.weights[theirs], np.zeros((len(partners), self.weights.shape[1]), np.int64)])
        moved = self.weights[mine][:, None] - returned[None]  # [mine, theirs + partners, costs]
        gain = self._badness(self.loads[rank]) + self._badness(self.loads[others])
        gain = gain - self._badness(self.loads[rank] - moved) - self._badness(self.loads[others] + moved)
        best, back = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[best, back] <= 0:
            return rank
        self._move(mine[best], int(others[back]))
        if back < len(theirs):
            self._move(theirs[back], rank)
        return int(others[back])

    def _badness(self, loads: np.ndarray) -> np.ndarray:
        return np.square(np.maximum(loads - self.target, 0)).sum(axis=-1)

    def _move(self, chunk: int, rank: int) -> None:
        self.loads[self.owners[chunk]] -= self.weights[chunk]
        self.loads[rank] += self.weights[chunk]
        self.owners[chunk] = rank
