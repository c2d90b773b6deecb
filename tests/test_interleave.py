"""Interleaving: a clip's tracks in time order, against a slow merge, and times in words against Decimal.

Run: pytest tests/test_interleave.py
"""

from decimal import ROUND_FLOOR, Decimal, getcontext
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcp.interleave import ORDER, StampConfig, TimedText, Track, interleave
from mmcp.sequence import TokenSequence, Unit

SECONDS = st.fractions(min_value=-5, max_value=7200, max_denominator=90000)


def unit(start, end, tokens=2):
    return Unit(
        num_tokens=tokens, start=Fraction(start), end=Fraction(end), grid=(1, 1, tokens), size=(tokens,), items=()
    )


def track(kind, starts, *, stamped=False, stream=0, length=1):
    units = [unit(start, Fraction(start) + length) for start in sorted(starts)]
    return Track(kind=kind, source="clip.mp4", stream=stream, units=units, stamped=stamped)


def stamp(time):
    return StampConfig().text(time).encode()


def test_worked_example():
    half = Fraction(1, 2)
    segments = interleave(
        [
            track("audio", [0, half, 1, 3 * half], stream=1, length=half),
            track("video", [0, 1], stamped=True),
        ],
        stamp=stamp,
    )
    assert [(s.kind, bytes(s.ids).decode() or len(s.units)) for s in segments] == [
        ("text", "<0.0>"), ("video", 1), ("audio", 2), ("text", "<1.0>"), ("video", 1), ("audio", 2),
    ]  # fmt: skip
    assert [(s.start, s.end) for s in segments] == [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2), (1, 2)]
    assert not any(segment.loss for segment in segments)
    assert segments[2].stream == 1 and segments[2].source == "clip.mp4"


@given(st.lists(st.tuples(st.sampled_from(["video", "image", "audio"]), st.booleans(), st.lists(SECONDS)), max_size=4),
       st.lists(SECONDS, max_size=5))  # fmt: skip
def test_order_equals_a_slow_merge(drawn, captions):
    tracks = [track(kind, starts, stamped=stamped, stream=i) for i, (kind, stamped, starts) in enumerate(drawn)]
    words = [TimedText(ids=(7,), start=start, end=start + 1) for start in sorted(captions)]
    queues = [(ORDER[t.kind], i, list(t.units)) for i, t in enumerate(tracks)] + [(ORDER["text"], 9, list(words))]
    expected = []
    while any(queue for _, _, queue in queues):
        _, i, queue = min((q for q in queues if q[2]), key=lambda q: (q[2][0].start, q[0], q[1]))
        piece = queue.pop(0)
        if i == 9 or tracks[i].stamped:
            expected.append(("text", None, piece.start))
        if i != 9:
            expected.append((tracks[i].kind, i, piece.start))
    segments = interleave(tracks, stamp=stamp, captions=words)
    found = []
    for segment in segments:
        found += [("text", None, segment.start)] if segment.kind == "text" else []
        found += [(segment.kind, segment.stream, u.start) for u in segment.units]
    assert found == expected
    for before, after in pairwise(segments):
        if before.kind == after.kind != "text" and before.stream == after.stream:
            raise AssertionError("two segments where one would do")


def test_nothing_gives_nothing():
    assert interleave([], stamp=stamp) == []
    assert interleave([track("video", [])], stamp=stamp) == []


@given(SECONDS, st.integers(0, 4))
def test_times_are_written_exactly(seconds, decimals):
    getcontext().prec = 60
    exact = Decimal(seconds.numerator) / Decimal(seconds.denominator)
    step = Decimal(10) ** -decimals
    expected = ((exact / step + Decimal("0.5")).to_integral_value(ROUND_FLOOR) * step).quantize(step)
    text = StampConfig(pattern="{seconds}", decimals=decimals).text(seconds)
    assert Decimal(text) == expected and not text.startswith("-0" if expected == 0 else "+")
    assert len(text.partition(".")[2]) == decimals


def test_halves_go_up_and_the_pattern_is_kept():
    config = StampConfig(pattern="[{seconds} s]")
    assert [config.text(Fraction(n, 20)) for n in (1, 5, 3599 * 20, -1)] == [
        "[0.1 s]", "[0.3 s]", "[3599.0 s]", "[0.0 s]",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"pattern='<now>'"):
        StampConfig(pattern="<now>")


def test_an_hour_keeps_every_unit_in_its_place():
    video = track("video", [Fraction(2 * i) for i in range(1800)], stamped=True, length=2)
    audio = track("audio", [Fraction(i) for i in range(3600)], stream=1)
    segments = interleave([video, audio], stamp=stamp)
    assert len(TokenSequence(tuple(segments)).units) == 5400 and len(segments) == 3 * 1800
    assert [segment.kind for segment in segments] == ["text", "video", "audio"] * 1800
    assert all(len(segment.units) == 2 for segment in segments if segment.kind == "audio")
