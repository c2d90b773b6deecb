"""Whisper's log-mel spectrogram, in pieces: numpy alone, for decode workers.

16 kHz mono; frames of 400 samples every 160, centred, periodic Hann window, reflected at the true ends of the sound;
power of the spectrum, Slaney's mel bands from 0 to 8 kHz, log10 of at least 1e-10. A sound of n samples has
n // 160 frames. What remains, max(x, m - 8) and (x + 4) / 4 with m the largest value of the whole sound, is `finish`:
the only step that needs more than a frame and its neighbourhood.
(Radford et al. 2022, https://github.com/openai/whisper/blob/main/whisper/audio.py)
"""

from functools import cache

import numpy as np

from mmcp.sequence import HOP, SAMPLE_RATE

HALO = 200  # samples on either side of a frame's centre that it sees
SILENCE = -10.0  # log10 of the least power that is told apart
BLOCK = 256  # frames transformed at a time: keeps the working memory within a processor's cache


def log_mel_raw(samples: np.ndarray, first: int, total: int, *, frames: int, bins: int) -> np.ndarray:
    """Compute log10 mel power of the frames centred at first, first + 160, ...; not yet clamped by `finish`.

    samples: those of `needed(first, total, frames=frames)`, mono at 16 kHz
    first:   number of the sample at which the piece begins, a multiple of 160
    total:   samples of the whole sound
    frames:  how many to return; those past the sound's total // 160 are SILENCE
    returns: [bins, frames] float32

    Frames do not depend on the piece they are computed in (but for the last bit of float64).
    """
    if first % HOP:
        raise ValueError(f"a piece of sound begins at sample {first}; begin at a multiple of {HOP}")
    lo, hi = needed(first, total, frames=frames)
    if len(samples) != hi - lo:
        raise ValueError(f"samples {lo} to {hi} of the sound are needed, got {len(samples)}; decode that span")
    result = np.full((bins, frames), SILENCE, dtype=np.float32)
    present = min(frames, total // HOP - first // HOP)
    if present <= 0:
        return result
    last = first + (present - 1) * HOP + HALO
    padded = np.pad(samples, (max(0, HALO - first), max(0, last - total)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * HALO)[::HOP]
    for start in range(0, present, BLOCK):
        spectrum = np.fft.rfft(windows[start : min(start + BLOCK, present)] * _hann())
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        result[:, start : start + len(power)] = np.log10(np.maximum(power @ mel_bands(bins), 10**SILENCE)).T
    return result


def needed(first: int, total: int, *, frames: int) -> tuple[int, int]:
    """First and last + 1 sample that a piece of `frames` frames beginning at sample `first` is computed from."""
    return max(0, first - HALO), min(total, first + (frames - 1) * HOP + HALO)


def finish(raw, clip_max):
    """Clamp to 8 below the largest value of the whole sound, and scale: what remains of Whisper's features.

    raw:      [..., bins, frames]  array or tensor
    clip_max: [...]                array or tensor: the largest raw value of the sound that each piece belongs to
    """
    return (raw.clip(min=clip_max[..., None, None] - 8) + 4) / 4


@cache
def _hann() -> np.ndarray:
    """[400] float64: the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(2 * HALO) / (2 * HALO))


@cache
def mel_bands(bins: int) -> np.ndarray:
    """[201, bins] float32: weight of each frequency in each mel band, triangles of equal area (Slaney).

    Slaney's scale is linear, 200/3 Hz a mel, up to 1000 Hz and logarithmic above, 27 mels to a factor of 6.4.
    """
    linear_mels, step = 15.0, np.log(6.4) / 27
    top = linear_mels + np.log(SAMPLE_RATE / 2 / 1000) / step
    mels = np.linspace(0, top, bins + 2)
    edges = np.where(mels < linear_mels, mels * 200 / 3, 1000 * np.exp(step * (mels - linear_mels)))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, HALO + 1)[:, None]
    rising = (frequencies - edges[:-2]) / np.diff(edges[:-1])
    falling = (edges[2:] - frequencies) / np.diff(edges[1:])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)
