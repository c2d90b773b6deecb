"""Drawn clips of many codecs, containers, frame patterns and starts: the frame for a time against a full decode.

Frames carry their number in the picture. Truth is PyAV's decode of the whole file from its start: which pictures there
are, in which order, at which pts; a player shows the last one whose time has come.

python -m pytest tests/data_pipelines/test_drawn_clips.py
"""

import random
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from tests.data_pipelines.clips import read_number, write_clip

QUICK = 12
EVERYWHERE = ("mp4", "mov", "mkv", "ts")
CODECS = {
    "libx264": (("yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "gray"), (*EVERYWHERE, "avi", "flv")),
    "libx265": (("yuv420p", "yuv420p10le", "gray"), EVERYWHERE),
    "libvpx": (("yuv420p",), ("webm", "mkv")),
    "libvpx-vp9": (("yuv420p", "yuv444p", "yuva420p", "yuv420p10le"), ("webm", "mkv", "mp4")),
    "libsvtav1": (("yuv420p", "yuv420p10le"), ("mkv", "mp4", "webm")),
    "mpeg4": (("yuv420p",), ("mp4", "avi", "mkv")),
    "mpeg2video": (("yuv420p", "yuv422p"), ("ts", "mpg", "mkv")),
    "mjpeg": (("yuvj420p", "yuvj444p"), ("avi", "mov", "mkv")),
    "ffv1": (("gray", "gray16le", "yuv444p10le", "bgra"), ("mkv", "avi")),
}


def drawn(draw: random.Random) -> tuple[str, dict]:
    """Draw a name and the settings of `write_clip`."""
    codec = draw.choice(sorted(CODECS))
    pixels, containers = CODECS[codec]
    kind, group = draw.choice(containers), draw.choice([1, 4, 9, 24, 100])
    settings = {"codec": codec, "pixels": draw.choice(pixels), "frames": draw.randint(1, 70)}
    settings["rate"] = 25 if codec == "mpeg2video" else draw.choice([5, 10, 24, 30])
    options = {"g": str(group)}
    if codec == "libx264":
        options = {"x264-params": f"keyint={group}:bframes={draw.randint(0, 4)}:open-gop={draw.randint(0, 1)}"}
        options["x264-params"] += f":b-pyramid={draw.randint(0, 2)}:intra-refresh={int(draw.random() < 0.1)}"
        options["profile"] = "high444" if settings["pixels"] not in ("yuv420p", "yuv420p10le") else "high10"
    elif codec == "libx265":
        options = {"x265-params": f"log-level=none:keyint={max(2, group)}:bframes={draw.randint(0, 4)}"}
        options["x265-params"] += f":open-gop={draw.randint(0, 1)}:radl={draw.choice([0, 2])}"
    elif codec in ("mpeg4", "mpeg2video"):
        options["bf"] = str(draw.randint(0, 2))
    elif codec.startswith("libvpx"):
        options |= {"auto-alt-ref": str(int(settings["pixels"] != "yuva420p")), "lag-in-frames": "12", "cpu-used": "8"}
    elif codec == "libsvtav1":
        options["preset"] = "12"
    even = codec in ("libsvtav1", "mpeg2video") or settings["pixels"] in ("yuv420p", "yuv422p", "yuv420p10le")
    height, width = draw.randint(40, 90), draw.randint(72, 140)
    settings["size"] = (height // 2 * 2, width // 2 * 2) if even else (height, width)
    if codec not in ("mpeg2video", "ffv1") and kind in ("mp4", "mov", "mkv", "webm", "ts") and draw.random() < 0.4:
        gaps = [draw.choice([100, 100, 33, 217, 1000]) for _ in range(settings["frames"])]
        settings["pts"] = np.cumsum([0, *gaps[1:]]).tolist()
    if kind in ("mp4", "mov", "mkv", "ts") and draw.random() < 0.4:
        settings["start"] = Fraction(draw.choice([1, 7, 50]), 2)
    if kind in ("mp4", "mkv", "ts") and draw.random() < 0.3:
        settings["sound"] = "aac"
    return f"clip.{kind}", settings | {"options": options}


def written(path: Path, settings: dict, draw: random.Random) -> None:
    """Write a drawn clip, at times with a header that lies about its length."""
    write_clip(str(path), **settings)
    data = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        lie_about_the_length(data, draw)
        path.write_bytes(data)


def lie_about_the_length(data: bytearray, draw: random.Random) -> None:
    """Change the durations of an mp4's headers, or the frame counts of an AVI's; other files stay."""
    fields = [(b"mvhd", 20), (b"tkhd", 24)] if b"moov" in data else [(b"avih", 24)] if data[8:11] == b"AVI" else []
    for name, offset in fields:
        at = data.find(name)
        struct.pack_into(">I" if name != b"avih" else "<I", data, at + offset, draw.choice([0, 1, 999, 10**9]))


def full_decode(path: Path) -> list[tuple[int | None, int]]:
    """(pts, number in the picture) of every picture, in the order in which the decoder puts them out."""
    with av.open(str(path)) as container:
        return [(frame.pts, read_number(frame.to_ndarray(format="rgb24"))) for frame in container.decode(video=0)]


def check_times(index: ClipIndex, truth: list[tuple[int | None, int]], draw: random.Random) -> None:
    """The frame for a time is the last one whose pts has come, exactly at its pts and a moment before the next."""
    times = [pts * index.video.time_base - index.origin for pts, _ in truth]
    assert [index.frame_time(frame) for frame in range(index.video.num_frames)] == times
    moment = Fraction(1, 10**9)
    for frame, time in enumerate(times):
        assert index.frame_at(time) == frame and index.frame_at(time - moment) == max(0, frame - 1)
    for _ in range(10):
        time = Fraction(draw.uniform(float(times[0]) - 1, float(times[-1]) + 1))
        assert index.frame_at(time) == max([0, *(frame for frame, shown in enumerate(times) if shown <= time)])


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(QUICK, 200))]
)
def test_the_frame_for_a_time_is_the_one_a_full_decode_shows(tmp_path, seed):
    draw = random.Random(seed)
    name, settings = drawn(draw)
    path = tmp_path / name
    try:
        written(path, settings, draw)
        truth = full_decode(path)
    except (av.error.FFmpegError, ValueError) as error:
        pytest.skip(f"this FFmpeg cannot write {settings['codec']} {settings['pixels']} to {name}: {error}")
    index = read_index(str(path), need=("video",))
    video, size = index.video, settings["size"]
    whole = decode_frames(str(path), index, range(video.num_frames), size)
    assert [read_number(picture) for picture in whole.pixels] == [number for _, number in truth], settings
    if video.seekable:
        check_times(index, truth, draw)
    for _ in range(5):
        asked = draw.choices(range(video.num_frames), k=draw.randint(1, 6))
        np.testing.assert_array_equal(decode_frames(str(path), index, asked, size).pixels, whole.pixels[asked])


TURNS = [
    (1, 0, 0, 1),
    (0, 1, -1, 0),
    (-1, 0, 0, -1),
    (0, -1, 1, 0),
    (-1, 0, 0, 1),
    (1, 0, 0, -1),
    (0, 1, 1, 0),
    (0, -1, -1, 0),
]


@pytest.mark.parametrize("turn", TURNS, ids=str)
def test_the_display_matrix_is_applied(tmp_path, turn):
    """Each of the eight matrices against the pixel mapping that it means: (x, y) goes to (a x + c y, b x + d y)."""
    path = tmp_path / "a.mp4"
    write_clip(str(path), frames=2)
    (stored,) = decode_frames(str(path), read_index(str(path)), [1], (64, 96)).pixels
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd") + 44
    a, b, c, d = turn
    struct.pack_into(">9i", data, at, a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    index = read_index(str(path))
    height, width = index.video.display
    (shown,) = decode_frames(str(path), index, [1], (height, width)).pixels
    y, x = np.mgrid[:64, :96]
    column, row = a * x + c * y, b * x + d * y
    expected = np.empty((height, width, 3), dtype=np.uint8)
    expected[row - row.min(), column - column.min()] = stored
    np.testing.assert_array_equal(shown, expected)
