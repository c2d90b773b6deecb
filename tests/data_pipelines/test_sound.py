"""Sound at 16 kHz against PyAV's own whole-file resampling, cut at any place, and against what cases must sound like.

python -m pytest tests/data_pipelines/test_sound.py
"""

import random
import tracemalloc
import wave
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest

from data_pipelines import sound, track_reader
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError
from data_pipelines.sound import SoundReader, channel_weights, decode_audio
from tests.data_pipelines.clips import clicks, write_clip

CASES = Path(__file__).parents[1] / "data" / "cases"


def whole(path: Path) -> sound.Sound:
    index = read_index(str(path))
    return decode_audio(str(path), index, 0, index.audio_samples[1])


def rms(samples: np.ndarray) -> float:
    return float(np.sqrt((samples.astype(np.float64) ** 2).mean()))


def frequency(samples: np.ndarray) -> float:
    """The strongest frequency, in Hz."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples))


def onsets(samples: np.ndarray) -> list[float]:
    """Seconds at which the clicks of a test clip begin."""
    loud = np.flatnonzero(np.abs(samples) > 0.2)
    return [float(loud[i]) / 16000 for i in range(len(loud)) if i == 0 or loud[i] - loud[i - 1] > 4000]


def pyav_whole(path: Path) -> np.ndarray:
    """[n] float32: the whole first stream of sound, resampled by PyAV in one go; one channel only."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler("flt", "mono", 16000)
        parts = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        return np.concatenate([part.to_ndarray()[0] for part in [*parts, *resampler.resample(None)]])


@pytest.mark.parametrize("name", ["six_ch_unknown_layout.wav", "sixteen_ch_unknown_layout.wav", "stereo_antiphase.wav"])
def test_no_layout_loses_the_tone(name):
    samples = whole(CASES / "B10_audio" / name).samples
    assert len(samples) == 16000 and rms(samples) > 0.01
    assert abs(frequency(samples) - 440) <= 1


def test_the_centre_is_heard():
    assert rms(whole(CASES / "B10_audio" / "surround51_voice_in_centre.mp4").samples) > 0.02


@pytest.mark.parametrize("name", ["aac_8k_mono.mp4", "speech_8k.wav"])
def test_other_rates_keep_their_length(name):
    assert abs(len(whole(CASES / "B10_audio" / name).samples) / 16000 - 3.44) < 0.01


def test_the_last_samples_are_there():
    samples = whole(CASES / "B10_audio" / "click_in_last_5ms_44k1.wav").samples
    assert len(samples) == 16000 and np.abs(samples[-160:]).max() > 0.5


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("B46_audio1s_video5s.mp4", 1), ("B46_audio5s_video2s.mp4", 5), ("B46_silent_track.mp4", 4)],
)
def test_sound_ends_where_its_track_ends(name, seconds):
    index = read_index(str(CASES / name))
    assert index.audio_samples == (0, 16000 * seconds)
    after = decode_audio(str(CASES / name), index, 16000 * seconds, 16000 * seconds + 500).samples
    assert not after.any() and len(after) == 500


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("samples_1.wav", 1),
        ("ms_5.wav", 80),
        ("ms_24.wav", 384),
        ("ms_26.wav", 416),
        ("exact_1s.wav", 16000),
        ("one_s_plus_1_sample.wav", 16001),
        ("header_says_1s_data_cut.wav", 4478),
        ("header_size_0.wav", 16000),
    ],
)
def test_short_and_mislabelled_files_give_what_they_hold(name, count):
    assert len(whole(CASES / "B47_audio" / name).samples) == count


def test_no_samples_is_an_error_that_names_the_file():
    with pytest.raises(MediaError, match=r"samples_0.wav: no samples"):
        read_index(str(CASES / "B47_audio" / "samples_0.wav"), need=("audio",))


def test_what_is_not_finite_or_too_loud_is_counted():
    broken = whole(CASES / "B47_audio" / "nan_inf_float.wav")
    assert np.isfinite(broken.samples).all() and broken.cleaned == 2 and broken.bounded == 0
    loud = whole(CASES / "B47_audio" / "float_over_range.wav")
    assert np.abs(loud.samples).max() <= 1 and loud.bounded > 0


