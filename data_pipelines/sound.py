"""Decode a range of sound as 16 kHz mono on the clip's clock. The same samples whatever the range they are cut by.

Downmix. A sample is the sum of the channels by WEIGHTS, divided by the sum of the weights. The centre, where films keep
speech, counts most, and the two sides of a pair count 3 : 2, so that a pair in opposite phase does not vanish.
Channels of unknown places count 3 : 2 in turn.

Rate. FFmpeg's swresample, started on a sample that both rates share and drained at the end.

Independence of the cut. Decoders carry state: sound is decoded in blocks of BLOCK seconds that lie fixed on the track,
each by a decoder that starts PREROLL seconds earlier and goes on as far past the end as the filter sees, and a range
takes what it needs of its blocks. Up to the first BLOCK seconds, and beyond for every codec whose state dies out within
the preroll, this is bit for bit what decoding from the start gives. (Codecs that fill bands with random noise, AAC with
noise substitution among them, draw other noise than from the start, the same each time.) A track whose positions are
not exact is one block.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil, gcd

import av
import numpy as np

from data_pipelines.container import AudioTrack, ClipIndex
from data_pipelines.media import MediaError, MediaFile, as_media_file, open_container
from data_pipelines.place_sound import JOIN_TOLERANCE
from data_pipelines.track_reader import TrackReader
from mmcp.sequence import SAMPLE_RATE

BLOCK = 60  # seconds
PREROLL = 2  # seconds
FILTER_REACH = 64  # samples at the lower of the two rates: swresample's filter sees 16 to each side
WEIGHTS = {"FC": 1.2, "FL": 0.6, "FR": 0.4, "LFE": 0.25, "LFE2": 0.25}
LEFT, RIGHT = 0.42, 0.28  # every other channel, by its side
UNKNOWN = (0.6, 0.4)
DECODERS_WITHOUT_NOISE = ("pcm_", "flac", "alac", "mp3float", "vorbis", "wavpack")
"""What the names of decoders begin with that are as new when flushed."""
SAMPLE_KINDS = {
    name: np.dtype(kind)
    for name, kind in {"u8": "u1", "s16": "i2", "s32": "i4", "s64": "i8", "flt": "f4", "dbl": "f8"}.items()
}
CHUNK = 1 << 16
TAG_BITS = 24  # a packet's number travels as the high bits of its pts; the decoder adds the samples it skips below


@dataclass(frozen=True, slots=True)
class Sound:
    """What decode_audio gives."""

    samples: np.ndarray
    """[n] float32 at 16 kHz, within -1 and 1; 0 where the track has no sound."""
    lost_packets: int
    """Packets that could not be decoded; silence stands for them."""
    cleaned: int
    """Samples of the source that were not finite and became 0."""
    bounded: int
    """Samples of the result that were beyond -1 or 1."""


@dataclass
class Damage:
    """Counts what is wrong while decoding."""

    lost_packets: int = 0
    cleaned: int = 0


def decode_audio(source: str | MediaFile, index: ClipIndex, first: int, last: int) -> Sound:
    """Decode samples first..last - 1 at 16 kHz; sample n is at n / 16000 s on the clip's clock.

    Before the track's start and after its end there are zeros. Memory: the result, and a few frames.
    Raises MediaError when the file has no sound or cannot be read.
    """
    with SoundReader(source, index) as sound:
        return sound.read(first, last)


class SoundReader:
    """Decodes ranges of one file's sound, opening it once. Raises MediaError when the file has no sound."""

    def __init__(self, source: str | MediaFile, index: ClipIndex):
        self.source, self.index = as_media_file(source), index
        if index.audio is None:
            raise MediaError(str(self.source), "no audio stream")
        self.track: AudioTrack = index.audio
        self.opened = ExitStack()
        self.reader: TrackReader | None = None

    def __enter__(self) -> "SoundReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def read(self, first: int, last: int) -> Sound:
        """Decode samples first..last - 1, as `decode_audio` does."""
        if first > last:
            raise ValueError(f"samples {first}..{last} are not a range; first must not exceed last")
        samples = np.zeros(last - first, dtype=np.float32)
        begin, end = self.index.audio_samples
        damage = Damage()
        for block in _blocks(self.track, max(first, begin) - begin, min(last, end) - begin):
            low, high = block.samples
            for position, part in _resampled(self._packets(), self.track, block, damage):
                kept = part[max(0, low - position) : max(0, high - position)]
                at = max(position, low) + begin - first
                samples[at : at + len(kept)] = kept
        bounded = int((np.abs(samples) > 1).sum())
        return Sound(np.clip(samples, -1, 1, out=samples), damage.lost_packets, damage.cleaned, bounded)

    def _packets(self) -> TrackReader:
        """The packets of the track; opened again for each block where one cannot go back, or the decoder is not as new.

        FFmpeg's decoders that draw noise go on drawing when they are flushed: the same block would sound different.
        """
        is_as_new = self.reader is not None and self.reader.decoder.name.startswith(DECODERS_WITHOUT_NOISE)
        if self.reader is None or not self.track.seekable or not is_as_new:
            self.opened.close()
            container = self.opened.enter_context(open_container(self.source))
            self.reader = TrackReader(container, self.track, str(self.source))
        return self.reader


