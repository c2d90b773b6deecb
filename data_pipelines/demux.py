"""Read the ClipIndex of a file: one pass over its packets, and the repairs that broken time stamps need.

Repairs, each with a note in the index:

1. A packet that is empty, or cut off by the end of the file, is left out.
2. Pictures before the first key frame cannot be decoded and are left out, as are those that refer back across it.
3. Time stamps that jump back by more than a second (joined recordings) continue one frame after the last.
4. Pictures without usable pts (AVI, raw streams; missing or repeated pts): when the codec does not reorder pictures,
   they are shown in the order of the file at their dts. When it does, frame f is the f-th picture that the decoder puts
   out, shown at the f-th smallest dts. Where there is no dts either, pictures follow each other at the nominal rate.
5. Sound packets whose times are within 20 ms of where the samples before them end are joined to these; a larger gap
   is silence, and what a larger overlap repeats is dropped.
"""

import struct
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor

import av
import numpy as np
from av.stream import Disposition

from data_pipelines.container import AudioTrack, ClipIndex, StreamInfo, VideoTrack
from data_pipelines.keyframes import CLOSED, OPEN, entry_kind, is_shown
from data_pipelines.media import MediaError, MediaFile, as_media_file, open_container

FREE_RUNNING = ("mpegts", "mpeg", "mpegtsraw", "mp3")  # formats whose time stamps start anywhere
WITHOUT_PTS = ("avi", "h264", "hevc", "m4v", "mpegvideo", "vc1", "obu")  # formats that store no pts
LATEST_START = 60  # seconds after zero
JOIN_TOLERANCE = Fraction(1, 50)  # seconds
JUMP_BACK = 1  # seconds


@dataclass
class Packets:
    """What one stream's packets say, in the order of the file."""

    pts: list[int | None] = field(default_factory=list)
    dts: list[int | None] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    """Whether a picture or samples come of it."""
    entry: list[str | None] = field(default_factory=list)
    """Pictures: the kind of entry at a key frame."""
    skip: list[int] = field(default_factory=list)
    """Sound: samples to drop at its start (encoder delay)."""
    discard: list[int] = field(default_factory=list)
    """Sound: samples to drop at its end (padding)."""
    first: av.VideoFrame | av.AudioFrame | None = None
    """The first picture or sound, decoded."""
    first_samples: int = 0
    """Samples of the first sound, encoder delay included."""
    is_cut: bool = False
    """Whether the last packet is incomplete."""

    def add(self, packet: av.Packet, codec: str, extradata: bytes) -> None:
        is_video = packet.stream.type == "video"
        data = bytes(packet) if is_video and (packet.is_keyframe or codec == "vp8") else b""
        self.pts.append(packet.pts)
        self.dts.append(packet.dts)
        self.duration.append(packet.duration or 0)
        self.size.append(packet.size)
        self.shown.append(not packet.is_discard and (not is_video or is_shown(codec, data)))
        self.entry.append(entry_kind(codec, extradata, data) if is_video and packet.is_keyframe else None)
        skip, discard = _skipped_samples(packet)
        self.skip.append(skip)
        self.discard.append(discard)
        self.is_cut = packet.is_corrupt

    def drop_last(self) -> None:
        for column in (self.pts, self.dts, self.duration, self.size, self.shown, self.entry, self.skip, self.discard):
            column.pop()

    def decode_first(self, packet: av.Packet) -> None:
        """Decode until there is a picture or a sound."""
        if self.first is None:
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                return
            if frames:
                self.first = frames[0]
                delay = self.skip[-1] if len(self.skip) == 1 else 0
                self.first_samples = delay + sum(getattr(frame, "samples", 0) for frame in frames)


