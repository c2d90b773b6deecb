"""A rank that fails in the middle of decoding ends all ranks, promptly and with its own error.

Run: python -m pytest tests/generate/test_failures.py
"""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmcp.attention import SoftmaxConfig
from mmcp.attention.softmax import Softmax
from mmcp.generate import Sampling, generate
from mmcp.parallel.collectives import PeerError
from mmcp.parallel.launch import RankError, launch
from mmcp.parallel.mesh import MeshConfig, build_mesh, process_group
from mmcp.training.stage_clock import StageClock
from tests.generate.answer_cases import END
from tests.training.exact_cases import Layout, drawn, tiny_model

MESH = MeshConfig(ring=3)
MODEL = tiny_model(pattern=(SoftmaxConfig(mode="ring"),))


@dataclass(frozen=True)
class Breaks(Sampling):
    """Cannot choose token 2 on one rank."""

    rank: int = 0

    def choose(self, logits: Tensor, key: tuple[int, ...]) -> int:
        if key[-1] == 2 and torch.distributed.get_rank() == self.rank:
            raise OSError("no space left on device")
        return super().choose(logits, key)


def answer_with(mesh: MeshConfig, sampling: Sampling) -> list:
    runner = Layout(mesh=mesh).runner(MODEL, build_mesh(mesh))
    rows = drawn(3, [["tvt", "t"], ["at"]])
    work = Layout(mesh=mesh).work(MODEL, rows)
    return generate(runner, work, room=6, end=END, clock=StageClock(runner.device), sampling=sampling)


def message_of_failure(mesh: MeshConfig, rank: int) -> str:
    try:
        answer_with(mesh, Breaks(rank=rank))
    except (OSError, PeerError) as error:
        assert answer_with(mesh, Sampling()), "ranks are still in step"
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("mesh", [MESH, MeshConfig(dp_shard=2, ulysses=2)], ids=["ring of 3", "two groups"])
def test_an_error_between_two_tokens_is_raised_on_all_ranks(rank_pool, mesh):
    found = rank_pool.run(message_of_failure, mesh, 1, ranks=mesh.world)
    assert found.pop(1) == "OSError: no space left on device"
    assert set(found) == {"PeerError: rank 1: OSError: no space left on device"}


def answer_until_a_layer_breaks() -> None:
    """Let rank 1 fail inside an attention layer, while the others wait for its answer."""
    decode, calls = Softmax.decode, iter(range(100))

    def breaking(self: Softmax, *args: Tensor | None) -> tuple[Tensor, Tensor]:
        if os.environ["RANK"] == "1" and next(calls) == 5:
            raise MemoryError("cannot allocate a tile")
        return decode(self, *args)

    Softmax.decode = breaking
    with process_group():
        answer_with(MESH, Sampling())


@pytest.mark.full
def test_an_error_inside_a_layer_ends_the_run_with_that_error():
    with pytest.raises(RankError, match="rank 1: MemoryError: cannot allocate a tile"):
        launch(answer_until_a_layer_breaks, MESH.world)
