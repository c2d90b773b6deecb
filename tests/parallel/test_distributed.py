"""The rank runner itself: results in rank order, and each kind of failure reported at once with nothing left running.

Run: python -m pytest tests/parallel/test_distributed.py
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool, run_on_ranks


def sum_of_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()  # the other ranks wait for it


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool


def test_one_run_returns_results_in_rank_order():
    assert run_on_ranks(sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


@pytest.mark.parametrize("ranks", [1, 3, 2])
def test_pool_serves_any_number_of_its_ranks(pool, ranks):
    total = float(sum(range(ranks)))
    assert pool.run(sum_of_ranks, 0, ranks=ranks) == [(rank, total) for rank in range(ranks)]


def test_pool_refuses_more_ranks_than_it_has(pool):
    with pytest.raises(ValueError, match="4 ranks asked of a pool of 3"):
        pool.run(sum_of_ranks, 0, ranks=4)


def test_failures_end_every_rank_at_once_and_the_pool_recovers(pool):
    pool.run(sum_of_ranks, 0, ranks=3)
    processes = list(pool._processes)
    with pytest.raises(ValueError, match="rank one is unhappy") as failure:
        pool.run(raise_on_rank_one)
    assert "in raise_on_rank_one" in failure.value.__notes__[0]
    assert not any(process.is_alive() for process in processes)
    assert pool.run(sum_of_ranks, 0, ranks=2) == [(0, 1.0), (1, 1.0)]
    with pytest.raises(ChildProcessError, match="rank 1 died, exit code 7"):
        pool.run(die_on_rank_one, ranks=2)
    assert not pool._processes


def test_a_hang_is_reported_with_the_place_where_it_hangs(pool):
    pool.run(sum_of_ranks, 0, ranks=2)
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0\] gave no answer within 2 s.*hang_on_rank_zero"):
        pool.run(hang_on_rank_zero, ranks=2, timeout=2)
    assert not pool._processes