def read_index(source: "str | MediaFile", *, need: tuple[str, ...] = ()) -> ClipIndex:
    """Read the index of a media file.

    need: the tracks ("video", "audio") without which the file is of no use.
    Raises MediaError: no such file, empty file, no index, not a media file, no video stream, no audio stream, no
    frames, no samples, no decoder.
    """
    source = as_media_file(source)
    notes: list[str] = []
    with open_container(source) as container:
        video, audio = _choose(container, "video"), _choose(container, "audio")
        for kind, stream in (("video", video), ("audio", audio)):
            if kind in need and stream is None:
                kinds = sorted({other.type for other in container.streams}) or ["nothing"]
                raise MediaError(str(source), f"no {kind} stream (the file holds: {', '.join(kinds)})")
        pictures, sounds = _demux(container, source, [video, audio], notes)
        video_track = None if video is None else _video_track(video, container.format.name, pictures, notes)
        audio_track = None if audio is None else _audio_track(audio, sounds, notes)
        if "video" in need and video_track is None:
            raise MediaError(str(source), "no frames: the video stream holds no picture that can be decoded")
        if "audio" in need and audio_track is None:
            raise MediaError(str(source), "no samples: the audio stream holds no sound that can be decoded")
        return ClipIndex(
            format=container.format.name,
            size=source.size if source.size is not None else container.size,
            origin=_origin(container.format.name, video_track, audio_track),
            streams=tuple(_stream_info(stream) for stream in container.streams),
            video=video_track,
            audio=audio_track,
            notes=tuple(notes),
        )


def _choose(container: av.container.InputContainer, kind: str) -> "av.VideoStream | av.AudioStream | None":
    """The stream a player plays; the cover picture of a song is no video."""
    streams = [
        stream
        for stream in container.streams
        if stream.type == kind and not stream.disposition & Disposition.attached_pic
    ]
    best = container.streams.best(kind) if streams else None
    return best if best in streams else streams[0] if streams else None


def _demux(container, source: MediaFile, streams: list, notes: list[str]) -> tuple[Packets, Packets]:
    """Collect the packets of the video and the audio stream; None stands for a stream that is not there."""
    found = (Packets(), Packets())
    wanted = [stream for stream in streams if stream is not None]
    names, headers = {}, {}
    for stream in wanted:
        if stream.codec_context is None:
            raise MediaError(str(source), f"no decoder for its {stream.type} stream (number {stream.index})")
        stream.codec_context.thread_count = 1
        names[stream.index] = stream.codec_context.codec.canonical_name
        headers[stream.index] = stream.codec_context.extradata or b""
    try:
        for packet in container.demux(wanted) if wanted else ():
            number = packet.stream_index
            packets = found[0 if packet.stream.type == "video" else 1]
            if packet.size:
                packets.add(packet, names[number], headers[number])
            if packet.size or packet.dts is None:  # the last, without size or time, puts out what was held back
                packets.decode_first(packet)
    except av.error.FFmpegError as error:
        notes.append(f"reading stopped before the end of the file: {error.strerror}")
    for stream in wanted:
        packets = found[0 if stream.type == "video" else 1]
        if packets.is_cut and names[stream.index].startswith("pcm_"):
            notes.append("audio: the last packet is cut off by the end of the file; used up to there")
        elif packets.is_cut:
            packets.drop_last()
            notes.append(f"{stream.type}: packet {len(packets.pts)} is cut off by the end of the file; left out")
    return found


