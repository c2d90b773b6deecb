"""Choose how finely a sample is seen and heard so that its sequence fits a number of tokens, with nothing cut in half.

A ladder of settings leads from the coarsest to the finest, no step giving less of anything. A sample gets the finest
that fits, counted exactly on the finished sequence; more budget therefore never means less of anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isqrt

from pydantic import PositiveFloat, PositiveInt

from mmcp.config import config
from mmcp.sequence import TokenSequence


@config
class Setting:
    """How finely a sample is seen and heard."""

    frames_per_second: PositiveFloat
    """Frames a second taken from a video; each frame of the file is taken at most once."""
    frame_pixels: PositiveInt
    """Most pixels of a frame, its sides in proportion; never more than the file has."""
    image_pixels: PositiveInt
    """Most pixels of an image, likewise."""
    sound: bool = True
    """Whether the sound of videos is heard; a sound on its own always is."""

    @property
    def rate(self) -> Fraction:
        """Frames a second as the decimal number written."""
        return Fraction(str(self.frames_per_second))


FINENESS = ("frames_per_second", "frame_pixels", "image_pixels", "sound")


def ladder(*steps: tuple[float, int, int, bool]) -> tuple[Setting, ...]:
    """Make settings of (frames a second, pixels of a frame, pixels of an image, sound)."""
    return tuple(
        Setting(frames_per_second=rate, frame_pixels=frame, image_pixels=image, sound=sound)
        for rate, frame, image, sound in steps
    )


@config
class BudgetConfig:
    """How long a sample's sequence may be."""

    tokens: PositiveInt
    """Most tokens of one sample, text, times and special tokens included."""
    settings: tuple[Setting, ...] = ladder(
        (1 / 16, 96**2, 224**2, False),
        (1 / 8, 96**2, 224**2, False),
        (1 / 4, 96**2, 224**2, False),
        (1 / 4, 96**2, 224**2, True),
        (1 / 2, 128**2, 336**2, True),
        (1.0, 128**2, 336**2, True),
        (1.0, 224**2, 448**2, True),
        (2.0, 224**2, 672**2, True),
        (2.0, 448**2, 896**2, True),
    )
    """From the coarsest to the finest; a single one fixes everything."""

    def __post_init__(self):
        if not self.settings:
            raise ValueError("a budget has no settings; give at least one")
        for coarse, fine in pairwise(self.settings):
            less = [name for name in FINENESS if getattr(fine, name) < getattr(coarse, name)]
            if less:
                raise ValueError(f"settings must go from coarse to fine, but {fine} has less {less[0]} than {coarse}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """What a budget did to one sample."""

    limit: int
    """Tokens allowed."""
    tokens: int
    """Tokens used."""
    full_tokens: int
    """Tokens of the finest setting."""
    setting: Setting
    """The setting chosen."""
    reduced: tuple[str, ...]
    """What is less than at the finest setting, in words."""


def fit(build: Callable[[Setting], TokenSequence], budget: BudgetConfig) -> tuple[TokenSequence, BudgetReport]:
    """Return the sequence at the finest setting whose tokens fit the budget, and what was given up for it.

    build: setting -> the sample's sequence
    Raises ValueError naming needed and allowed tokens when even the coarsest does not fit.
    """
    finest = budget.settings[-1]
    full = build(finest)
    for setting in reversed(budget.settings):
        sequence = full if setting is finest else build(setting)
        if sequence.num_tokens <= budget.tokens:
            report = BudgetReport(
                limit=budget.tokens,
                tokens=sequence.num_tokens,
                full_tokens=full.num_tokens,
                setting=setting,
                reduced=reductions(sequence, full),
            )
            return sequence, report
    raise ValueError(
        f"{_needs(sequence)} at the coarsest setting, the budget allows {budget.tokens}; {_remedy(sequence, budget)}"
    )


def reductions(sequence: TokenSequence, full: TokenSequence) -> tuple[str, ...]:
    """Say what `sequence` has less of than `full`: units and rows of each kind."""
    words = []
    for kind in ("video", "image", "audio"):
        (units, rows), (all_units, all_rows) = (_amount(of, kind) for of in (sequence, full))
        if units < all_units:
            words.append(f"{kind}: {units} of {all_units} units")
        if rows < all_rows and units:
            words.append(f"{kind}: {rows} of {all_rows} rows")
    return tuple(words)


def _amount(sequence: TokenSequence, kind: str) -> tuple[int, int]:
    segments = [segment for segment in sequence.segments if segment.kind == kind]
    return sum(len(segment.units) for segment in segments), sum(segment.num_tokens for segment in segments)


def _needs(sequence: TokenSequence) -> str:
    media = sum(segment.num_tokens for segment in sequence.segments if segment.kind != "text")
    return (
        f"{sequence.num_tokens} tokens ({media} of media, {sequence.num_tokens - media} of text and times) are needed"
    )


def _remedy(sequence: TokenSequence, budget: BudgetConfig) -> str:
    if not sequence.units:
        return f"allow at least {sequence.num_tokens} tokens, or shorten the text"
    return (
        f"allow at least {sequence.num_tokens} tokens, or put a setting with fewer frames a second than "
        f"{budget.settings[0].frames_per_second:g} or smaller pictures first"
    )


def picture_size(native: tuple[int, int], *, multiple: int, pixels: int) -> tuple[int, int]:
    """Height and width of a picture in whole blocks of `multiple` pixels, in proportion, at most `pixels` if it can.

    native: height and width in the file; never enlarged, except to whole blocks
    Each side grows with `pixels`, never shrinks. (96, 160) at 4096 pixels in blocks of 16 -> (48, 80)
    """
    blocks = max(1, pixels // multiple**2)
    height, width = native
    limits = [max(1, round(side / multiple)) for side in native]
    rows = max(1, min(isqrt(blocks * height // width), limits[0]))
    columns = max(1, min(isqrt(blocks * width // height), limits[1], blocks))
    return min(rows, blocks) * multiple, columns * multiple
