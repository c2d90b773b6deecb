"""Which query may read which key, told from the segments of a row: one description, every form that attention needs.

A mask is causal inside each document, and may add both-ways blocks, a sliding window and an attention sink:

    query i reads key j of its own document when
        j <= i  and  (no window, or i - j < window, or j is among the document's first `sink` tokens)
        or i and j lie in the same both-ways block (a unit that attends both ways, a document's prefix), as a whole or
        within the window

Two documents of 3 tokens; 5 tokens of which 1 and 2 are one image; window 2 with sink 1:

    1 . . . . .        1 . . . .        1 . . . .
    1 1 . . . .        1 1 1 . .        1 1 . . .
    1 1 1 . . .        1 1 1 . .        1 1 1 . .
    . . . 1 . .        1 1 1 1 .        1 . 1 1 .
    . . . 1 1 .        1 1 1 1 1        1 . . 1 1
    . . . 1 1 1
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.ranges import Ranges, overlapping

ATTENDS = ("causal", "both", "prefix")


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal inside each document, widened by both-ways blocks, narrowed by a window."""

    bounds: np.ndarray
    """[documents + 1] int64: first token of each document, then the number of tokens (cu_seqlens)."""
    blocks: np.ndarray
    """[blocks, 2] int64: bounds of each both-ways block; ascending and disjoint, each in one document."""
    window: int = 0
    """Tokens a query sees looking back, itself included; 0: all."""
    sink: int = 0
    """First tokens of a document that stay visible beyond the window."""
    window_cuts_blocks: bool = False
    """Whether the window also limits how far a query looks back inside its both-ways block."""

    @staticmethod
    def of(sequence: TokenSequence) -> "Mask":
        """Describe the mask of one row.

        Raises ValueError for an unknown `attends`, and for text that attends `both`: it has no units.
        """
        return Mask(sequence.document_bounds, _both_ways_blocks(sequence))

    @staticmethod
    def causal(lengths: list[int]) -> "Mask":
        """Describe packed causal documents of the given lengths, in tokens."""
        bounds = np.concatenate([[0], np.cumsum([length for length in lengths if length])]).astype(np.int64)
        return Mask(bounds, np.zeros((0, 2), dtype=np.int64))

    def with_window(self, window: int, sink: int = 0, *, cuts_blocks: bool = False) -> "Mask":
        """Let a query look back on `window` tokens and the document's first `sink` only; 0 and 0: no limit.

        Both-ways blocks stay whole, unless `cuts_blocks`, as in Gemma 3 since transformers 5.
        """
        if window < 0 or sink < 0:
            raise ValueError(f"window={window} and sink={sink} count tokens; use 0 for none")
        if sink and not window:
            raise ValueError(f"sink={sink} without a window changes nothing: every token is visible; set a window")
        return replace(self, window=window, sink=sink, window_cuts_blocks=cuts_blocks)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds[-1])

    @cached_property
    def documents(self) -> np.ndarray:
        """[s] int64: number of the document of each token, counted over non-empty ones."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    @cached_property
    def block_ids(self) -> np.ndarray:
        """[s] int64: number of the both-ways block of each token, -1 outside of blocks."""
        ids = np.full(self.num_tokens, -1, dtype=np.int64)
        lengths = self.blocks[:, 1] - self.blocks[:, 0]
        before = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum())) + np.repeat(self.blocks[:, 0] - before, lengths)
        ids[within] = np.repeat(np.arange(len(self.blocks)), lengths)
        return ids

    def dense(self) -> np.ndarray:
        """[s, s] bool: the definition, written out; for references and pictures of short rows."""
        query, key = np.ogrid[: self.num_tokens, : self.num_tokens]
        causal = (key <= query) & (self.documents[:, None] == self.documents[None, :])
        block = (self.block_ids[:, None] == self.block_ids[None, :]) & (self.block_ids[:, None] >= 0)
        if self.window:
            near = (query - key < self.window) | (key - self.bounds[self.documents][None, :] < self.sink)
            causal &= near
            block &= near | (not self.window_cuts_blocks)
        return causal | block

    @cached_property
    def slices(self) -> np.ndarray:
        """[slices, 6] int64: the same pairs as disjoint pieces of plain geometry.

        Columns: first and last + 1 query, first and last + 1 key, lowest and highest diagonal; a slice holds the pairs
        of its rectangle with lowest <= key - query <= highest. No pair is in two slices: merging by log-sum-exp
        would count it twice.
        """
        pieces = [
            piece
            for start, stop in zip(self.bounds[:-1], self.bounds[1:], strict=True)
            if start < stop
            for piece in self._document_slices(int(start), int(stop))
        ]
        return np.array(pieces, dtype=np.int64).reshape(-1, 6)

    def pairs(self) -> int:
        """Count the (query, key) pairs that may be read: what softmax attention costs."""
        return int(count_pairs(self.slices).sum())

    def _document_slices(self, start: int, stop: int) -> list[tuple[int, int, int, int, int, int]]:
        first, last = np.searchsorted(self.blocks[:, 0], [start, stop])
        blocks = [(int(a), int(b)) for a, b in self.blocks[first:last]]
        if self.window and self.window < stop - start:
            return self._windowed_slices(start, stop, blocks)
        pieces = []
        causal_from = start
        if blocks and blocks[0][0] == start:  # a leading block is a full square: cheaper than two triangles
            causal_from = blocks[0][1]
            pieces.append(_full(start, causal_from, start, causal_from))
            blocks = blocks[1:]
        if causal_from < stop:
            pieces.append((causal_from, stop, start, stop, start - stop, 0))
        return pieces + [_above(a, b) for a, b in blocks if b - a > 1]

    def _windowed_slices(
        self, start: int, stop: int, blocks: list[tuple[int, int]]
    ) -> list[tuple[int, int, int, int, int, int]]:
        window, sink_end = self.window, min(start + self.sink, stop)
        pieces = [(start, stop, start, stop, 1 - window, 0)]
        if self.sink:
            pieces.append((start + window, stop, start, sink_end, start - stop, -window))
        for a, b in blocks:
            if b - a > 1:
                pieces.append(_above(a, b))
            first_key = max(a, sink_end)
            if first_key + window < b and not self.window_cuts_blocks:  # what the window would hide inside the block
                pieces.append((first_key + window, b, first_key, b - window, a - b, -window))
        return pieces


def count_pairs(slices: np.ndarray) -> np.ndarray:
    """[slices] int64: pairs in each slice of `Mask.slices`, in closed form."""
    q0, q1, k0, k1, lowest, highest = slices.T
    shift = q0 - k0
    below_highest = _pairs_below(q1 - q0, k1 - k0, highest + shift)
    return below_highest - _pairs_below(q1 - q0, k1 - k0, lowest + shift - 1)


def restrict(slices: np.ndarray, queries: Ranges, keys: Ranges) -> np.ndarray:
    """Keep the pairs of some queries and some keys: [pieces, 6] int64, as slices, each inside one range of both.

    Rectangles are tight: every query of a piece reads one of its keys, and every key is read.
    A causal (0, 4, 0, 4, -3, 0) for queries 2 3 and keys 0 3 becomes (2, 4, 0, 1, -3, 0) and (3, 4, 3, 4, -3, 0).
    """
    query_starts, query_stops = _bounds(queries)
    key_starts, key_stops = _bounds(keys)
    piece, query = overlapping(query_starts, query_stops, slices[:, 0], slices[:, 1])
    entry, key = overlapping(key_starts, key_stops, slices[piece, 2], slices[piece, 3])
    piece, query = piece[entry], query[entry]
    lowest, highest = slices[piece, 4], slices[piece, 5]
    q0, q1 = np.maximum(slices[piece, 0], query_starts[query]), np.minimum(slices[piece, 1], query_stops[query])
    k0, k1 = np.maximum(slices[piece, 2], key_starts[key]), np.minimum(slices[piece, 3], key_stops[key])
    q0, q1 = np.maximum(q0, k0 - highest), np.minimum(q1, k1 - lowest)
    k0, k1 = np.maximum(k0, q0 + lowest), np.minimum(k1, q1 + highest)
    pieces = np.stack([q0, q1, k0, k1, lowest, highest], axis=1)
    return pieces[(q0 < q1) & (k0 < k1)]


def keys_of(pieces: np.ndarray) -> Ranges:
    """Return the keys that pieces of `restrict` read."""
    order = np.lexsort((pieces[:, 3], pieces[:, 2]))
    start, stop = pieces[order, 2], np.maximum.accumulate(pieces[order, 3])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > stop[:-1]])[: len(order)])
    last = np.concatenate([first[1:], [len(order)]])[: len(first)] - 1
    return tuple(zip(start[first].tolist(), stop[last].tolist(), strict=True))


def renumber(pieces: np.ndarray, queries: Ranges, keys: Ranges) -> np.ndarray:
    """Count queries and keys from 0 inside their sets instead of along the row: pieces of `restrict` stay one each.

    The example of `restrict` becomes (0, 2, 0, 1, -1, 2), (1, 2, 1, 2, -1, 2)
    """
    shift_query, shift_key = _shifts(pieces[:, 0], queries), _shifts(pieces[:, 2], keys)
    along = shift_key - shift_query
    return pieces + np.stack([shift_query, shift_query, shift_key, shift_key, along, along], axis=1)


def join(pieces: np.ndarray) -> np.ndarray:
    """Join full rectangles that touch: [pieces, 6] int64, the same pairs in fewer pieces.

    Scattered tokens make one rectangle of each run of queries with each run of keys; counted inside their sets, all
    runs of keys before a run of queries lie side by side.
    """
    q0, q1, k0, k1, lowest, highest = pieces.T
    full = (lowest <= k0 - q1 + 1) & (highest >= k1 - 1 - q0)
    rectangles = _joined_along(_joined_along(pieces[full, :4], 2), 0)
    q0, q1, k0, k1 = rectangles.T
    return np.concatenate([pieces[~full], np.stack([q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0], axis=1)])


def _joined_along(rectangles: np.ndarray, axis: int) -> np.ndarray:
    """Join [n, 4] rectangles (q0, q1, k0, k1) that touch along queries (axis 0) or keys (2) and agree in the other."""
    if not len(rectangles):
        return rectangles
    other = 2 - axis
    rows = rectangles[np.lexsort((rectangles[:, axis], rectangles[:, other + 1], rectangles[:, other]))]
    agree = (rows[1:, other : other + 2] == rows[:-1, other : other + 2]).all(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], ~(agree & (rows[1:, axis] == rows[:-1, axis + 1]))]))
    joined = rows[starts].copy()
    joined[:, axis + 1] = rows[np.concatenate([starts[1:], [len(rows)]]) - 1, axis + 1]
    return joined


def _bounds(ranges: Ranges) -> np.ndarray:
    return np.array(ranges, dtype=np.int64).reshape(-1, 2).T


def _shifts(positions: np.ndarray, ranges: Ranges) -> np.ndarray:
    """What to add to each position, the start of a piece inside one range, to count from 0 inside the set."""
    starts, stops = _bounds(ranges)
    before = np.cumsum(stops - starts) - (stops - starts)
    return (before - starts)[np.searchsorted(starts, positions, side="right") - 1] if len(starts) else positions


def _pairs_below(rows: np.ndarray, columns: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """Count i < rows, j < columns with j - i <= diagonal."""

    def ramp(x: np.ndarray) -> np.ndarray:  # sum of clamp(t, 0, columns) for t <= x
        inside = np.clip(x, 0, columns)
        return inside * (inside + 1) // 2 + np.maximum(x - columns, 0) * columns

    return ramp(rows + diagonal) - ramp(diagonal)


def _full(q0: int, q1: int, k0: int, k1: int) -> tuple[int, int, int, int, int, int]:
    return q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0


def _above(start: int, stop: int) -> tuple[int, int, int, int, int, int]:
    """Return the pairs of a square block in which the key comes after the query."""
    return start, stop - 1, start + 1, stop, 1, stop - start


def _both_ways_blocks(sequence: TokenSequence) -> np.ndarray:
    blocks: list[tuple[int, int]] = []
    unit, bounds, offsets = 0, sequence.unit_ranges.tolist(), sequence.offsets.tolist()
    before = -1  # the document of the last token so far
    prefix_of = -1  # the document whose leading prefix is still open, as blocks[-1]
    for segment, start, stop in zip(sequence.segments, offsets, offsets[1:], strict=False):
        _check(segment)
        units = bounds[unit : unit + len(segment.units)]
        unit += len(segment.units)
        if start == stop:
            continue
        leads = before != segment.document
        before = segment.document
        in_prefix = segment.attends == "prefix" and (leads or prefix_of == segment.document)
        prefix_of = segment.document if in_prefix else -1
        if in_prefix:
            blocks.append((blocks.pop()[0] if not leads else start, stop))
        elif segment.attends == "both":
            blocks += [(a, b) for a, b in units if a < b]
    return np.array(blocks, dtype=np.int64).reshape(-1, 2)


def _check(segment: Segment) -> None:
    if segment.attends not in ATTENDS:
        raise ValueError(f"a segment attends '{segment.attends}', which is unknown; use one of {', '.join(ATTENDS)}")
    if segment.attends == "both" and segment.kind == "text":
        raise ValueError("a text segment attends 'both', but has no units to see as a whole; use 'prefix' or 'causal'")
