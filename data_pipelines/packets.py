"""The packets of a file, read once from its start to its end, nothing decoded but the first picture and sound."""

import struct
from collections.abc import Sequence
from typing import Any

import av
import numpy as np

from data_pipelines.columns import Column, ColumnBuilder
from data_pipelines.keyframes import entry_kind, is_shown
from data_pipelines.media import demux

JUMP_BACK = 1  # seconds


NO_TIME = -(1 << 63)  # a time stamp that is missing


class Packets:
    """What one stream's packets say, in the order of the file. Columns are built by `finish`."""

    def __init__(self, stream: av.VideoStream | av.AudioStream):
        self.is_video = stream.type == "video"
        self.codec: str = stream.codec_context.codec.canonical_name
        self.extradata: bytes = stream.codec_context.extradata or b""
        self.pts = Column.of(())  # NO_TIME where it is missing
        self.dts = Column.of(())
        self.duration = Column.of(())
        self.size = Column.of(())
        self.shown = Column.of(())  # 1 if a picture or samples come of it, else 0
        self.entries: dict[int, str] = {}  # pictures: key frame -> the kind of entry
        self.trims: dict[int, tuple[int, int]] = {}  # sound: samples to drop at a packet's start (delay), end (padding)
        self.is_cut = False  # whether the last packet is incomplete
        self.first: Any = None  # the first picture (av.VideoFrame) or sound (av.AudioFrame), decoded
        self.first_samples = 0  # samples of the first sound, encoder delay included
        self.num_packets = 0
        self._columns = {name: ColumnBuilder() for name in ("pts", "dts", "duration", "size", "shown")}
        self._last: tuple[int, ...] = ()

    def add(self, packet: av.Packet) -> None:
        """Note a packet; it counts once another one or `finish` comes."""
        self._keep_last()
        is_shown_packet = not packet.is_discard
        if self.is_video:
            is_key = packet.is_keyframe
            data = bytes(packet) if is_key or self.codec == "vp8" else b""
            is_shown_packet = is_shown_packet and is_shown(self.codec, data)
            if is_key:
                self.entries[self.num_packets] = entry_kind(self.codec, self.extradata, data)
        else:
            trims = _trims(packet)
            if trims != (0, 0):
                self.trims[self.num_packets] = trims
        pts, dts = (NO_TIME if time is None else time for time in (packet.pts, packet.dts))
        self._last = (pts, dts, packet.duration or 0, packet.size, int(is_shown_packet))
        self.num_packets += 1
        self.is_cut = packet.is_corrupt

    def drop_last(self) -> None:
        """Forget the last packet."""
        self._last = ()
        self.num_packets -= 1
        self.entries.pop(self.num_packets, None)
        self.trims.pop(self.num_packets, None)

    def finish(self) -> None:
        """Build the columns."""
        self._keep_last()
        for name in list(self._columns):
            setattr(self, name, self._columns.pop(name).build())

    def _keep_last(self) -> None:
        for builder, value in zip(self._columns.values(), self._last, strict=False):
            builder.append(value)
        self._last = ()

    def decode_first(self, packet: av.Packet) -> None:
        """Decode one packet; keep what comes of it."""
        try:
            frames: list[Any] = packet.decode()
        except av.error.FFmpegError:
            return
        if frames:
            self.first = frames[0]
            delay = self.trims.get(0, (0, 0))[0] if self.num_packets == 1 else 0
            self.first_samples = 0 if self.is_video else delay + sum(frame.samples for frame in frames)


def read_packets(
    container: av.container.InputContainer, streams: Sequence[av.VideoStream | av.AudioStream], notes: list[str]
) -> dict[int, Packets]:
    """Collect the packets of some streams, by stream number; what is wrong with the file goes to the notes."""
    found = {stream.index: Packets(stream) for stream in streams}
    try:
        for packet in demux(container, *streams):
            packets = found[packet.stream_index]
            if packet.size:
                packets.add(packet)
            if packets.first is None and (packet.size or packet.dts is None):  # the very last packet drains the decoder
                packets.decode_first(packet)
    except av.error.FFmpegError as error:
        notes.append(f"reading stopped before the end of the file: {error.strerror}")
    for packets in found.values():
        if packets.is_cut and packets.codec.startswith("pcm_"):
            notes.append("audio: the last packet is cut off by the end of the file; used up to there")
        elif packets.is_cut:
            packets.drop_last()
            kind = "video" if packets.is_video else "audio"
            notes.append(f"{kind}: packet {packets.num_packets} is cut off by the end of the file; left out")
        packets.finish()
    return found


def continued(times: np.ndarray, tick: int, jump: int) -> np.ndarray:
    """Fill missing times, and close jumps back of more than `jump`: each goes on `tick` after the latest before.

    times: [n] int64, NO_TIME where one is missing
    """
    latest_before = np.maximum.accumulate(times[:-1])
    if not (times == NO_TIME).any() and (times[1:] >= latest_before - jump).all():
        return times
    repaired = np.empty_like(times)
    shift = 0
    latest: int | None = None
    for number, time in enumerate(times.tolist()):
        if time == NO_TIME:
            value = 0 if latest is None else latest + tick
        else:
            if latest is not None and time + shift < latest - jump:
                shift = latest + tick - time
            value = time + shift
        repaired[number] = value
        latest = value if latest is None else max(latest, value)
    return repaired


def _trims(packet: av.Packet) -> tuple[int, int]:
    """Samples to drop at the start and at the end of a packet of sound, as the container says."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    skip, discard = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
    return skip, discard
