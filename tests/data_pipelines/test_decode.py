"""Frames by number against a full decode from the start, in many codecs and containers; frames carry their number.

python -m pytest tests/data_pipelines/test_decode.py
"""

import contextlib
import os
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from data_pipelines import track_reader
from data_pipelines.decode import BACKGROUND, decode_frames, decode_image, image_size
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError
from tests.data_pipelines.clips import packets_of, read_number, red_quadrant, write_clip

CASES = Path(__file__).parents[1] / "data" / "cases"
OPEN_GOP = {"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}
GOP = {"g": "15"}
X265 = "keyint=15:bframes=4:log-level=none:"
CLIPS = {
    "h264.mp4": {"options": GOP},
    "h264_open.mp4": {"options": OPEN_GOP},
    "h264_open.mkv": {"options": OPEN_GOP},
    "h264_open.ts": {"options": OPEN_GOP},
    "h264_refresh.mp4": {"options": {"x264-params": "intra-refresh=1:keyint=15:bframes=0"}},
    "h264_interlaced.ts": {"options": {"x264-params": "tff=1:keyint=15", "flags": "+ildct+ilme"}},
    "h264.avi": {"options": GOP},
    "h264.flv": {"options": GOP},
    "h264_fragments.mp4": {"options": GOP, "sound": "aac", "container": {"movflags": "frag_keyframe+empty_moov"}},
    "h264_no_edits.mp4": {"options": GOP, "sound": "aac", "container": {"use_editlist": "0"}},
    "hevc_open.mp4": {"codec": "libx265", "options": {"x265-params": X265 + "open-gop=1"}},
    "hevc_open.ts": {"codec": "libx265", "options": {"x265-params": X265 + "open-gop=1"}},
    "hevc_radl.mkv": {"codec": "libx265", "options": {"x265-params": X265 + "open-gop=0:radl=2"}},
    "vp8_hidden.webm": {"codec": "libvpx", "options": {**GOP, "auto-alt-ref": "1", "lag-in-frames": "16"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {**GOP, "auto-alt-ref": "1", "lag-in-frames": "16"}},
    "av1.mkv": {"codec": "libsvtav1", "options": {**GOP, "preset": "12"}},
    "mpeg2_open.ts": {"codec": "mpeg2video", "rate": 25, "options": {**GOP, "bf": "2"}},
    "mpeg2_open.mpg": {"codec": "mpeg2video", "rate": 25, "options": {**GOP, "bf": "2"}},
    "mpeg4.avi": {"codec": "mpeg4", "options": {**GOP, "bf": "2"}},
    "mpeg4.mp4": {"codec": "mpeg4", "options": {**GOP, "bf": "2"}},
    "mjpeg.mov": {"codec": "mjpeg", "pixels": "yuvj420p"},
    "late.mp4": {"options": GOP, "start": Fraction(5, 2), "sound": "aac"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


def written(folder: Path, name: str) -> str:
    path = folder / name
    if not path.exists():
        try:
            write_clip(str(path), **CLIPS[name])
        except av.error.FFmpegError as error:
            path.unlink(missing_ok=True)
            pytest.skip(f"this FFmpeg cannot write {name}: {error}")
    return str(path)


def full_decode(path: str) -> list[tuple[int | None, np.ndarray]]:
    with av.open(path) as container:
        return [(picture.pts, picture.to_ndarray(format="rgb24")) for picture in container.decode(video=0)]


@pytest.mark.parametrize("jumps", [True, False], ids=["seek", "read_through"])
@pytest.mark.parametrize("name", CLIPS)
def test_frames_are_those_of_a_full_decode(folder, name, jumps, monkeypatch):
    monkeypatch.setattr(track_reader, "READ_THROUGH", 0 if jumps else 1000)
    path = written(folder, name)
    truth = full_decode(path)
    index = read_index(path)
    video = index.video
    whole = decode_frames(path, index, range(video.num_frames), (64, 96))
    assert [read_number(picture) for picture in whole.pixels] == [read_number(picture) for _, picture in truth]
    if video.seekable:
        assert video.pts.tolist() == [pts for pts, _ in truth]
    assert whole.num_decoded <= len(video.sizes)
    draw = random.Random(name)
    for _ in range(6):
        asked = draw.choices(range(video.num_frames), k=draw.randint(1, 5))
        some = decode_frames(path, index, asked, (64, 96))
        np.testing.assert_array_equal(some.pixels, whole.pixels[asked])
        first, last = packets_of(video, asked)
        assert some.num_decoded <= last - first


def test_few_frames_decode_little(folder):
    path = written(folder, "h264_open.mp4")
    index = read_index(path)
    assert decode_frames(path, index, [31], (32, 48)).num_decoded <= 18
    assert decode_frames(path, index, [0, 59], (32, 48)).num_decoded <= 1 + 18


def test_an_open_group_starts_at_the_key_frame_before(folder):
    video = read_index(written(folder, "h264_open.mp4")).video
    leading = [
        frame for frame in range(video.num_frames) if video.packet[frame] > video.entry_packets[1] and frame < 15
    ]
    assert leading, "the clip has no leading pictures, so it tests nothing"
    assert all(video.starts(np.array(leading)) == video.entry_packets[0])


def test_intra_refresh_has_no_entry_but_the_first(folder):
    assert read_index(written(folder, "h264_refresh.mp4")).video.entry_packets.tolist() == [0]


def test_joined_recordings_play_on(folder, tmp_path):
    joined = tmp_path / "joined.ts"
    joined.write_bytes(Path(written(folder, "h264_open.ts")).read_bytes() * 2)
    index = read_index(str(joined))
    assert index.video.num_frames == 120 and "jump back" in index.notes[0]
    assert (np.diff(index.video.pts) > 0).all()
    pixels = decode_frames(str(joined), index, [3, 59, 60, 119], (64, 96)).pixels
    assert [read_number(picture) for picture in pixels] == [3, 59, 0, 59]


def test_a_capture_that_starts_inside_a_group(folder, tmp_path):
    data = Path(written(folder, "h264_open.ts")).read_bytes()
    index = read_index(written(folder, "h264_open.ts"))
    cut = tmp_path / "cut.ts"
    start = int(index.video.sizes[:8].sum() * 1.3) // 188 * 188
    cut.write_bytes(data[: 188 * 3] + data[start:])
    index = read_index(str(cut))
    pixels = decode_frames(str(cut), index, range(index.video.num_frames), (64, 96)).pixels
    numbers = [read_number(picture) for picture in pixels]
    assert numbers == list(range(60 - len(numbers), 60)) and len(numbers) >= 45
    assert any("cannot be decoded; left out" in note for note in index.notes)


@pytest.mark.parametrize(("degrees", "quadrant"), [(90, "br"), (180, "tr"), (270, "tl")])
def test_phone_clips_come_out_upright(degrees, quadrant):
    path = str(CASES / f"B07_rotate{degrees}.mp4")
    index = read_index(path)
    pixels = decode_frames(path, index, [0, 31], index.video.display).pixels
    assert pixels.shape[1:3] == index.video.display
    assert all(red_quadrant(picture) == quadrant for picture in pixels)


@pytest.mark.parametrize("path", sorted((CASES / "B11_pixfmt").iterdir()), ids=lambda path: path.name)
def test_odd_sizes_and_formats(path):
    index = read_index(str(path))
    pixels = decode_frames(str(path), index, range(index.video.num_frames), index.video.display).pixels
    assert pixels.dtype == np.uint8 and pixels.shape[1:] == (*index.video.display, 3)
    if index.video.aspect == 1:
        truth = np.stack([picture for _, picture in full_decode(str(path))])
        assert np.abs(pixels[:, :, -6:].astype(int) - truth[:, :, -6:]).mean() < 12
    if path.name.startswith("ramp"):
        profile = pixels[0].mean(axis=(0, 2))
        assert np.corrcoef(profile, np.arange(len(profile)))[0, 1] > 0.98
        assert profile.min() < 25 and profile.max() > 225


@pytest.mark.parametrize("name", ["av1.mkv", "live_no_duration.webm", "h264_bframes_no_pts.avi", "xvid.avi"])
def test_old_and_new_codecs_give_every_frame_in_order(name):
    path = str(CASES / "B12_codecs" / name)
    index = read_index(path)
    pixels = decode_frames(path, index, range(30), (64, 96)).pixels
    assert [read_number(picture) for picture in pixels] == list(range(30))


def test_resizing_is_antialiased_and_close_to_the_whole_picture():
    path = str(CASES / "ref_4s_noaudio.mp4")
    index = read_index(path)
    small = decode_frames(path, index, [5], (16, 24)).pixels[0].astype(float)
    large = decode_frames(path, index, [5], (64, 96)).pixels[0].astype(float)
    means = large.reshape(16, 4, 24, 4, 3).mean(axis=(1, 3))
    assert np.abs(small - means).mean() < 6


def test_a_damaged_frame_is_named_with_its_time_and_the_rest_is_given():
    path = str(CASES / "B09_broken" / "bitflips.mp4")
    index = read_index(path)
    with pytest.raises(MediaError, match=r"bitflips.mp4 at 1.233 s: frame 37 cannot be decoded"):
        decode_frames(path, index, range(index.video.num_frames), (64, 96))
    good = decode_frames(path, index, [0, 8], (64, 96))
    assert [read_number(picture) for picture in good.pixels] == [0, 8] and not good.damaged
    repaired = decode_frames(path, index, range(38, 67), (64, 96))
    assert set(repaired.damaged) <= set(range(38, 67))


def test_frames_that_are_not_there_are_refused():
    path = str(CASES / "B09_broken" / "one_frame.mp4")
    with pytest.raises(ValueError, match=r"has frames 0..0, asked for 0..1"):
        decode_frames(path, read_index(path), [0, 1], (8, 8))


def test_no_frames_is_an_empty_result():
    path = str(CASES / "ref_4s_noaudio.mp4")
    assert decode_frames(path, read_index(path), [], (8, 8)).pixels.shape == (0, 8, 8, 3)


def test_a_file_that_changed_is_an_error_not_a_wrong_frame(folder, tmp_path):
    index = read_index(written(folder, "h264.mp4"))
    with pytest.raises(MediaError):
        decode_frames(str(CASES / "B09_broken" / "one_frame.mp4"), index, [40], (8, 8))


def test_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for path in [*(CASES / "B09_broken").iterdir()] * 5:
        with contextlib.suppress(MediaError):
            index = read_index(str(path), need=("video",))
            decode_frames(str(path), index, range(index.video.num_frames), (8, 8))
    for path in [*(CASES / "B45_images").iterdir()] * 5:
        with contextlib.suppress(MediaError):
            decode_image(str(path), (8, 8))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("orientation", [2, 3, 6, 8])
def test_images_are_upright(orientation):
    reference = decode_image(str(CASES / "B45_images" / "exif_1_reference.jpg"), (64, 96))
    path = str(CASES / "B45_images" / f"exif_{orientation}.jpg")
    assert image_size(path) == (64, 96)
    assert np.abs(decode_image(path, (64, 96)).astype(int) - reference).mean() < 6


@pytest.mark.parametrize("name", ["rgba_hidden_magenta.png", "palette_trns.png"])
def test_what_is_transparent_shows_the_background(name):
    path = str(CASES / "B45_images" / name)
    pixels = decode_image(path, image_size(path)).reshape(-1, 3)
    assert not (pixels == (255, 0, 255)).all(axis=1).any()
    assert (pixels == BACKGROUND).all(axis=1).any()


def test_every_mode_of_image_becomes_rgb():
    path = str(CASES / "B45_images" / "gray16_ramp.png")
    ramp = decode_image(path, image_size(path))
    profile = ramp.mean(axis=(0, 2))
    assert np.corrcoef(profile, np.arange(len(profile)))[0, 1] > 0.98 and profile.min() < 20 and profile.max() > 200
    for name in ("gray_alpha.png", "cmyk.jpg", "animated.gif"):
        assert decode_image(str(CASES / "B45_images" / name), (16, 24)).shape == (16, 24, 3)


@pytest.mark.parametrize("name", ["truncated.jpg", "not_an_image.jpg", "not_there.jpg"])
def test_a_broken_image_is_named(name):
    with pytest.raises(MediaError, match=name):
        decode_image(str(CASES / "B45_images" / name), (8, 8))
