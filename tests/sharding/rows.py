"""Drawn rows of every shape, and a cost model of round numbers, for the tests of the sharder."""

from dataclasses import replace
from fractions import Fraction
from math import prod

from hypothesis import strategies as st

from mmcp.sequence import Segment, TokenSequence, Unit
from mmcp.sharding.cost import CostModel, LayerCost, Rates

MODEL = CostModel(
    encoder_flops={kind: lambda size: 7 * prod(size) + 3 for kind in ("image", "video", "audio")},
    encoder_bytes={kind: lambda size: 5 * prod(size) for kind in ("image", "video", "audio")},
    linear_flops=11_000,
    layers=(
        LayerCost(count=2, heads=4, pair_flops=64, token_flops=0, mode="ring"),
        LayerCost(count=1, heads=4, pair_flops=0, token_flops=900, mode="ring"),
    ),
    label_flops=50_000,
    token_bytes=640,
    label_bytes=128,
    row_bytes=256,
    call_tokens=64,
    rates=Rates(flops_per_second=1_000_000),
)


@st.composite
def rows(draw, max_segments=7):
    """Draw a row: documents, text with and without loss, images, clips and sound; segments may be empty."""
    segments, document = [], 0
    for number in range(draw(st.integers(0, max_segments))):
        document += draw(st.booleans())
        kind = draw(st.sampled_from(("text", "text", "image", "video", "audio")))
        attends = draw(st.sampled_from(("causal", "prefix") if kind == "text" else ("causal", "both", "prefix")))
        if kind == "text":
            ids = tuple(range(draw(st.integers(0, 6))))
            segments.append(Segment(kind="text", document=document, ids=ids, loss=draw(st.booleans()), attends=attends))
            continue
        source = draw(st.sampled_from(("a.mp4", "b.mp4")))
        units = media_units(kind, draw(st.integers(0, 4)), grain=draw(st.integers(1, 3)), group=draw(st.integers(1, 5)))
        shift = 10 * number
        units = tuple(replace(unit, decode=(unit.decode[0] + shift, unit.decode[1] + shift)) for unit in units)
        segments.append(Segment(kind=kind, document=document, source=source, units=units, attends=attends))
    return TokenSequence(tuple(segments))


def media_units(kind, count, *, grain=1, group=1, stride=3):
    """Make `count` units: video units show one frame in `stride`, from a key frame each `group * stride` frames."""
    units = []
    for number in range(count):
        start, end = Fraction(number), Fraction(number + 1)
        if kind == "image":
            size, grid, items, decode = (8 * grain, 8), (1, grain, 1), (), (0, 0)
        elif kind == "video":
            frame = number * stride
            size, grid, items = (1, 8 * grain, 8), (1, grain, 1), (frame,)
            decode = (frame // (group * stride) * (group * stride), frame + 1)
        else:
            size, grid, items = (20 * grain,), (grain, 1, 1), (100 * number, 100 * number + 100)
            decode = (number, number + 1)
        unit = Unit(
            num_tokens=grain,
            start=start,
            end=end,
            grid=grid,
            size=size,
            items=items,
            decode=decode,
            native=(16, 16) if kind != "audio" else (0, 0),
        )
        units.append(unit)
    return tuple(units)
