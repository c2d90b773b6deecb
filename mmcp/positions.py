"""Rotary positions of a row, told from its segments without drift; they restart in each document.

Three axes: time, height, width. A run starts at the base b, one above everything before it in its document:

    text or sound of n tokens   (b+i, b+i, b+i)                              the next base is b + n
    image of H x W rows         (b, b+i, b+j)                                the next base is b + max(H, W)
    video segment               (b + steps + t, b+i, b+j)                    steps = floor((start - first start) * rate)

`positions_mrope` follows Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631), with times from real stamps. A video
written as one segment is timed as in Qwen2.5-VL. Where timestamp text stands before each frame group, each group is a
segment of its own, and its rows share the time b, as in Qwen3-VL: the text tells the time.

`positions_time_aligned` follows Qwen2.5-Omni and Qwen3-Omni (2503.20215, 2509.17765): picture and sound of one clip,
joined with no text between them, are one run, and both are placed by their own start on the clip's clock:

    sound of n rows             (b + steps + i) on all axes                  one row is one step

Where transformers 5.24 differs, on purpose (tests/test_positions.py has both):

    text after a video or a clip goes on above the largest position so far; transformers goes on above the last piece,
    so that text can share positions with a clip whose picture outlasts its sound, and, in Qwen2.5-VL, with the video
    each stream keeps its start, and groups their real times; transformers counts from 0 in even steps, in float32

Worked example, text of 2 tokens, an image of 2 x 2, text of 1:

    time    0 1   2 2 2 2   4
    height  0 1   2 2 3 3   4
    width   0 1   2 3 2 3   4
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

import numpy as np

from mmcp.sequence import Segment, TokenSequence, Unit

FINE = 1 << 20  # parts of a position that fractional ones are whole multiples of
TWO = Fraction(2)
TWENTY_FIVE = Fraction(25)


def positions_1d(sequence: TokenSequence) -> np.ndarray:
    """Count the tokens of each document: [1, s] int64."""
    lengths = np.diff(sequence.document_bounds)
    return (np.arange(sequence.num_tokens) - np.repeat(sequence.document_bounds[:-1], lengths))[None]


def positions_mrope(sequence: TokenSequence, tokens_per_second: Fraction = TWO) -> np.ndarray:
    """Place each token in time, height and width: [3, s] int64.

    tokens_per_second: steps along the time axis per second of a video segment; 2 in Qwen2.5-VL.
    """
    timed = (Run((segment,), is_timed=segment.kind == "video") for segment in sequence.segments)
    return _place(timed, Clock(tokens_per_second, 1), brackets=1)


def positions_time_aligned(
    sequence: TokenSequence,
    tokens_per_second: Fraction = TWENTY_FIVE,
    *,
    is_fractional: bool = False,
    brackets: int = 1,
) -> np.ndarray:
    """Place each token in time, height and width, picture and sound of a clip on one clock: [3, s].

    tokens_per_second: steps per second, also the rate of the rows of sound; 25 in Qwen2.5-Omni, 13 in Qwen3-Omni
    is_fractional: do not round times down to whole steps, as in Qwen3-Omni; the result is float64, else int64
    brackets: tokens of the text before, and of the text after, a clip with picture and sound that share one position;
        2 in Qwen2.5-Omni, whose marks for picture and sound stand there side by side
    Raises ValueError for text beside such a clip that is too short to hold its brackets.
    """
    scale = FINE if is_fractional else 1
    placed = _place(_clips(sequence), Clock(tokens_per_second, scale), brackets=brackets)
    return placed / scale if is_fractional else placed


@dataclass(frozen=True)
class Run:
    """Segments that share a base."""

    segments: tuple[Segment, ...]
    is_timed: bool
    """Whether units are placed by their start; else they follow each other."""

    @property
    def is_joined(self) -> bool:
        """Whether it has picture and sound."""
        return {"video", "audio"} <= {segment.kind for segment in self.segments}


@dataclass(frozen=True)
class Clock:
    """From seconds to parts of a position, exactly, rounded down once."""

    rate: Fraction
    """Positions per second."""
    scale: int
    """Parts of a position."""

    def parts(self, start: Fraction, first: Fraction) -> int:
        """Return floor((start - first) * rate * scale)."""
        numerator = start.numerator * first.denominator - first.numerator * start.denominator
        denominator = start.denominator * first.denominator * self.rate.denominator
        return numerator * self.rate.numerator * self.scale // denominator


def _clips(sequence: TokenSequence) -> Iterator[Run]:
    """Join consecutive video and audio segments of one source and document; all others stand alone."""

    def clip(numbered: tuple[int, Segment]) -> tuple:
        number, segment = numbered
        joins = segment.kind in ("video", "audio")
        return (segment.document, segment.source) if joins else (segment.document, segment.source, number)

    filled = ((number, segment) for number, segment in enumerate(sequence.segments) if segment.num_tokens)
    for _, group in groupby(filled, key=clip):
        segments = tuple(segment for _, segment in group)
        yield Run(segments, is_timed=segments[0].kind in ("video", "audio"))


Row = tuple[int, bool, int, int, int, int, int, int, int]
"""What stands at one place of its run, a text segment or one unit: its tokens; whether all axes advance with each, as
in text and sound; parts of a position after the run's base; height and width in rows; parts from the base to its end;
the numbers of its base and of its document; tokens at its start beyond the first that share the first's position."""


