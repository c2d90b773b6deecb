"""Small clips whose frames carry their number in the picture, so that a wrong frame is visible."""

from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

from data_pipelines.container import ClipIndex, VideoTrack
from data_pipelines.units import PictureRule, frame_units, sampled_frames
from mmcp.sequence import Unit

BARS = 12


def numbered(number: int, *, height: int = 64, width: int = 96) -> np.ndarray:
    """[h, w, 3] uint8: 12 bars, white for the 1 bits of `number`, over a ground that moves."""
    y, x = np.mgrid[:height, :width]
    picture = np.repeat(((x * 2 + y + number * 3) % 128 + 32).astype(np.uint8)[..., None], 3, axis=2)
    top, bottom = int(height * 0.05), int(height * 0.45)
    for bar in range(BARS):
        left, right = round(bar * width / BARS), round((bar + 1) * width / BARS)
        picture[top:bottom, left:right] = 235 if number >> bar & 1 else 16
    return picture


def read_number(picture: np.ndarray) -> int:
    """The number in a picture of `numbered`, [h, w, 3] or [h, w], at any size."""
    grey = picture.mean(axis=2) if picture.ndim == 3 else picture
    height, width = grey.shape
    band = grey[int(height * 0.12) : max(int(height * 0.12) + 1, int(height * 0.38))]
    value = 0
    for bar in range(BARS):
        left = int((bar + 0.3) * width / BARS)
        right = max(left + 1, int((bar + 0.7) * width / BARS))
        value |= int(band[:, left:right].mean() > 128) << bar
    return value


def red_quadrant(picture: np.ndarray) -> str:
    """Which quarter of an [h, w, 3] picture is red: tl, tr, bl or br."""
    height, width = picture.shape[0] // 2, picture.shape[1] // 2
    quarters = {
        "tl": picture[:height, :width],
        "tr": picture[:height, width:],
        "bl": picture[height:, :width],
        "br": picture[height:, width:],
    }
    return max(quarters, key=lambda name: float(quarters[name][..., 0].mean()) - float(quarters[name][..., 1].mean()))


def write_clip(
    path: str,
    *,
    codec: str = "libx264",
    frames: int = 60,
    rate: int = 10,
    size: tuple[int, int] = (64, 96),
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    pts: list[int] | None = None,
    start: Fraction = Fraction(0),
    sound: str | None = None,
    sound_start: Fraction = Fraction(0),
    sound_seconds: float | None = None,
) -> None:
    """Write a clip of numbered frames, with a click of sound at every whole second when `sound` names a codec.

    pts:   of each frame in units of 1 / (100 x rate); by default at the rate
    start: seconds at which the first frame is shown
    """
    height, width = size
    with av.open(str(path), "w", options=container or {}) as out:
        video = out.add_stream(codec, rate=rate, options=options or {})
        video.height, video.width, video.pix_fmt = height, width, pixels
        tick = Fraction(1, rate if codec == "mpeg2video" else 100 * rate)  # MPEG-2 knows no finer one
        video.time_base = video.codec_context.time_base = tick
        audio = out.add_stream(sound, rate=48000, layout="mono") if sound else None
        times = pts or [round(i / (rate * tick)) for i in range(frames)]
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(numbered(number, height=height, width=width), format="rgb24")
            frame.pts, frame.time_base = time + int(start / tick), tick
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        if audio is not None:
            _write_clicks(out, audio, sound_seconds or frames / rate, sound_start)


def _write_clicks(out: av.container.OutputContainer, audio: av.AudioStream, seconds: float, start: Fraction) -> None:
    samples = clicks(seconds)
    for first in range(0, len(samples), 4096):
        part = np.ascontiguousarray(samples[None, first : first + 4096])
        frame = av.AudioFrame.from_ndarray(part, format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, first + int(start * 48000), Fraction(1, 48000)
        out.mux(audio.encode(frame))
    out.mux(audio.encode(None))


def clicks(seconds: float) -> np.ndarray:
    """[n] float32 at 48 kHz: a quiet tone, and a 5 ms burst at every whole second."""
    time = np.arange(round(seconds * 48000)) / 48000
    burst = (time % 1 < 0.005) * 0.8 * np.sin(2 * np.pi * 2000 * time)
    return (0.02 * np.sin(2 * np.pi * 440 * time) + burst).astype(np.float32)


def packets_of(track: VideoTrack, frames: Sequence[int]) -> tuple[int, int]:
    """First and last + 1 packet that a decoder must run through to show all of `frames`, one by one."""
    chosen = [np.array([frame]) for frame in frames]
    return min(int(track.starts(one)[0]) for one in chosen), max(int(track.stops(one)[0]) for one in chosen)


def frame_groups(index: ClipIndex, size: tuple[int, int], rule: PictureRule, *, rate: Fraction) -> tuple[Unit, ...]:
    """Group a clip's sampled frames in order; the last group is filled by repeating its last frame.

    size: height and width as encoded
    """
    assert index.video is not None, "a clip without pictures has no frame groups"
    frames = sampled_frames(index.video, rate)
    groups = np.append(frames, np.repeat(frames[-1:], -len(frames) % rule.frames)).reshape(-1, rule.frames)
    return frame_units(index, groups, [size] * len(groups), rule, end=index.video_end)
