"""Is the N-rank step the one-rank step? Loss, hidden states and every parameter's gradient, compared.

Run:     mmcp verify experiments/configs/demo.yaml --ranks 3
Expect:  errors near the rounding of the type: below 1e-10 in float64, below 1e-5 in float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmcp.parallel.collectives import all_reduce
from mmcp.training.step import StageClock, StepRunner, StepWork

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest error that still counts as equal, by type."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step computed; the same on every rank."""

    loss: float
    """Mean token loss of the step."""
    hidden: dict[int, Tensor]
    """By row number: [s, e] final hidden states in sequence order."""
    gradients: dict[str, Tensor]
    """By parameter name: the whole gradient."""


def measure(runner: StepRunner, work: StepWork) -> Outcome:
    """Run one step forward and backward and gather everything it computed."""
    mesh, clock = runner.mesh, StageClock(runner.device)
    loss_sum = all_reduce(runner.backward(work, clock), "sum", group=mesh.world, name="loss")
    named = runner.model.named_parameters()
    gradients = {name: _whole(parameter.grad).clone() for name, parameter in named}
    runner.model.zero_grad()
    return Outcome(loss_sum.item() / work.label_tokens, _hidden(runner, work, clock), gradients)


@torch.no_grad()
def _hidden(runner: StepRunner, work: StepWork, clock: StageClock) -> dict[int, Tensor]:
    mesh, rows = runner.mesh, {}
    for batch in runner.micro_batches(work, clock):
        local = runner.hidden(batch)
        if batch.number is not None:
            rows[batch.number] = local.new_zeros(batch.sequence.num_tokens, local.shape[1])
            positions = torch.from_numpy(batch.row.info.plan.positions(mesh.cp.index))
            rows[batch.number][positions] = local
    width = runner.model.embedding.weight.shape[1]
    dtype = runner.model.embedding.weight.dtype
    empty = {i: torch.zeros(row.num_tokens, width, dtype=dtype) for i, row in enumerate(work.plan.rows)}
    return {i: all_reduce(rows.get(i, empty[i]), "sum", group=mesh.world, name="verify") for i in empty}


def compare(one: Outcome, many: Outcome) -> dict[str, float | str]:
    """Return the errors of `many` against `one`: |a - b| / max(|b|, 1e-3 |g|), L2 norms per tensor.

    g is the gradient of the whole model, so that a tensor whose true gradient is 0 is held to the model's scale.
    """
    whole = float(np.sqrt(sum(float(grad.double().square().sum()) for grad in one.gradients.values())))
    errors = {
        name: float((many.gradients[name] - grad).norm()) / max(float(grad.norm()), 1e-3 * whole, 1e-300)
        for name, grad in one.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    hidden = [float((many.hidden[i] - row).norm()) / max(float(row.norm()), 1e-300) for i, row in one.hidden.items()]
    return {
        "loss_rel": abs(many.loss - one.loss) / max(abs(one.loss), 1e-300),
        "hidden_rel": max(hidden, default=0.0),
        "grad_rel_max": errors[worst],
        "worst_parameter": worst,
    }


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "every parameter has a gradient after a step"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
