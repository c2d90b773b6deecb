"""The store of features: same bits back, bounded, damage and change of anything seen, shared by processes.

Run: pytest tests/data_pipelines/test_feature_cache.py
"""

import os
import shutil
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import feature_cache
from data_pipelines.demux import read_index
from data_pipelines.feature_cache import FeatureCache, Kept, decode_missing, file_digest, sound_digest, unit_key
from data_pipelines.media import MediaFile
from encoders import VideoPatches
from encoders.mel import log_mel_raw, needed
from tests.data_pipelines.clips import frame_groups

CASES = Path(__file__).parents[1] / "data" / "cases"
KEY = "ab" + "0" * 62


def features(seed: int = 0, rows: int = 4) -> Kept:
    values = np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)
    return Kept(features=values, loudest=-1.25)


def key(number: int) -> str:
    return f"{number:064x}"


def test_what_is_read_is_what_was_written(tmp_path):
    cache = FeatureCache(tmp_path, 1 << 20)
    for dtype in (np.float32, np.float64, np.uint16):
        kept = Kept(features=(features().features * 1000).astype(dtype), loudest=0.1)
        cache.write(KEY, kept)
        found = FeatureCache(tmp_path, 1 << 20).read(KEY)
        assert found.features.tobytes() == kept.features.tobytes() and found.features.dtype == dtype
        assert found.features.shape == (4, 8) and found.loudest == 0.1
    assert cache.read(key(1)) is None


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage", "other key"])
def test_a_damaged_entry_is_missing(tmp_path, damage):
    cache = FeatureCache(tmp_path, 1 << 20)
    cache.write(KEY, features())
    path = tmp_path / KEY[:2] / KEY[2:]
    data = bytearray(path.read_bytes())
    if damage == "other key":
        other = "ab" + "1" * 62
        shutil.copy(path, tmp_path / "ab" / other[2:])
        assert cache.read(other) is None
        return
    data[-3] ^= 1
    path.write_bytes({"cut": data[:-5], "flip": data, "empty": b"", "garbage": b"{}\nx"}[damage])
    assert cache.read(KEY) is None


def test_the_disk_is_bounded_and_the_longest_unused_go_first(tmp_path):
    bound = 400_000
    caches = [FeatureCache(tmp_path, bound) for _ in range(3)]  # as three ranks have
    for number in range(600):
        caches[number % 3].write(key(number << 240), features(number, rows=60))
        caches[0].read(key(0))
        os.utime(tmp_path / "00" / key(0)[2:], ns=(time.time_ns() + 10**9,) * 2)
        assert caches[0].size() <= bound
    assert caches[0].read(key(0)) is not None and caches[0].read(key(1 << 240)) is None
    assert caches[0].read(key(599 << 240)) is not None
    caches[0].write(KEY, Kept(features=np.zeros(bound), loudest=0.0))
    assert caches[0].read(KEY) is None


def test_a_full_disk_stores_nothing(tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, 1 << 20)
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    cache.write(KEY, features())
    assert cache.read(KEY) is None


@pytest.fixture
def clip(tmp_path):
    shutil.copy(CASES / "ref_4s_noaudio.mp4", tmp_path / "a.mp4")
    return MediaFile(str(tmp_path / "a.mp4"))


def age(file: MediaFile, monkeypatch) -> None:
    """Let all that was written count as old."""
    monkeypatch.setattr(feature_cache, "RACY_NS", -1)


