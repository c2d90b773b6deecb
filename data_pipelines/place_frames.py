"""Number the frames of a video by the time they are shown, and find where a decoder may start.

Repairs, each with a note in the index:

1. Pictures before the first key frame cannot be decoded and are left out, as are those that refer back across it.
2. Time stamps that jump back by more than a second (joined recordings) go on one frame after the last.
3. Formats that store no display times (AVI, raw streams): frames are shown at the ticks of the file, the dts.
4. Missing or repeated pts, and those FFmpeg makes up for H.264 and HEVC in such formats: when the codec reorders
   pictures, frame f is the f-th that the decoder puts out; otherwise frames are in the order of the file.
"""

import struct
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np

from data_pipelines.columns import Column
from data_pipelines.container import VideoTrack
from data_pipelines.keyframes import CLOSED, OPEN
from data_pipelines.packets import JUMP_BACK, NO_TIME, Packets, continued

WITHOUT_PTS = ("avi", "h264", "hevc", "m4v", "mpegvideo", "vc1", "obu")  # formats that store no pts


def place_frames(stream: av.VideoStream, format_name: str, packets: Packets, notes: list[str]) -> VideoTrack | None:
    """Number the frames; None when there is none."""
    usable = np.flatnonzero(_decodable(packets, notes)).astype(np.int32)
    if not len(usable) or packets.first is None:
        return None
    nominal = stream.average_rate or stream.guessed_rate or Fraction(25)
    base = stream.time_base or 1 / nominal
    tick = max(1, round(1 / (nominal * base)))
    times = _display_times(stream, format_name, packets, usable, tick)
    if times.note:
        notes.append(times.note)
    entry_packets, entry_frames = _entries(packets, times.packet, times.counted)
    lost = int(entry_frames[0])
    if lost:
        notes.append(f"video: {lost} frames that refer back across the first key frame cannot be decoded; left out")
    return VideoTrack(
        stream=stream.index,
        codec=stream.codec_context.codec.canonical_name,
        time_base=base,
        pts=Column.of(times.pts[lost:]),
        duration=packets.duration[int(times.packet[-1])] or tick,
        packet=Column.of(times.packet[lost:]),
        sizes=packets.size,
        entry_packets=Column.of(entry_packets),
        entry_frames=Column.of(np.maximum(entry_frames - lost, 0)),
        counted=times.counted,
        seekable=not times.note,
        coded=(packets.first.height, packets.first.width),
        aspect=Fraction(stream.sample_aspect_ratio or 1),
        turn=_turn(packets.first),
        pixels=packets.first.format.name,
    )


@dataclass(frozen=True)
class DisplayTimes:
    """When frames are shown, and the packet of each, in display order; the note is empty when nothing was repaired."""

    pts: np.ndarray
    packet: np.ndarray
    counted: bool
    note: str


def _display_times(
    stream: av.VideoStream, format_name: str, packets: Packets, usable: np.ndarray, tick: int
) -> DisplayTimes:
    """Order the frames by pts where these can be trusted, and repair them where not.

    usable: [f]  packets that hold a frame, in the order of the file
    """
    shown, dts = packets.pts[usable], packets.dts[usable]
    steady = continued(dts, tick, round(JUMP_BACK / (stream.time_base or 1)))
    missing = shown == NO_TIME
    shifts = np.where(dts == NO_TIME, 0, steady - dts) if steady is not dts else 0
    shown += shifts
    reorders = bool(stream.codec_context.has_b_frames)
    derived = format_name in WITHOUT_PTS and reorders
    wrong = derived and stream.codec_context.codec.canonical_name in ("h264", "hevc")  # FFmpeg guesses these pts
    order = np.argsort(shown, kind="stable").astype(np.int32)
    shown = shown[order]
    if wrong or missing.any() or (shown[1:] == shown[:-1]).any():
        how = "in the order the decoder puts them out" if reorders else "in the order of the file"
        note = f"video: missing or repeated time stamps; frames are numbered {how}"
        return DisplayTimes(_spread(steady), usable, reorders, note)
    if derived:
        note = "video: the format stores no display times; frames are shown at the ticks of the file"
        return DisplayTimes(_spread(steady), usable[order], False, note)
    note = "video: time stamps jump back; what follows is shown after what came before" if np.any(shifts) else ""
    return DisplayTimes(shown, usable[order], False, note)


def _decodable(packets: Packets, notes: list[str]) -> np.ndarray:
    """[p] bool: packets that give a frame, those before the first key frame left out."""
    shown = np.asarray(packets.shown, dtype=bool)
    first = min(packets.entries, default=0)
    before = int(shown[:first].sum())
    if before:
        notes.append(f"video: {before} frames before the first key frame cannot be decoded; left out")
        shown[:first] = False
    return shown


def _entries(packets: Packets, packet: np.ndarray, counted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Find where a decoder may start.

    packet: [f]  the packet of each frame, in display order
    returns the entry packets [k], and for each the first frame that is exact [k].
    The first key frame of a file is always an entry; others must be safe, and closed where frames are only counted.
    """
    frame_of = np.full(packets.num_packets, len(packet), dtype=np.int32)
    frame_of[packet] = np.arange(len(packet), dtype=np.int32)
    earliest_from = np.minimum.accumulate(frame_of[::-1])[::-1]  # [p] first frame stored at or after each packet
    entry_packets: list[int] = []
    entry_frames: list[int] = []
    for i, kind in packets.entries.items():
        safe = kind == CLOSED or (kind == OPEN and not counted)
        if earliest_from[i] == len(packet) or (entry_packets and not safe):
            continue
        entry_packets.append(i)
        hidden = frame_of[i] == len(packet)
        entry_frames.append(int(earliest_from[i] if counted or kind == CLOSED or hidden else frame_of[i]))
    if not entry_packets:
        entry_packets, entry_frames = [int(packet.min())], [0]
    return np.array(entry_packets, dtype=np.int64), np.array(entry_frames, dtype=np.int64)


def _spread(times: np.ndarray) -> np.ndarray:
    """[f] int64: the times sorted, equal ones moved apart by single ticks."""
    steps = np.arange(len(times))
    return np.maximum.accumulate(np.sort(times) - steps) + steps


def _turn(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read a display matrix [a b u; c d v; x y w] as (transpose, mirror left-right, mirror top-bottom).

    A point (x, y) goes to (a x + c y, b x + d y); angles between quarter turns go to the nearest.
    """
    for number in range(len(frame.side_data)):
        data = frame.side_data[number]  # type: ignore[literal-required]
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack("=9i", bytes(data))[:5]
            return (True, c < 0, b < 0) if abs(b) > abs(a) else (False, a < 0, d < 0)
    return (False, False, False)
