"""Drawn rows with every kind of segment, and random media for them: a step for any encoders, without a file.

A document is written as letters: `t` text, trained at random and at the end; `q` text that is never trained; `i` image,
`v` video, `a` sound of one to three units. A row is a list of documents, a step a list of rows:

    [["tvtat", "qt"], ["aqt"]]     two rows; the first packs two documents
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from mmcp.sequence import Segment, TokenSequence, Unit, pack

KIND_OF = {"i": "image", "v": "video", "a": "audio"}
STEP = (("tvtat", "qt", "qitvt"), ("aqt",), ("ttt",), ("vq",))
"""Packed documents, sound alone, text alone, and a row without labels."""

Encoders = Mapping[str, Any]
"""Encoder configs by segment kind, each also a PictureRule or a SoundRule of data_pipelines.units."""


def draw_rows(rows: Sequence[Sequence[str]], *, seed: int, encoders: Encoders, vocabulary: int) -> list[TokenSequence]:
    """Draw the rows of one step. Documents and their media do not depend on how they are cut into rows."""
    rng = np.random.default_rng(seed)
    return [pack([_document(rng, letters, encoders, vocabulary) for letters in row]) for row in rows]


def draw_media(rows: Sequence[TokenSequence], *, seed: int, encoders: Encoders) -> dict[int, dict[int, np.ndarray]]:
    """Draw what a decoder would give, by row and unit number: pixels uint8, raw log-mel float32."""
    rng = np.random.default_rng(seed)
    return {
        number: {
            unit: _array(rng, row.unit_segment(unit).kind, row.units[unit].size, encoders)
            for unit in range(len(row.units))
        }
        for number, row in enumerate(rows)
    }


def _document(rng: np.random.Generator, letters: str, encoders: Encoders, vocabulary: int) -> TokenSequence:
    segments = []
    for i, letter in enumerate(letters):
        if letter in KIND_OF:
            kind = KIND_OF[letter]
            units = tuple(_unit(rng, kind, encoders) for _ in range(int(rng.integers(1, 4))))
            segments.append(Segment(kind=kind, units=units, source=f"clip {rng.integers(3)}"))
            continue
        ids = tuple(rng.integers(0, vocabulary, int(rng.integers(2, 8))).tolist())
        is_drawn = bool(rng.integers(2))
        segments.append(Segment(kind="text", ids=ids, loss=letter == "t" and (is_drawn or i == len(letters) - 1)))
    return TokenSequence(tuple(segments))


def _unit(rng: np.random.Generator, kind: str, encoders: Encoders) -> Unit:
    encoder = encoders[kind]
    if kind == "audio":
        size: tuple[int, ...] = (
            encoder.frames_per_row * int(rng.integers(1, 1 + encoder.window // encoder.frames_per_row)),
        )
    else:
        sides = encoder.multiple, encoder.multiple * int(rng.integers(1, 3))
        size = sides if kind == "image" else (encoder.frames, *sides)
    grid = encoder.grid(size)
    return Unit(num_tokens=prod(grid), start=Fraction(0), end=Fraction(1), grid=grid, size=size, items=())


def _array(rng: np.random.Generator, kind: str, size: tuple[int, ...], encoders: Encoders) -> np.ndarray:
    if kind == "audio":
        return rng.uniform(-10, 1, (encoders[kind].bins, *size)).astype(np.float32)
    return rng.integers(0, 256, (*size, 3), dtype=np.uint8)
