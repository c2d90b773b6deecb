"""Write one long clip with known events, as a prepared set of one sample: the input of experiments/hour_clip.py.

The picture is a texture that slides to the left; every `every_s` seconds one colour fills it for two seconds, and a
tone of the colour's pitch sounds with it. The question, at the end, is which colours there were. Frames are written as
YUV planes, so that an hour takes about a minute.
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.progress import track

from data_pipelines.prepare import prepare
from mmcp.config import config

PALETTE = {
    "red": (81, 90, 240),
    "green": (145, 54, 34),
    "blue": (41, 240, 110),
    "yellow": (210, 16, 146),
    "purple": (107, 202, 222),
}
"""Y, U and V of each colour (BT.601)."""
FLASH_S = 2
NOISE = 0.02  # of the sound between the tones


@config
class LongClip:
    """What the clip is like."""

    seconds: PositiveInt = 3600
    frames_per_second: PositiveInt = 10
    height: int = Field(default=180, ge=16, multiple_of=2)
    """Pixels."""
    width: int = Field(default=320, ge=16, multiple_of=2)
    """Pixels."""
    group_of_pictures: PositiveInt = 50
    """Frames from one key frame to the next."""
    sample_rate: PositiveInt = 44100
    """Samples of sound a second."""
    every_s: int = Field(default=30, gt=FLASH_S)
    """Seconds from one flash to the next; the first comes half as long after the start."""

    @property
    def name(self) -> str:
        """All that decides the clip, in a name for a folder."""
        picture = f"{self.width}x{self.height}_{self.frames_per_second}fps_gop{self.group_of_pictures}"
        return f"{self.seconds}s_{picture}_{self.sample_rate}hz_every{self.every_s}s"

    @property
    def flashes(self) -> dict[int, str]:
        """Colour by the second at which it starts."""
        starts = range(self.every_s // 2, self.seconds - FLASH_S, self.every_s)
        chosen = np.random.default_rng(0).choice(list(PALETTE), len(starts))
        return dict(zip(starts, chosen.tolist(), strict=True))


def prepared_clip(clip: LongClip, folder: Path) -> Path:
    """Return the shards of the clip below `folder`; write clip and shards if they are not there."""
    home = folder / clip.name
    shards, file = home / "shards", home / "clip.mp4"
    if not (shards / "index.json").is_file():
        home.mkdir(parents=True, exist_ok=True)
        write_clip(clip, file)
        question = "Which colors flashed, in order?"
        asked = [{"type": "video", "video": file.name}, {"type": "text", "text": question}]
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": " ".join(clip.flashes.values())},
        ]
        manifest = home / "manifest.jsonl"
        manifest.write_text(json.dumps({"id": "clip", "task": "colors", "messages": turns}) + "\n", encoding="utf-8")
        prepare(manifest, shards)
    return shards


def write_clip(clip: LongClip, file: Path) -> None:
    """Write the mp4 (H.264, AAC), second by second; the file has its name only when it is whole."""
    partial = file.with_suffix(".part.mp4")
    speed = {"preset": "ultrafast", "crf": "30", "sc_threshold": "0", "threads": "1"}
    with av.open(str(partial), "w") as container:
        picture = container.add_stream("libx264", rate=clip.frames_per_second, options=speed)
        picture.width, picture.height, picture.pix_fmt = clip.width, clip.height, "yuv420p"
        picture.gop_size = clip.group_of_pictures
        sound = container.add_stream("aac", rate=clip.sample_rate, layout="mono")
        shown, noise = _Picture(clip), np.random.default_rng(1).standard_normal(clip.sample_rate) * NOISE
        for second in track(range(clip.seconds), f"write {file.name}", console=Console(stderr=True)):
            for frame in shown.frames(second):
                container.mux(picture.encode(frame))
            container.mux(sound.encode(_sound(clip, second, noise)))
        for stream in (picture, sound):
            container.mux(stream.encode(None))
    partial.replace(file)


class _Picture:
    """Draws the frames of one second after the other."""

    def __init__(self, clip: LongClip):
        self.clip = clip
        y, x = np.mgrid[: clip.height, : 2 * clip.width]
        waves = np.sin(2 * np.pi * (x / clip.width * 4 + np.sin(y / 20))) + np.sin(2 * np.pi * y / clip.height * 3)
        self.texture = (126 + 40 * waves).astype(np.uint8)

    def frames(self, second: int) -> Iterator[av.VideoFrame]:
        """Yield the frames of a second, stamped."""
        clip, half = self.clip, self.clip.height // 2
        colour = _colour(clip, second)
        planes = np.full((clip.height + half, clip.width), 128, dtype=np.uint8)
        if colour is not None:
            planes[: clip.height] = colour[0]
            planes[clip.height :].reshape(2, -1)[:] = [[colour[1]], [colour[2]]]
        for number in range(second * clip.frames_per_second, (second + 1) * clip.frames_per_second):
            if colour is None:
                start = number % clip.width
                planes[: clip.height] = self.texture[:, start : start + clip.width]
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, clip.frames_per_second)
            yield frame


def _colour(clip: LongClip, second: int) -> tuple[int, int, int] | None:
    """Return the colour that fills the picture in this second, if one does."""
    start = next((start for start in (second, second - 1) if start in clip.flashes), None)
    return None if start is None else PALETTE[clip.flashes[start]]


def _sound(clip: LongClip, second: int, noise: np.ndarray) -> av.AudioFrame:
    """One second of noise, with the tone of a flash over it."""
    colour, samples = _colour(clip, second), noise
    if colour is not None:
        time = np.arange(clip.sample_rate) / clip.sample_rate
        samples = noise + 0.3 * np.sin(2 * np.pi * 2 * (100 + colour[0]) * time)
    frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], format="fltp", layout="mono")
    frame.sample_rate = clip.sample_rate
    frame.pts, frame.time_base = second * clip.sample_rate, Fraction(1, clip.sample_rate)
    return frame
