"""Choose how finely a sample is seen and heard so that its sequence fits a number of tokens, with nothing cut in half.

Settings lead from coarse to fine. Between them a sample is refined in small steps, one unit at a time, by the one chain
of `data_pipelines.chain`: it gets as much as fits. Below the coarsest setting the chain goes on down to one unit for a
whole clip, so that no clip is too long; a single setting fixes everything instead.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isqrt
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from data_pipelines.chain import SCALE
from mmcp.config import config


@config
class Setting:
    """How finely a sample is seen and heard."""

    frames_per_second: PositiveFloat
    """Frames a second taken from a video; each frame of the file is taken at most once."""
    frame_pixels: PositiveInt
    """Most pixels of a frame, its sides in proportion; never more than the file has."""
    image_pixels: PositiveInt
    """Most pixels of an image, likewise."""
    sound: bool | Annotated[float, Field(ge=0, le=1)] = True
    """Rows a second of sound as a share of the encoder's: true or 1 all of them; false or 0 does not hear videos."""

    @property
    def rate(self) -> Fraction:
        """Frames a second as the decimal number written."""
        return Fraction(str(self.frames_per_second))

    @property
    def share(self) -> Fraction:
        """Share of the sound's rows as the decimal number written."""
        return Fraction(str(float(self.sound)))


FINENESS = ("frames_per_second", "frame_pixels", "image_pixels", "sound")


def ladder(*steps: tuple[float, int, int, bool | float]) -> tuple[Setting, ...]:
    """Make settings of (frames a second, pixels of a frame, pixels of an image, share of the sound)."""
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
        (1 / 16, 96**2, 224**2, 0.25),
        (1 / 4, 96**2, 224**2, 0.5),
        (1 / 2, 128**2, 336**2, True),
        (1.0, 224**2, 448**2, True),
        (2.0, 224**2, 672**2, True),
        (2.0, 448**2, 896**2, True),
    )
    """From coarse to fine; a sample may end up anywhere between. A single one fixes everything."""
    adaptive: bool = False
    """Whether stretches of a video that change more are refined earlier; told from the sizes of its packets."""

    def __post_init__(self):
        if not self.settings:
            raise ValueError("a budget has no settings; give at least one")
        for coarse, fine in pairwise(self.settings):
            less = [name for name in FINENESS if getattr(fine, name) < getattr(coarse, name)]
            if less:
                raise ValueError(f"settings must go from coarse to fine, but {fine} has less {less[0]} than {coarse}")

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose."""
        return len(self.settings) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """What a budget did to one sample."""

    limit: int
    """Tokens allowed."""
    tokens: int
    """Tokens used."""
    full_tokens: int
    """Tokens at the finest setting."""
    detail: tuple[str, ...]
    """How finely each media item is seen and heard, in words."""
    reduced: tuple[str, ...]
    """Which of them less than at the finest setting, and by how much."""


def doublings(ratio: Fraction) -> int:
    """Count how often 1 must double to reach at least `ratio`."""
    count = 0
    while Fraction(2**count) < ratio:
        count += 1
    return count


class Scale:
    """Keys of the chain: where on the way from the coarsest to the finest setting a degree of detail lies.

    Setting w lies at `marks[w]`, the first at 0; from one to the next there is SCALE for each doubling of the frames a
    second and of their pixels. What comes before the first setting has negative keys.
    """

    def __init__(self, settings: tuple[Setting, ...]):
        self.settings = settings
        self.marks = [0]
        self.rate_doublings = [0]
        for coarse, fine in pairwise(settings):
            rate = doublings(fine.rate / coarse.rate)
            pixels = doublings(Fraction(fine.frame_pixels, coarse.frame_pixels))
            self.rate_doublings.append(rate)
            self.marks.append(self.marks[-1] + SCALE * max(1, rate + pixels))

    def between(self, values: list[Fraction], value: Fraction, *, begins: list[int] | None = None) -> int:
        """Return the key of `value` on a line through one value for each setting, values in ascending order.

        begins: by setting, how much of the way to it is over before this line begins
        """
        leg = next((i for i, target in enumerate(values) if value <= target), len(values) - 1)
        if leg == 0:
            return -SCALE + int((SCALE - 1) * value / values[0])
        start = self.marks[leg - 1] + (begins[leg] if begins else 0)
        low, high = values[leg - 1], values[leg]
        return start + int((self.marks[leg] - start) * (min(value, high) - low) / (high - low))


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


def picture_sizes(native: tuple[int, int], *, multiple: int, pixels: int) -> list[tuple[int, int]]:
    """Every size that `picture_size` gives up to `pixels`, in order, one side growing at a time.

    (64, 64) at 4096 pixels in blocks of 16 -> (16, 16), (32, 16), (32, 32), (48, 32), (48, 48), (64, 48), (64, 64)
    """
    height, width = native
    most = max(1, pixels // multiple**2)
    finest = picture_size(native, multiple=multiple, pixels=pixels)
    turns = {most, *range(1, min(most, max(finest) // multiple) + 1)}
    turns |= {min(most, -(-(row**2) * width // height)) for row in range(1, finest[0] // multiple + 1)}
    turns |= {min(most, -(-(column**2) * height // width)) for column in range(1, finest[1] // multiple + 1)}
    sizes: list[tuple[int, int]] = []
    for blocks in sorted(turns):
        size = picture_size(native, multiple=multiple, pixels=max(1, blocks) * multiple**2)
        if sizes and size[0] > sizes[-1][0] and size[1] > sizes[-1][1]:
            sizes.append((size[0], sizes[-1][1]))
        if not sizes or size != sizes[-1]:
            sizes.append(size)
    return sizes
