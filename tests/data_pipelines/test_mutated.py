"""Damaged files of every kind: a result or a MediaError that names the file; nothing hangs, crashes or leaks.

python -m pytest tests/data_pipelines/test_mutated.py
"""

import os
import random
from pathlib import Path

import psutil
import pytest

from data_pipelines.media import MediaError
from data_pipelines.workers import WorkerError, WorkerPool
from tests.data_pipelines import worker_jobs

CASES = Path(__file__).parents[1] / "data" / "cases"
KINDS = (".mp4", ".mkv", ".wav", ".jpg", ".tar")
FILES = sorted(path for path in CASES.rglob("*") if path.is_file() and path.stat().st_size > 100)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, blank, repeat or insert bytes somewhere."""
    changed, at = bytearray(data), draw.randrange(len(data))
    kind = draw.choice(["flip", "cut", "blank", "repeat", "insert"])
    if kind == "flip":
        for _ in range(draw.choice([1, 5, 50])):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "blank":
        changed[at : at + 200] = bytes(len(changed[at : at + 200]))
    elif kind == "repeat":
        changed[at:at] = changed[at : at + draw.randrange(1, 3000)]
    else:
        changed[at:at] = draw.randbytes(5)
    return bytes(changed)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))], ids=lambda seed: f"seed{seed}"
)
def test_every_outcome_is_a_result_or_a_named_error(tmp_path, seed):
    draw = random.Random(seed)
    outcomes = {"used": 0, "refused": 0}
    before = len(os.listdir("/proc/self/fd"))
    for number in range(60):
        source = draw.choice(FILES)
        path = tmp_path / f"{number}{source.suffix}"
        path.write_bytes(mutate(source.read_bytes(), draw))
        try:
            worker_jobs.use_file(str(path))
            outcomes["used"] += 1
        except MediaError as error:
            assert str(path) in str(error)
            outcomes["refused"] += 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert min(outcomes.values()) > 5


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.full)])
def test_no_damage_hangs_kills_or_fattens_a_worker(tmp_path, count):
    """As many damaged mp4, mkv, wav, jpg and tar files in turn, each a job with a deadline."""
    draw, refused = random.Random(count), 0
    pool = WorkerPool(1, deadline_s=20.0)
    try:
        (pid,) = pool.pids()
        memory = []
        for number in range(count):
            source = draw.choice([file for file in FILES if file.suffix == KINDS[number % len(KINDS)]])
            path = tmp_path / f"{number}{source.suffix}"
            path.write_bytes(mutate(source.read_bytes(), draw))
            try:
                pool.submit(worker_jobs.use_file, str(path)).result()
            except WorkerError as error:
                assert str(error).startswith(f"MediaError: {path}"), error
                refused += 1
            path.unlink()
            memory.append(psutil.Process(pid).memory_info().rss)
        assert pool.pids() == [pid], "the worker was replaced"
        assert refused > count / 10
        assert memory[-1] < 1.2 * max(memory[: count // 3])
    finally:
        pool.close()
