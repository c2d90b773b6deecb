"""Place every packet of sound on the sample grid of its track.

Packets whose times are within JOIN_TOLERANCE of where the samples before them end are joined to these. A larger gap is
silence, of a larger overlap the later part is dropped; both are noted in the index.
"""

from fractions import Fraction
from math import floor

import av
import numpy as np

from data_pipelines.container import AudioTrack
from data_pipelines.packets import JUMP_BACK, Packets, continued

JOIN_TOLERANCE = Fraction(1, 50)  # seconds


def place_sound(stream: av.AudioStream, packets: Packets, notes: list[str]) -> AudioTrack | None:
    """Place every packet of sound on the track's own sample grid; None when there is none."""
    if packets.first is None:
        return None
    rate = packets.first.sample_rate
    base = stream.time_base or Fraction(1, rate)
    pts = continued(packets.pts, max(packets.duration[0], 1), round(JUMP_BACK / base))
    repaired = pts != packets.pts
    if repaired:
        notes.append("audio: missing time stamps or jumps back; packets follow each other there")
    samples, exact = _packet_samples(packets, rate, base)
    skipped, heard = _heard(packets, samples)
    if not any(heard):
        return None
    first = next(i for i, count in enumerate(heard) if count)
    zero = pts[first] + floor(Fraction(skipped[first], rate) / base + Fraction(1, 2))
    position: list[int] = []
    cursor = resynced = 0
    tolerance = round(JOIN_TOLERANCE * rate)
    for i, count in enumerate(heard):
        due = _samples_of(pts[i] - zero, base, rate) + skipped[i]
        if i > first and count and abs(due - cursor) > tolerance:
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
    lengths = [_samples_of(duration, base, rate) for duration in packets.duration]
    tick = _samples_of(1, base, rate)
    if base * rate <= 1:
        return lengths, True
    nominal = packets.first_samples
    near = [abs(length - nominal) <= tick for length in lengths]
    if all(near[1:-1]):
        last = nominal if near[-1] else min(nominal, lengths[-1])
        return [nominal] * (len(lengths) - 1) + [last], True
    return lengths, False


def _samples_of(ticks: int, base: Fraction, rate: int) -> int:
    """Ticks of a time base as samples, to the nearest; in integers, since every packet asks."""
    scale = base.denominator
    return (2 * ticks * base.numerator * rate + scale) // (2 * scale)


def _heard(packets: Packets, samples: list[int]) -> tuple[list[int], list[int]]:
    """Samples dropped at the start of each packet, and samples heard of it. A delay may run over several packets.

    Some containers take the padding off the last packet's duration, some only name it, some do both.
    """
    skipped: list[int] = []
    heard: list[int] = []
    left = 0
    for count, (skip, discard), shown in zip(samples, packets.trims, packets.shown, strict=True):
        left += skip
        drop = min(left, count)
        left -= drop
        skipped.append(drop)
        whole = max(count, packets.first_samples) if discard else count
        heard.append(max(0, min(count, whole - discard) - drop) if shown else 0)
    return skipped, heard
