"""AdamW on float32 master weights, with a learning rate that is a function of the step alone."""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor

from mmcp.config import config

RATE = "rate"  # key of an optimizer's group: its learning rate in units of that of the step
_MASTER_TYPES = (torch.float32, torch.float64)
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@config
class OptimConfig:
    """AdamW, warm-up and cosine; a step is one update of the weights, whatever it accumulates."""

    learning_rate: Positive = 1e-3
    """Highest rate, reached at step `warmup_steps`."""
    total_steps: Annotated[int, Field(ge=1)] = 1000
    """Steps of the whole run; the cosine ends there."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps on which the rate rises linearly, from learning_rate / (warmup_steps + 1)."""
    min_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Rate at `total_steps` and after, as a part of learning_rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment per step."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Per step and unit of rate; for matrices only, never for norms, biases and other vectors."""
    clip_norm: Positive = 1.0
    """Largest L2 norm of the whole model's gradient."""

    def __post_init__(self):
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} leaves none of total_steps={self.total_steps}; use fewer"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, ...: the same after a resume, because nothing else goes in.

        warmup_steps=2, total_steps=6, min_rate_ratio=0:   1/3  2/3  1  0.85  0.5  0.15  (then 0)
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.min_rate_ratio + (1 - self.min_rate_ratio) * cosine)

    def build(self, model: nn.Module, *, rate_of: Callable[[str], float] = lambda name: 1.0) -> torch.optim.AdamW:
        """Make the optimizer of the parameters that are trained, the moments in their type.

        rate_of: name of a parameter -> its learning rate, in units of `rate(step)`
        Raises ValueError for a parameter that is not float32 or float64: in bfloat16 most updates round to nothing.
        A model runs in bfloat16 by FSDP2's MixedPrecisionPolicy, whose sharded parameters are the float32 masters.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in trained.items():
            if parameter.dtype not in _MASTER_TYPES:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}, in which small updates are lost; keep parameters float32 "
                    "and set the type of the computation with MixedPrecisionPolicy(param_dtype=...)"
                )
        if not trained:
            raise ValueError("no parameter is trained; set requires_grad on a part of the model")
        alike: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            alike.setdefault((rate_of(name), parameter.ndim >= 2), []).append(parameter)
        groups = [
            {"params": parameters, "weight_decay": self.weight_decay if is_matrix else 0.0, RATE: rate}
            for (rate, is_matrix), parameters in alike.items()
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)


def apply_update(optimizer: torch.optim.Optimizer, optim: OptimConfig, step: int) -> float:
    """Clip the gradients, update the weights at the rate of `step`, free the gradients; return the norm.

    The norm is that of the whole model before clipping, over all ranks (gradients are DTensors under FSDP2).
    Raises FloatingPointError, on every rank alike and before the weights are touched, when it is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    total = total.full_tensor() if isinstance(total, DTensor) else total
    norm = float(total)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient's norm is {norm} at step {step}; lower the rate or look at the step's data"
        )
    nn.utils.clip_grads_with_norm_(parameters, optim.clip_norm, total)
    for group in optimizer.param_groups:
        group["lr"] = optim.rate(step) * group.get(RATE, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
