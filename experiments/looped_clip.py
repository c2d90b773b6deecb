"""Write a long clip fast: a few seconds are encoded once, and their packets are written again and again.

Every round begins with a key frame, so the file decodes as any other; frames carry the second of their round as a bar
that moves, and there is a click of sound at every whole second.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from mmcp.config import config

CLICK_S = 0.005
AAC_FRAME = 1024  # samples


@config
class LoopedClip:
    """What the clip is like."""

    seconds: PositiveInt = 3600
    round_s: PositiveInt = 24
    """Seconds that are encoded; `seconds` is cut to whole rounds."""
    frames_per_second: PositiveInt = 10
    height: int = Field(default=1080, ge=16, multiple_of=2)
    """Pixels."""
    width: int = Field(default=1920, ge=16, multiple_of=2)
    """Pixels."""
    group_of_pictures: PositiveInt = 240
    """Frames from one key frame to the next."""
    moving: float = Field(default=0.1, ge=0, le=1)
    """Share of the picture that moves: a tenth as in a lecture, all as from a moving camera."""
    sample_rate: NonNegativeInt = 48000
    """Samples of sound a second; 0: no sound."""

    def __post_init__(self):
        if self.round_s * self.sample_rate % AAC_FRAME:
            raise ValueError(
                f"rounds of {self.round_s} s at {self.sample_rate} Hz are not whole frames of {AAC_FRAME} samples; "
                "use round_s=24 with sample_rate=48000"
            )

    @property
    def name(self) -> str:
        """All that decides the clip, as the name of a file."""
        picture = (
            f"{self.width}x{self.height}_{self.frames_per_second}fps_gop{self.group_of_pictures}_moving{self.moving:g}"
        )
        return f"{self.seconds}s_rounds_of_{self.round_s}s_{picture}_{self.sample_rate}hz.mp4"


def looped_clip(clip: LoopedClip, folder: Path) -> Path:
    """Return the clip below `folder` (H.264 with B-frames, AAC); write it if it is not there."""
    file = folder / clip.name
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part.mp4")
        _write(clip, partial)
        partial.replace(file)
    return file


def _write(clip: LoopedClip, file: Path) -> None:
    with av.open(str(file), "w") as container:
        speed = {"preset": "ultrafast", "crf": "28", "bf": "2", "sc_threshold": "0", "threads": "1"}
        picture = container.add_stream("libx264", rate=clip.frames_per_second, options=speed)
        picture.width, picture.height, picture.pix_fmt = clip.width, clip.height, "yuv420p"
        picture.gop_size = clip.group_of_pictures
        shown = [packet for frame in _frames(clip) for packet in picture.encode(frame)] + picture.encode(None)
        rounds: list[tuple] = [(picture, shown, 0)]
        if clip.sample_rate:
            sound = container.add_stream("aac", rate=clip.sample_rate, layout="stereo")
            heard = [packet for second in range(3 * clip.round_s) for packet in sound.encode(_sound(clip, second))]
            length = clip.round_s * clip.sample_rate
            heard = [packet for packet in heard if length <= (packet.pts or 0) < 2 * length]  # no join is at an end
            rounds.append((sound, heard, -length))
        for number in range(clip.seconds // clip.round_s):
            for stream, packets, shift in rounds:
                for stored in packets:
                    container.mux(_again(stored, stream, number * clip.round_s, shift))


def _again(stored: av.Packet, stream: av.stream.Stream, seconds: int, shift: int) -> av.Packet:
    """Copy a packet to a time `seconds` later, and `shift` ticks."""
    assert stored.time_base is not None and stored.pts is not None and stored.dts is not None
    later = round(seconds / stored.time_base) + shift
    packet = av.Packet(bytes(stored))
    packet.pts, packet.dts, packet.duration = stored.pts + later, stored.dts + later, stored.duration
    packet.time_base, packet.is_keyframe, packet.stream = stored.time_base, stored.is_keyframe, stream
    return packet


def _frames(clip: LoopedClip) -> Iterator[av.VideoFrame]:
    """Yield the frames of a round: a texture that moves on the left, and a white bar for the second."""
    moving = round(clip.width * clip.moving)
    y, x = np.mgrid[: clip.height, : 2 * clip.width]
    waves = np.sin(2 * np.pi * (x / clip.width * 4 + np.sin(y / 90))) + np.sin(y / 57)
    texture = (126 + 40 * waves).astype(np.uint8)
    for number in range(clip.round_s * clip.frames_per_second):
        planes = np.full((clip.height * 3 // 2, clip.width), 128, dtype=np.uint8)
        shift = number * 4 % clip.width
        planes[: clip.height] = texture[:, : clip.width]
        planes[: clip.height, :moving] = texture[:, shift : shift + moving]
        bar = number // clip.frames_per_second * clip.width // clip.round_s
        planes[: clip.height // 4, bar : bar + clip.width // clip.round_s] = 235
        frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
        frame.pts, frame.time_base = number, Fraction(1, clip.frames_per_second)
        yield frame


def _sound(clip: LoopedClip, second: int) -> av.AudioFrame:
    """Make a second of sound: a tone of the round's second, and a click."""
    time = np.arange(clip.sample_rate) / clip.sample_rate
    pitch = 200 + 20 * (second % clip.round_s)  # Hz
    tone = 0.1 * np.sin(2 * np.pi * pitch * time) + 0.7 * (time < CLICK_S) * np.sin(12000 * time)
    frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]).astype(np.float32), format="fltp", layout="stereo")
    frame.sample_rate, frame.pts = clip.sample_rate, second * clip.sample_rate
    frame.time_base = Fraction(1, clip.sample_rate)
    return frame
