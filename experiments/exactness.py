"""What one step computes, gathered from all ranks, and how far two such results are apart."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmcp.parallel.collectives import all_reduce
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork

LIMITS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}
"""Largest error that still counts as equal, by type of the computation."""


@dataclass(frozen=True, eq=False)
class Computed:
    """What one step computed; the same on every rank."""

    loss: float
    """Mean token loss of the step."""
    hidden: dict[int, Tensor]
    """By row number: [s, e] final hidden states in sequence order."""
    gradients: dict[str, Tensor]
    """By name of a parameter that trains: the whole gradient."""

    def write(self, file: Path) -> None:
        """Write it as safetensors."""
        loss = {"loss": _scalar(self.loss)}
        hidden = {f"hidden.{number}": rows for number, rows in self.hidden.items()}
        save_file({**loss, **hidden, **{f"grad.{name}": grad for name, grad in self.gradients.items()}}, file)

    @classmethod
    def read(cls, file: Path) -> "Computed":
        """Read what `write` wrote."""
        tensors = load_file(file)
        hidden = {int(name.removeprefix("hidden.")): t for name, t in tensors.items() if name.startswith("hidden.")}
        gradients = {name.removeprefix("grad."): t for name, t in tensors.items() if name.startswith("grad.")}
        return cls(tensors["loss"].item(), hidden, gradients)


def measure(runner: StepRunner, work: StepWork) -> Computed:
    """Run one step forward and backward and gather everything it computed; every rank calls it."""
    mesh, clock = runner.mesh, StageClock(runner.device)
    loss_sum = all_reduce(runner.backward(work, clock), "sum", group=mesh.world, name="loss")
    trained = {name: parameter for name, parameter in runner.model.named_parameters() if parameter.requires_grad}
    gradients = {name: _whole(parameter.grad).contiguous().clone() for name, parameter in trained.items()}
    runner.model.zero_grad()
    return Computed(loss_sum.item() / work.label_tokens, _hidden(runner, work, clock), gradients)


@torch.no_grad()
def _hidden(runner: StepRunner, work: StepWork, clock: StageClock) -> dict[int, Tensor]:
    """Put every row's hidden states together, as float64: [s, e] by row number."""
    mesh, width = runner.mesh, runner.model.embedding.weight.shape[1]
    rows = {
        i: torch.zeros(row.num_tokens, width, dtype=torch.float64, device=runner.device)
        for i, row in enumerate(work.plan.rows)
    }
    for batch in runner.micro_batches(work, clock):
        local = runner.hidden(batch)
        if batch.number is not None:
            positions = torch.from_numpy(batch.row.info.plan.positions(mesh.cp.index)).to(runner.device)
            rows[batch.number][positions] = local.double()
    return {i: all_reduce(whole, "sum", group=mesh.world, name="verify") for i, whole in rows.items()}


def compare(one: Computed, many: Computed) -> dict[str, float | str]:
    """Return the errors of `many` against `one`: |a - b| / max(|b|, 1e-3 |g|), L2 norms per tensor.

    g is the gradient of the whole model, so that a tensor whose true gradient is 0 is held to the model's scale. An
    error that is not finite is infinity.
    """
    assert one.gradients.keys() == many.gradients.keys(), "both models have the same parameters"
    floor = 1e-3 * math.sqrt(sum(float(grad.double().square().sum()) for grad in one.gradients.values()))
    errors = {name: _error(many.gradients[name], grad, floor) for name, grad in one.gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "loss_rel": _error(_scalar(many.loss), _scalar(one.loss), 0.0),
        "hidden_rel": max((_error(many.hidden[i], row, 0.0) for i, row in one.hidden.items()), default=0.0),
        "grad_rel_max": errors[worst],
        "worst_parameter": worst,
    }


def _error(value: Tensor, reference: Tensor, floor: float) -> float:
    value, reference = value.double(), reference.double()
    error = float((value - reference).norm()) / max(float(reference.norm()), floor, 1e-300)
    return error if math.isfinite(error) else math.inf


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "every parameter has a gradient after a step"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