def _skipped_samples(packet: av.Packet) -> tuple[int, int]:
    """Samples to drop at the start and at the end of a packet of sound, as the container says."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    return struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))


def _stream_info(stream: av.stream.Stream) -> StreamInfo:
    context = stream.codec_context
    return StreamInfo(
        index=stream.index,
        kind=stream.type or "unknown",
        codec=context.codec.canonical_name if context is not None else "unknown",
        time_base=stream.time_base or Fraction(0),
        start=stream.start_time,
    )


def _origin(format_name: str, video: VideoTrack | None, audio: AudioTrack | None) -> Fraction:
    """Time 0 of the clip on the file's own timeline; the module's docstring of container.py has the rule."""
    starts = [] if video is None else [int(video.pts[0]) * video.time_base]
    starts += [] if audio is None else [audio.start]
    earliest = min(starts, default=Fraction(0))
    has_zero = format_name not in FREE_RUNNING and 0 <= earliest <= LATEST_START
    return Fraction(0) if has_zero else earliest


def _video_track(stream: av.VideoStream, format_name: str, packets: Packets, notes: list[str]) -> VideoTrack | None:
    """Number the frames; None when there is none."""
    usable = np.flatnonzero(_decodable(packets, notes))
    if not len(usable) or packets.first is None:
        return None
    nominal = stream.average_rate or stream.guessed_rate or Fraction(25)
    tick = max(1, round(1 / (nominal * stream.time_base)))
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
        time_base=stream.time_base,
        pts=times.pts[lost:],
        duration=packets.duration[times.packet[-1]] or tick,
        packet=times.packet[lost:],
        sizes=np.array(packets.size, dtype=np.int64),
        entry_packets=entry_packets,
        entry_frames=np.maximum(entry_frames - lost, 0),
        counted=times.counted,
        seekable=not times.note,
        coded=(packets.first.height, packets.first.width),
        aspect=Fraction(stream.sample_aspect_ratio or 1),
        turn=_turn(packets.first),
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
    pts, dts = ([times[i] for i in usable] for times in (packets.pts, packets.dts))
    steady = _continued(dts, tick, stream.time_base)
    shifts = [0 if time is None else after - time for time, after in zip(dts, steady, strict=True)]
    shown = [None if time is None else time + shift for time, shift in zip(pts, shifts, strict=True)]
    reorders = bool(stream.codec_context.has_b_frames)
    derived = format_name in WITHOUT_PTS and reorders
    wrong = derived and stream.codec_context.codec.canonical_name in ("h264", "hevc")  # FFmpeg guesses these pts
    if wrong or None in shown or len(set(shown)) != len(shown):
        order = "in the order the decoder puts them out" if reorders else "in the order of the file"
        note = f"video: missing or repeated time stamps; frames are numbered {order}"
        return DisplayTimes(_spread(steady), usable, reorders, note)
    times = np.array(shown, dtype=np.int64)
    order = np.argsort(times)
    if derived:
        note = "video: the format stores no display times; frames are shown at the ticks of the file"
        return DisplayTimes(_spread(steady), usable[order], False, note)
    note = "video: time stamps jump back; what follows is shown after what came before" if any(shifts) else ""
    return DisplayTimes(times[order], usable[order], False, note)


def _decodable(packets: Packets, notes: list[str]) -> np.ndarray:
    """[p] bool: packets that give a frame, those before the first key frame left out."""
    shown = np.array(packets.shown, dtype=bool)
    marked = [i for i, entry in enumerate(packets.entry) if entry is not None]
    before = int(shown[: marked[0]].sum()) if marked else 0
    if before:
        notes.append(f"video: {before} frames before the first key frame cannot be decoded; left out")
        shown[: marked[0]] = False
    return shown


def _entries(packets: Packets, packet: np.ndarray, counted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Find where a decoder may start.

    packet: [f]  the packet of each frame, in display order
    returns the entry packets [k], and for each the first frame that is exact [k].
    The first key frame of a file is always an entry; others must be safe, and closed where frames are only counted.
    """
    frame_of = np.full(len(packets.size), len(packet))
    frame_of[packet] = np.arange(len(packet))
    earliest_from = np.minimum.accumulate(frame_of[::-1])[::-1]  # [p] first frame stored at or after each packet
    entry_packets: list[int] = []
    entry_frames: list[int] = []
    for i, kind in enumerate(packets.entry):
        safe = kind == CLOSED or (kind == OPEN and not counted)
        if kind is None or earliest_from[i] == len(packet) or (entry_packets and not safe):
            continue
        entry_packets.append(i)
        hidden = frame_of[i] == len(packet)
        entry_frames.append(int(earliest_from[i] if counted or kind == CLOSED or hidden else frame_of[i]))
    if not entry_packets:
        entry_packets, entry_frames = [int(packet.min())], [0]
    return np.array(entry_packets, dtype=np.int64), np.array(entry_frames, dtype=np.int64)


def _continued(times: list[int | None], tick: int, time_base: Fraction) -> list[int]:
    """Fill missing times and close jumps back: what follows continues `tick`, one frame, after the latest before."""
    repaired: list[int] = []
    shift = 0
    latest: int | None = None
    for time in times:
        if time is None:
            value = 0 if latest is None else latest + tick
        else:
            if latest is not None and time + shift < latest - JUMP_BACK / time_base:
                shift = latest + tick - time
            value = time + shift
        repaired.append(value)
        latest = value if latest is None else max(latest, value)
    return repaired