CLIPS = {
    "aac.mp4": "aac",
    "aac.ts": "aac",
    "aac.mkv": "aac",
    "opus.webm": "libopus",
    "mp3.mp4": "libmp3lame",
    "flac.mkv": "flac",
    "pcm.mov": "pcm_s16le",
    "ac3.ts": "ac3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sounds")


def written(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        codec = "libvpx" if path.suffix == ".webm" else "libx264"
        write_clip(str(path), codec=codec, sound=CLIPS[name], frames=20, rate=2)
    return path


@pytest.mark.parametrize("jumps", [True, False], ids=["seek", "read_through"])
@pytest.mark.parametrize("name", CLIPS)
def test_any_cut_gives_the_same_samples(folder, name, jumps, monkeypatch):
    monkeypatch.setattr(track_reader, "READ_THROUGH", 0 if jumps else 10_000)
    monkeypatch.setattr(sound, "BLOCK", 3)
    path = written(folder, name)
    index = read_index(str(path))
    begin, end = index.audio_samples
    everything = decode_audio(str(path), index, begin - 500, end + 500).samples
    assert not everything[:500].any() and not everything[-500:].any()
    draw = random.Random(name)
    for _ in range(4):
        first, last = sorted(draw.randint(begin - 500, end + 500) for _ in range(2))
        part = decode_audio(str(path), index, first, last).samples
        np.testing.assert_array_equal(part, everything[first - begin + 500 : last - begin + 500])


@pytest.mark.parametrize("rate", [11025, 22050, 44100, 32000, 96000])
def test_any_cut_of_any_rate_gives_the_same_samples(tmp_path, rate, monkeypatch):
    monkeypatch.setattr(sound, "BLOCK", 1)
    path = tmp_path / "a.wav"
    tone = np.sin(np.arange(3 * rate) / rate * 2 * np.pi * (300 + 200 * np.arange(3 * rate) / rate))
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((tone * 30000).astype(np.int16).tobytes())
    index = read_index(str(path))
    everything = decode_audio(str(path), index, 0, 48000).samples
    assert np.abs(everything - pyav_whole(path)).max() <= 1e-6
    draw = random.Random(rate)
    for _ in range(20):
        first, last = sorted(draw.randint(0, 48000) for _ in range(2))
        part = decode_audio(str(path), index, first, last).samples
        np.testing.assert_allclose(part, everything[first:last], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["aac.mp4", "opus.webm", "ac3.ts", "flac.mkv"])
def test_ranges_in_turn_decode_each_block_once(folder, name, monkeypatch):
    """The file is opened once where a decoder is as new when it is flushed, else once a block."""
    monkeypatch.setattr(sound, "BLOCK", 2)
    monkeypatch.setattr(sound, "PREROLL", 1)
    path = str(written(folder, name))
    index, opened, read = read_index(path), [], []
    open_container, read_packet = sound.open_container, track_reader.TrackReader.read
    monkeypatch.setattr(sound, "open_container", lambda file: opened.append(file) or open_container(file))
    monkeypatch.setattr(track_reader.TrackReader, "read", lambda reader: read.append(1) or read_packet(reader))
    begin, end = index.audio_samples
    cuts = [*range(begin, end, 32000), end]
    with SoundReader(path, index) as reader:
        parts = [reader.read(*cut).samples for cut in pairwise(cuts)]
    assert len(opened) == (1 if name == "flac.mkv" else len(parts))
    assert len(read) < 1.8 * index.audio.num_packets
    np.testing.assert_array_equal(np.concatenate(parts), decode_audio(path, index, begin, end).samples)


@pytest.mark.parametrize("name", CLIPS)
def test_blocks_equal_decoding_from_the_start(folder, name, monkeypatch):
    """Every codec here but AC-3, whose decoder fills bands with noise, forgets its past within the preroll."""
    monkeypatch.setattr(sound, "BLOCK", 3)
    path = written(folder, name)
    index = read_index(str(path))
    begin, end = index.audio_samples
    ours, theirs = decode_audio(str(path), index, begin, end).samples, pyav_whole(path)
    count = min(len(ours), len(theirs)) - 32  # the filter sees what PyAV plays after the end that the container states
    assert count >= 159_000
    assert np.abs(ours[:count] - theirs[:count]).max() <= (1e-3 if name.startswith("ac3") else 1e-6)


@pytest.mark.parametrize("name", CLIPS)
def test_sound_and_picture_share_the_clock(folder, name):
    """A click sounds at every whole second of a clip whose frames are shown at every half; both from the same zero."""
    path = written(folder, name)
    index = read_index(str(path))
    heard = onsets(decode_audio(str(path), index, 0, index.audio_samples[1]).samples)
    shown = [float(index.frame_time(2 * second)) for second in range(10)]
    delay = 0.03 if path.suffix in (".ts", ".mkv", ".webm") else 0.002  # the muxers of these shift sound by its delay
    np.testing.assert_allclose(heard, shown, atol=delay)


@pytest.mark.parametrize("name", ["late.mp4", "late.mkv"])
def test_late_sound_stays_late(tmp_path, name):
    path = tmp_path / name
    write_clip(str(path), sound="aac", sound_start=Fraction(3, 2), frames=40)
    index = read_index(str(path))
    samples = decode_audio(str(path), index, 0, index.audio_samples[1]).samples
    np.testing.assert_allclose(onsets(samples), [1.5, 2.5, 3.5, 4.5], atol=0.03)
    assert not samples[: int(1.4 * 16000)].any()


def test_a_hole_in_the_sound_is_silence_and_noted(tmp_path):
    path = tmp_path / "hole.mkv"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=16000, layout="mono")
        for start in (0, 3):
            frame = av.AudioFrame.from_ndarray(np.full((1, 16000), 8000, np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, start * 16000, Fraction(1, 16000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    index = read_index(str(path))
    samples = decode_audio(str(path), index, 0, 64000).samples
    assert index.notes == ("audio: 1 gaps or overlaps of more than 0.02 s",)
    assert samples[:16000].all() and not samples[16000:48000].any() and samples[48000:].all()


def peak_of_the_last_ten_seconds(path: Path, seconds: int) -> int:
    """Bytes that decoding the end of a sound of this length takes at the most."""
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(48000)
        out.writeframes(np.tile((clicks(1) * 30000).astype(np.int16), seconds).tobytes())
    index = read_index(str(path))
    tracemalloc.start()
    samples = decode_audio(str(path), index, (seconds - 10) * 16000, seconds * 16000).samples
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(onsets(samples)) == 10
    return peak


def test_memory_does_not_follow_length(tmp_path):
    short, long = (peak_of_the_last_ten_seconds(tmp_path / f"{seconds}.wav", seconds) for seconds in (20, 600))
    assert long < 1.5 * short


@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1", "7.1", "5.1(side)", "quad", "3.0", "6 channels"])
def test_no_channel_is_lost_and_no_pair_cancels(layout):
    channels = int(layout.split()[0]) if "channels" in layout else av.AudioLayout(layout).nb_channels
    weights = channel_weights(layout, channels).astype(np.float64)
    assert abs(weights.sum() - 1) < 1e-6 and weights.min() > 0.05
    for left in range(0, channels - 1, 2):
        if layout != "3.0" or left == 0:
            assert abs(weights[left] - weights[left + 1]) > 0.02


def test_ranges_that_are_read_in_turn_are_those_read_alone():
    clip = str(CASES / "ref_4s_30fps_aac.mp4")  # AAC that draws noise
    index = read_index(clip)
    begin, end = index.audio_samples
    middle = (begin + end) // 2
    with SoundReader(clip, index) as reader:
        for first, last in ((middle, end), (begin, middle), (middle - 8000, middle + 8000)):
            assert np.array_equal(reader.read(first, last).samples, decode_audio(clip, index, first, last).samples)
