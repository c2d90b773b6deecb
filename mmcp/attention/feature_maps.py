"""What linear attention applies to queries and keys before their products: functions of a head's numbers, [..., d]."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1, positive also where that sum would round to 0 (arXiv 2006.16236)."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "elu": elu_plus_one,
    "softmax": lambda x: x.softmax(-1),
}
"""By the name that a variant's config takes; a variant lists those that suit it."""
