"""Place every packet of sound on the sample grid of its track.

Packets whose times are within JOIN_TOLERANCE of where the samples before them end are joined to these. A larger gap is
silence, of a larger overlap the later part is dropped; both are noted in the index.
"""

from fractions import Fraction
from math import floor

import av
import numpy as np

from data_pipelines.columns import Column
from data_pipelines.container import AudioTrack
from data_pipelines.packets import JUMP_BACK, Packets, continued

JOIN_TOLERANCE = Fraction(1, 50)  # seconds


def place_sound(stream: av.AudioStream, packets: Packets, notes: list[str]) -> AudioTrack | None:
    """Place every packet of sound on the track's own sample grid; None when there is none."""
    if packets.first is None:
        return None
    rate = packets.first.sample_rate
    base = stream.time_base or Fraction(1, rate)
    stamps = np.asarray(packets.pts)
    pts = continued(stamps, max(packets.duration[0], 1), round(JUMP_BACK / base))
    repaired = pts is not stamps
    if repaired:
        notes.append("audio: missing time stamps or jumps back; packets follow each other there")
    samples, exact = _packet_samples(packets, rate, base)
    skipped, heard = _heard(packets, samples)
    if not heard.any():
        return None
    first = int(np.flatnonzero(heard)[0])
    zero = int(pts[first]) + floor(Fraction(int(skipped[first]), rate) / base + Fraction(1, 2))
    due = _samples_of(pts - zero, base, rate) + skipped
    position, resynced = _positions(due, heard, first, round(JOIN_TOLERANCE * rate))
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
        pts=Column.of(pts),
        position=Column.of(position),
        count=Column.of(heard),
        exact=exact,
        seekable=not repaired and bool((pts[1:] > pts[:-1]).all()),
    )


def _positions(due: np.ndarray, heard: np.ndarray, first: int, tolerance: int) -> tuple[np.ndarray, int]:
    """Where each packet's sound begins, and how often it does not begin where the sound before it ends.

    due: [p]  where its time stamp puts it
    """
    joined = np.cumsum(heard) - heard
    off = np.abs(due - joined) > tolerance
    if not off[first + 1 :][heard[first + 1 :] > 0].any():
        return joined, 0
    cursor = resynced = 0
    position = np.empty_like(joined)
    for i, count in enumerate(heard.tolist()):
        if i > first and count and abs(int(due[i]) - cursor) > tolerance:
            cursor, resynced = max(int(due[i]), 0), resynced + 1
        position[i] = cursor
        cursor += count
    return position, resynced


def _packet_samples(packets: Packets, rate: int, base: Fraction) -> tuple[np.ndarray, bool]:
    """[p] samples of each packet before trimming, and whether they are exact.

    A time base coarser than a sample rounds durations; a codec with packets of one size is exact all the same.
    """
    lengths = _samples_of(np.asarray(packets.duration), base, rate)
    tick = int(_samples_of(np.ones(1, dtype=np.int64), base, rate)[0])
    if base * rate <= 1:
        return lengths, True
    nominal = packets.first_samples
    near = np.abs(lengths - nominal) <= tick
    if near[1:-1].all():
        last = nominal if near[-1] else min(nominal, int(lengths[-1]))
        lengths[:-1], lengths[-1] = nominal, last
        return lengths, True
    return lengths, False


def _samples_of(ticks: np.ndarray, base: Fraction, rate: int) -> np.ndarray:
    """Ticks of a time base as samples, to the nearest; exact in integers."""
    scale, factor = base.denominator, 2 * base.numerator * rate
    if np.abs(ticks).max(initial=0) * factor >= 1 << 62:
        return np.array([(tick * factor + scale) // (2 * scale) for tick in ticks.tolist()], dtype=np.int64)
    return (ticks * factor + scale) // (2 * scale)


def _heard(packets: Packets, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[p] samples dropped at the start of each packet, and samples heard of it. A delay may run over several packets.

    Some containers take the padding off the last packet's duration, some only name it, some do both.
    """
    skipped, heard = np.zeros_like(samples), samples.copy()
    left = done = 0
    for packet, (skip, discard) in packets.trims.items():
        left, _ = _skip(skipped, samples, left, done, packet)
        left, done = left + skip, packet
        if discard:
            count = int(samples[packet])
            heard[packet] = min(count, max(count, packets.first_samples) - discard)
    _skip(skipped, samples, left, done, len(samples))
    return skipped, np.where(np.asarray(packets.shown, dtype=bool), np.maximum(heard - skipped, 0), 0)


def _skip(skipped: np.ndarray, samples: np.ndarray, left: int, start: int, stop: int) -> tuple[int, int]:
    """Drop `left` samples from the packets start..stop - 1 on; return how many are still to be dropped."""
    at = start
    while left and at < stop:
        skipped[at] = min(left, int(samples[at]))
        left -= int(skipped[at])
        at += 1
    return left, at
