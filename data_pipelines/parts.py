"""Videos, sounds and images as parts of a chain: how coarse each can be, and what refines it in which order.

A part starts as one unit for all of it and is halved until it has MANY units or the coarsest setting's rate; so far a
unit has at most SMALL rows. Then it follows the settings: twice as often, then larger, then twice as often again. With
MANY units no single step costs more than a percent of the whole; with fewer, no step costs more than a small unit, or
one row or column of blocks.

Halving is by leaves, the units at the finest rate: a cell of level l of a video shows every 2**l-th of its frames, and
one of a sound hears 2**l windows as one. Frames and stamps of a coarser cell are among those of the finer ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod

import numpy as np

from data_pipelines.budget import Scale, Setting, doublings, picture_size, picture_sizes
from data_pipelines.chain import ABSENT, SCALE, Cell, Part, Stage
from data_pipelines.container import ClipIndex
from data_pipelines.scene_change import EVEN, change_scores
from data_pipelines.units import (
    PictureRule,
    SoundRule,
    frame_units,
    image_unit,
    sampled_frames,
    sound_span,
    sound_units,
)
from data_pipelines.view import View
from mmcp.sequence import Unit

MANY = 100  # units: one more of them, or one twice as large, is at most a percent
SMALL = 24  # rows of a unit while there are few of them

Lead = Callable[[Sequence[Fraction]], np.ndarray]
"""[cells + 1] edges in seconds -> [cells] int64: by how much of a key each cell is refined earlier."""


MOST_LEAD = 2 * SCALE  # a stretch that changes a lot is at most twice refined before one that changes as the whole


def scene_lead(index: ClipIndex, edges: Sequence[Fraction]) -> np.ndarray:
    """[cells] int64: how much earlier the stretches between times are refined: a doubling for twice the change."""
    scores = np.append(change_scores(index, edges), EVEN)
    exponent = np.frexp(np.maximum(scores, 1).astype(np.float64))[1].astype(np.int64) - 1
    logarithm = exponent * SCALE + (np.maximum(scores, 1) * SCALE >> exponent) - SCALE  # exact, linear between powers
    return np.clip(logarithm[:-1] - logarithm[-1], -SCALE, MOST_LEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """A part, and how its cells become units."""

    part: Part
    units: Callable[[Sequence[Cell]], tuple[Unit, ...]]
    words: Callable[[Sequence[Cell]], str]
    """How finely it is seen or heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """The way of one part from coarse to fine: where it must have come at each setting."""

    leaves: int
    levels: Sequence[int]
    """By setting: level of its cells."""
    sizes: Sequence[int]
    """By setting: number of their size."""
    rows: Sequence[int]
    """By size: rows of a whole unit."""
    split_key: Callable[[int, int], int]
    """(setting, level before) -> key of halving."""
    grow_key: Callable[[int], int]
    """size after -> key of growing."""
    many: int = MANY
    """Units from which on none of them is more than a percent of the whole."""

    def stages(self) -> tuple[int, int, tuple[Stage, ...]]:
        """Return level and size of the start, and the stages."""
        top = max(0, self.leaves - 1).bit_length()
        small = max((i for i, rows in enumerate(self.rows[: self.sizes[0] + 1]) if rows <= SMALL), default=0)
        size, level = small, halved(self.leaves, self.levels, self.many)
        stages = [Stage(key=-SCALE * before, level=before, size=size, splits=True) for before in range(top, level, -1)]
        for setting, (target, wanted) in enumerate(zip(self.levels, self.sizes, strict=True)):
            while level > target:
                stages.append(Stage(key=self.split_key(setting, level), level=level, size=size, splits=True))
                level -= 1
            while size < wanted:
                stages.append(Stage(key=self.grow_key(size + 1), level=level, size=size, splits=False))
                size += 1
        return top, small, tuple(stages)


def halved(leaves: int, levels: Sequence[int], many: int) -> int:
    """Level at which the units of a part begin to grow: that of the coarsest setting, or where there are `many`."""
    level = max(0, leaves - 1).bit_length()
    while level > levels[-1] and (level > levels[0] or -(-leaves >> level) < many):
        level -= 1
    return level


