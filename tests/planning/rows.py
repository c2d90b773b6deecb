"""Rows with text and media in known amounts."""

from fractions import Fraction
from math import prod

import numpy as np

from encoders import AudioWindows, ImagePatches, VideoPatches
from mmcp.sequence import Segment, TokenSequence, Unit

SIZES = {"image": (16, 24), "video": (2, 16, 16), "audio": (20,)}
GRIDS = {
    "image": ImagePatches(patch=4).grid,
    "video": VideoPatches(patch=4).grid,
    "audio": AudioWindows(bins=80, window=20, frames_per_row=4).grid,
}


def media_row(text: int, media: int, *, seed: int = 0) -> TokenSequence:
    """Make one document: `media` units of each kind between two runs of text, of which the second is trained."""
    rng = np.random.default_rng(seed)
    words = [tuple(rng.integers(0, 80, count).tolist()) for count in (text // 3, text - text // 3)]
    units = [_segment(kind) for _ in range(media) for kind in SIZES]
    return TokenSequence((Segment(kind="text", ids=words[0]), *units, Segment(kind="text", ids=words[1], loss=True)))


def _segment(kind: str) -> Segment:
    grid = GRIDS[kind](SIZES[kind])
    unit = Unit(num_tokens=prod(grid), start=Fraction(0), end=Fraction(1), grid=grid, size=SIZES[kind], items=())
    return Segment(kind=kind, units=(unit,), source="clip")
