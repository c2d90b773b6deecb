"""Runs killed with SIGKILL, ranks and workers at once, against one that was not: same steps, same losses, bit for bit.

Run: pytest tests/training/test_killed_runs.py
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import experiments.pipeline
from mmcp.training import checkpoint
from mmcp.training.metrics import read_metrics
from tests.cases.stuck_decoding import decode_but_die_of_sound
from tests.training.tiny_run import CONFIG, tiny_settings, train_here, train_in

ROOT = Path(__file__).parents[2]
STEPS = 12


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_kills_lose_and_repeat_nothing(tiny_shards, tmp_path, rank_pool):
    overrides = ("mesh.ulysses=2", f"optim.total_steps={STEPS}", "train.checkpoint_every=1", "data.prefetch=3")
    whole = train_in(rank_pool, tiny_settings(tiny_shards, tmp_path / "whole", *overrides))
    folder, rng, kills, tries = tmp_path / "killed", random.Random(0), 0, 0
    while len(read_metrics(folder) if (folder / "metrics.jsonl").exists() else []) < STEPS:
        tries += 1
        assert tries < 15, "the run does not come to its end"
        resume = ["--resume"] if checkpoint.latest(folder / "checkpoints") else []
        if not resume and folder.exists():
            folder.rename(tmp_path / f"nothing{tries}")  # killed before there was anything to resume
        settings = (f"folder={folder}", f"data.train={tiny_shards}", f"data.workers={rng.randint(1, 2)}")
        command = [sys.executable, "-m", "mmcp.cli", "train", str(CONFIG), *settings, *overrides, *resume]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
        if kills < 5:
            kills += kill_between_steps(process, folder, rng)
        process.wait(timeout=200)
    assert kills == 5
    found = read_metrics(folder)
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["loss"] for line in found] == [line["loss"] for line in whole]
    assert [line["plan_digest"] for line in found] == [line["plan_digest"] for line in whole]
    states = [checkpoint.read_state(run / "checkpoints" / f"step_{STEPS}") for run in (folder, tmp_path / "whole")]
    assert states[0]["order"] == states[1]["order"] and states[0]["counters"] == states[1]["counters"]


def kill_between_steps(process: subprocess.Popen, folder: Path, rng: random.Random) -> bool:
    """Kill all processes of a run a moment after its next step; return whether it was still going."""
    metrics = folder / "metrics.jsonl"
    before, deadline = metrics.stat().st_size if metrics.exists() else 0, time.monotonic() + 150
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > before:
            time.sleep(rng.uniform(0, 0.3))
            break
        time.sleep(0.01)
    is_running = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    return is_running


def train_with_a_deadly_sound(settings) -> str:
    experiments.pipeline.decode_units, kept = decode_but_die_of_sound, experiments.pipeline.decode_units
    try:
        train_here(settings)
    except ValueError as error:
        return str(error)
    finally:
        experiments.pipeline.decode_units = kept
    return "ran through"


def test_a_dead_worker_ends_the_run_on_all_ranks_where_asked(tiny_shards, tmp_path, rank_pool):
    overrides = ("mesh.ulysses=2", "optim.total_steps=6", "data.dead_worker=stop", "train.max_lost_share=1.0")
    settings = tiny_settings(tiny_shards, tmp_path, *overrides)
    began = time.monotonic()
    messages = rank_pool.run(train_with_a_deadly_sound, settings, ranks=2, timeout=60.0)
    assert time.monotonic() - began < 60
    for message in messages:
        assert "data.dead_worker is stop" in message and "sample 'sound': decode worker" in message, message
