"""Move pieces of work between ranks while that brings costs above even down.

A piece is a unit, the first or the last units of a group of pictures that a rank has, or some that share no frames. A
rank that shows a later unit of a group decodes the frames of the earlier ones anyway, so what a piece costs depends on
who takes it. Where no move helps, two ranks swap pieces. Loads are integers in the scale of Evenness, ties go to the
first.
"""

from dataclasses import dataclass

import numpy as np

from mmcp.sequence import KINDS
from mmcp.sharding.evenness import DECODE, SCALE, Evenness
from mmcp.sharding.groups import Groups
from mmcp.sharding.ranges import expand

MOST_MOVES = 512
"""Moves in all, and this for each rank besides:"""
MOVES_PER_RANK = 16
GRAIN = 64
"""Grain of the number of frames, as a share of all, for a share of decoding."""
FRAMES_WEIGH = 8
"""What a frame that is decoded again counts for, in rows that are routed, both as shares of all."""
BLOCKS = (4, 16, 64, 256)
"""Units without a group of pictures that move together: images, windows of sound."""
LEAST_GAIN = 64
"""Moves that lower the badness of a rank by less than this part of it are not made."""
MOST_SWAPS = 96
"""Swaps tried in all."""
MOST_TARGETS = 64
"""Ranks a piece may go to that are asked, besides those that hold units of its group."""
PARTNERS = 6
"""Least loaded ranks asked for a swap, and as many of those that hold units of the same groups."""
MOST_SWAPPED = 128
"""Pieces of one rank that are tried in swaps."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What one rank could give away; p is their number."""

    starts: np.ndarray
    """[p] int64: first unit, as a place in the order of Refine; `stops`: last + 1 among those of the rank."""
    stops: np.ndarray
    units: np.ndarray
    """[units] int64: all units of the rank; starts and stops count these."""
    relief: np.ndarray
    """[p, 3] int64: load that the rank is rid of."""
    added: np.ndarray
    """[p, 3] int64: load of a rank that takes it and holds nothing of its group."""
    groups: np.ndarray
    """[p] int64: group of pictures."""
    ends: np.ndarray
    """[p] int64: load of decoding up to the last unit."""
    rows: np.ndarray
    """[p] int64: embedding rows, scaled like loads."""
    homes: np.ndarray
    """[p] int64: rank that holds the tokens of the first unit."""
    in_frames: np.ndarray
    """[p] int64: frames, scaled like loads, for GRAIN of decoding."""

    def take(self, chosen: np.ndarray) -> "Pieces":
        """Keep some."""
        fields = (self.relief, self.added, self.groups, self.ends, self.rows, self.homes, self.in_frames)
        return Pieces(self.starts[chosen], self.stops[chosen], self.units, *(field[chosen] for field in fields))


