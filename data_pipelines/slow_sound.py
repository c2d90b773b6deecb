"""Log-mel of a long stretch of sound at a lower rate: the power of neighbouring mel frames averaged, in pieces.

A window that stands for more mel frames than it has is heard as one with longer analysis windows: nothing between is
skipped. Its values are comparable with those at the full rate, since power is averaged before the logarithm.
"""

from collections.abc import Callable

import numpy as np

PIECE = 6000  # mel frames computed at once: a minute of sound, 4 MB of samples


def averaged_mel(piece: Callable[[int, int], np.ndarray], frames: int, size: int) -> np.ndarray:
    """Average `frames` mel frames to `size` of equal length, a boundary frame shared out by how much of it lies where.

    piece: (first, count) -> [bins, count] raw log10 mel power of that many frames from `first` on
    returns: [bins, size] float32
    """
    power: np.ndarray | None = None
    for first in range(0, frames, PIECE):
        raw = piece(first, min(PIECE, frames - first))
        power = np.zeros((len(raw), size)) if power is None else power
        _add(power, np.power(10.0, raw.astype(np.float64)), first, size / frames)
    assert power is not None, "a stretch without a frame has no average"
    return np.log10(power * (size / frames)).astype(np.float32)


def _add(power: np.ndarray, values: np.ndarray, first: int, ratio: float) -> None:
    """Add frames to the averages that they overlap: each begins in one of them and ends in the same or the next."""
    edges = np.arange(first, first + values.shape[1] + 1) * ratio
    place = np.minimum(edges[:-1].astype(np.int64), power.shape[1] - 1)
    beyond = np.clip((edges[1:] - (place + 1)) / ratio, 0, 1)  # share of a frame that lies in the next average
    following = np.minimum(place + 1, power.shape[1] - 1)
    for row, value in zip(power, values, strict=True):
        row += np.bincount(place, value * (1 - beyond), minlength=len(row))
        row += np.bincount(following, value * beyond, minlength=len(row))