def test_a_changed_file_has_another_digest(clip, tmp_path, monkeypatch):
    data = Path(clip.path).read_bytes()
    before = file_digest(clip, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("digests/*")), "remembered though it may change in the same instant"
    stat = os.stat(clip.path)
    changed = bytearray(data)
    changed[-1] ^= 1
    Path(clip.path).write_bytes(changed)
    os.utime(clip.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(clip, tmp_path / "cache") != before
    Path(clip.path).write_bytes(data)
    assert file_digest(clip, tmp_path / "cache") == before
    age(clip, monkeypatch)
    assert file_digest(clip, tmp_path / "cache") == before
    assert len(list((tmp_path / "cache").glob("digests/*"))) == 1
    monkeypatch.setattr(MediaFile, "open", None)
    assert file_digest(clip, tmp_path / "cache") == before


def test_a_change_after_the_digest_was_remembered_is_seen(clip, tmp_path, monkeypatch):
    age(clip, monkeypatch)
    before, stat = file_digest(clip, tmp_path / "cache"), os.stat(clip.path)
    time.sleep(0.02)  # the file system's clock ticks
    data = bytearray(Path(clip.path).read_bytes())
    data[-1] ^= 1
    Path(clip.path).write_bytes(data)
    os.utime(clip.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(clip, tmp_path / "cache") != before


def test_everything_that_decides_features_is_in_the_key(clip):
    index = read_index(clip)
    units = frame_groups(index, (32, 48), VideoPatches(patch=8), rate=Fraction(1))
    key = partial(unit_key, kind="video", stream=0, index=index, sound="")
    keys = {
        key("content", "encoder", unit=units[0]),
        key("other", "encoder", unit=units[0]),
        key("content", "other", unit=units[0]),
        key("content", "encoder", unit=units[1]),
        key("content", "encoder", unit=replace(units[0], size=(2, 32, 64))),
        key("content", "encoder", unit=units[0], stream=1),
        key("content", "encoder", unit=units[0], kind="image"),
        key("content", "encoder", unit=units[0], sound=sound_digest(units)),
        key("content", "encoder", unit=units[0], index=replace(index, origin=Fraction(1))),
    }
    assert len(keys) == 9


def test_kept_units_are_not_decoded_and_changed_files_are(clip, tmp_path, monkeypatch):
    age(clip, monkeypatch)
    index = read_index(clip)
    units = frame_groups(index, (32, 48), VideoPatches(patch=8), rate=Fraction(1))
    call = partial(
        decode_missing, (str(tmp_path / "cache"), 1 << 20), "encoder", 0, "", "video", clip, index, units,
        partial(log_mel_raw, bins=80), needed,
    )  # fmt: skip
    header, arrays = call()
    assert all(header["keys"]) and header["frames"] > 0 and arrays[0].shape == (2, 32, 48, 3)
    cache = FeatureCache(tmp_path / "cache", 1 << 20)
    cache.write(header["keys"][1], features(1))
    again, mixed = call()
    assert again["keys"] == [header["keys"][0], ""] and np.array_equal(mixed[0], arrays[0])
    assert np.array_equal(mixed[1], features(1).features) and again["loudest"] == [0.0, -1.25]
    cache.write(header["keys"][0], features(0))
    last, kept = call()
    assert last["keys"] == ["", ""] and last["frames"] == 0 and len(kept) == 2
    time.sleep(0.02)
    with open(clip.path, "ab") as file:
        file.write(b"\0\0\0\x08free")
    fresh, _ = call()
    assert all(fresh["keys"]) and not set(fresh["keys"]) & set(header["keys"])


def test_a_file_that_changes_while_it_is_read_is_not_kept(clip, tmp_path, monkeypatch):
    index = read_index(clip)
    units = frame_groups(index, (32, 48), VideoPatches(patch=8), rate=Fraction(1))
    decode = feature_cache.decode_units

    def changing(*args, **options):
        result = decode(*args, **options)
        with open(clip.path, "ab") as file:
            file.write(b"\0\0\0\x08free")
        return result

    monkeypatch.setattr(feature_cache, "decode_units", changing)
    header, _ = decode_missing(
        (str(tmp_path / "cache"), 1 << 20), "encoder", 0, "", "video", clip, index, units, log_mel_raw, needed
    )
    assert header["keys"] == ["?", "?"]
