"""Whole runs through files, workers and checkpoints: one loss curve for every layout, stops that leave no trace.

Run: python -m pytest tests/training/test_runs.py
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmcp.training import checkpoint
from mmcp.training.metrics import read_metrics
from tests.training.tiny_run import CONFIG, checkpoint_tensors, tiny_settings, train_here, train_in

STEPS, HALF = 20, 10
ROOT = Path(__file__).parents[2]
CURVE = 1e-8  # relative error of a loss after 20 steps in float64: rounding, grown by training


@pytest.fixture(scope="module")
def two_ranks(tiny_shards, tmp_path_factory, rank_pool):
    """The run folder of 20 steps on two context-parallel ranks, with the checkpoint of step 10, and its metrics."""
    folder = tmp_path_factory.mktemp("two ranks")
    held_out = (f"data.held_out={tiny_shards}", "data.held_out_samples=5", f"train.evaluate_every={HALF}")
    saves = (f"train.checkpoint_every={HALF}", "train.keep_last=-1")
    settings = tiny_settings(tiny_shards, folder, "mesh.ulysses=2", *saves, *held_out)
    return folder, train_in(rank_pool, settings)


def curve(metrics: list[dict]) -> list[float]:
    assert [line["step"] for line in metrics] == list(range(STEPS))
    return [line["loss"] for line in metrics]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="one rank"),
        pytest.param(("mesh.dp_shard=2",), id="two data-parallel groups"),
        pytest.param(("data.row_tokens=512",), id="one rank, more micro-batches"),
        pytest.param(
            ("mesh.dp_replicate=2", "mesh.ulysses=2", "data.row_tokens=512"), id="2 x 2", marks=pytest.mark.full
        ),
        pytest.param(("mesh.ulysses=3", "sharding.strategy=contiguous"), id="three ranks", marks=pytest.mark.full),
    ],
)
def test_every_layout_trains_alike(two_ranks, tiny_shards, tmp_path, rank_pool, layout):
    _, expected = two_ranks
    held_out = (f"data.held_out={tiny_shards}", "data.held_out_samples=5", f"train.evaluate_every={HALF}")
    found = train_in(rank_pool, tiny_settings(tiny_shards, tmp_path, *layout, *held_out))
    for name in ("loss", "grad_norm", "held_out_loss"):
        values = [(line[name], other[name]) for line, other in zip(expected, found, strict=True) if name in line]
        assert values
        for value, other in values:
            assert other == pytest.approx(value, rel=CURVE), name
    for name in ("label_tokens", "tokens", "lr"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    held_out = [line["held_out_loss"] for line in found if "held_out_loss" in line]
    assert held_out[1] < held_out[0] < curve(found)[0], "it learns"


def test_what_only_fetches_changes_no_bit(two_ranks, tiny_shards, tmp_path, rank_pool):
    """Again with the same seed, but two decode workers a rank, three steps ahead."""
    folder, expected = two_ranks
    overrides = ("mesh.ulysses=2", "data.workers=2", "data.prefetch=3")
    found = train_in(rank_pool, tiny_settings(tiny_shards, tmp_path, *overrides))
    assert curve(found) == curve(expected)
    assert_same_bits(checkpoint_tensors(tmp_path, STEPS), checkpoint_tensors(folder, STEPS))


def assert_same_bits(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def halfway(folder: Path, target: Path) -> Path:
    """Copy a run as it was when the checkpoint of step 10 was the latest."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "checkpoints" / f"step_{STEPS}")
    return target


def test_a_resume_on_the_same_layout_goes_on_bit_for_bit(two_ranks, tiny_shards, tmp_path, rank_pool):
    folder, expected = two_ranks
    copy = halfway(folder, tmp_path / "copy")
    found = train_in(rank_pool, tiny_settings(tiny_shards, copy, "mesh.ulysses=2"), resume=True)
    assert curve(found) == curve(expected)
    assert [line["lr"] for line in found] == [line["lr"] for line in expected]
    assert_same_bits(checkpoint_tensors(copy, STEPS), checkpoint_tensors(folder, STEPS))
    states = [checkpoint.read_state(run / "checkpoints" / f"step_{STEPS}") for run in (copy, folder)]
    assert states[0]["order"] == states[1]["order"] and states[0]["counters"] == states[1]["counters"]


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.full), 4])
def test_a_resume_on_other_ranks_goes_on_alike(two_ranks, tiny_shards, tmp_path, rank_pool, ranks):
    folder, expected = two_ranks
    copy = halfway(folder, tmp_path / "copy")
    found = train_in(rank_pool, tiny_settings(tiny_shards, copy, f"mesh.ulysses={ranks}"), resume=True)
    assert curve(found) == pytest.approx(curve(expected), rel=CURVE)
    assert curve(found)[:HALF] == curve(expected)[:HALF]


def test_a_resume_with_another_schedule_is_refused_by_name(two_ranks, tiny_shards, tmp_path):
    copy = halfway(two_ranks[0], tmp_path / "copy")
    settings = tiny_settings(tiny_shards, copy, "optim.total_steps=40", "data.documents_per_step=5")
    with pytest.raises(ValueError, match=r"documents_per_step was 4, is 5; optim\.total_steps was 20, is 40"):
        train_here(settings, resume=True)


def test_a_signal_saves_and_leaves_and_a_resume_goes_on_bit_for_bit(two_ranks, tiny_shards, tmp_path, rank_pool):
    _, expected = two_ranks
    folder = tmp_path / "stopped"
    settings = (f"folder={folder}", f"data.train={tiny_shards}", "mesh.ulysses=2")
    command = [sys.executable, "-m", "mmcp.cli", "train", str(CONFIG), *settings]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(folder, 5, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    stopped = len(read_metrics(folder))
    assert 5 <= stopped < STEPS
    assert checkpoint.latest(folder / "checkpoints") == folder / "checkpoints" / f"step_{stopped}"
    found = train_in(rank_pool, tiny_settings(tiny_shards, folder, "mesh.ulysses=2"), resume=True)
    assert curve(found) == curve(expected)
    assert_same_bits(checkpoint_tensors(folder, STEPS), checkpoint_tensors(two_ranks[0], STEPS))


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while len(read_metrics(folder)) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.01)