class Refine:
    """A layout of units over ranks, its loads, and the moves between them."""

    def __init__(self, evenness: Evenness, groups: Groups, ranks: np.ndarray, holders: np.ndarray):
        """Start from a layout.

        ranks: [u] int64  the rank of each unit
        holders: [u] int64  the rank that holds its first token
        """
        costs = evenness.costs
        starts, stops = costs.spans.T
        self.order, self.group, self.first = groups.order, groups.number, groups.first
        self.evenness, self.even = evenness, evenness.even
        self.owner, self.home = ranks[self.order], holders[self.order]
        table = np.stack([costs.flops, costs.output_ns, costs.bytes], axis=1)[self.order]
        self.rest = evenness.scale(table)
        frames = np.zeros_like(table)
        frames[:, DECODE] = ((stops - starts) * costs.frame_ns)[self.order]
        self.end = evenness.scale(frames)[:, DECODE]
        frames[:, DECODE] = costs.model.rates.seek_ns
        self.seek = np.where(self.end > 0, evenness.scale(frames)[:, DECODE], 0)
        self.rows = self._share(costs.rows, int(costs.rows.sum()))
        video = np.where(costs.kinds == KINDS.index("video"), stops - starts, 0)
        self.in_frames = self._share(video, costs.least_decoding[1]) * GRAIN // np.maximum(self.end, 1)
        self.loads = evenness.loads(ranks, evenness.num_ranks)
        stops_of = np.cumsum(np.bincount(self.owner, minlength=evenness.num_ranks))
        self.held = np.split(np.argsort(self.owner, kind="stable"), stops_of[:-1])

    def _share(self, values: np.ndarray, total: int) -> np.ndarray:
        """Sort values [u] like `order` and scale them: an even share of the total is SCALE."""
        return values[self.order] * self.evenness.num_ranks * SCALE // max(1, total)

    def run(self) -> np.ndarray:
        """Move until nothing is above even or no move helps; return [u] int64, the rank of each unit."""
        stuck, has_moved, swaps = np.zeros(len(self.loads), dtype=bool), False, 0
        for _ in range(MOST_MOVES + MOVES_PER_RANK * len(stuck)):
            excess = np.where(stuck[:, None], 0, self.loads - self.even)
            rank, cost = map(int, np.unravel_index(int(excess.argmax()), excess.shape))
            if excess[rank, cost] <= 0:
                if not (has_moved and stuck.any()):
                    break
                stuck[:], has_moved = False, False
                continue
            pieces = self._pieces(rank)
            partner = self._give(rank, cost, pieces)
            if partner < 0 and swaps < MOST_SWAPS:
                partner = self._swap(rank, cost, pieces)
                swaps += 1
            if partner < 0:
                stuck[rank] = True
            else:
                stuck[partner], has_moved = False, True
        ranks = np.empty_like(self.owner)
        ranks[self.order] = self.owner
        return ranks

    def _give(self, rank: int, cost: int, pieces: Pieces) -> int:
        """Make the best move of a piece of `rank` to another rank; return that, or -1."""
        held = self._held(rank, pieces)
        targets = np.unique(np.concatenate([self._lightest(rank, cost, MOST_TARGETS), held[1]]))
        added = self._added(pieces, targets, held)
        gain = self._badness(self.loads[rank]) + self._badness(self.loads[targets])[None]
        gain = gain - self._badness(self.loads[rank] - pieces.relief)[:, None]
        gain = gain - self._badness(self.loads[targets][None] + added)
        more = added[:, :, DECODE] - pieces.relief[:, None, DECODE]
        more = np.maximum(more, FRAMES_WEIGH * more * pieces.in_frames[:, None] // GRAIN)
        price = SCALE // 64 + np.maximum(self._routed(pieces, rank, targets) + more, 0)
        is_worth = gain > self._badness(self.loads[rank]) // LEAST_GAIN
        worth = np.where(is_worth, gain // price + 1, 0)
        piece, target = np.unravel_index(int(worth.argmax()), worth.shape)
        if worth[piece, target] <= 0:
            return -1
        self._move(pieces, int(piece), rank, int(targets[target]))
        return int(targets[target])

    def _swap(self, rank: int, cost: int, pieces: Pieces) -> int:
        """Make the best swap of a piece of `rank` for a piece of a partner; return that, or -1."""
        mine, chosen = self._some(pieces), None
        best = int(self._badness(self.loads[rank])) // LEAST_GAIN
        own, sharers = self.loads[rank], np.unique(self._held(rank, pieces)[1])
        sharers = sharers[np.argsort(self.loads[sharers, cost], kind="stable")][:PARTNERS]
        for partner in np.union1d(self._lightest(rank, cost, PARTNERS), sharers).tolist():
            theirs = self._some(self._pieces(partner))
            if not len(theirs.starts):
                continue
            other = self.loads[partner]
            out = self._added(mine, np.array([partner]), self._held(rank, mine))[:, 0]
            back = self._added(theirs, np.array([rank]), self._held(partner, theirs))[:, 0]
            gain = self._badness(own) + self._badness(other)
            gain = gain - self._badness(own - mine.relief[:, None] + back[None])
            gain = gain - self._badness(other + out[:, None] - theirs.relief[None])
            gain = np.where(mine.groups[:, None] == theirs.groups[None], 0, gain)
            place = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[place] > best:
                best, chosen = int(gain[place]), (partner, int(place[0]), theirs, int(place[1]))
        if chosen is None:
            return -1
        partner, piece, theirs, returned = chosen
        self._move(mine, piece, rank, partner)
        self._move(theirs, returned, partner, rank)
        return partner

    def _pieces(self, rank: int) -> Pieces:
        """List what `rank` could give away: units, the first and the last ones of each group, blocks of lone ones."""
        units = self.held[rank]
        group, end, rest = self.group[units], self.end[units], self.rest[units]
        number = np.arange(len(units))
        last = np.searchsorted(group, group, side="right") - 1
        before = np.where(np.diff(group, prepend=-1) == 0, np.roll(end, 1), 0)
        sums = np.concatenate([np.zeros((1, 3), dtype=np.int64), np.cumsum(rest, axis=0)])
        rows = np.concatenate([[0], np.cumsum(self.rows[units])])
        first = np.searchsorted(group, group)
        suffix, prefix = np.flatnonzero(last > number), np.flatnonzero((last > number) & (first < number))
        block, after = self._blocks(group)
        starts = np.concatenate([number, suffix, first[prefix], block])
        stops = np.concatenate([number + 1, last[suffix] + 1, prefix + 1, after])
        work, reach = sums[stops] - sums[starts], end[stops - 1]
        reach[len(reach) - len(block) :] = np.cumsum(end)[after - 1] - np.cumsum(end)[block] + end[block]
        relief, added = work.copy(), work
        relief[:, DECODE] += np.where(stops - 1 >= last[starts], reach - before[starts], 0)
        added[:, DECODE] += reach + self.seek[units][starts]
        return Pieces(
            starts, stops, units, relief, added, group[starts], reach, rows[stops] - rows[starts],
            self.home[units][starts], self.in_frames[units][starts],
        )  # fmt: skip

    def _blocks(self, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find runs of 4, 16, 64 .. units that are groups of their own: first and last + 1 of each."""
        is_lone = np.concatenate([[0], np.cumsum(self.first[group + 1] - self.first[group] == 1)])
        starts = [np.arange(0, len(group) - size + 1, size) for size in BLOCKS]
        first = np.concatenate(starts)
        stops = first + np.repeat(BLOCKS, [len(each) for each in starts])
        is_whole = is_lone[stops] - is_lone[first] == stops - first
        return first[is_whole], stops[is_whole]

    def _held(self, rank: int, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tell who else holds units of the groups of `pieces`: groups, ranks, and how far each of these decodes."""
        groups = np.unique(pieces.groups)
        units = expand(np.stack([self.first[groups], self.first[groups + 1]], axis=1))
        units = units[self.owner[units] != rank]
        key = self.group[units] * len(self.loads) + self.owner[units]
        keys, place = np.unique(key, return_inverse=True)
        reach = np.zeros(len(keys), dtype=np.int64)
        np.maximum.at(reach, place, self.end[units])
        return keys // len(self.loads), keys % len(self.loads), reach

    def _added(self, pieces: Pieces, targets: np.ndarray, held: tuple[np.ndarray, ...]) -> np.ndarray:
        """Load that each piece adds to each target: [p, targets, 3] int64."""
        added = np.repeat(pieces.added[:, None], len(targets), axis=1)
        groups, ranks, reach = held
        is_asked = np.isin(ranks, targets)
        groups, ranks, reach = groups[is_asked], ranks[is_asked], reach[is_asked]
        by_group = np.argsort(pieces.groups, kind="stable")
        low = np.searchsorted(pieces.groups[by_group], groups)
        high = np.searchsorted(pieces.groups[by_group], groups, side="right")
        piece = by_group[expand(np.stack([low, high], axis=1))]
        column = np.repeat(np.searchsorted(targets, ranks), high - low)
        known = np.minimum(np.repeat(reach, high - low), pieces.ends[piece])
        added[piece, column, DECODE] -= known + np.where(known > 0, self.seek.max(initial=0), 0)
        return added

    def _lightest(self, rank: int, cost: int, most: int) -> np.ndarray:
        """Ranks other than `rank` with the least load of a cost, ascending."""
        lightest = np.argsort(self.loads[:, cost], kind="stable")[: most + 1]
        return np.sort(lightest[lightest != rank][:most])

    def _some(self, pieces: Pieces) -> Pieces:
        """Keep every so many, MOST_SWAPPED at most."""
        return pieces.take(np.arange(0, len(pieces.starts), max(1, -(-len(pieces.starts) // MOST_SWAPPED))))

    def _routed(self, pieces: Pieces, rank: int, targets: np.ndarray) -> np.ndarray:
        """Rows routed more when a piece goes to a target: [p, targets] int64."""
        leaves = (pieces.homes == rank).astype(np.int64)[:, None]
        return pieces.rows[:, None] * (leaves - (pieces.homes[:, None] == targets[None]))

    def _badness(self, loads: np.ndarray) -> np.ndarray:
        return np.square(np.maximum(loads - self.even, 0) >> 4).sum(axis=-1)

    def _move(self, pieces: Pieces, piece: int, rank: int, target: int) -> None:
        """Move one piece and price both ranks anew."""
        moved = pieces.units[pieces.starts[piece] : pieces.stops[piece]]
        self.owner[moved] = target
        self.held[rank] = self.held[rank][self.owner[self.held[rank]] == rank]
        self.held[target] = np.sort(np.concatenate([self.held[target], moved]))
        for changed in (rank, target):
            self.loads[changed] = self.evenness.loads_of(self.order[self.held[changed]])
