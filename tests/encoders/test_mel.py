"""Log-mel: against transformers' WhisperFeatureExtractor on whole sounds, and pieces against the whole.

Run: pytest tests/encoders/test_mel.py
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.mel import SILENCE, finish, log_mel_raw, mel_bands, needed
from mmcp.sequence import HOP


def sound(samples: int, seed: int) -> np.ndarray:
    """Noise and a gliding tone, loud and quiet by turns; float32."""
    rng = np.random.default_rng(seed)
    t = np.arange(samples) / 16000
    loudness = 10.0 ** rng.uniform(-4, 0, samples // 4000 + 1).repeat(4000)[:samples]
    return (loudness * (np.sin(2 * np.pi * (300 + 900 * t) * t) + 0.1 * rng.standard_normal(samples))).astype(
        np.float32
    )


def piece(samples: np.ndarray, first: int, *, frames: int, bins: int = 80) -> np.ndarray:
    """Compute one piece from only the samples it says it needs."""
    lo, hi = needed(first, len(samples), frames=frames)
    return log_mel_raw(samples[lo:hi].copy(), first, len(samples), frames=frames, bins=bins)


def whole(samples: np.ndarray, bins: int = 80) -> np.ndarray:
    return piece(samples, 0, frames=len(samples) // HOP, bins=bins)


@pytest.mark.parametrize("bins", [80, 128])
def test_mel_bands_equal_transformers(bins):
    audio_utils = pytest.importorskip("transformers.audio_utils")
    expected = audio_utils.mel_filter_bank(
        num_frequency_bins=201, num_mel_filters=bins, min_frequency=0.0, max_frequency=8000.0, sampling_rate=16000,
        norm="slaney", mel_scale="slaney",
    )  # fmt: skip
    np.testing.assert_allclose(mel_bands(bins), expected, atol=1e-9)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("samples", [16000, 16001, 48123, 384])
def test_whole_sound_equals_whisper(samples, bins):
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    x = sound(samples, samples)
    expected = extractor._np_extract_fbank_features(x[None].astype(np.float64), "cpu")[0]
    raw = whole(x, bins)
    assert raw.shape == expected.shape == (bins, samples // HOP)
    np.testing.assert_allclose(finish(raw, raw.max()), expected, rtol=0, atol=1e-6)


def test_thirty_seconds_equal_the_public_call():
    transformers = pytest.importorskip("transformers")
    x = sound(480_000, 3)
    expected = transformers.WhisperFeatureExtractor()(x, sampling_rate=16000, return_tensors="np").input_features[0]
    raw = whole(x)
    np.testing.assert_allclose(finish(raw, raw.max()), expected, atol=1e-5)


@given(st.integers(0, 9000), st.integers(1, 40), st.integers(0, 10**6))
def test_pieces_join_to_the_whole(samples, frames, seed):
    x = sound(samples, seed)
    expected = whole(x)
    pieces = [piece(x, first, frames=frames) for first in range(0, samples, frames * HOP)]
    joined = np.concatenate(pieces, axis=1) if pieces else np.zeros((80, 0), np.float32)
    np.testing.assert_allclose(joined[:, : samples // HOP], expected, atol=1e-6)
    assert (joined[:, samples // HOP :] == SILENCE).all()


def test_finish_needs_the_largest_value_of_the_whole_sound():
    x = np.concatenate([sound(16000, 1), 1e-5 * sound(16000, 2)])
    raw = whole(x)
    halves = [finish(half, half.max()) for half in (raw[:, :100], raw[:, 100:])]
    assert np.abs(np.concatenate(halves, axis=1) - finish(raw, raw.max())).max() > 0.1


def test_silence_is_finite_and_padding_is_the_floor():
    raw = piece(np.zeros(300, np.float32), 0, frames=4)
    np.testing.assert_allclose(raw, SILENCE, atol=1e-6)
    np.testing.assert_allclose(finish(raw, raw.max()), (SILENCE + 4) / 4, atol=1e-6)


def test_finish_takes_tensors_of_several_sounds():
    torch = pytest.importorskip("torch")
    raw = np.stack([whole(sound(1600, seed)) for seed in (1, 2)])
    loudest = raw.max((1, 2)) + np.array([0, 3], np.float32)
    expected = np.stack([finish(one, high) for one, high in zip(raw, loudest, strict=True)])
    np.testing.assert_array_equal(finish(torch.from_numpy(raw), torch.from_numpy(loudest)).numpy(), expected)


def test_wrong_spans_are_refused():
    with pytest.raises(ValueError, match="multiple of 160"):
        log_mel_raw(np.zeros(400, np.float32), 100, 400, frames=2, bins=80)
    with pytest.raises(ValueError, match="samples 120 to 400"):
        log_mel_raw(np.zeros(400, np.float32), 320, 400, frames=1, bins=80)
