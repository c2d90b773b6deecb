"""Exchange chunks of work between ranks until no rank has more than its share of any of several costs."""

import numpy as np

SCALE = 1 << 20  # an even share of a cost, after scaling
PARTNERS = (12, 96)  # least loaded ranks asked first, and when these do not help
MOST_STEPS = 2048
MOST_CHUNKS = 24  # chunks of one rank considered in one exchange


class Exchange:
    """Chunks on ranks, exchanged to lower the sum over ranks and costs of the squared load above the target."""

    def __init__(self, weights: np.ndarray, owners: np.ndarray, num_ranks: int, *, even: np.ndarray, rows: np.ndarray):
        """Start from a layout.

        weights: [chunks, costs] int64  in units of SCALE for an even share
        owners: [chunks] int64  the rank of each chunk
        even: [costs] int64  loads up to this are as good as even
        rows: [chunks] int64  embedding rows in the same unit, routed when a chunk is not where it started
        """
        self.weights, self.owners, self.rows, self.home = weights, owners.copy(), rows, owners
        self.target = np.maximum(even, weights.max(axis=0, initial=0))
        self.loads = np.zeros((num_ranks, weights.shape[1]), dtype=np.int64)
        np.add.at(self.loads, owners, weights)

    def run(self) -> np.ndarray:
        """Exchange until no rank above its target gains by it; return [chunks] owners."""
        stuck = np.zeros(len(self.loads), dtype=bool)
        for _ in range(MOST_STEPS):
            excess = np.where(stuck[:, None], 0, self.loads - self.target)
            rank, cost = map(int, np.unravel_index(int(excess.argmax()), excess.shape))
            if excess[rank, cost] <= 0:
                return self.owners
            by_load = np.argsort(self.loads[:, cost], kind="stable")
            by_load = by_load[by_load != rank]
            stuck[rank] = not any(self._improve(rank, by_load[:number]) for number in PARTNERS)
        return self.owners

    def _improve(self, rank: int, partners: np.ndarray) -> bool:
        """Make the best exchange of one chunk of `rank` for one chunk, or none, of a partner; say if there was one."""
        mine = self._some_chunks(rank, MOST_CHUNKS)
        theirs = np.concatenate([self._some_chunks(partner, MOST_CHUNKS) for partner in partners.tolist()])
        others = np.concatenate([self.owners[theirs], partners])
        nothing = np.zeros((len(partners), self.weights.shape[1]), dtype=np.int64)
        returned = np.concatenate([self.weights[theirs], nothing])
        moved = self.weights[mine][:, None] - returned[None]  # [mine, theirs + partners, costs]
        gain = self._badness(self.loads[rank]) + self._badness(self.loads[others])
        gain = gain - self._badness(self.loads[rank] - moved) - self._badness(self.loads[others] + moved)
        routed = self._routed(mine, rank, others) + np.append(self._routed_back(theirs, rank), nothing[:, 0])
        gain = np.where(gain > 0, gain // (SCALE // 16 + np.maximum(routed, 0)) + 1, 0)
        best, back = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[best, back] <= 0:
            return False
        self._move(mine[best], int(others[back]))
        if back < len(theirs):
            self._move(theirs[back], rank)
        return True

    def _some_chunks(self, rank: int, most: int) -> np.ndarray:
        """Chunks of a rank, ascending; evenly spaced ones where it has more than `most`."""
        chunks = np.flatnonzero(self.owners == rank)
        return chunks[:: -(-len(chunks) // most)] if len(chunks) > most else chunks

    def _routed(self, chunks: np.ndarray, rank: int, others: np.ndarray) -> np.ndarray:
        """Rows routed more when chunks of `rank` move to others: [chunks, others] int64."""
        leaves = (self.home[chunks] == rank).astype(np.int64)[:, None]
        comes_home = self.home[chunks][:, None] == others[None]
        return self.rows[chunks][:, None] * (leaves - comes_home)

    def _routed_back(self, chunks: np.ndarray, rank: int) -> np.ndarray:
        """Rows routed more when chunks move to `rank`: [chunks] int64."""
        leaves = (self.home[chunks] == self.owners[chunks]).astype(np.int64)
        return self.rows[chunks] * (leaves - (self.home[chunks] == rank))

    def _badness(self, loads: np.ndarray) -> np.ndarray:
        return np.square(np.maximum(loads - self.target, 0)).sum(axis=-1)

    def _move(self, chunk: int, rank: int) -> None:
        self.loads[self.owners[chunk]] -= self.weights[chunk]
        self.loads[rank] += self.weights[chunk]
        self.owners[chunk] = rank
