"""Numbers as people read them, and long series as a screen can show them."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeGuard

import numpy as np

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: object) -> str:
    """Write a number in at most six characters, an absent one as `-`: short(1234567) -> '1.23M'."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if not is_number(value):
        return str(value)
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{prefix}"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def ticks(top: float) -> dict[str, list]:
    """Return the marks of an axis from 0 to `top` and what is written at them: at most five, with prefixes.

    ticks(4.1e15) -> {"tickvals": [0, 1e15, 2e15, 3e15, 4e15], "ticktext": ["0", "1P", "2P", "3P", "4P"]}
    """
    if top <= 0:
        return {"tickvals": [0], "ticktext": ["0"]}
    rough = top / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    values = [number * step for number in range(int(top / step) + 1)]
    return {"tickvals": values, "ticktext": [short(float(value)) for value in values]}


def finite(points: Iterable[tuple[object, object]]) -> tuple[np.ndarray, np.ndarray]:
    """Keep the points that have two finite numbers: x and y, float64."""
    kept = [(float(x), float(y)) for x, y in points if is_number(x) and is_number(y)]
    x, y = np.array(kept, dtype=np.float64).reshape(-1, 2).T
    return x, y


def decimate(x: np.ndarray, y: np.ndarray, limit: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Keep about `limit` points: of each run of points the lowest and the highest, so that no peak is lost."""
    if len(x) <= limit:
        return x, y
    bounds = np.linspace(0, len(x), limit // 2 + 1).astype(np.int64)
    kept = {0, len(x) - 1}
    for start, stop in pairwise(bounds.tolist()):
        kept |= {int(start + y[start:stop].argmin()), int(start + y[start:stop].argmax())}
    index = np.array(sorted(kept))
    return x[index], y[index]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value read from JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
