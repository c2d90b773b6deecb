"""Twenty steps of Trainer, accelerate and SFTTrainer on two ranks against the same trainer on one process.

The one process runs the unmodified model. Losses of every step, held-out losses in between, and a run that was stopped
and resumed, in float64; with and without gradient accumulation, answers of very different lengths.
Run: python -m pytest tests/integrations/test_hf_trainers.py
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

for name in ("transformers", "accelerate", "trl", "datasets"):
    pytest.importorskip(name)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mmcp.parallel.mesh import MeshConfig, build_mesh  # noqa: E402
from tests.integrations.hf_cases import wide_casts  # noqa: E402

STEPS = 20


def as_torchrun() -> None:
    """Forget what accelerate knows of an earlier run, and tell it of this one as torchrun would."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
    for name in names:
        os.environ.pop(name, None)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    if dist.get_world_size() > 1:
        values = (dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size(), "127.0.0.1", 1, 1)
        os.environ |= dict(zip(names, map(str, values), strict=True))


def curve(
    module: Any, out: str, ranks: int, resume: bool, options: dict[str, Any], groups: int = 1
) -> tuple[list[float], list[float]]:
    """Train with a Trainer of an example; return its losses and held-out losses, unrounded."""
    from mmcp.integrations.transformers.trainer import parallelize_trainer

    trainer = module.make_trainer(out, **options)
    trainer.model.double()
    if ranks > 1:
        parallelize_trainer(trainer, build_mesh(MeshConfig(dp_shard=groups, ulysses=ranks)))
    losses: list[float] = []
    step = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.training_step = noted
    with nullcontext() if module.__name__.endswith("hf_sft") else wide_casts():
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{STEPS // 2}" if resume else False)
    return losses, [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def run_trainer(out: str, resume: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    from experiments import hf_trainer

    as_torchrun()
    return curve(hf_trainer, out, dist.get_world_size(), resume, options)


def run_groups(out: str, groups: int, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train with Trainer in data-parallel groups of two ranks; with one rank a group, unmodified."""
    from experiments import hf_trainer

    as_torchrun()
    return curve(hf_trainer, out, dist.get_world_size() // groups, False, options, groups=groups)


def run_sft(out: str, resume: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    from experiments import hf_sft

    as_torchrun()
    return curve(hf_sft, out, dist.get_world_size(), resume, options)


def run_accelerate(out: str, resume: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    from experiments import hf_accelerate

    as_torchrun()
    mesh = build_mesh(MeshConfig(ulysses=dist.get_world_size())) if dist.get_world_size() > 1 else None
    with wide_casts():
        losses, held_out = hf_accelerate.train(mesh, out, resume=resume, dtype=torch.float64, **options)
    return losses, [held_out]


def compare(pool, tmp_path, run: Callable, options: dict[str, Any]) -> None:
    close = 1e-6 if run is run_sft else 1e-8  # TRL's own head computes in float32
    ((expected, held_out),) = pool.run(run, str(tmp_path / "one"), False, options, ranks=1)
    for losses, scores in pool.run(run, str(tmp_path / "two"), False, options, ranks=2):
        assert losses == pytest.approx(expected, rel=close)
        assert scores == pytest.approx(held_out, rel=close)
    for losses, scores in pool.run(run, str(tmp_path / "two"), True, options, ranks=2):
        assert len(losses) == len(expected) // 2
        assert losses == pytest.approx(expected[-len(losses) :], rel=close)
        assert scores[-1] == pytest.approx(held_out[-1], rel=close)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("run", [run_trainer, run_accelerate, run_sft])
def test_two_ranks_train_as_one_process(rank_pool, tmp_path, run, accumulation):
    compare(rank_pool, tmp_path, run, {"steps": STEPS, "accumulation": accumulation})


def test_groups_of_ranks_train_as_processes_of_ddp(rank_pool, tmp_path):
    options = {"steps": 6, "accumulation": 2}
    alone = rank_pool.run(run_groups, str(tmp_path / "ddp"), 2, options, ranks=2)
    grouped = rank_pool.run(run_groups, str(tmp_path / "groups"), 2, options, ranks=4)
    for rank, (losses, scores) in enumerate(grouped):
        assert losses == pytest.approx(alone[rank // 2][0], rel=1e-8)
        assert scores == pytest.approx(alone[rank // 2][1], rel=1e-8)
    assert alone[0][0] != pytest.approx(alone[1][0], rel=1e-3)  # groups did see different batches
