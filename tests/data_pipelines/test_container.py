"""ClipIndex against a full decode from the start, and against the right values of publicly reported broken files.

python -m pytest tests/data_pipelines/test_container.py
"""

import shutil
from fractions import Fraction
from math import ceil
from pathlib import Path

import av
import pytest

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.units import sampled_frames
from tests.data_pipelines.clips import read_number, write_clip

CASES = Path(__file__).parents[1] / "data" / "cases"
BROKEN = ("zero_bytes.mp4", "html_saved_as.mp4", "no_moov.mp4")
GOOD = sorted(
    path
    for path in [*CASES.glob("*.m*"), *CASES.glob("B09_broken/*"), *CASES.glob("B1[0-2]*/*"), *CASES.glob("B47*/*")]
    if path.name not in BROKEN and path.is_file()
)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_json_gives_the_same_index_back(path):
    index = read_index(str(path))
    text = index.to_json()
    assert ClipIndex.from_json(text) == index
    assert ClipIndex.from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zero_bytes.mp4", "empty file"),
        ("html_saved_as.mp4", "not a media file"),
        ("no_moov.mp4", "no index (moov missing"),
        ("audio_only.mp4", "no video stream"),
        ("zero_frames.mp4", "no frames"),
        ("not_there.mp4", "no such file"),
        (".", "is a folder"),
    ],
)
def test_each_fault_has_its_own_reason_and_names_the_file(name, reason):
    path = str(CASES / "B09_broken" / name)
    with pytest.raises(MediaError) as caught:
        read_index(path, need=("video",))
    assert caught.value.reason.startswith(reason)
    assert path in str(caught.value)


def test_a_clip_without_sound_says_so():
    with pytest.raises(MediaError, match="no audio stream"):
        read_index(str(CASES / "B46_no_audio_track.mp4"), need=("audio",))
    assert read_index(str(CASES / "B46_no_audio_track.mp4")).audio is None


def test_a_cut_file_is_indexed_up_to_the_cut():
    index = read_index(str(CASES / "B09_broken" / "cut_tail.mp4"))
    assert index.video.num_frames == 82
    assert index.notes == ("video: packet 82 is cut off by the end of the file; left out",)


@pytest.mark.parametrize(
    ("name", "display"),
    [
        ("B07_rotate90.mp4", (96, 64)),
        ("B07_rotate180.mp4", (64, 96)),
        ("B07_rotate270.mp4", (96, 64)),
        ("B11_pixfmt/sar_2to1.mp4", (64, 192)),
        ("B11_pixfmt/odd_101x57_yuv444.mp4", (57, 101)),
        ("B11_pixfmt/odd_427x241_vp9.webm", (241, 427)),
    ],
)
def test_display_size_is_upright_with_square_pixels(name, display):
    assert read_index(str(CASES / name)).video.display == display


@pytest.mark.parametrize("name", ["av1.mkv", "live_no_duration.webm", "h264_bframes_no_pts.avi", "xvid.avi"])
def test_headers_that_lie_or_are_silent_do_not_matter(name):
    index = read_index(str(CASES / "B12_codecs" / name))
    times = [index.frame_time(frame) for frame in range(index.video.num_frames)]
    assert len(times) == 30
    assert all(abs(time - Fraction(frame, 10)) <= Fraction(1, 100) for frame, time in enumerate(times))
    assert abs(index.video_end - 3) <= Fraction(1, 100)


@pytest.mark.parametrize("name", ["B08_vfr.mp4", "B08_vfr.mkv"])
def test_the_frame_at_a_time_is_the_one_a_player_shows(name):
    path = str(CASES / name)
    index = read_index(path)
    with av.open(path) as container:
        shown = [
            (picture.pts * picture.time_base, picture.to_ndarray(format="rgb24")) for picture in container.decode()
        ]
    first, end = shown[0][0], index.video_end + index.origin
    for rate in (1, 2, 7, 97):
        asked = [first + Fraction(n, rate) for n in range(ceil((end - first) * rate))]
        expected = {max(i for i, (time, _) in enumerate(shown) if time <= at) for at in asked}
        assert sampled_frames(index.video, Fraction(rate)).tolist() == sorted(expected)


