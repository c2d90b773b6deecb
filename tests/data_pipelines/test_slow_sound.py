"""Sound at a lower rate against the averages of the whole spectrogram, and decoded from a file.

Run: pytest tests/data_pipelines/test_slow_sound.py
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines import slow_sound
from data_pipelines.decode_units import decode_units
from data_pipelines.demux import read_index
from data_pipelines.media import MediaFile
from data_pipelines.slow_sound import averaged_mel
from data_pipelines.sound import decode_audio
from data_pipelines.units import sound_units
from encoders import AudioWindows
from encoders.mel import log_mel_raw, needed

CLIP = MediaFile(str(Path(__file__).parents[1] / "data" / "cases" / "ref_4s_30fps_aac.mp4"))
RAW = np.random.default_rng(0).uniform(-10, 4, (3, 400)).astype(np.float32)


def overlaps(frames: int, size: int) -> np.ndarray:
    """[frames, size]: share of each average that each frame makes up."""
    edges = np.arange(size + 1) * frames / size
    low, high = np.arange(frames)[:, None], np.arange(1, frames + 1)[:, None]
    return np.clip(np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]), 0, None) * size / frames


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_averages_in_pieces_are_those_of_the_whole(frames, size, piece):
    size = min(size, frames)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_sound, "PIECE", piece)
        got = averaged_mel(lambda first, count: RAW[:, first : first + count], frames, size)
    expected = np.log10(10.0 ** RAW[:, :frames].astype(np.float64) @ overlaps(frames, size))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_file_is_heard_at_half_the_rate():
    index, rule = read_index(CLIP), AudioWindows(window=100, frames_per_row=20)
    units = sound_units(index, rule, [(0, 200, 100), (200, 100, 100), (300, 80, 40)], first=0)
    begin, end = index.audio_samples
    assert [unit.num_tokens for unit in units] == [5, 5, 2] and units[1].items[0] - begin == 200 * 160
    header, arrays = decode_units("audio", CLIP, index, units, partial(log_mel_raw, bins=8), needed)
    samples = decode_audio(CLIP, index, begin, end).samples
    whole = log_mel_raw(samples, 0, end - begin, frames=400, bins=8)
    mean = np.log10((10.0 ** whole[:, :200].astype(np.float64)).reshape(8, 100, 2).mean(2))
    np.testing.assert_allclose(arrays[0], mean, atol=1e-4)
    np.testing.assert_allclose(arrays[1], whole[:, 200:300], atol=1e-5)
    assert arrays[2].shape == (8, 40) and header["notes"] == []
