"""Units decoded from excerpts of an index, in any order, by any number of workers, against one pass with all of it.

python -m pytest tests/data_pipelines/test_decode_units.py
"""

import pickle
import random
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import sound
from data_pipelines.decode_units import decode_units, excerpt
from data_pipelines.demux import read_index
from data_pipelines.media import MediaFile
from data_pipelines.units import sound_windows
from data_pipelines.workers import WorkerPool
from encoders import AudioWindows, VideoPatches
from encoders.mel import log_mel_raw, needed
from tests.data_pipelines.clips import frame_groups, write_clip

CASES = Path(__file__).parents[1] / "data" / "cases"
MEL = partial(log_mel_raw, bins=40)
CLIPS = {
    "open.mp4": {"options": {"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}, "sound": "aac"},
    "open.ts": {"options": {"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}, "sound": "aac"},
    "counted.avi": {"options": {"g": "15"}, "sound": "pcm_s16le"},
    "opus.webm": {"codec": "libvpx", "options": {"g": "15"}, "sound": "libopus"},
    "mp3.mp4": {"options": {"g": "15"}, "sound": "libmp3lame"},
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name, settings in CLIPS.items():
        write_clip(str(folder / name), **settings)
    return folder


def tracks(path: Path) -> list[tuple]:
    """(kind, file, index, units) of each track of a clip."""
    file = MediaFile(str(path))
    index = read_index(file)
    found = [("video", file, index, frame_groups(index, (32, 48), VideoPatches(patch=8, frames=2), rate=Fraction(3)))]
    if index.audio is not None:
        found.append(("audio", file, index, sound_windows(index, AudioWindows(window=100, frames_per_row=20))))
    return found


@pytest.mark.parametrize("name", CLIPS)
def test_an_excerpt_gives_what_the_whole_index_gives(clips, name, monkeypatch):
    monkeypatch.setattr(sound, "BLOCK", 2)
    draw = random.Random(name)
    for kind, file, index, units in tracks(clips / name):
        _, whole = decode_units(kind, file, index, units, MEL, needed)
        for _ in range(8):
            first, last = sorted(draw.sample(range(len(units) + 1), 2))
            part = units[first:last]
            cut = pickle.loads(pickle.dumps(excerpt(kind, index, part, needed)))
            header, arrays = decode_units(kind, file, cut, part, MEL, needed)
            assert all(np.array_equal(array, other) for array, other in zip(arrays, whole[first:last], strict=True))
            assert header["notes"] == []


@pytest.mark.parametrize("num_workers", [1, 3])
def test_order_and_workers_change_no_bit(clips, num_workers):
    draw, expected, jobs = random.Random(num_workers), {}, []
    for name in CLIPS:
        for kind, file, index, units in tracks(clips / name):
            _, expected[name, kind] = decode_units(kind, file, index, units, MEL, needed)
            for start in range(0, len(units), 4):
                jobs.append((name, kind, start, file, excerpt(kind, index, units[start : start + 4], needed), units))
    draw.shuffle(jobs)
    pool = WorkerPool(num_workers, deadline_s=60)
    try:
        futures = [
            pool.submit(decode_units, kind, file, cut, units[start : start + 4], MEL, needed)
            for _, kind, start, file, cut, units in jobs
        ]
        for (name, kind, start, *_), future in zip(jobs, futures, strict=True):
            for array, other in zip(future.result()[1], expected[name, kind][start : start + 4], strict=True):
                assert np.array_equal(array, other), f"{name}, {kind}, units from {start}"
    finally:
        pool.close()


def test_a_missing_frame_keeps_its_number_and_time():
    file = MediaFile(str(CASES / "B09_broken" / "bitflips.mp4"))
    index = read_index(file)
    units = frame_groups(index, (32, 48), VideoPatches(patch=8, frames=1), rate=Fraction(30))[30:40]
    with pytest.raises(ValueError, match=r"bitflips.mp4 at 1.233 s: frame 37 cannot be decoded"):
        decode_units("video", file, excerpt("video", index, units, needed), units, MEL, needed)


def test_a_job_of_a_long_clip_is_small(tmp_path):
    write_clip(str(tmp_path / "long.mp4"), options={"g": "15"}, frames=3000, size=(16, 16), sound="aac")
    for kind, _, index, units in tracks(tmp_path / "long.mp4"):
        jobs = [len(pickle.dumps(excerpt(kind, index, units[i : i + 4], needed))) for i in range(0, len(units), 4)]
        assert max(jobs) < 6000 < len(pickle.dumps(index))
