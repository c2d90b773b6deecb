"""The hour: its smoke run is compared with its own requirements, and these with figures that break them one by one.

The long clip is decoded again and its colours compared with the answer. Run: pytest tests/experiments/test_hour_clip.py
"""

import json

import numpy as np
import pytest

from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from data_pipelines.media import MediaFile
from data_pipelines.shards import ShardSet
from experiments.hour_clip import HourConfig, Measured, check_losses, check_run, main, one_rank_records
from experiments.long_clip import PALETTE, LongClip, prepared_clip

CLIP = LongClip(seconds=24, height=36, width=64, group_of_pictures=20, sample_rate=8000, every_s=6)


def line(rank: int) -> dict:
    """What a rank reports that does its half of 100 groups of two frames, one frame in ten, and 200 windows."""
    return {
        "tokens": 40000,
        "frames_decoded": 1000,
        "units_encoded": 150,
        "pss_mb": 900.0,
        "num_units": {"audio": 200, "video": 100},
        "units": {"audio": [[100 * rank, 100 * rank + 100]], "video": [[50 * rank, 50 * rank + 50]]},
        "frames": [1000 * rank, 1000 * rank + 990],
    }


def measured(change) -> Measured:
    """Two ranks, one step, after `change` has altered their lines and the imbalance."""
    lines, imbalance = [line(0), line(1)], {"linear": 1.0, "encode": 1.01}
    change(lines, imbalance)
    return Measured([[each] for each in lines], imbalance)


def test_what_is_as_required_has_no_fault():
    assert not list(check_run(HourConfig(), measured(lambda lines, imbalance: None)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines, imbalance: lines[0]["units"].update(video=[[0, 51]]), "video units"),
        (lambda lines, imbalance: lines[1]["units"].update(audio=[[101, 200]]), "audio units"),
        (lambda lines, imbalance: lines[1]["units"].update(video=[[50, 99]]), "video units"),
        (lambda lines, imbalance: lines[0]["units"].update(video=[[0, 25], [25, 50]]), "video units"),
        (lambda lines, imbalance: lines[0].update(units_encoded=151), "encoded"),
        (lambda lines, imbalance: lines[0].update(frames_decoded=1.1 * 991 + 51), "rank 0 decoded"),
        (lambda lines, imbalance: lines[1].update(frames_decoded=0), "rank 1 decoded"),
        (lambda lines, imbalance: lines[1].update(pss_mb=3073.0), "rank 1 and its workers"),
        (lambda lines, imbalance: [each.update(tokens=32767) for each in lines], "32767 tokens"),
        (lambda lines, imbalance: imbalance.update(linear=1.051), "'linear'"),
        (lambda lines, imbalance: imbalance.update(encode=1.051), "'encode'"),
    ],
)
def test_each_requirement_is_checked(change, fault):
    found = list(check_run(HourConfig(), measured(change)))
    assert any(fault in text for text in found), found


def test_a_cut_allows_one_group_of_pictures():
    def change(lines, imbalance):
        lines[0].update(frames_decoded=int(1.1 * 991) + 50)

    assert not list(check_run(HourConfig(), measured(change)))


@pytest.mark.parametrize(("loss", "is_fault"), [(2.0, False), (2.00001, False), (2.00003, True), (float("nan"), True)])
def test_another_loss_on_one_rank_is_a_fault(loss, is_fault):
    runs = [Measured([[{"loss": value, "pss_mb": 1.0, "seconds": {}}]], {}) for value in (2.0, loss)]
    assert bool(check_losses(HourConfig(), one_rank_records("mix", *runs))) == is_fault


def test_the_clip_shows_what_the_answer_says(tmp_path):
    shards = ShardSet.open(str(prepared_clip(CLIP, tmp_path)))
    sample, _ = shards.load(0)
    answer = sample.turns[-1][1][0].text
    file = MediaFile(str(tmp_path / CLIP.name / "clip.mp4"))
    index = read_index(file, need=("video", "audio"))
    assert index.video.num_frames == 240 and float(index.duration) == pytest.approx(24, abs=0.2)
    seen = []
    for second in (3, 9, 15, 21):
        pixel = decode_frames(file, index, [second * 10 + 5], (16, 16)).pixels[0, 8, 8].astype(float)
        seen.append(min(PALETTE, key=lambda name: abs(rgb(*PALETTE[name]) - pixel).sum()))
    assert " ".join(seen) == answer


def rgb(y: int, u: int, v: int) -> np.ndarray:
    """BT.601, video range, to RGB."""
    scaled, blue, red = 1.164 * (y - 16), u - 128, v - 128
    return np.clip([scaled + 1.596 * red, scaled - 0.392 * blue - 0.813 * red, scaled + 2.017 * blue], 0, 255)


def test_a_prepared_clip_is_not_written_again(tmp_path):
    first = prepared_clip(CLIP, tmp_path)
    written = (first / "index.json").stat().st_mtime_ns
    assert prepared_clip(CLIP, tmp_path) == first
    assert (first / "index.json").stat().st_mtime_ns == written


def test_smoke(tmp_path, capsys):
    report = tmp_path / "hour.json"
    code = main(["smoke=true", f"folder={tmp_path}", "--json", str(report)])
    assert code == 0, capsys.readouterr().out
    record = json.loads(report.read_text())
    assert record["ranks"] == 2 and record["tokens"] > 2048
    assert [(step["variant"], step["step"]) for step in record["steps"]] == [
        (variant, step) for variant in ("softmax", "mix") for step in range(3)
    ]
    for step in record["steps"]:
        assert sum(step["units_encoded"]) == 360 and sum(step["rows_routed"]) > 0
        assert all(len(step[name]) == 2 for name in ("seconds_by_rank", "frames_decoded", "pss_mb"))
    assert all(entry["error"] < 1e-5 for entry in record["one_rank"])