def _spread(times: list[int]) -> np.ndarray:
    """[f] int64: the times sorted, equal ones moved apart by single ticks."""
    steps = np.arange(len(times))
    return np.maximum.accumulate(np.sort(np.array(times, dtype=np.int64)) - steps) + steps


def _turn(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read a display matrix [a b u; c d v; x y w] as (transpose, mirror left-right, mirror top-bottom).

    A point (x, y) goes to (a x + c y, b x + d y); angles between quarter turns go to the nearest.
    """
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack("=9i", bytes(data))[:5]
            return (True, c < 0, b < 0) if abs(b) > abs(a) else (False, a < 0, d < 0)
    return (False, False, False)


def _audio_track(stream: av.AudioStream, packets: Packets, notes: list[str]) -> AudioTrack | None:
    """Place every packet of sound on the track's own sample grid; None when there is none."""
    if packets.first is None:
        return None
    rate, base = packets.first.sample_rate, stream.time_base
    pts = _continued(packets.pts, max(packets.duration[0], 1), base)
    repaired = pts != packets.pts
    if repaired:
        notes.append("audio: missing time stamps or jumps back; packets follow each other there")
    samples, exact = _packet_samples(packets, rate, base)
    skipped, heard = _heard(packets, samples)
    if not any(heard):
        return None
    first = next(i for i, count in enumerate(heard) if count)
    zero = pts[first] + floor(Fraction(skipped[first], rate) / base + Fraction(1, 2))
    position, cursor, resynced = [], 0, 0
    for i, count in enumerate(heard):
        due = round((pts[i] - zero) * base * rate) + skipped[i]
        if i > first and count and abs(due - cursor) > JOIN_TOLERANCE * rate:
            cursor, resynced = max(due, 0), resynced + 1
        position.append(cursor)
        cursor += count
    if resynced:
        notes.append(f"audio: {resynced} gaps or overlaps of more than {float(JOIN_TOLERANCE)} s")
    return AudioTrack(
        stream=stream.index,
        codec=stream.codec_context.codec.canonical_name,
        time_base=base,
        rate=rate,
        channels=packets.first.layout.nb_channels,
        layout=packets.first.layout.name,
        start=zero * base,
        pts=np.array(pts, dtype=np.int64),
        position=np.array(position, dtype=np.int64),
        count=np.array(heard, dtype=np.int64),
        exact=exact,
        seekable=not repaired and bool((np.diff(pts) > 0).all()),
    )


def _packet_samples(packets: Packets, rate: int, base: Fraction) -> tuple[list[int], bool]:
    """Samples of each packet before trimming, and whether they are exact.

    A time base coarser than a sample rounds durations; a codec with packets of one size is exact all the same.
    """
    exact_base = (base * rate).numerator <= (base * rate).denominator
    lengths = [duration * base * rate for duration in packets.duration]
    if exact_base:
        return [round(length) for length in lengths], True
    nominal = packets.first_samples
    near = [abs(length - nominal) <= base * rate for length in lengths]
    if all(near[1:-1]):
        last = min(nominal, round(lengths[-1])) if not near[-1] else nominal
        return [nominal] * (len(lengths) - 1) + [last], True
    return [round(length) for length in lengths], False


def _heard(packets: Packets, samples: list[int]) -> tuple[list[int], list[int]]:
    """Samples dropped at the start of each packet, and samples heard of it. A delay may run over several packets.

    Some containers take the padding off the last packet's duration, some only name it, some do both.
    """
    skipped, heard, left = [], [], 0
    for count, skip, discard, shown in zip(samples, packets.skip, packets.discard, packets.shown, strict=True):
        left += skip
        drop = min(left, count)
        left -= drop
        skipped.append(drop)
        whole = max(count, packets.first_samples) if discard else count
        heard.append(max(0, min(count, whole - discard) - drop) if shown else 0)
    return skipped, heard
