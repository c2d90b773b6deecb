"""From what an index tells of a file to its units: frame groups, windows of sound, images. No pixel is decoded.

What to decode for a unit stands in it: `decode_frames(file, index, unit.items, unit.size[1:])` for a frame group,
`decode_image(file, unit.size)` for an image, and for a window of sound samples `unit.items` on the clip's clock, with
the neighbours that its features need.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, prod
from typing import Protocol

import numpy as np

from data_pipelines.container import AudioTrack, ClipIndex, VideoTrack
from data_pipelines.view import WHOLE, View
from mmcp.sequence import HOP, SAMPLE_RATE, Unit


class PictureRule(Protocol):
    """What units must know of an image or video encoder."""

    @property
    def frames(self) -> int:
        """Frames of one unit."""

    @property
    def multiple(self) -> int:
        """Pixels that both sides of a picture are a multiple of."""

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        """Rows along time, height and width for a unit of this size."""


class SoundRule(Protocol):
    """What units must know of a sound encoder."""

    @property
    def window(self) -> int:
        """Mel frames of a whole window."""

    @property
    def frames_per_row(self) -> int:
        """Mel frames that a window's length must be a multiple of."""

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        """Rows along time, 1 and 1 for a window of this size."""


def image_unit(native: tuple[int, int], size: tuple[int, int], rule: PictureRule) -> Unit:
    """Make the unit of one image; native, size: height and width in the file and as encoded."""
    grid = rule.grid(size)
    rows = grid[0] * grid[1] * grid[2]
    zero = Fraction(0)
    return Unit(num_tokens=rows, start=zero, end=zero, grid=grid, size=size, items=(), native=native)


def sampled_frames(
    track: VideoTrack, rate: Fraction, *, start: Fraction | None = None, end: Fraction | None = None
) -> np.ndarray:
    """Number the frames a player shows at start + k / rate, before `end`, each once: [n] int64, ascending.

    start, end: seconds on the file's own timeline, by default those of the picture; a start before the first frame is
                that frame's
    A rate above the file's gives every frame.
    """
    step = 1 / (rate * track.time_base)  # in ticks
    first, last = Fraction(int(track.pts[0])), Fraction(int(track.pts[-1]) + max(1, track.duration))
    first = first if start is None else max(first, start / track.time_base)
    last = last if end is None else min(last, end / track.time_base)
    count = max(0, -int((first - last) * step.denominator // step.numerator))
    whole = first.numerator // first.denominator  # a frame is shown from a whole tick on
    part = first - whole
    scale = step.denominator * part.denominator
    ticks = (
        whole + (np.arange(count) * (step.numerator * part.denominator) + part.numerator * step.denominator) // scale
    )
    return np.unique(np.searchsorted(track.pts, ticks, side="right") - 1)


def frame_units(
    index: ClipIndex, groups: np.ndarray, sizes: Sequence[tuple[int, int]], rule: PictureRule, *, end: Fraction
) -> tuple[Unit, ...]:
    """Make the units of groups of frames.

    groups: [n, frames] int64, in order of their first frames
    sizes:  [n]  height and width as encoded
    end:    seconds at which the last group ends; the others last from their first frame to the next group's
    """
    track = index.video
    assert track is not None, "a clip without pictures has no frame groups"
    first, last = track.starts(groups).min(axis=1).tolist(), track.stops(groups).max(axis=1).tolist()
    edges = [index.frame_time(frame) for frame in groups[:, 0]] + [end]
    shapes = {size: (rule.frames, *size) for size in set(sizes)}
    grids = {size: rule.grid(shape) for size, shape in shapes.items()}
    return tuple(
        Unit(
            num_tokens=prod(grids[sizes[i]]),
            start=edges[i],
            end=edges[i + 1],
            grid=grids[sizes[i]],
            size=shapes[sizes[i]],
            items=tuple(group),
            decode=(first[i], last[i]),
            native=track.display,
        )
        for i, group in enumerate(groups.tolist())
    )


def sound_windows(index: ClipIndex, rule: SoundRule) -> tuple[Unit, ...]:
    """Cut a clip's sound into windows of whole mel frames; the last is padded with silence to whole rows.

    No sound, or one shorter than one mel frame (10 ms), gives no window. The windows' `items` cover the sound once.
    """
    first, frames = sound_span(index, WHOLE)
    spans = []
    for low in range(0, frames, rule.window):
        count = min(rule.window, frames - low)
        spans.append((low, count, -(-count // rule.frames_per_row) * rule.frames_per_row))
    return sound_units(index, rule, spans, first=first)


def sound_span(index: ClipIndex, view: View) -> tuple[int, int]:
    """First mel frame of a view, counted from the start of the sound, and how many there are."""
    if index.audio is None:
        return 0, 0
    begin, end = index.audio_samples
    low, high = 0, (end - begin) // HOP
    if view.video_start is not None:
        low = max(low, floor((view.video_start * SAMPLE_RATE - begin) / HOP))
    if view.video_end is not None:
        high = min(high, ceil((view.video_end * SAMPLE_RATE - begin) / HOP))
    return low, max(0, high - low)


def sound_units(
    index: ClipIndex, rule: SoundRule, spans: Sequence[tuple[int, int, int]], *, first: int
) -> tuple[Unit, ...]:
    """Make the units of stretches of sound.

    spans: (first mel frame counted from `first`, mel frames of sound, mel frames as encoded) of each; where it has
           more frames than are encoded, they are averaged (see data_pipelines.slow_sound)
    first: mel frame of the sound at which the view begins
    What is left of the sound after its last whole mel frame belongs to the last stretch.
    """
    track, (begin, end) = index.audio, index.audio_samples
    assert track is not None or not spans, "a clip without sound has no stretch of it"
    whole = (end - begin) // HOP
    units = []
    for low, frames, size in spans:
        last = first + low + frames
        items = (begin + (first + low) * HOP, end if last == whole else begin + last * HOP)
        grid = rule.grid((size,))
        units.append(
            Unit(
                num_tokens=grid[0],
                start=Fraction(items[0], SAMPLE_RATE),
                end=Fraction(items[1], SAMPLE_RATE),
                grid=grid,
                size=(size,),
                items=items,
                decode=_packets(track, items[0] - begin, items[1] - begin),  # type: ignore[arg-type]
            )
        )
    return tuple(units)


def _packets(track: AudioTrack, first: int, last: int) -> tuple[int, int]:
    """First and last + 1 packet that hold samples first .. last - 1, counted at 16 kHz from the track's start."""
    low, high = first * track.rate // SAMPLE_RATE, -(-last * track.rate // SAMPLE_RATE)
    start = int(np.searchsorted(track.position, low, side="right")) - 1
    return max(0, start), int(np.searchsorted(track.position, high, side="left"))
