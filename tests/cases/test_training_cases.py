"""Public bug reports on training (B58 to B60), each tried on ours through the real loop; sources in the docstrings.

Run: python -m pytest tests/cases/test_training_cases.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

import psutil
import pytest
import torch

import experiments.pipeline
import experiments.train_video_lm
from data_pipelines.decode_units import decode_units
from data_pipelines.prepare import prepare
from data_pipelines.workers import WorkerPool
from experiments.base import RunConfig
from experiments.train_video_lm import train, train_on
from mmcp.model.vlm import VideoLM
from mmcp.parallel.launch import RankError, launch
from mmcp.parallel.mesh import build_mesh
from mmcp.training import checkpoint
from mmcp.training.metrics import read_metrics
from mmcp.training.optim import OptimConfig
from tests.cases.stuck_decoding import decode_but_hang_on_sound
from tests.training.exact_cases import Layout, drawn, tiny_model, train_case
from tests.training.tiny_run import tiny_settings, train_here, train_in

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "cases"
LOST_OF_B48 = {"longword"}  # more letters than the budget has tokens


def test_b58_bfloat16_learns_as_float32_does(rank_pool):
    """meta-pytorch/torchtune#2254: 200 steps on one batch at a rate whose updates are lost in bfloat16 weights."""
    optim = OptimConfig(learning_rate=1e-5, total_steps=200, min_rate_ratio=1.0, weight_decay=0.0)
    steps = [drawn(0, [["tvtat", "t"]])] * 200
    fall, runs = {}, {}
    for name, compute in (("float32", None), ("bfloat16", torch.bfloat16)):
        layout = Layout(dtype=torch.float32, compute_dtype=compute)
        runs[name] = rank_pool.run(train_case, tiny_model(), layout, steps, optim, steps[0], ranks=1, timeout=250.0)[0]
        fall[name] = runs[name].scores[0] - runs[name].scores[1]
    assert fall["float32"] > 0 and fall["bfloat16"] > 0.8 * fall["float32"], fall
    start = train_case(tiny_model(), Layout(dtype=torch.float32), [], optim).parameters
    used = {name for name in start if not name.startswith("encoders.image")}
    moved = torch.cat([(runs["bfloat16"].parameters[name] != start[name]).flatten() for name in used])
    assert moved.float().mean() > 0.9
    assert {value.dtype for value in runs["bfloat16"].parameters.values()} == {torch.float32}


def kill_a_worker(settings: RunConfig) -> None:
    """Train, and kill a decode worker of rank 0 when step 2 is done."""
    pools: list[WorkerPool] = []

    class Noted(WorkerPool):
        def __init__(self, *args):
            super().__init__(*args)
            pools.append(self)

    @contextmanager
    def deadly(runner):
        def kill(_, loaded):
            if loaded.step == 2 and runner.mesh.rank == 0:
                os.kill(pools[0].pids()[0], signal.SIGKILL)

        yield kill

    experiments.train_video_lm.WorkerPool = Noted
    try:
        train_on(build_mesh(settings.mesh), settings, Path(settings.folder), resume=False, watch=deadly)
    finally:
        experiments.train_video_lm.WorkerPool = WorkerPool
    assert not any(psutil.pid_exists(pid) for pid in pools[0].pids()), "a worker outlived the run"


def test_b59_a_worker_that_is_killed_is_replaced(rank_pool, tiny_shards, tmp_path):
    """hpcaitech/Open-Sora#600 (a): the run goes on; at most the sample that was being decoded is lost, by name."""
    overrides = ("mesh.ulysses=2", "optim.total_steps=8", "data.workers=2", "train.max_lost_share=0.5")
    settings = tiny_settings(tiny_shards, tmp_path, *overrides)
    rank_pool.run(kill_a_worker, settings, ranks=2, timeout=200.0)
    assert len(read_metrics(tmp_path)) == 8
    counters = checkpoint.read_state(tmp_path / "checkpoints" / "step_8")["counters"]
    assert counters["lost"] <= 2
    assert all("sample '" in message and "SIGKILL" in message for message in counters["faults"])


def hang_in_a_worker(settings: RunConfig) -> str:
    experiments.pipeline.decode_units = decode_but_hang_on_sound
    try:
        train_here(settings)
    except ValueError as error:
        return str(error)
    finally:
        experiments.pipeline.decode_units = decode_units
    return ""


@pytest.mark.parametrize("mode", ["strict", pytest.param("patient", marks=pytest.mark.full)])
def test_b59_a_worker_that_never_answers_is_killed_and_its_sample_named(rank_pool, tiny_shards, tmp_path, mode):
    """hpcaitech/Open-Sora#600 (c): strict, the run ends on every rank; else the sample is void and the run goes on."""
    patience = "train.strict=true" if mode == "strict" else "train.max_lost_share=0.5"
    overrides = ("mesh.ulysses=2", "optim.total_steps=4", "optim.warmup_steps=1", "data.deadline_s=10.0", patience)
    settings = tiny_settings(tiny_shards, tmp_path, *overrides)
    messages = rank_pool.run(hang_in_a_worker, settings, ranks=2, timeout=200.0)
    if mode == "strict":
        assert all("sample 'sound': decode worker" in message for message in messages)
        assert all("no result within 10 s; it was killed" in message for message in messages)
        return
    assert messages == ["", ""] and len(read_metrics(tmp_path)) == 4
    counters = checkpoint.read_state(tmp_path / "checkpoints" / "step_4")["counters"]
    shards = settings.data.open_train()
    used = [shards.load(number)[0].id for number in shards.order(settings.seed).samples(0, 16)]
    assert counters["lost"] == used.count("sound") > 0, used
    assert all("sample 'sound'" in message for message in counters["faults"])


