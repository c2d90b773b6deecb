"""Hundreds of files opened one after the other, in forked and in spawned processes: nothing grows, nothing stays open.

Also decode workers used from such processes: a hang and a crash cost their own jobs.

python -m pytest tests/data_pipelines/test_many_opens.py
"""

import contextlib
import gc
import multiprocessing
import os
from pathlib import Path

import psutil
import pytest

from data_pipelines.media import MediaError
from data_pipelines.workers import WorkerError, WorkerPool
from tests.data_pipelines import worker_jobs

CASES = Path(__file__).parents[1] / "data" / "cases"
FILES = [
    *sorted((CASES / "B09_broken").iterdir()),
    *sorted((CASES / "B45_images").iterdir()),
    *(
        CASES / name
        for name in ("ref_4s_30fps_aac.mp4", "B08_vfr.mkv", "B10_audio/aac_8k_mono.mp4", "B12_codecs/xvid.avi")
    ),
]
ROUND = len(FILES)


def open_again_and_again(rounds: int, answers: multiprocessing.Queue) -> None:
    """Tell resident bytes and open descriptors after each round."""
    found = []
    for _ in range(rounds):
        for path in FILES:
            with contextlib.suppress(MediaError):
                worker_jobs.use_file(str(path))
        gc.collect()
        found.append((psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd"))))
    answers.put(found)


def hang_and_crash(answers: multiprocessing.Queue) -> None:
    """Give a pool a hanging job, a crashing one and good ones; tell what came of each."""
    pool = WorkerPool(2, deadline_s=1.0)
    try:
        bad = [pool.submit(job) for job in (worker_jobs.hang_in_native_code, worker_jobs.crash_in_native_code)]
        good = [pool.submit(worker_jobs.squares, count) for count in range(8)]
        failures = [future.exception(timeout=30) for future in bad]
        squares = [future.result(timeout=30)[1][0].tolist() for future in good]
        answers.put(([isinstance(failure, WorkerError) and str(failure) for failure in failures], squares, pool.pids()))
    finally:
        pool.close()


def run_in(method: str, function, *args):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=function, args=(*args, answers))
    process.start()
    try:
        return answers.get(timeout=200)
    finally:
        process.join(20)
        process.kill()


@pytest.mark.parametrize(
    ("method", "opens"),
    [("fork", 100), *(pytest.param(method, 300, marks=pytest.mark.full) for method in ("fork", "spawn"))],
)
def test_nothing_grows_and_nothing_stays_open(method, opens):
    found = run_in(method, open_again_and_again, -(-opens // ROUND) + 2)
    memory, descriptors = zip(*found, strict=True)
    assert len(set(descriptors[1:])) == 1, descriptors
    assert memory[-1] - memory[1] < memory[1] / 10, memory


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_hang_and_a_crash_cost_their_own_jobs(method):
    (hung, crashed), squares, pids = run_in(method, hang_and_crash)
    assert "no result within 1 s; it was killed" in hung and "SIGSEGV" in crashed
    assert squares == [[number**2 for number in range(count)] for count in range(8)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
