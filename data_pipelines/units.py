"""From what an index tells of a file to its units: frame groups, windows of sound, images. No pixel is decoded.

What to decode for a unit stands in it: `decode_frames(file, index, unit.items, unit.size[1:])` for a frame group,
`decode_image(file, unit.size)` for an image, and for a window of sound samples `unit.items` on the clip's clock, with
the neighbours that its features need.
"""

from fractions import Fraction
from typing import Protocol

import numpy as np

from data_pipelines.container import AudioTrack, ClipIndex, VideoTrack
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


def sampled_frames(track: VideoTrack, rate: Fraction) -> np.ndarray:
    """Number the frames a player shows at the first frame's time + k / rate, each once: [n] int64, ascending.

    A rate above the file's gives every frame.
    """
    step = 1 / (rate * track.time_base)  # in ticks
    length = int(track.pts[-1]) + max(1, track.duration) - int(track.pts[0])
    count = -(-length * step.denominator // step.numerator)
    ticks = track.pts[0] + np.arange(count) * step.numerator // step.denominator
    return np.unique(np.searchsorted(track.pts, ticks, side="right") - 1)


def frame_groups(index: ClipIndex, size: tuple[int, int], rule: PictureRule, *, rate: Fraction) -> tuple[Unit, ...]:
    """Group a clip's sampled frames; the last group is filled by repeating its last frame.

    size: height and width as encoded
    A group lasts from its first frame to the next group's; the last one to the end of the picture.
    """
    track = index.video
    assert track is not None, "a clip without pictures has no frame groups"
    frames = sampled_frames(track, rate)
    groups = np.append(frames, np.repeat(frames[-1:], -len(frames) % rule.frames)).reshape(-1, rule.frames)
    first, last = track.starts(groups).min(axis=1).tolist(), track.stops(groups).max(axis=1).tolist()
    edges = [index.frame_time(frame) for frame in groups[:, 0]] + [index.video_end]
    shape = (rule.frames, *size)
    grid = rule.grid(shape)
    rows = grid[0] * grid[1] * grid[2]
    return tuple(
        Unit(
            num_tokens=rows,
            start=edges[i],
            end=edges[i + 1],
            grid=grid,
            size=shape,
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
    track, (begin, end) = index.audio, index.audio_samples
    if track is None:
        return ()
    mel_frames = (end - begin) // HOP
    units = []
    for first in range(0, mel_frames, rule.window):
        frames = min(rule.window, mel_frames - first)
        is_last = first + frames == mel_frames
        items = (begin + first * HOP, end if is_last else begin + (first + frames) * HOP)
        size = (-(-frames // rule.frames_per_row) * rule.frames_per_row,)
        grid = rule.grid(size)
        units.append(
            Unit(
                num_tokens=grid[0],
                start=Fraction(items[0], SAMPLE_RATE),
                end=Fraction(items[1], SAMPLE_RATE),
                grid=grid,
                size=size,
                items=items,
                decode=_packets(track, items[0] - begin, items[1] - begin),
            )
        )
    return tuple(units)


def _packets(track: AudioTrack, first: int, last: int) -> tuple[int, int]:
    """First and last + 1 packet that hold samples first .. last - 1, counted at 16 kHz from the track's start."""
    low, high = first * track.rate // SAMPLE_RATE, -(-last * track.rate // SAMPLE_RATE)
    start = int(np.searchsorted(track.position, low, side="right")) - 1
    return max(0, start), int(np.searchsorted(track.position, high, side="left"))
