"""Rotary positions of a row: exact integers, told from its segments; they restart in each document.

`positions_mrope` follows Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631), with times from real stamps.
Three axes: time, height, width. A run starts at the base b, one above everything before it in its document:

    text or sound of n tokens   (b+i, b+i, b+i)                              the next base is b + n
    image of H x W rows         (b, b+i, b+j)                                the next base is b + max(H, W)
    video segment               (b + floor((start - first start) * tokens_per_second) + t, b+i, b+j)

A video written as one segment is timed as in Qwen2.5-VL. Where timestamp text stands before each frame group, each
group is a segment of its own, and its rows share the time b, as in Qwen3-VL: the text tells the time.

Worked example, text of 2 tokens, an image of 2 x 2, text of 1:

    time    0 1   2 2 2 2   4
    height  0 1   2 2 3 3   4
    width   0 1   2 3 2 3   4
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mmcp.sequence import TokenSequence


def positions_1d(sequence: TokenSequence) -> np.ndarray:
    """Count the tokens of each document: [1, s] int64."""
    lengths = np.diff(sequence.document_bounds)
    return (np.arange(sequence.num_tokens) - np.repeat(sequence.document_bounds[:-1], lengths))[None]


def positions_mrope(sequence: TokenSequence, tokens_per_second: Fraction = Fraction(2)) -> np.ndarray:
    """Place each token in time, height and width: [3, s] int64.

    tokens_per_second: steps along the time axis per second of a video segment; 2 in Qwen2.5-VL.
    """
    items = _items(sequence, tokens_per_second)
    base = _bases(items)
    item = np.repeat(np.arange(len(items.tokens)), items.tokens)
    before = np.cumsum(items.tokens) - items.tokens
    within = np.arange(len(item)) - before[item]
    height, width = items.height[item], items.width[item]
    row, column = within // width, within % width
    time = items.time[item] + row // height
    offsets = np.where(items.is_line[item], within, np.stack([time, row % height, column]))
    return base[item] + offsets


@dataclass(frozen=True)
class _Items:
    """What advances the base: a text segment, or one unit. Arrays of one entry per item that has tokens."""

    tokens: np.ndarray
    is_line: np.ndarray
    """Text and sound: all axes advance with each token."""
    time: np.ndarray
    """Time steps after the start of the run."""
    height: np.ndarray
    width: np.ndarray
    extent: np.ndarray
    """Positions from the run's base to the end of the item."""
    run: np.ndarray
    """Number of the run of each item: items of one run share a base."""
    document: np.ndarray


def _items(sequence: TokenSequence, tokens_per_second: Fraction) -> _Items:
    rows, run = [], 0
    for segment in sequence.segments:
        if segment.kind == "text":
            rows.append((segment.num_tokens, True, 0, 1, 1, segment.num_tokens, run, segment.document))
        for unit in segment.units:
            time, height, width = unit.grid
            is_line = segment.kind == "audio"
            late = (unit.start - segment.units[0].start) * tokens_per_second if segment.kind == "video" else 0
            steps = late.numerator // late.denominator
            extent = unit.num_tokens if is_line else max(steps + time, height, width)
            rows.append((unit.num_tokens, is_line, steps, height, width, extent, run, segment.document))
            run += segment.kind != "video"
        run += 1
    columns = np.array([row for row in rows if row[0]], dtype=np.int64).reshape(-1, 8).T
    return _Items(columns[0], columns[1].astype(bool), *columns[2:])


def _bases(items: _Items) -> np.ndarray:
    """[items] int64: base of the run of each item."""
    if not len(items.run):
        return np.zeros(0, dtype=np.int64)
    first = np.flatnonzero(np.diff(items.run, prepend=-1))
    extents = np.maximum.reduceat(items.extent, first)
    before = np.cumsum(extents) - extents
    document = items.document[first]
    starts = np.flatnonzero(np.diff(document, prepend=document[0] - 1))
    restart = np.repeat(before[starts], np.diff(np.append(starts, len(document))))
    return np.repeat(before - restart, np.diff(np.append(first, len(items.run))))
