"""Budgets: the finest setting that fits, never less of anything for more tokens, pictures in proportion.

Run: pytest tests/data_pipelines/test_budget.py
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.budget import FINENESS, BudgetConfig, Setting, fit, ladder, picture_size
from mmcp.sequence import Segment, TokenSequence, Unit

SIDES = st.integers(1, 5000)


def sequence(setting, *, seconds=100, text=30):
    """Lay out a pretended clip: one row for every 1000 pixels of a frame, two a second of sound."""

    def units(count, rows):
        zero = Fraction(0)
        unit = Unit(num_tokens=rows, start=zero, end=zero, grid=(1, 1, rows), size=(1, 1), items=())
        return (unit,) * count

    frames = int(setting.rate * seconds)
    segments = [Segment(kind="text", ids=(1,) * text)]
    segments += [Segment(kind="video", units=units(frames, max(1, setting.frame_pixels // 1000)))]
    segments += [Segment(kind="audio", units=units(seconds, 2))] if setting.sound else []
    return TokenSequence(tuple(segments))


@given(st.integers(40, 9000))
def test_the_finest_setting_that_fits_is_taken(tokens):
    budget = BudgetConfig(tokens=tokens)
    fitting = [setting for setting in budget.settings if sequence(setting).num_tokens <= tokens]
    chosen, report = fit(sequence, budget) if fitting else (None, None)
    if fitting:
        assert report.setting == fitting[-1] and chosen == sequence(fitting[-1])
        assert report.tokens == chosen.num_tokens <= report.limit == tokens
        assert bool(report.reduced) == (report.setting != budget.settings[-1])
    else:
        with pytest.raises(ValueError, match="tokens"):
            fit(sequence, budget)


@given(st.integers(100, 9000), st.integers(0, 9000))
def test_more_budget_never_means_less_of_anything(tokens, more):
    little, much = (fit(sequence, BudgetConfig(tokens=count))[1].setting for count in (tokens, tokens + more))
    assert all(getattr(much, name) >= getattr(little, name) for name in FINENESS)


def test_what_was_reduced_is_said():
    steps = ladder((1, 4000, 1, False), (2, 8000, 1, True))
    _, report = fit(sequence, BudgetConfig(tokens=430, settings=steps))
    assert report.setting == steps[0] and (report.tokens, report.full_tokens) == (430, 1830)
    assert report.reduced == ("video: 100 of 200 units", "video: 400 of 1600 rows", "audio: 0 of 100 units")
    assert fit(sequence, BudgetConfig(tokens=1830, settings=steps))[1].reduced == ()


def test_what_does_not_fit_is_refused_with_numbers_and_remedy():
    fixed = ladder((2, 8000, 1, True))
    with pytest.raises(
        ValueError, match=r"1830 tokens \(1800 of media, 30 of text .* allows 1829; allow at least 1830"
    ):
        fit(sequence, BudgetConfig(tokens=1829, settings=fixed))
    with pytest.raises(ValueError, match=r"50 tokens \(0 of media.* shorten the text"):
        fit(lambda setting: TokenSequence((Segment(kind="text", ids=(1,) * 50),)), BudgetConfig(tokens=49))


def test_settings_must_go_from_coarse_to_fine():
    with pytest.raises(ValueError, match="less frame_pixels"):
        BudgetConfig(tokens=1, settings=ladder((1, 100, 1, True), (2, 99, 1, True)))
    with pytest.raises(ValueError, match="less sound"):
        BudgetConfig(tokens=1, settings=ladder((1, 100, 1, True), (2, 100, 1, False)))
    with pytest.raises(ValueError, match="no settings"):
        BudgetConfig(tokens=1, settings=())


def test_a_rate_is_the_decimal_number_written():
    assert Setting(frames_per_second=0.1, frame_pixels=1, image_pixels=1).rate == Fraction(1, 10)


@given(SIDES, SIDES, st.sampled_from([8, 16, 28, 32]), st.integers(1, 2_000_000))
def test_pictures_are_whole_blocks_within_the_pixels(height, width, multiple, pixels):
    rows, columns = (side / multiple for side in picture_size((height, width), multiple=multiple, pixels=pixels))
    assert rows == int(rows) >= 1 and columns == int(columns) >= 1
    assert rows * columns <= max(1, pixels // multiple**2)
    assert rows <= max(1, height / multiple + 0.5) and columns <= max(1, width / multiple + 0.5)


@given(SIDES, SIDES, st.sampled_from([8, 16, 28]), st.integers(1, 1_000_000), st.integers(0, 1_000_000))
def test_more_pixels_shrink_no_side(height, width, multiple, pixels, more):
    small = picture_size((height, width), multiple=multiple, pixels=pixels)
    large = picture_size((height, width), multiple=multiple, pixels=pixels + more)
    assert large[0] >= small[0] and large[1] >= small[1]


@pytest.mark.parametrize(
    ("native", "pixels", "size"),
    [
        ((96, 160), 4096, (48, 80)),
        ((64, 64), 1024, (32, 32)),
        ((180, 320), 10**6, (176, 320)),
        ((9, 2000), 4096, (16, 256)),
        ((5, 5), 10**6, (16, 16)),
    ],
)
def test_pictures_keep_their_proportions(native, pixels, size):
    assert picture_size(native, multiple=16, pixels=pixels) == size