def awkward_rows() -> Iterator[dict]:
    """Rows of every text of B48, clips of B46 whose sound is missing or of another length, and short sounds of B47."""
    for line in (CASES / "B48_texts.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield {"id": row["id"], "messages": [say("user", row["text"]), say("assistant", "yes")]}
    for path in [*sorted(CASES.glob("B46_*.mp4")), *sorted((CASES / "B47_audio").iterdir())]:
        kind = "video" if path.suffix == ".mp4" else "audio"
        asked = say("user", [{"type": kind, kind: str(path)}, {"type": "text", "text": "what?"}])
        yield {"id": path.name, "messages": [asked, say("assistant", "that")]}


def say(role: str, content: object) -> dict:
    return {"role": role, "content": content}


def test_b46_b47_b48_awkward_samples_train_in_one_batch(rank_pool, tmp_path):
    """vllm-project/vllm#48420, qiuqiangkong/panns_inference#13, NVIDIA-NeMo/Speech#2598: finite, the rest named."""
    rows = list(awkward_rows())
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = prepare(manifest, tmp_path / "shards")
    rejected = [json.loads(line)["id"] for line in Path(report.rejects).read_text().splitlines()]
    assert rejected == ["samples_0.wav"]
    batch = f"data.documents_per_step={report.accepted}"
    overrides = (batch, "optim.total_steps=2", "optim.warmup_steps=1", "train.max_lost_share=0.5")
    settings = tiny_settings(tmp_path / "shards", tmp_path / "run", *overrides)
    lines = train_in(rank_pool, settings)
    assert all(isfinite(line["loss"]) for line in lines)
    counters = checkpoint.read_state(tmp_path / "run" / "checkpoints" / "step_2")["counters"]
    assert {message.split("'")[1] for message in counters["faults"]} == LOST_OF_B48


def fail_on_rank_one(settings: RunConfig, how: str) -> None:
    """Train as `mmcp train` does, with a fault on rank 1."""

    def fail(*_, **__):
        Path(settings.folder, "fault").touch()
        if how == "exit":
            os._exit(7)
        raise OSError(f"a fault of the {how}")

    if os.environ["RANK"] == "1":
        if how == "reader":
            experiments.train_video_lm.Pipeline.document = fail
        if how in ("forward", "exit"):
            VideoLM.forward = fail
        if how == "writer":
            checkpoint.HuggingFaceStorageWriter.write_data = fail
    train(settings, Path(settings.folder), resume=False)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reader", "rank 1: a fault of the reader"),
        ("forward", "rank 1: a fault of the forward"),
        ("writer", "rank 1: cannot write"),
        ("exit", "rank 1: ended without a word, exit code 7"),
    ],
)
def test_b60_when_one_rank_fails_all_end_soon_and_say_why(tiny_shards, tmp_path, how, message, ranks):
    """pytorch/pytorch#163546."""
    shards, folder = str(tiny_shards), str(tmp_path)
    command = [sys.executable, "-m", "tests.cases.test_training_cases", shards, folder, how, str(ranks)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = children_while_it_runs(process)
    ended = time.time()
    _, errors = process.communicate()
    assert process.returncode == 1, errors
    assert ended - (tmp_path / "fault").stat().st_mtime < 60
    first = next(line for line in errors.splitlines() if "error" in line.lower() or "rank" in line)
    assert first.startswith(f"error: {message}"), errors
    if how == "writer":
        assert "a fault of the writer" in first
        assert (tmp_path / "checkpoints" / "step_2.tmp").is_dir()
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    assert len(started) > ranks, "ranks and decode workers were seen"
    assert not running_after(started, seconds=10)


def running_after(pids: set[int], *, seconds: float) -> list[int]:
    """Return which processes still run after some seconds; the system needs a moment to end a dead rank's workers."""
    deadline = time.time() + seconds
    while True:
        left = [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]
        if not left or time.time() > deadline:
            return left
        time.sleep(0.1)


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children_while_it_runs(process: subprocess.Popen) -> set[int]:
    """Note every process that a run starts, until it ends."""
    seen: set[int] = set()
    while process.poll() is None:
        try:
            seen |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    return seen


def main(shards: str, folder: str, how: str, ranks: str) -> None:
    settings = tiny_settings(Path(shards), Path(folder), f"mesh.ulysses={ranks}", "train.checkpoint_every=2")
    try:
        launch(fail_on_rank_one, int(ranks), settings, how)
    except RankError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
