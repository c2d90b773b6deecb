"""Drawn token sequences: every kind of segment, unit size, document layout and mask option, from one seed."""

from fractions import Fraction

import numpy as np

from mmcp.sequence import Segment, TokenSequence, Unit


def draw_sequence(rng: np.random.Generator, *, segments: int = 6, documents: int = 3) -> TokenSequence:
    """Draw a short row: mixed kinds, empty segments, units of one to twelve rows, every way to attend."""
    numbers = np.sort(rng.integers(0, documents, segments))
    clock, drawn = Fraction(0), []
    for number in numbers.tolist():
        kind = str(rng.choice(["text", "image", "video", "audio"]))
        attends = str(rng.choice(["causal", "prefix"] if kind == "text" else ["causal", "both", "prefix"]))
        if kind == "text":
            ids = tuple(rng.integers(0, 50, rng.integers(0, 9)).tolist())
            drawn.append(Segment(kind=kind, document=number, ids=ids, attends=attends, loss=bool(rng.integers(2))))
            continue
        units = []
        for _ in range(rng.integers(0, 4)):
            units.append(draw_unit(rng, kind=kind, start=clock))
            clock += Fraction(int(rng.integers(1, 40)), 7)
        drawn.append(Segment(kind=kind, document=number, units=tuple(units), attends=attends))
    return TokenSequence(tuple(drawn))


def draw_unit(rng: np.random.Generator, *, kind: str, start: Fraction) -> Unit:
    """Draw one unit whose grid fits its kind; pixels are of no matter here."""
    height, width = rng.integers(1, 4, 2).tolist()
    depth = int(rng.integers(1, 3)) if kind == "video" else 1
    grid = (height + width, 1, 1) if kind == "audio" else (depth, height, width)
    tokens = grid[0] * grid[1] * grid[2]
    size = {"image": (28, 28), "video": (2, 28, 28), "audio": (100,)}[kind]
    return Unit(num_tokens=tokens, start=start, end=start + 1, grid=grid, size=size, items=())
