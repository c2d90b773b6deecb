"""Frames through decord against PyAV's: the same numbers and times, pixels within 12 grey levels; refused elsewhere.

python -m pytest tests/data_pipelines/test_decord_frames.py
"""

import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames
from data_pipelines.decode_units import decode_units, excerpt
from data_pipelines.decord_frames import BACKENDS, backend_for, decode_with_decord, why_unsafe
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError, MediaFile
from encoders import VideoPatches
from tests.data_pipelines.clips import frame_groups, read_number, write_clip

CASES = Path(__file__).parents[1] / "data" / "cases"
GOP = {"g": "15"}
OPEN = {"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}
SAFE = {
    "h264.mp4": {"options": GOP},
    "late.mp4": {"options": GOP, "start": Fraction(5, 2), "sound": "aac"},
    "h264.mkv": {"options": GOP, "size": (58, 102)},
    "vp8_hidden.webm": {"codec": "libvpx", "options": {**GOP, "auto-alt-ref": "1", "lag-in-frames": "16"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": GOP},
    "mjpeg.mov": {"codec": "mjpeg", "pixels": "yuvj420p"},
    "uneven.mp4": {"options": GOP, "pts": [i * 100 + (i % 7) * 11 for i in range(60)]},
}
UNSAFE = {
    "open.mp4": ({"options": OPEN}, "refer back across a key frame"),
    "open.ts": ({"options": OPEN}, "the format mpegts"),
    "h264.avi": ({"options": GOP}, "the format avi"),
    "mpeg4.mp4": ({"codec": "mpeg4", "options": GOP}, "not known to be right for mpeg4"),
    "grey.mkv": ({"codec": "ffv1", "pixels": "gray"}, "not known to be right for ffv1"),
    "ten.mp4": ({"options": GOP, "pixels": "yuv420p10le"}, "the pixel format is yuv420p10le"),
}


def index_of(folder: Path, name: str, settings: dict) -> tuple[str, ClipIndex]:
    write_clip(str(folder / name), **settings)
    return str(folder / name), read_index(str(folder / name))


@pytest.mark.parametrize("name", SAFE)
def test_the_same_frames_whichever_backend_reads_them(tmp_path, name):
    pytest.importorskip("decord", reason="decord has wheels for x86-64 only")
    path, index = index_of(tmp_path, name, SAFE[name])
    assert backend_for("decord", index) == ("decord", "")
    draw = random.Random(name)
    for size in ((64, 96), (30, 44)):
        asked = draw.choices(range(index.video.num_frames), k=12)
        ours, theirs = (BACKENDS[backend](path, index, asked, size).pixels for backend in ("pyav", "decord"))
        assert [read_number(picture) for picture in theirs] == asked
        assert np.abs(ours.astype(int) - theirs).max() <= 12


@pytest.mark.parametrize("name", UNSAFE)
def test_a_clip_that_decord_would_get_wrong_is_read_by_pyav(tmp_path, name):
    settings, reason = UNSAFE[name]
    path, index = index_of(tmp_path, name, settings)
    backend, why = backend_for("decord", index)
    assert backend == "pyav" and reason in why
    units = frame_groups(index, (64, 96), VideoPatches(patch=8, frames=1), rate=Fraction(10))
    _, arrays = decode_units("video", MediaFile(path), index, units, None, None, backend=backend)
    assert [read_number(array[0]) for array in arrays] == list(range(index.video.num_frames))


@pytest.mark.parametrize("name", ["B07_rotate90.mp4", "B12_codecs/h264_bframes_no_pts.avi", "B12_codecs/av1.mkv"])
def test_public_cases_that_decord_gets_wrong_are_refused(name):
    assert why_unsafe(read_index(str(CASES / name)))


def test_a_member_of_a_tar_by_an_excerpt(tmp_path):
    pytest.importorskip("decord", reason="decord has wheels for x86-64 only")
    clip = (CASES / "ref_4s_30fps_aac.mp4").read_bytes()
    (tmp_path / "big").write_bytes(b"x" * 1000 + clip + b"y" * 1000)
    file = MediaFile(str(tmp_path / "big"), 1000, len(clip))
    index = read_index(file)
    assert not why_unsafe(index)
    units = frame_groups(index, (64, 96), VideoPatches(patch=8, frames=2), rate=Fraction(15))[20:]
    part = excerpt("video", index, units, None)
    _, ours = decode_units("video", file, part, units, None, None)
    _, theirs = decode_units("video", file, part, units, None, None, backend="decord")
    difference = np.abs(np.stack(ours).astype(int) - np.stack(theirs))
    assert difference.mean() < 1 and (difference > 12).mean() < 0.02  # at the edges of saturated colours only


def test_what_contradicts_the_index_is_an_error(tmp_path):
    pytest.importorskip("decord", reason="decord has wheels for x86-64 only")
    path, _ = index_of(tmp_path, "a.mp4", SAFE["h264.mp4"])
    _, other = index_of(tmp_path, "b.mp4", SAFE["uneven.mp4"])
    with pytest.raises(MediaError, match=r"decord's times are .* s off those of the index"):
        decode_with_decord(path, other, [0], (8, 8))
    _, other = index_of(tmp_path, "c.mp4", {"options": {"g": "20"}})
    with pytest.raises(MediaError, match="other key frames than the index"):
        decode_with_decord(path, other, [0], (8, 8))
    (tmp_path / "a.mp4").write_bytes(b"<html>")
    with pytest.raises(MediaError, match="decord cannot read it"):
        decode_with_decord(path, other, [0], (8, 8))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="video backend 'opencv' is unknown; use one of decord, pyav"):
        backend_for("opencv", read_index(str(CASES / "B08_vfr.mp4")))


def test_pyav_is_never_replaced():
    index = read_index(str(CASES / "B08_vfr.mp4"))
    assert backend_for("pyav", index) == ("pyav", "") and BACKENDS["pyav"] is decode_frames
