"""Change told from packet sizes against the change that was painted into the clips, in several codecs.

python -m pytest tests/data_pipelines/test_scene_change.py
"""

from fractions import Fraction

import av
import numpy as np
import pytest

from data_pipelines import scene_change
from data_pipelines.container import ClipIndex, VideoTrack
from data_pipelines.demux import read_index
from data_pipelines.scene_change import EVEN, change_scores, frame_changes

RATE, SECONDS = 10, 24
FIXED = {"qmin": "4", "qmax": "4"}  # or rate control spreads a cut over seconds
CODECS = {
    "h264_cuts.mp4": ("libx264", {}),
    "h264_fixed.mp4": ("libx264", {"g": "20", "sc_threshold": "0"}),
    "h264_open.ts": ("libx264", {"x264-params": "open-gop=1:keyint=30:bframes=3"}),
    "hevc.mkv": ("libx265", {"x265-params": "log-level=none:keyint=30"}),
    "vp9.webm": ("libvpx-vp9", {"g": "30"}),
    "mpeg4.avi": ("mpeg4", {"g": "12", "bf": "2", **FIXED}),
    "mjpeg.avi": ("mjpeg", FIXED),
}


def write_scenes(path: str, codec: str, options: dict[str, str], cuts: list[int], moving: list[int]) -> None:
    """Write a clip of still scenes, a new one at each second of `cuts`; during the seconds of `moving` it moves."""
    draw = np.random.default_rng(0)
    with av.open(path, "w") as out:
        stream = out.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height = 96, 64
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        scenes = shift = 0
        for number in range(RATE * SECONDS):
            if number == 0 or (number % RATE == RATE // 2 and number // RATE in cuts):
                scenes += 1
                scene = draw.integers(60, 196, (8, 12, 3)).repeat(8, axis=0).repeat(8, axis=1)
                scene += draw.integers(-30, 30, scene.shape) * (scenes % 2)  # equal ones would be equally large
            shift += 3 * (number // RATE in moving)
            picture = np.roll(scene, shift, axis=1).astype(np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))


@pytest.mark.parametrize("name", CODECS)
def test_seconds_with_a_cut_or_motion_score_higher(tmp_path, name):
    codec, options = CODECS[name]
    cuts, moving = [5, 9, 13], [17, 18] if codec != "mjpeg" else []  # a shifted picture is as large a JPEG
    write_scenes(str(tmp_path / name), codec, options, cuts, moving)
    index = read_index(str(tmp_path / name))
    begin = index.frame_time(0)
    scores = change_scores(index, [begin + second for second in range(SECONDS + 1)])
    changing = [*cuts, *moving]
    still = [int(scores[second]) for second in range(SECONDS) if second not in changing]
    lowest = min(int(scores[second]) for second in changing)
    assert lowest > 2 * np.median(still), scores.tolist()
    assert sum(score >= lowest for score in still) <= 2, scores.tolist()  # encoders refine what they coded in a hurry


def track(sizes: list[int], keys: list[int]) -> VideoTrack:
    number = np.arange(len(sizes))
    return VideoTrack(
        stream=0,
        codec="h264",
        time_base=Fraction(1, 10),
        pts=number,
        duration=1,
        packet=number,
        sizes=np.array(sizes),
        entry_packets=np.array(keys),
        entry_frames=np.array(keys),
        counted=False,
        seekable=True,
        coded=(8, 8),
        aspect=Fraction(1),
        turn=(False, False, False),
    )


def clip(video: VideoTrack | None) -> ClipIndex:
    return ClipIndex(format="x", size=0, origin=Fraction(1, 4), streams=(), video=video, audio=None, notes=())


def test_key_frames_that_are_due_count_by_their_difference_and_early_ones_in_full():
    sizes = [900, 10, 10, 10, 10, 910, 10, 12, 14, 10, 600, 10, 700, 10, 10]
    changes = frame_changes(track(sizes, [0, 5, 10, 12]))
    assert changes.tolist() == [0, 10, 10, 10, 10, 12, 10, 12, 14, 10, 264, 10, 700, 10, 10]


def test_scores_are_of_exact_times():
    index = clip(track([500, 0, 0, 80, 0, 0, 0, 20, 0, 0], [0]))
    at = index.frame_time(3)  # 0.3 s - 0.25 s
    assert change_scores(index, [at - 1, at, at + Fraction(1, 10)]).tolist() == [0, 8 * EVEN]
    assert change_scores(index, [at + Fraction(1, 10**9), at + 1]).tolist() == [EVEN * 20 // 100]
    assert change_scores(index, [index.frame_time(0), index.video_end]).tolist() == [EVEN]


def test_a_still_picture_changes_evenly():
    assert change_scores(clip(track([500], [0])), [Fraction(0), Fraction(1), Fraction(3)]).tolist() == [EVEN, EVEN]


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="without pictures"):
        change_scores(clip(None), [Fraction(0), Fraction(1)])
    with pytest.raises(ValueError, match="edges must increase, got 1, 1"):
        change_scores(clip(track([5], [0])), [Fraction(1), Fraction(1)])


def test_nothing_is_decoded():
    assert not {"av", "decode_frames"} & set(vars(scene_change))
