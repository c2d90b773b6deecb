"""What demuxing tells of a media file: its ClipIndex. Every frame and its time are known before a pixel is decoded.

One pass over the packets; only the first picture and the first sound are decoded, for what no container states
reliably (rotation, shape of the pixels, rate and channels of the sound).

The clock of a clip. Time 0 is the zero of the file's own timeline, as a player shows it, so that times are the real
pts. It is the earliest frame or sample instead when the format has no zero (MPEG-TS, MPEG-PS, MP3), or when that
earliest one lies before zero or more than a minute after it. `ClipIndex.origin` is time 0 on the file's timeline: time
of a frame = pts x time base - origin, exactly. Picture and sound share it.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from mmcp.sequence import SAMPLE_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """One stream of a file, used or not."""

    index: int
    kind: str
    """video, audio, subtitle, data or attachment."""
    codec: str
    time_base: Fraction
    """Seconds of one tick."""
    start: int | None
    """Start time that the container states, in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoTrack:
    """The pictures of a file. Frames are numbered in display order, packets in the order of the file (decode order)."""

    stream: int
    codec: str
    time_base: Fraction
    pts: np.ndarray
    """[f] int64, strictly increasing: when frame f is shown, in ticks."""
    duration: int
    """Ticks for which the last frame is shown."""
    packet: np.ndarray
    """[f] int64: the packet that holds frame f."""
    sizes: np.ndarray
    """[p] int64: bytes of each packet, those without a frame of their own included."""
    entry_packets: np.ndarray
    """[k] int64, increasing: packets from which a decoder can start."""
    entry_frames: np.ndarray
    """[k] int64, not decreasing: the first frame that is exact when decoding starts at that packet."""
    counted: bool
    """The file has no usable pts: frame f is the f-th picture that a decoder puts out, counted from an entry."""
    seekable: bool
    """Packets can be found again by pts after a seek; otherwise they are counted from the start of the file."""
    coded: tuple[int, int]
    """Height and width of a decoded picture, in pixels."""
    aspect: Fraction
    """Width of a pixel / its height."""
    turn: tuple[bool, bool, bool]
    """What makes a decoded picture upright: transpose, then mirror left-right, then mirror top-bottom."""

    @property
    def num_frames(self) -> int:
        return len(self.pts)

    @property
    def display(self) -> tuple[int, int]:
        """Height and width as a player shows it: pixels made square by stretching the shorter side, then turned."""
        height, width = self.coded
        if self.aspect > 1:
            width = max(1, round(width * self.aspect))
        else:
            height = max(1, round(height / self.aspect))
        return (width, height) if self.turn[0] else (height, width)

    def starts(self, frames: np.ndarray) -> np.ndarray:
        """[n] int64: for each frame, the last packet from which decoding gives it exactly.

        The entry must come before the frame both in the file and on the screen: a picture that follows a key frame in
        the file but precedes it on the screen may refer back across it.
        """
        shown = np.searchsorted(self.entry_frames, frames, side="right")
        stored = np.searchsorted(self.entry_packets, self.packet[frames], side="right")
        return self.entry_packets[np.maximum(np.minimum(shown, stored) - 1, 0)]

    def stops(self, frames: np.ndarray) -> np.ndarray:
        """[n] int64: for each frame, the last packet needed for it + 1; the next entry where frames are counted."""
        if not self.counted:
            return self.packet[frames] + 1
        following = np.searchsorted(self.entry_packets, self.starts(frames), side="right")
        return np.append(self.entry_packets, len(self.sizes))[following]

    def stamp(self, packet: int) -> int | None:
        """The pts of a packet; None when it holds no frame."""
        frame = np.flatnonzero(self.packet == packet)
        return int(self.pts[frame[0]]) if len(frame) else None

    def find(self, pts: int) -> int | None:
        """The packet with this pts; None when there is none."""
        frame = int(np.searchsorted(self.pts, pts))
        return int(self.packet[frame]) if frame < len(self.pts) and self.pts[frame] == pts else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioTrack:
    """The sound of a file. Positions count samples at the track's own rate from its first sample that is heard."""

    stream: int
    codec: str
    time_base: Fraction
    rate: int
    """Samples a second, as decoded."""
    channels: int
    layout: str
    start: Fraction
    """Time on the file's timeline of the first sample that is heard, encoder delay left out, in seconds."""
    pts: np.ndarray
    """[p] int64: pts of each packet, in ticks."""
    position: np.ndarray
    """[p] int64: position of the first sample of the packet that is heard."""
    count: np.ndarray
    """[p] int64: samples of the packet that are heard; 0 for encoder delay."""
    exact: bool
    """Positions are exact to the sample; otherwise decoding has to count from the start of the file."""
    seekable: bool
    """Packets can be found again by pts after a seek; otherwise they are counted from the start of the file."""

    @property
    def num_samples(self) -> int:
        """Samples at the track's own rate, gaps included."""
        return int((self.position + self.count).max(initial=0))

    def stamp(self, packet: int) -> int | None:
        """The pts of a packet."""
        return int(self.pts[packet])

    def find(self, pts: int) -> int | None:
        """The packet with this pts; None when there is none."""
        packet = int(np.searchsorted(self.pts, pts))
        return packet if packet < len(self.pts) and self.pts[packet] == pts else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClipIndex:
    """What demuxing tells of a media file. Two are equal when their JSON is."""

    format: str
    size: int
    """Bytes of the file."""
    origin: Fraction
    """Seconds on the file's own timeline at which the clip's clock shows 0."""
    streams: tuple[StreamInfo, ...]
    video: VideoTrack | None
    audio: AudioTrack | None
    notes: tuple[str, ...]
    """What was wrong with the file and how it was repaired, in words; empty for a sound file."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClipIndex) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def frame_time(self, frame: int) -> Fraction:
        """Seconds on the clip's clock at which frame number `frame` is shown."""
        assert self.video is not None, "a file without pictures has no frames"
        return int(self.video.pts[frame]) * self.video.time_base - self.origin

    @property
    def video_end(self) -> Fraction:
        """Seconds at which the last frame is no longer shown; 0 without pictures."""
        if self.video is None:
            return Fraction(0)
        return (int(self.video.pts[-1]) + self.video.duration) * self.video.time_base - self.origin

    @property
    def audio_samples(self) -> tuple[int, int]:
        """First and last + 1 sample at 16 kHz on the clip's clock that hold sound; (0, 0) without sound.

        The first is rounded to the nearest sample, the last up: nothing is lost.
        """
        if self.audio is None or not self.audio.num_samples:
            return (0, 0)
        first = floor((self.audio.start - self.origin) * SAMPLE_RATE + Fraction(1, 2))
        return first, first - (-self.audio.num_samples * SAMPLE_RATE // self.audio.rate)

    @property
    def duration(self) -> Fraction:
        """Seconds from time 0 to the end of the last frame or sample."""
        return max(self.video_end, Fraction(self.audio_samples[1], SAMPLE_RATE), Fraction(0))

    def to_json(self) -> str:
        """Canonical JSON: the same index gives the same bytes."""
        return json.dumps(
            {
                "format": self.format,
                "size": self.size,
                "origin": str(self.origin),
                "streams": [_fields(stream) for stream in self.streams],
                "video": None if self.video is None else _fields(self.video),
                "audio": None if self.audio is None else _fields(self.audio),
                "notes": list(self.notes),
            },
            allow_nan=False,
            separators=(",", ":"),
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> "ClipIndex":
        """Read what `to_json` wrote."""
        data = json.loads(text)
        return cls(
            format=data["format"],
            size=data["size"],
            origin=Fraction(data["origin"]),
            streams=tuple(StreamInfo(**_values(StreamInfo, stream)) for stream in data["streams"]),
            video=None if data["video"] is None else VideoTrack(**_values(VideoTrack, data["video"])),
            audio=None if data["audio"] is None else AudioTrack(**_values(AudioTrack, data["audio"])),
            notes=tuple(data["notes"]),
        )


def _fields(record: StreamInfo | VideoTrack | AudioTrack) -> dict:
    """The fields of a record as JSON values."""
    return {name: _to_value(getattr(record, name)) for name in record.__dataclass_fields__}


def _values(kind: type[StreamInfo | VideoTrack | AudioTrack], data: dict) -> dict:
    """The fields of a record of `kind` from JSON values."""
    return {name: _from_value(field.type, data[name]) for name, field in kind.__dataclass_fields__.items()}


def _to_value(value: object) -> object:
    if isinstance(value, np.ndarray):
        return _compress(value)
    if isinstance(value, Fraction):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _from_value(kind: object, value: Any) -> object:
    if kind is np.ndarray:
        return _expand(value)
    if kind is Fraction:
        return Fraction(value)
    return tuple(value) if isinstance(value, list) else value


def _compress(values: np.ndarray) -> dict:
    """Runs of equal differences where these are shorter: 0 512 1024 1536 -> {"first": 0, "runs": [[512, 3]]}."""
    if len(values) < 2:
        return {"values": values.tolist()}
    steps = np.diff(values)
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    if 2 * len(starts) > len(values):
        return {"values": values.tolist()}
    counts = np.diff(starts, append=len(steps))
    return {"first": int(values[0]), "runs": np.stack([steps[starts], counts], axis=1).tolist()}


def _expand(data: dict) -> np.ndarray:
    if "values" in data:
        return np.array(data["values"], dtype=np.int64)
    runs = np.array(data["runs"], dtype=np.int64)
    return np.cumsum(np.concatenate([[data["first"]], np.repeat(runs[:, 0], runs[:, 1])]))