def thin(rows: Sequence[int], kept: set[int], units: float) -> list[int]:
    """Choose which sizes to go through: all of them with few units, larger steps where a unit is a small share.

    rows:  by size
    kept:  sizes that must be chosen, the first and the last among them
    units: how many there are, in units of the usual size
    """
    chosen = [0]
    while chosen[-1] < len(rows) - 1:
        last = chosen[-1]
        step = max(1, int(units * rows[last] / (2 * MANY)))
        following = last + 1
        while following not in kept and rows[following + 1] - rows[last] <= step:
            following += 1
        chosen.append(following)
    return chosen


def video_part(
    index: ClipIndex,
    rule: PictureRule,
    settings: Sequence[Setting],
    *,
    view: View,
    stamp_tokens: Callable[[Fraction], int],
    lead: Lead | None = None,
) -> MediaPart:
    """Make the part of a clip's pictures. Raises ValueError for a view that the clip cannot give."""
    assert index.video is not None, "a clip without pictures has no part"
    frames, finest = viewed_frames(index, view, settings[-1].rate)
    leaves = -(-len(frames) // rule.frames)
    limit = view.max_pixels or settings[-1].frame_pixels
    if view.total_pixels is not None:
        limit = min(limit, max(1, view.total_pixels // len(frames)))
    pixels = [min(setting.frame_pixels, limit) for setting in settings[:-1]] + [limit]
    all_sizes = _viewed_sizes(index.video.display, rule.multiple, limit, view)
    area = [prod(size) for size in all_sizes]
    all_rows = [prod(rule.grid((rule.frames, *size))) for size in all_sizes]
    reached = [_last(all_sizes, picture_size(index.video.display, multiple=rule.multiple, pixels=p)) for p in pixels]
    levels = [min(doublings(Fraction(leaves)), doublings(finest / setting.rate)) for setting in settings[:-1]] + [0]
    many = MANY if lead is None else MANY << MOST_LEAD // SCALE
    chosen = [len(all_sizes) - 1]
    if len(settings) > 1:
        units_then = -(-leaves >> halved(leaves, levels, many))
        chosen = thin(all_rows, {0, *reached, *chosen}, units_then * MANY / many)
    sizes = [all_sizes[i] for i in chosen]
    rows = [all_rows[i] for i in chosen]
    scale = Scale(tuple(settings))
    begins = [SCALE * count for count in scale.rate_doublings]
    path = _Path(
        leaves=leaves,
        levels=levels,
        sizes=[chosen.index(i) for i in reached] if len(settings) > 1 else [0],
        rows=rows,
        many=many,
        split_key=lambda setting, level: scale.marks[max(0, setting - 1)] + SCALE * (levels[setting - 1] - level),
        grow_key=lambda size: scale.between(
            [Fraction(setting.frame_pixels) for setting in settings], Fraction(area[chosen[size]]), begins=begins
        ),
    )
    starts = frames[:: rule.frames]
    stamps = np.array([stamp_tokens(index.frame_time(frame)) for frame in starts.tolist()], dtype=np.int64)
    end = index.video_end if view.video_end is None else min(index.video_end, view.video_end)

    @cache
    def leads(level: int) -> np.ndarray:
        assert lead is not None
        return lead([*(index.frame_time(frame) for frame in starts[:: 1 << level].tolist()), end])

    def units(cells: Sequence[Cell]) -> tuple[Unit, ...]:
        groups = _groups(frames, cells, rule.frames)
        return frame_units(index, groups, [sizes[cell.size] for cell in cells], rule, end=end)

    def words(cells: Sequence[Cell]) -> str:
        spacing = [cell.level for cell in cells]
        rates = [float(finest / 2**level) for level in (max(spacing), min(spacing))]
        shown = [sizes[i] for i in (min(cell.size for cell in cells), max(cell.size for cell in cells))]
        pictures = " to ".join(dict.fromkeys(f"{height}x{width}" for height, width in shown))
        return f"{len(cells)} groups, {_span(rates)} frames a second, {pictures} pixels"

    level, size, stages = path.stages() if len(settings) > 1 else (0, 0, ())
    part = Part(
        leaves=leaves,
        level=level,
        size=size,
        stages=stages,
        tokens=lambda level, size: rows[size] + stamps[:: 1 << level],
        lead=None if lead is None else leads,
    )
    return MediaPart(part=part, units=units, words=words)


def viewed_frames(index: ClipIndex, view: View, rate: Fraction) -> tuple[np.ndarray, Fraction]:
    """[n] int64: the frames of a view at the finest rate, ascending; and that rate."""
    track = index.video
    assert track is not None
    start = max(index.frame_time(0), view.video_start or Fraction(0))
    end = index.video_end if view.video_end is None else min(index.video_end, view.video_end)
    if end <= start:
        raise ValueError(f"video_start and video_end leave nothing of a clip of {float(index.video_end):.3f} s")
    length = end - start
    rate = view.fps if view.fps is not None else rate
    if view.nframes is not None:
        rate = Fraction(view.nframes) / length
    if view.min_frames is not None:
        rate = max(rate, view.min_frames / length)
    if view.max_frames is not None:
        rate = min(rate, view.max_frames / length)
    return sampled_frames(track, rate, start=start + index.origin, end=end + index.origin), rate


def _viewed_sizes(native: tuple[int, int], multiple: int, limit: int, view: View) -> list[tuple[int, int]]:
    """Sizes from the smallest to the largest that a view allows."""
    sizes = picture_sizes(native, multiple=multiple, pixels=limit)
    if view.min_pixels is None:
        return sizes
    large = [size for size in sizes if prod(size) >= min(view.min_pixels, prod(sizes[-1]))]
    if prod(sizes[-1]) + multiple * sum(sizes[-1]) < view.min_pixels:
        raise ValueError(
            f"min_pixels {view.min_pixels} is more than a picture of {native[0]} x {native[1]} pixels gives within "
            f"{limit}; lower it: pictures are never enlarged"
        )
    return large


def _last(sizes: Sequence[tuple[int, int]], size: tuple[int, int]) -> int:
    """Number of the last of the growing `sizes` that is not larger than `size`; the first when all are."""
    return max((i for i, (height, width) in enumerate(sizes) if height <= size[0] and width <= size[1]), default=0)


def _groups(frames: np.ndarray, cells: Sequence[Cell], per_group: int) -> np.ndarray:
    """[cells, per_group] int64: the frames of each cell, the last that there is repeated where a clip ends early."""
    first = np.array([cell.first for cell in cells], dtype=np.int64) * per_group
    step = np.left_shift(1, np.array([cell.level for cell in cells], dtype=np.int64))
    places = first[:, None] + step[:, None] * np.arange(per_group)
    last = first + (len(frames) - 1 - first) // step * step
    return frames[np.minimum(places, last[:, None])]


def image_part(native: tuple[int, int], rule: PictureRule, settings: Sequence[Setting], *, view: View) -> MediaPart:
    """Make the part of an image. Raises ValueError for a view that it cannot give."""
    limit = view.max_pixels or settings[-1].image_pixels
    sizes = _viewed_sizes(native, rule.multiple, limit, view)
    sizes = sizes[-1:] if len(settings) == 1 else sizes
    rows = [prod(rule.grid(size)) for size in sizes]
    scale, pixels = Scale(tuple(settings)), [Fraction(setting.image_pixels) for setting in settings]
    small = max((i for i, count in enumerate(rows) if count <= SMALL), default=0)
    stages = tuple(
        Stage(key=scale.between(pixels, Fraction(prod(sizes[i + 1]))), level=0, size=i, splits=False)
        for i in range(small, len(sizes) - 1)
    )
    return MediaPart(
        part=Part(
            leaves=1, level=0, size=small, stages=stages, tokens=lambda _, size: np.array([rows[size]], dtype=np.int64)
        ),
        units=lambda cells: tuple(image_unit(native, sizes[cell.size], rule) for cell in cells),
        words=lambda cells: f"{sizes[cells[0].size][0]}x{sizes[cells[0].size][1]} pixels",
    )


def sound_part(
    index: ClipIndex, rule: SoundRule, settings: Sequence[Setting], *, view: View, always: bool
) -> MediaPart:
    """Make the part of a clip's sound; of one without sound it has no cell.

    always: heard at any setting, as a sound on its own is
    """
    first, frames = sound_span(index, view)
    leaves = -(-frames // rule.window)
    shares = [setting.share for setting in settings]
    if always:
        least = min((share for share in shares if share), default=Fraction(1))
        shares = [share or least for share in shares]
    most = rule.window // rule.frames_per_row
    steps = list(range(min(SMALL, most), most + 1))
    reached = [_degree(share, steps) for share in shares]
    kept = {0, len(steps) - 1, *(size for _, size in reached)}
    chosen = thin(steps, kept, min(MANY, max(1, leaves)))
    sizes = [steps[i] * rule.frames_per_row for i in chosen]
    reached = [(level, size if size == ABSENT else chosen.index(size)) for level, size in reached]
    path = _sound_path(Scale(tuple(settings)), leaves, shares, [steps[i] for i in chosen], reached)

    def spans(cells: Sequence[Cell]) -> list[tuple[int, int, int]]:
        found = []
        for cell in cells:
            low, whole = cell.first * rule.window, rule.window << cell.level
            count = min(whole, frames - low)
            wanted = -(-count * sizes[cell.size] // whole)
            found.append((low, count, -(-wanted // rule.frames_per_row) * rule.frames_per_row))
        return found

    def tokens(level: int, size: int) -> np.ndarray:
        cells = -(-leaves >> level)
        last = spans([Cell((cells - 1) << level, level, size)])[0][2]
        return np.array([sizes[size]] * (cells - 1) + [last], dtype=np.int64) // rule.frames_per_row

    level, size, stages = path
    return MediaPart(
        part=Part(leaves=leaves, level=level, size=size, stages=stages, tokens=tokens),
        units=lambda cells: sound_units(index, rule, spans(cells), first=first),
        words=lambda cells: f"{sum(count for *_, count in spans(cells)) // rule.frames_per_row} rows of sound",
    )


def _degree(share: Fraction, rows: Sequence[int]) -> tuple[int, int]:
    """Level and size at which a sound has `share` of its rows: fewer rows a window first, then joined windows."""
    if not share:
        return 0, ABSENT
    wanted = share * rows[-1]
    if wanted >= rows[0]:
        return 0, next(i for i, count in enumerate(rows) if count >= wanted)
    return doublings(rows[0] / wanted), 0


def _sound_path(
    scale: Scale, leaves: int, shares: Sequence[Fraction], rows: Sequence[int], reached: Sequence[tuple[int, int]]
) -> tuple[int, int, tuple[Stage, ...]]:
    """Level and size of a sound before any stage, and its stages."""
    heard = next((i for i, share in enumerate(shares) if share), None)
    if heard is None or not leaves:
        return 0, ABSENT, ()
    top = (leaves - 1).bit_length()
    levels = [min(top, level) for level, _ in reached[heard:]]
    sizes = [size for _, size in reached[heard:]]
    if len(shares) == 1:
        return levels[0], sizes[0], ()

    def key(share: Fraction) -> int:
        """Key of a share of the rows: on a line between the settings on either side."""
        after = next((i for i in range(heard, len(shares)) if share <= shares[i]), len(shares) - 1)
        if after == heard:
            return scale.marks[after] - SCALE
        (low, high), (start, end) = shares[after - 1 : after + 1], scale.marks[after - 1 : after + 1]
        return start + int((end - start) * (min(share, high) - low) / (high - low))

    path = _Path(
        leaves=leaves,
        levels=levels,
        sizes=sizes,
        rows=rows,
        split_key=lambda _, level: key(Fraction(rows[0], rows[-1]) / 2 ** (level - 1)),
        grow_key=lambda size: key(Fraction(rows[size], rows[-1])),
    )
    level, size, stages = path.stages()
    if not heard:
        return level, size, stages
    late = scale.marks[heard - 1]
    return (
        level,
        ABSENT,
        (
            Stage(key=late, level=level, size=ABSENT, splits=False),
            *(replace(stage, key=max(late, stage.key)) for stage in stages),
        ),
    )


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in values))
