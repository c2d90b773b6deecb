"""The library's exchanges on rank-filled integers one can check by eye, the recorder's counts, and faults agreed on.

Run: python -m pytest tests/parallel/test_collectives.py
"""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mmcp.parallel.collectives import (
    Group,
    PeerError,
    agree,
    all_gather,
    all_gather_json,
    all_reduce,
    exchange,
    exchange_rows,
    record,
)
from tests.parallel.cases import whole_group


def uneven_rows(dtype: torch.dtype) -> tuple[list, list, dict]:
    """Rank r sends j rows of 10 r + j to rank j: rank 0 receives none."""
    group = whole_group()
    sizes = list(range(group.size))
    rows = torch.tensor([[10.0 * group.index + j] * 2 for j in sizes for _ in range(j)], dtype=dtype).reshape(-1, 2)
    rows.requires_grad_()
    with record(group) as recorder:
        received = exchange_rows(rows, sizes, [group.index] * group.size, group=group, name="rows")
        (received * (group.index + 1)).sum().backward()
    return received[:, 0].tolist(), rows.grad[:, 1].tolist(), recorder.traffic


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_exchange_of_uneven_rows_and_its_gradient(rank_pool, dtype):
    results = rank_pool.run(uneven_rows, dtype, ranks=3)
    assert [received for received, _, _ in results] == [[], [1, 11, 21], [2, 2, 12, 12, 22, 22]]
    assert [grads for _, grads, _ in results] == [[2, 3, 3]] * 3  # what its receiver multiplied each row by
    for rank, (_, _, traffic) in enumerate(results):
        counted = {phase: (entry.collectives, entry.bytes) for (_, phase), entry in traffic.items()}
        row = 2 * dtype.itemsize
        others = sum(j for j in range(3) if j != rank)
        assert counted == {"forward": (1, 2 * rank * row), "backward": (1, others * row)}


def small_exchanges() -> dict:
    group = whole_group()
    mine = torch.tensor([group.index, 5 - group.index])
    return {
        "max": all_reduce(mine, "max", group=group, name="m").tolist(),
        "sum": all_reduce(mine, "sum", group=group, name="s").tolist(),
        "gathered": all_gather(mine, group=group, name="g").tolist(),
        "objects": all_gather_json({"rank": group.index, "name": "x" * group.index}, group=group, name="j"),
        "kept": mine.tolist(),
    }


def test_reductions_and_gathers(rank_pool):
    three = rank_pool.run(small_exchanges, ranks=3)
    for rank, result in enumerate(three):
        assert result["max"] == [2, 5] and result["sum"] == [3, 12]
        assert result["gathered"] == [[0, 5], [1, 4], [2, 3]]
        assert result["objects"] == [{"rank": i, "name": "x" * i} for i in range(3)]
        assert result["kept"] == [rank, 5 - rank]


def test_one_rank_never_communicates():
    group, rows = Group(), torch.arange(6.0).reshape(3, 2).requires_grad_()
    with record(group) as recorder:
        assert exchange_rows(rows, [3], [3], group=group, name="x") is rows
        assert exchange(rows, [3], [3], group=group, name="x", backward=False) is rows
        assert all_reduce(rows, "sum", group=group, name="x").tolist() == rows.tolist()
        assert all_gather(rows, group=group, name="x").tolist() == [rows.tolist()]
        assert all_gather_json([1, "a"], group=group, name="x") == [[1, "a"]]
        agree(None, group=group)
        with pytest.raises(ValueError, match="bad"):
            agree(ValueError("bad"), group=group)
    assert recorder.traffic == {}


def checkpointed_exchange() -> dict:
    group = whole_group()
    rows = torch.ones(2, 1, requires_grad=True)

    def layer(x):
        return exchange_rows(x * x, [1, 1], [1, 1], group=group, name="rows") ** 2

    with record(group) as recorder:
        checkpoint(layer, rows, use_reentrant=False).sum().backward()
    return {phase: entry.collectives for (_, phase), entry in recorder.traffic.items()}


def test_recomputed_exchanges_are_counted_apart(rank_pool):
    assert rank_pool.run(checkpointed_exchange, ranks=2) == [{"forward": 1, "recompute": 1, "backward": 1}] * 2


def agree_with_errors(failing: tuple[int, ...]) -> str:
    group = whole_group()
    error = ValueError(f"clip {group.index} is broken") if group.index in failing else None
    try:
        agree(error, group=group)
    except (PeerError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def test_a_fault_of_one_rank_is_raised_on_all(rank_pool):
    assert rank_pool.run(agree_with_errors, (), ranks=3) == [""] * 3
    told = "PeerError: rank 1: ValueError: clip 1 is broken"
    assert rank_pool.run(agree_with_errors, (1,), ranks=3) == [told, "ValueError: clip 1 is broken", told]
    both = rank_pool.run(agree_with_errors, (0, 2), ranks=3)
    assert both[1] == "PeerError: rank 0: ValueError: clip 0 is broken; rank 2: ValueError: clip 2 is broken"


def agree_without_rank_zero(gave_up: Path) -> str:
    """Rank 0 answers nothing until rank 1 has given up."""
    group = whole_group()
    if group.index == 0:
        while not gave_up.exists():
            time.sleep(0.05)
        return ""
    try:
        agree(None, group=group, timeout=timedelta(seconds=1))
    except PeerError as raised:
        return str(raised)
    finally:
        gave_up.touch()
    return "no error"


def test_agreeing_waits_no_longer_than_told(rank_pool, tmp_path):
    message = rank_pool.run(agree_without_rank_zero, tmp_path / "gave up", ranks=2, timeout=40)[1]
    assert "gave no answer in time" in message
