"""What each stretch of a row is, in words, times and costs: text, frame groups, images, windows of sound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from mmcp.masks import count_pairs
from mmcp.sequence import KINDS, SAMPLE_RATE, Segment, TokenSequence, Unit
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.ranges import overlapping

MOST_PIECES = 20_000  # beyond these, neighbours are told as one
TEXT_SHOWN = 60  # characters of a text

Words = Callable[[tuple[int, ...]], str]
"""Token ids -> the text they spell."""


@dataclass(frozen=True)
class Piece:
    """A text segment, or one unit of a media segment."""

    start: int
    """First token."""
    kind: str
    words: str
    span: tuple[Fraction, Fraction] | None
    """Seconds on the clip's clock; None for what has no time."""


def row_pieces(sequence: TokenSequence, words: Words | None = None) -> list[Piece]:
    """List the pieces of a row in token order; without `words`, text is told by its length only."""
    pieces, unit = [], 0
    for segment, start in zip(sequence.segments, sequence.offsets.tolist(), strict=False):
        if segment.kind == "text" and segment.num_tokens:
            span = (segment.start, segment.end) if segment.end > segment.start else None
            pieces.append(Piece(start, "text", _text_words(segment, words), span))
        for each in segment.units:
            first = int(sequence.unit_ranges[unit, 0])
            span = (each.start, each.end) if each.end > each.start else None
            pieces.append(Piece(first, segment.kind, unit_words(segment, each), span))
            unit += 1
    return pieces


def _text_words(segment: Segment, words: Words | None) -> str:
    trained = ", trained" if segment.loss else ""
    if words is None:
        return f"text of {segment.num_tokens:,} tokens{trained}"
    text = words(segment.ids)
    shown = text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}..."
    return f'"{shown}"{trained}' if shown.strip() else f"{segment.num_tokens:,} special tokens{trained}"


def unit_words(segment: Segment, unit: Unit) -> str:
    """Say what a unit shows, in how many pixels or rows, and what must be decoded for it."""
    if segment.kind == "audio":
        first, last = (item / SAMPLE_RATE for item in unit.items)
        return f"sound {first:,.2f} s to {last:,.2f} s, {unit.num_tokens} rows"
    pixels = " x ".join(map(str, unit.size[-2:]))
    if segment.kind == "image":
        return f"image '{segment.source}', {pixels} pixels"
    frames = ", ".join(f"{item:,}" for item in dict.fromkeys(unit.items))
    return f"frames {frames} at {pixels} pixels; decoded from frame {unit.decode[0]:,} on"


def row_data(sequence: TokenSequence, costs: RowCosts | None, words: Words | None = None) -> dict[str, Any]:
    """Return what `ribbon.js` tells of a row: lists with one entry per piece, costs as they would be on one rank."""
    pieces = row_pieces(sequence, words)
    each = -(-len(pieces) // MOST_PIECES) or 1
    groups = [pieces[first : first + each] for first in range(0, len(pieces), each)]
    starts = np.array([group[0].start for group in groups], dtype=np.int64)
    edges = np.append(starts, sequence.num_tokens)
    return {
        "tokens": sequence.num_tokens,
        "kinds": KINDS,
        "start": starts.tolist(),
        "kind": [KINDS.index(max(group, key=lambda piece: piece.kind != "text").kind) for group in groups],
        "words": [group[0].words + (f" and {len(group) - 1} more" if len(group) > 1 else "") for group in groups],
        "time": [_time(group, 0) for group in groups],
        "until": [_time(group, 1) for group in groups],
        "costs": {} if costs is None else _costs(sequence, costs, edges),
    }


def plan_row_data(num_tokens: int, unit_kinds: Mapping[int, str], unit_ranges: Sequence[tuple[int, int]]) -> dict:
    """Return the same of a row that only its plan tells of: kinds and ranges, neither times nor words."""
    ordered = sorted((start, unit_kinds[unit]) for unit, (start, stop) in enumerate(unit_ranges) if start < stop)
    stops = {stop for start, stop in unit_ranges if start < stop}
    known = dict(ordered)
    starts = sorted(({0} | known.keys() | stops) - {num_tokens}) if num_tokens else []
    kinds = [known.get(start, "text") for start in starts]
    return {
        "tokens": num_tokens,
        "kinds": KINDS,
        "start": starts,
        "kind": [KINDS.index(kind) for kind in kinds],
        "words": kinds,
        "time": [None] * len(starts),
        "until": [None] * len(starts),
        "costs": {},
    }


def _time(group: Sequence[Piece], end: int) -> float | None:
    """Return when the first piece with a time begins (end=0) or the last one ends (end=1), in seconds."""
    spans = [piece.span for piece in group if piece.span is not None]
    if not spans:
        return None
    return round(float(max(span[1] for span in spans) if end else spans[0][0]), 3)


def _costs(sequence: TokenSequence, costs: RowCosts, edges: np.ndarray) -> dict[str, list[float]]:
    """Price the stretches between edges [pieces + 1], each alone: nanoseconds to decode, forward FLOPs."""
    model, units = costs.model, np.searchsorted(edges, sequence.unit_ranges[:, 0], side="right") - 1
    frames = costs.spans[:, 1] - costs.spans[:, 0]
    decode = _sum_at(units, frames * costs.frame_ns + costs.output_ns, len(edges) - 1)
    encode = _sum_at(units, costs.flops, len(edges) - 1)
    tokens = np.diff(edges)
    backbone = [int(count) * model.linear_flops for count in tokens]
    for layer in model.layers:
        pairs = query_pairs(costs.mask_of(layer).slices, edges) if layer.pair_flops else np.zeros_like(tokens)
        both = zip(pairs.tolist(), tokens.tolist(), strict=True)
        added = [layer.flops(layer.heads, pair, count) for pair, count in both]
        backbone = [before + more for before, more in zip(backbone, added, strict=True)]
    return {
        "decode_ns": list(map(_rounded, decode.tolist())),
        "encoder_flops": list(map(_rounded, encode.tolist())),
        "backbone_flops": list(map(_rounded, backbone)),
    }


def query_pairs(slices: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the pairs whose query lies between two edges: [edges - 1] int64; slices as in `Mask.slices`."""
    entry, piece = overlapping(edges[:-1], edges[1:], slices[:, 0], slices[:, 1])
    clipped = slices[entry].copy()
    clipped[:, 0] = np.maximum(clipped[:, 0], edges[:-1][piece])
    clipped[:, 1] = np.minimum(clipped[:, 1], edges[1:][piece])
    return _sum_at(piece, count_pairs(clipped), len(edges) - 1)


def runs(values: np.ndarray, limit: int) -> tuple[list[int], list[int], bool]:
    """Compress equal neighbours: starts, values, and whether only samples at equal distances are given.

    [4, 4, 7, 7, 7] -> [0, 2], [4, 7], False
    """
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.zeros(0, dtype=np.int64)
    is_sampled = len(starts) > limit
    if is_sampled:
        starts = np.array(list(accumulate([0] + [-(-len(values) // limit)] * (limit - 1))), dtype=np.int64)
        starts = starts[starts < len(values)]
    return starts.tolist(), values[starts].tolist(), is_sampled


def _sum_at(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, places, values)
    return sums


def _rounded(value: int) -> float:
    return float(f"{value:.3g}")
