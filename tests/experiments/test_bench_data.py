"""The bench of readers on a small clip: every reader gives what it promises, and what does not hold is told.

python -m pytest tests/experiments/test_bench_data.py
"""

from dataclasses import replace

import pytest

from experiments import bench, bench_data
from experiments.bench_data import DataBench, _faults
from experiments.bench_readers import READERS
from experiments.looped_clip import LoopedClip, looped_clip


@pytest.mark.parametrize(
    "readers",
    [
        ("mmcp", "PyAV, float batch", "mmcp, sound in parts"),
        pytest.param((*bench_data.PICTURES, *bench_data.SOUND, *bench_data.FEATURES), marks=pytest.mark.full),
    ],
    ids=["some", "all"],
)
def test_a_small_bench_runs_through(tmp_path, readers):
    quoted = ", ".join(f'"{reader}"' for reader in readers)
    outcome = bench.run("data", ["smoke=true", "with_loader=false", f"folder={tmp_path}", f"readers=[{quoted}]"])
    assert outcome.is_ok and [row["reader"] for row in outcome.record["readers"]] == list(readers)
    assert all("error" in row or row["seconds"] > 0 for row in outcome.record["readers"])
    assert outcome.record["time_ratio"] > 0 and outcome.record["memory_ratio"] > 1


@pytest.mark.full
def test_one_command_measures_readers_and_loader(tmp_path):
    overrides = ["smoke=true", f"folder={tmp_path}", f"loader.folder={tmp_path}", 'readers=["mmcp"]']
    found = bench.run("data", [*overrides, "loader.steps=2", "loader.loaded_steps=1"]).record
    assert found["readers"][0]["seconds"] > 0 and found["loader"]["alone"]["tokens_per_second"] > 0
    assert len(found["loader"]["training"]["waited_share"]) == 2


def test_what_does_not_hold_is_told():
    ratios = {"time_ratio": 9.0, "memory_ratio": 80.0, "mel_difference": 1e-5, "mb_per_hour": 4.0}
    assert list(_faults(DataBench(), ratios)) == [
        "time_ratio is 9.0, at least 10 is required",
        "mel_difference is 1e-05, at most 1e-06 is allowed",
    ]


def test_readers_of_pictures_see_the_same_frames(tmp_path):
    clip = LoopedClip(seconds=24, height=90, width=160, sample_rate=0)
    file = str(looped_clip(clip, tmp_path))
    ours = READERS["mmcp"](file, frames=24, size=(90, 160)).astype(float)
    native = READERS["PyAV, float batch"](file, frames=24) * 255
    assert abs(ours - native).mean() < 2
    bars = (ours[:, 5, :, 0] > 200).argmax(axis=1)  # the white bar moves on by the second
    assert (bars[1:] > bars[:-1]).all()


def test_a_clip_of_broken_rounds_is_refused():
    with pytest.raises(ValueError, match="are not whole frames of 1024 samples"):
        replace(LoopedClip(), round_s=7)