@dataclass(frozen=True, slots=True)
class Block:
    """The part of one block of a track that is asked for, and the packets it is decoded from."""

    samples: tuple[int, int]
    """First and last + 1 sample at 16 kHz, from the track's start."""
    span: tuple[int, int]
    """The samples at the track's own rate that these are computed from."""
    warm: int
    """Packet that the decoder starts at."""
    used: int
    """First packet whose sound is used."""
    own: tuple[int, int]
    """First and last + 1 packet that begin in this block: what is wrong with others is counted by other blocks."""
    last: int
    """Last + 1 packet that is used."""


def _blocks(track: AudioTrack, low: int, high: int) -> Iterator[Block]:
    """Yield the blocks of samples low..high - 1 at 16 kHz, from the track's start; none when there are none."""
    if low >= high:
        return
    if not (track.exact and track.seekable):
        every = (0, track.num_packets)
        yield Block((low, high), _source_span(track, low, high), 0, 0, every, track.num_packets)
        return
    long, short = BLOCK * track.rate, BLOCK * SAMPLE_RATE
    for number in range(low // short, -(-high // short)):
        samples = max(low, number * short), min(high, (number + 1) * short)
        span = _source_span(track, *samples)
        furthest, _ = _source_span(track, number * short, (number + 1) * short)
        used = max(int(track.position.searchsorted(furthest, side="right")) - 1, track.position.first)
        first, end, last = track.position.searchsorted([number * long, (number + 1) * long, span[1]]).tolist()
        warm = track.position.searchsorted(track.position[min(first, track.num_packets - 1)] - PREROLL * track.rate)
        yield Block(samples, span, int(warm) if first else 0, used, (first, end), last)


def packets_needed(track: AudioTrack, low: int, high: int) -> tuple[int, int]:
    """First and last + 1 packet that `decode_audio` reads for samples low..high - 1, from the track's start."""
    blocks = list(_blocks(track, low, high))
    return blocks[0].warm, blocks[-1].last


def _source_span(track: AudioTrack, low: int, high: int) -> tuple[int, int]:
    """The samples at the track's own rate that samples low..high - 1 at 16 kHz are computed from."""
    step = track.rate // gcd(track.rate, SAMPLE_RATE)
    reach = FILTER_REACH * max(1, ceil(track.rate / SAMPLE_RATE))
    start = max(0, low * track.rate // SAMPLE_RATE - reach) // step * step
    return start, min(track.num_samples, -(-high * track.rate // SAMPLE_RATE) + reach)


def _resampled(
    reader: TrackReader, track: AudioTrack, block: Block, damage: Damage
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position at 16 kHz from the track's start, samples) that cover a block's samples and a little more."""
    start, stop = block.span
    parts = _contiguous(_decoded(reader, track, block, damage), start, stop)
    position = start * SAMPLE_RATE // track.rate
    if track.rate == SAMPLE_RATE:
        for part in parts:
            yield position, part
            position += len(part)
        return
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    fed = 0
    for part in parts:
        frame = av.AudioFrame.from_ndarray(part[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = track.rate, fed, Fraction(1, track.rate)
        fed += len(part)
        for out in resampler.resample(frame):
            yield position, out.to_ndarray()[0]
            position += out.samples
    for out in resampler.resample(None):
        yield position, out.to_ndarray()[0]
        position += out.samples


def _contiguous(parts: Iterator[tuple[int, np.ndarray]], start: int, stop: int) -> Iterator[np.ndarray]:
    """Samples start..stop in pieces of CHUNK: gaps are zeros, of an overlap the earlier part is kept."""
    piece = np.zeros(min(CHUNK, stop - start), dtype=np.float32)
    base = cursor = start
    for position, part in parts:
        part = part[max(0, cursor - position) : max(0, stop - position)]
        position = min(max(position, cursor), stop)
        while position + len(part) >= base + len(piece):
            taken = max(0, base + len(piece) - position)
            piece[len(piece) - taken :] = part[:taken]
            yield piece
            position, part = position + taken, part[taken:]
            base += len(piece)
            piece = np.zeros(min(CHUNK, stop - base), dtype=np.float32)
            if base == stop:
                return
        piece[position - base : position - base + len(part)] = part
        cursor = position + len(part)
    while base < stop:
        yield piece
        base += len(piece)
        piece = np.zeros(min(CHUNK, stop - base), dtype=np.float32)


@dataclass(slots=True)
class Placement:
    """Where decoded sound goes: at its packet's position, or after the sound before it if positions are not exact."""

    track: AudioTrack
    packet: int = -1
    """The packet that the last frame came from."""
    used: int = 0
    """Samples of that packet placed so far."""
    cursor: int = 0
    """Position after them."""

    def place(self, frame: av.AudioFrame, samples: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the position of a frame's samples, and what of them is heard."""
        if frame.pts is not None and frame.pts >> TAG_BITS != self.packet:
            is_first = self.packet < 0
            self.packet, self.used = frame.pts >> TAG_BITS, 0
            due = self.track.position[self.packet]
            if self.track.exact or is_first or abs(due - self.cursor) > JOIN_TOLERANCE * self.track.rate:
                self.cursor = due
        if self.track.exact:
            samples = samples[: max(0, self.track.count[self.packet] - self.used)]
        position = self.cursor
        self.used += len(samples)
        self.cursor += len(samples)
        return position, samples


def _decoded(reader: TrackReader, track: AudioTrack, block: Block, damage: Damage) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position at the track's rate, mono samples) of a block's packets; ends early once past its span."""
    reader.go_to(block.warm)
    reader.decoder.flush_buffers()
    placement, (first, end) = Placement(track), block.own
    for number in range(block.warm, block.last + 1):
        packet = reader.read() if number < block.last else None
        if packet is not None:
            packet.pts, packet.dts = number << TAG_BITS, None
        try:
            frames = reader.decoder.decode(packet)
        except av.error.FFmpegError:
            damage.lost_packets += first <= number < end
            continue
        for frame in frames:
            if frame.sample_rate != track.rate:
                reason = f"its sound changes from {track.rate} to {frame.sample_rate} samples a second"
                raise MediaError(reader.path, reason, Fraction(placement.cursor, track.rate))
            mono, cleaned = _downmix(frame)
            position, samples = placement.place(frame, mono)
            if placement.packet >= block.used:
                damage.cleaned += cleaned if first <= placement.packet < end else 0
                yield position, samples
        if placement.packet >= block.used and placement.cursor >= block.span[1]:
            return


def _downmix(frame: av.AudioFrame) -> tuple[np.ndarray, int]:
    """One frame in any format and layout -> [n] float32 mono, and how many values were not finite and became 0."""
    channels, kind = frame.layout.nb_channels, SAMPLE_KINDS[frame.format.packed.name]
    if frame.format.is_planar:
        planes = [np.frombuffer(memoryview(plane), kind, frame.samples) for plane in frame.planes]
        samples = planes[0][None] if channels == 1 else np.stack(planes)
    else:
        samples = np.frombuffer(memoryview(frame.planes[0]), kind, frame.samples * channels).reshape(-1, channels).T
    if kind.kind == "u":
        samples = (samples.astype(np.float32) - 128) / 128
    elif kind.kind == "i":
        samples = samples.astype(np.float32) / float(1 << (8 * kind.itemsize - 1))
    weights = channel_weights(frame.layout.name, channels)
    with np.errstate(invalid="ignore"):
        mono = weights @ samples.astype(np.float32, copy=False)
    if np.isfinite(mono).all():
        return mono, 0
    finite = np.isfinite(samples)
    return weights @ np.where(finite, samples, 0).astype(np.float32), int((~finite).sum())


@cache
def channel_weights(layout: str, channels: int) -> np.ndarray:
    """[channels] float32: the share of each channel in the mono sum; they add up to 1. FFmpeg's names of layouts."""
    try:
        names = [channel.name for channel in av.AudioLayout(layout).channels]
    except ValueError:
        names = []
    if len(names) != channels or "NONE" in names or "?" in "".join(names):
        weights = [UNKNOWN[i % 2] for i in range(channels)]
    else:
        weights = [WEIGHTS.get(name, RIGHT if name.endswith("R") else LEFT) for name in names]
    return (np.array(weights) / sum(weights)).astype(np.float32)
