"""The packets of a file, read once from its start to its end, nothing decoded but the first picture and sound."""

import struct
from collections.abc import Sequence
from typing import Any

import av

from data_pipelines.keyframes import entry_kind, is_shown
from data_pipelines.media import demux

JUMP_BACK = 1  # seconds


class Packets:
    """What one stream's packets say, in the order of the file."""

    def __init__(self, stream: av.VideoStream | av.AudioStream):
        self.is_video = stream.type == "video"
        self.codec: str = stream.codec_context.codec.canonical_name
        self.extradata: bytes = stream.codec_context.extradata or b""
        self.pts: list[int | None] = []
        self.dts: list[int | None] = []
        self.duration: list[int] = []
        self.size: list[int] = []
        self.shown: list[bool] = []  # whether a picture or samples come of it
        self.entry: list[str | None] = []  # pictures: the kind of entry at a key frame
        self.trims: list[tuple[int, int]] = []  # sound: samples to drop at the start (delay) and at the end (padding)
        self.is_cut = False  # whether the last packet is incomplete
        self.first: Any = None  # the first picture (av.VideoFrame) or sound (av.AudioFrame), decoded
        self.first_samples = 0  # samples of the first sound, encoder delay included

    def add(self, packet: av.Packet) -> None:
        self.pts.append(packet.pts)
        self.dts.append(packet.dts)
        self.duration.append(packet.duration or 0)
        self.size.append(packet.size)
        self.is_cut = packet.is_corrupt
        if self.is_video:
            is_key = packet.is_keyframe
            data = bytes(packet) if is_key or self.codec == "vp8" else b""
            self.shown.append(not packet.is_discard and is_shown(self.codec, data))
            self.entry.append(entry_kind(self.codec, self.extradata, data) if is_key else None)
        else:
            self.shown.append(not packet.is_discard)
            self.trims.append(_trims(packet))

    def drop_last(self) -> None:
        columns: tuple[list, ...] = (self.pts, self.dts, self.duration, self.size, self.shown, self.entry, self.trims)
        for column in columns:
            del column[-1:]

    def decode_first(self, packet: av.Packet) -> None:
        """Decode one packet; keep what comes of it."""
        try:
            frames: list[Any] = packet.decode()
        except av.error.FFmpegError:
            return
        if frames:
            self.first = frames[0]
            delay = self.trims[0][0] if len(self.trims) == 1 else 0
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
            notes.append(f"{kind}: packet {len(packets.pts)} is cut off by the end of the file; left out")
    return found


def continued(times: list[int | None], tick: int, jump: int) -> list[int]:
    """Fill missing times, and close jumps back of more than `jump`: each goes on `tick` after the latest before."""
    repaired: list[int] = []
    shift = 0
    latest: int | None = None
    for time in times:
        if time is None:
            value = 0 if latest is None else latest + tick
        else:
            if latest is not None and time + shift < latest - jump:
                shift = latest + tick - time
            value = time + shift
        repaired.append(value)
        latest = value if latest is None else max(latest, value)
    return repaired


def _trims(packet: av.Packet) -> tuple[int, int]:
    """Samples to drop at the start and at the end of a packet of sound, as the container says."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    skip, discard = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
    return skip, discard
