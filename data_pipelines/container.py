"""What demuxing tells of a media file: its ClipIndex. Every frame and its time are known before a pixel is decoded.

One pass over the packets; only the first picture and the first sound are decoded, for what no container states
reliably (rotation, shape of the pixels, rate and channels of the sound).

The clock of a clip. Time 0 is the zero of the file's own timeline, as a player shows it, so that times are the real
pts. It is the earliest frame or sample instead when the format has no zero (MPEG-TS, MPEG-PS, MP3), or when that
earliest one lies before zero or more than a minute after it. `ClipIndex.origin` is time 0 on the file's timeline: time
of a frame = pts x time base - origin, exactly. Picture and sound share it.
"""

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from data_pipelines.columns import Column
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
    pts: Column
    """[f], strictly increasing: when frame f is shown, in ticks."""
    duration: int
    """Ticks for which the last frame is shown."""
    packet: Column
    """[f]: the packet that holds frame f."""
    sizes: Column
    """[p]: bytes of each packet, those without a frame of their own included."""
    entry_packets: Column
    """[k], increasing: packets from which a decoder can start."""
    entry_frames: Column
    """[k], not decreasing: the first frame that is exact when decoding starts at that packet."""
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
    pixels: str = "unknown"
    """FFmpeg's name of the format of a decoded picture."""

    def __post_init__(self):
        _store_columns(self)

    @property
    def num_frames(self) -> int:
        return len(self.pts)

    @property
    def num_packets(self) -> int:
        return len(self.sizes)

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
        shown = self.entry_frames.searchsorted(frames, side="right")
        stored = self.entry_packets.searchsorted(self.packet[frames], side="right")
        return self.entry_packets[np.maximum(np.minimum(shown, stored) - 1, self.entry_packets.first)]

    def stops(self, frames: np.ndarray) -> np.ndarray:
        """[n] int64: for each frame, the last packet needed for it + 1; the next entry where frames are counted."""
        if not self.counted:
            return self.packet[frames] + 1
        following = self.entry_packets.searchsorted(self.starts(frames), side="right")
        last = len(self.entry_packets) - 1
        return np.where(following > last, self.num_packets, self.entry_packets[np.minimum(following, last)])

    def frames_by_packet(self) -> tuple[int, np.ndarray]:
        """The first packet that holds a frame known here, and [n] int32 from it on: frame of a packet, -1 for none."""
        packets = np.asarray(self.packet)
        first = int(packets.min())
        frames = np.full(int(packets.max()) + 1 - first, -1, dtype=np.int32)
        frames[packets - first] = np.arange(self.packet.first, len(self.packet), dtype=np.int32)
        return first, frames

    def stamp(self, packet: int) -> int | None:
        """The pts of a packet; None when it holds no frame."""
        frame = self.packet.index(packet)
        return None if frame is None else self.pts[frame]

    def find(self, pts: int) -> int | None:
        """The packet with this pts; None when there is none."""
        frame = _place(self.pts, pts)
        return None if frame is None else self.packet[frame]

    def window(self, start: int, stop: int) -> "VideoTrack":
        """What is needed to decode packets start..stop - 1; frames and packets keep their numbers."""
        first, frames = self.frames_by_packet()
        held = frames[max(0, start - first) : max(0, stop - first)]
        held = held[held >= 0]
        span = (int(held.min()), int(held.max()) + 1) if len(held) else (0, 1)
        entries = self.entry_packets.searchsorted([start, stop], side="right")
        entry_span = (max(0, int(entries[0]) - 1), min(len(self.entry_packets), int(entries[1]) + 1))
        return replace(
            self,
            pts=self.pts.window(*span),
            packet=self.packet.window(*span),
            sizes=Column.of(np.zeros(self.num_packets, dtype=np.int64)),
            entry_packets=self.entry_packets.window(*entry_span),
            entry_frames=self.entry_frames.window(*entry_span),
        )


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
    pts: Column
    """[p]: pts of each packet, in ticks."""
    position: Column
    """[p]: position of the first sample of the packet that is heard."""
    count: Column
    """[p]: samples of the packet that are heard; 0 for encoder delay."""
    exact: bool
    """Positions are exact to the sample; otherwise decoding has to count from the start of the file."""
    seekable: bool
    """Packets can be found again by pts after a seek; otherwise they are counted from the start of the file."""

    num_samples: int = 0
    """Samples at the track's own rate, gaps included; 0: up to the end of the last packet."""

    def __post_init__(self):
        _store_columns(self)
        if not self.num_samples:
            ends = np.asarray(self.position) + np.asarray(self.count)
            object.__setattr__(self, "num_samples", int(ends.max(initial=0)))

    @property
    def num_packets(self) -> int:
        return len(self.pts)

    def stamp(self, packet: int) -> int | None:
        """The pts of a packet."""
        return self.pts[packet]

    def find(self, pts: int) -> int | None:
        """The packet with this pts; None when there is none."""
        return _place(self.pts, pts)

    def window(self, start: int, stop: int) -> "AudioTrack":
        """What is needed to decode packets start..stop - 1, under their numbers."""
        columns = {name: getattr(self, name).window(start, stop) for name in ("pts", "position", "count")}
        return replace(self, **columns)


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
        return self.video.pts[frame] * self.video.time_base - self.origin

    def frame_at(self, time: Fraction) -> int:
        """Number of the frame that a player shows at a time; the first one before it begins, the last after it ends."""
        assert self.video is not None, "a file without pictures has no frames"
        shown = self.video.pts.searchsorted((time + self.origin) // self.video.time_base, side="right")
        return max(0, int(shown) - 1)

    @property
    def video_end(self) -> Fraction:
        """Seconds at which the last frame is no longer shown; 0 without pictures."""
        if self.video is None:
            return Fraction(0)
        return (self.video.pts[-1] + self.video.duration) * self.video.time_base - self.origin

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


def _store_columns(track: "VideoTrack | AudioTrack") -> None:
    """Make columns of a new track's arrays."""
    for name, field in track.__dataclass_fields__.items():
        if field.type is Column:
            object.__setattr__(track, name, Column.of(getattr(track, name)))


def _place(column: Column, value: int) -> int | None:
    """Where a value stands in an increasing column; None when it does not."""
    at = int(column.searchsorted(value))
    return at if at < len(column) and column[at] == value else None


def _fields(record: StreamInfo | VideoTrack | AudioTrack) -> dict:
    """The fields of a record as JSON values; those that follow from others are left out."""
    stored = (name for name in record.__dataclass_fields__ if name != "num_samples")
    return {name: _to_value(getattr(record, name)) for name in stored}


def _values(kind: type[StreamInfo | VideoTrack | AudioTrack], data: dict) -> dict:
    """The fields of a record of `kind` from JSON values."""
    return {name: _from_value(kind.__dataclass_fields__[name].type, value) for name, value in data.items()}


def _to_value(value: object) -> object:
    if isinstance(value, Column):
        return value.to_json()
    if isinstance(value, Fraction):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _from_value(kind: object, value: Any) -> object:
    if kind is Column:
        return Column.from_json(value)
    if kind is Fraction:
        return Fraction(value)
    return tuple(value) if isinstance(value, list) else value
