"""Decode workers and the loader: results against direct calls, and what is left after raising, hanging, crashing.

python -m pytest tests/data_pipelines/test_workers.py
"""

import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_pipelines.loader import Job, Loader
from data_pipelines.workers import WorkerError, WorkerPool
from tests.data_pipelines import worker_jobs


@pytest.fixture
def pool():
    pool = WorkerPool(2, deadline_s=1.5)
    yield pool
    pids = pool.pids()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids), "a worker outlived its pool"


def test_replies_equal_direct_calls(pool):
    futures = [pool.submit(worker_jobs.squares, count) for count in range(20)]
    for count, future in enumerate(futures):
        header, arrays = future.result()
        expected_header, expected = worker_jobs.squares(count)
        assert header.pop("began") > 0 and header == expected_header
        for array, other in zip(arrays, expected, strict=True):
            assert array.dtype == other.dtype and np.array_equal(array, other)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (worker_jobs.fail, "ValueError: clip.mp4 is empty"),
        (worker_jobs.hang, "no result within 1.5 s"),
        (worker_jobs.hang_in_native_code, "no result within 1.5 s"),
        (worker_jobs.crash, "died after .* with signal SIGSEGV"),
        (worker_jobs.crash_in_native_code, "died after .* with signal SIGSEGV"),
    ],
)
def test_a_bad_job_costs_itself_only(pool, job, message):
    bad = pool.submit(job)
    good = [pool.submit(worker_jobs.squares, 3) for _ in range(6)]
    with pytest.raises(WorkerError, match=message):
        bad.result()
    assert all(future.result()[1][0].tolist() == [0, 1, 4] for future in good)


def test_a_worker_that_dies_between_jobs_costs_none(pool):
    pool.submit(worker_jobs.squares, 1).result()
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    while any(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pool.pids() if psutil.pid_exists(pid)):
        time.sleep(0.01)
    futures = [pool.submit(worker_jobs.squares, 3) for _ in range(4)]
    assert all(future.result()[1][0].tolist() == [0, 1, 4] for future in futures)


def test_workers_do_not_import_torch(pool):
    pool.submit(worker_jobs.squares, 1).result()
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pool.pids()]
    assert not any("libtorch" in text for text in maps)


def test_steps_come_in_order_and_within_the_prefetch(pool):
    prepared, taken = [], []

    def prepare(step):
        prepared.append(step)
        return step * 10, [Job(step, "sample", worker_jobs.slow, (step,))]

    with Loader(prepare, pool, steps=range(3, 15), prefetch=2) as loader:
        for loaded in loader:
            taken.append(loaded.step)
            assert loaded.payload == loaded.step * 10
            assert loaded.results[0][1][0]["step"] == loaded.step
            assert len(prepared) - len(taken) <= 2
    assert taken == list(range(3, 15))


def test_a_failure_of_planning_reaches_the_consumer(pool):
    def prepare(step):
        if step == 1:
            raise ValueError("row 7: no such clip")
        return None, []

    with Loader(prepare, pool, steps=range(5), prefetch=3) as loader, pytest.raises(ValueError, match="row 7"):
        list(loader)


def test_steps_before_a_failure_of_planning_are_handed_over(pool):
    def prepare(step):
        if step == 4:
            raise ValueError("row 7: no such clip")
        return None, [Job(step, "sample", worker_jobs.slow, (step,)) for _ in range(5)]

    taken = []
    loader = Loader(prepare, pool, steps=range(9), prefetch=1, lookahead=7)
    with loader, pytest.raises(ValueError, match="row 7"):
        taken.extend(len(loaded.results) for loaded in loader)
    assert taken == [5] * 4


def test_stopping_early_leaves_no_thread_and_no_descriptor():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pool = WorkerPool(1, deadline_s=5)
        with Loader(lambda step: (step, []), pool, steps=range(100), prefetch=2) as loader:
            next(iter(loader))
        pool.close()
        del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
