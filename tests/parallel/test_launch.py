"""What the launcher returns, says and leaves behind when ranks return, raise, exit, die or are asked to stop.

Each failing run is a process of its own, so that its exit code, output and left-over processes can be seen.
Run: python -m pytest tests/parallel/test_launch.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from mmcp.parallel.collectives import agree, all_reduce
from mmcp.parallel.launch import RankError, launch
from mmcp.parallel.stop import StopRequest
from tests.parallel.cases import whole_group

RANKS = 2


def sum_of_ranks(start: int) -> tuple[int, int, str]:
    """Return the sum over ranks and the threads this rank has, as torch and its workers see them."""
    dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fail(how: str, folder: str) -> None:
    """Start a worker that sleeps, note both pids, then fail on rank 1 while the others wait in a collective."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worker = subprocess.Popen(["sleep", "1000"])
    Path(folder, f"{rank}.pids").write_text(f"{os.getpid()} {worker.pid}")
    dist.barrier()
    if rank == 1:
        if how == "raise":
            raise ValueError("clip_7.mp4 at 3.2 s has no picture")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "launcher dies":
            os.kill(os.getppid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    time.sleep(1000)


def stop_when_asked(folder: str, unwilling: str) -> str:
    """Step until asked to stop, agreeing on the step; an unwilling rank never looks."""
    dist.init_process_group("gloo")
    group = whole_group()
    with StopRequest() as stop:
        for step in range(10_000):
            Path(folder, f"{dist.get_rank()}.pids").write_text(f"{os.getpid()}")
            time.sleep(0.01)
            if not unwilling and all_reduce(torch.tensor(int(stop.is_set())), "max", group=group, name="stop"):
                Path(folder, f"{dist.get_rank()}.stopped").write_text(str(step))
                dist.destroy_process_group()
                return f"stopped at step {step}"
    raise AssertionError("never asked to stop")


def disagree() -> None:
    dist.init_process_group("gloo")
    agree(None, group=whole_group())
    agree(ValueError("disk full: 3 bytes left") if dist.get_rank() == 1 else None, group=whole_group())


@pytest.fixture
def run_in_child(tmp_path):
    """Return `start(function, *args)`: launch a function of this file from a new process, as the CLI would."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.parallel.test_launch", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    for pid in pids(tmp_path):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def wait_until_gone(folder: Path) -> None:
    """Wait until no rank and no worker is left; a killed process is reaped a moment later."""
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids(folder) if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


def wait_for_ranks(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.pids"))) < RANKS:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def test_rank_0_returns_its_value_and_the_cores_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(sum_of_ranks, 2, 10) == (21, share, str(share))
    assert "OMP_NUM_THREADS" not in os.environ and "RANK" not in os.environ, (
        "the launcher's own environment is as before"
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "error: rank 1: clip_7.mp4 at 3.2 s has no picture\n"),
        ("exit", "error: rank 1: ended without a word, exit code 3\n"),
        ("kill", "error: rank 1: was ended by SIGKILL; the machine may have run out of memory\n"),
    ],
)
def test_the_first_failing_rank_is_named_once_and_nothing_is_left(run_in_child, tmp_path, how, message):
    process = run_in_child("fail", how, str(tmp_path))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and output == ""
    assert [line + "\n" for line in errors.splitlines() if "error: " in line] == [message], errors
    assert "Traceback" not in errors
    assert len(pids(tmp_path)) == 2 * RANKS
    wait_until_gone(tmp_path)


def test_when_the_launcher_is_killed_its_ranks_and_their_workers_go_too(run_in_child, tmp_path):
    process = run_in_child("fail", "launcher dies", str(tmp_path))
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(pids(tmp_path)) == 2 * RANKS
    wait_until_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_lets_every_rank_stop_at_the_same_step(run_in_child, tmp_path, number):
    process = run_in_child("stop_when_asked", str(tmp_path), "")
    wait_for_ranks(tmp_path)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    steps = {path.read_text() for path in tmp_path.glob("*.stopped")}
    assert len(steps) == 1 and output == f"stopped at step {steps.pop()}\n"
    wait_until_gone(tmp_path)


def test_a_second_signal_kills(run_in_child, tmp_path):
    process = run_in_child("stop_when_asked", str(tmp_path), "unwilling")
    wait_for_ranks(tmp_path)
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None, "the first signal is only a request"
    process.terminate()
    assert process.wait(timeout=30) == 143
    wait_until_gone(tmp_path)


def test_a_fault_of_one_rank_is_raised_on_all_and_named_by_its_own():
    with pytest.raises(RankError, match="disk full") as caught:
        launch(disagree, RANKS)
    assert str(caught.value) == "rank 1: disk full: 3 bytes left"
    assert "in disagree" in caught.value.__notes__[0], "the traceback is kept for debugging"


def test_under_torchrun_the_function_is_called_here(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch(os.getpid, 2) == os.getpid()
    with pytest.raises(ValueError, match="ranks=3, but torchrun started 2"):
        launch(os.getpid, 3)


def test_a_run_needs_a_rank():
    with pytest.raises(ValueError, match="ranks=0"):
        launch(os.getpid, 0)


def main(function: str, *arguments: str) -> None:
    try:
        print(launch(globals()[function], RANKS, *arguments))
    except RankError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