def _rows(runs: Iterable[Run], clock: Clock, brackets: int) -> Iterator[Row]:
    """List what has tokens, in order; items with one number share a base."""
    numbered = [run for run in runs if any(segment.num_tokens for segment in run.segments)]
    joined = [False, *(run.is_joined for run in numbered), False]
    base = 0
    for place, run in enumerate(numbered):
        starts = [unit.start for segment in run.segments for unit in segment.units[:1]] if run.is_timed else []
        first = starts[0] if len(starts) == 1 else min(starts, default=Fraction(0))
        for segment in run.segments:
            if segment.kind == "text":
                lead, trail = ((brackets - 1) * joined[place + step] for step in (0, 2))
                yield _text(segment, lead, trail, base, clock.scale)
            for unit in segment.units:
                parts = clock.parts(unit.start, first) if run.is_timed and unit.start is not first else 0
                yield _unit(segment, unit, parts, base, clock.scale)
                base += not run.is_timed
        base += 1


def _text(segment: Segment, lead: int, trail: int, base: int, scale: int) -> Row:
    n = segment.num_tokens - lead - trail
    if n < 1 + (lead > 0 and trail > 0):
        raise ValueError(
            f"text of {segment.num_tokens} tokens beside a clip with picture and sound cannot hold its brackets; "
            "write the marks of the clip's start and end into it"
        )
    return segment.num_tokens, True, 0, 1, 1, n * scale, base, segment.document, lead


def _unit(segment: Segment, unit: Unit, parts: int, base: int, scale: int) -> Row:
    time, height, width = unit.grid
    n = unit.num_tokens
    if segment.kind == "audio":
        return n, True, parts, 1, 1, parts + n * scale, base, segment.document, 0
    extent = max(parts + time * scale, height * scale, width * scale)
    return n, False, parts, height, width, extent if n else 0, base, segment.document, 0


def _place(runs: Iterable[Run], clock: Clock, *, brackets: int) -> np.ndarray:
    """[3, s] int64: the positions of all tokens, in parts of 1 / scale."""
    rows = [row for row in _rows(runs, clock, brackets) if row[0]]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 9).T
    tokens, is_line, parts, height, width, extent, run, document, lead = columns
    ends = np.cumsum(tokens)
    base, scale = _bases(run, document, extent), clock.scale
    placed = np.empty((3, tokens.sum()), dtype=np.int64)
    within = np.arange(placed.shape[1]) - np.repeat(ends - tokens, tokens)
    line = is_line.astype(bool)
    on_line = np.repeat(line, tokens)
    text, grid = tokens[line], tokens[~line]
    along = within[on_line] - np.repeat(lead[line], text)
    last = np.repeat((extent - parts)[line] // scale - 1, text)
    placed[:, on_line] = np.clip(along, 0, last) * scale + np.repeat((base + parts)[line], text)
    offsets = _grids(height[~line], width[~line], grid) * scale
    offsets += np.repeat(base[~line], grid)
    offsets[0] += np.repeat(parts[~line], grid)
    placed[:, ~on_line] = offsets
    return placed


def _grids(height: np.ndarray, width: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[3, sum of tokens] int64: time, row and column of each row of each grid; equal grids are counted once."""
    sizes = np.stack([tokens, height, width])
    kinds, kind = np.unique(sizes, axis=1, return_inverse=True)
    tables = []
    for count, high, wide in kinds.T.tolist():
        place = np.arange(count)
        tables.append(np.stack([place // (high * wide), place // wide % high, place % wide]))
    changes = np.flatnonzero(np.diff(kind.ravel(), prepend=-1))
    lengths = np.diff(np.append(changes, kind.size))
    parts = [np.tile(tables[kind.flat[at]], (1, n)) for at, n in zip(changes.tolist(), lengths.tolist(), strict=True)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64)


def _bases(run: np.ndarray, document: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """[items] int64: base of the run of each item."""
    if not len(run):
        return np.zeros(0, dtype=np.int64)
    first = np.flatnonzero(np.diff(run, prepend=-1))
    extents = np.maximum.reduceat(extent, first)
    before = np.cumsum(extents) - extents
    of_run = document[first]
    starts = np.flatnonzero(np.diff(of_run, prepend=of_run[0] - 1))
    restart = np.repeat(before[starts], np.diff(np.append(starts, len(of_run))))
    return np.repeat(before - restart, np.diff(np.append(first, len(run))))