@pytest.mark.parametrize("name", ["B08_vfr.mp4", "B08_vfr.mkv"])
def test_the_frame_of_a_moment_shows_that_moment(name):
    index = read_index(str(CASES / name))
    moments = [Fraction(text) for text in ("0.5", "3", "5", "7.5", "7.95", "100")]
    frames = [index.frame_at(moment) for moment in moments]
    shown = [read_number(picture) for picture in decode_frames(str(CASES / name), index, frames, (64, 96)).pixels]
    last = index.frame_time(index.video.num_frames - 1)
    for moment, frame, number in zip(moments, frames, shown, strict=True):
        assert abs(index.frame_time(frame) - Fraction(number, 30)) <= Fraction(1, 100)
        assert Fraction(-1, 100) <= min(moment, last) - Fraction(number, 30) <= Fraction(1, 5)


def test_one_frame_a_second_of_variable_rate():
    index = read_index(str(CASES / "B08_vfr.mp4"))
    frames = sampled_frames(index.video, Fraction(1))
    assert len(frames) == 8
    picture = decode_frames(str(CASES / "B08_vfr.mp4"), index, frames, (64, 96)).pixels
    for frame, pixels in zip(frames, picture, strict=True):
        assert abs(index.frame_time(frame) - Fraction(read_number(pixels), 30)) <= Fraction(1, 20)


@pytest.mark.parametrize(
    ("name", "start", "sound_start", "origin", "first"),
    [
        ("late.mp4", 2, 2, 0, 2),
        ("late.mkv", 2, 2, 0, 2),
        ("far.mp4", 5000, 5000, 5000, 0),
        ("late.ts", 2, 2, 2, 0),
    ],
)
def test_time_zero_is_the_files_own_where_it_has_one(tmp_path, name, start, sound_start, origin, first):
    path = str(tmp_path / name)
    write_clip(path, start=Fraction(start), sound="aac", sound_start=Fraction(sound_start), frames=20)
    index = read_index(path)
    assert abs(index.origin - origin) < Fraction(1, 20)
    assert abs(index.frame_time(0) - first) < Fraction(1, 20)


def test_streams_are_listed_with_their_codecs():
    index = read_index(str(CASES / "ref_4s_30fps_aac.mp4"))
    assert [(stream.index, stream.kind, stream.codec) for stream in index.streams] == [
        (0, "video", "h264"),
        (1, "audio", "aac"),
    ]
    assert sum(index.video.sizes) < index.size
    assert index.duration == 4


@pytest.mark.parametrize(
    "name",
    [
        "-dash.mp4",
        "UPPER.MP4",
        "a:b.mp4",
        "brace{0..2}[x].mp4",
        "percent%03d.mp4",
        'it\'s "q".mp4',
        "a b.mp4",
        "\u00e9\u2014\u52d5\u753b\U0001f3ac.mp4",
    ],
)
def test_no_character_of_a_name_has_a_meaning(tmp_path, monkeypatch, name):
    shutil.copy(CASES / "ref_4s_noaudio.mp4", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    index = read_index(name)
    assert index.video.num_frames == 120
    assert len(decode_frames(name, index, [119], (64, 96)).pixels) == 1


def test_a_member_of_a_larger_file_is_read_in_place(tmp_path):
    clip = (CASES / "ref_4s_30fps_aac.mp4").read_bytes()
    (tmp_path / "big").write_bytes(b"x" * 1000 + clip + b"y" * 1000)
    member = MediaFile(str(tmp_path / "big"), 1000, len(clip))
    index = read_index(member)
    assert index == read_index(str(CASES / "ref_4s_30fps_aac.mp4"))
    assert read_number(decode_frames(member, index, [77], (64, 96)).pixels[0]) == 77
