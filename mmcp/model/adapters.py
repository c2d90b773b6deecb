"""Low-rank adapters of the backbone's linear maps, made by peft: y = W x + (alpha / rank) B A x, with A and B trained.

Hu et al. 2021 (arXiv 2106.09685). B begins at 0. An adapted map `up` holds W as `up.base_layer.weight`, A as
`up.lora_A.default.weight` and B as `up.lora_B.default.weight`.
"""

import hashlib
import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from mmcp.config import config

BASE, DOWN, UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


@config
class LoraConfig:
    """Adapters of the backbone; the parts that train beside them are declared in `parts`."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rows of A; 0: no adapters."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapter's answer is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("project.q", "project.k", "project.v", "out", "gate", "up", "down")
    """Ends of the names of the maps that are adapted; all layers have the same."""

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank

    def adapt(self, backbone: nn.Module) -> None:
        """Put adapters beside the targets, unfilled: `draw_adapter` fills them.

        Raises ValueError for a target that no layer has, ImportError without peft.
        """
        if not self.rank:
            return
        maps = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
        chosen = [name for name in maps if any(name.endswith(f".{target}") for target in self.targets)]
        missing = [target for target in self.targets if not any(name.endswith(f".{target}") for name in maps)]
        if missing:
            known = ", ".join(sorted({name.split(".", 2)[2] for name in maps}))
            raise ValueError(f"model.lora.targets: no layer has a map '{missing[0]}'; the layers have {known}")
        peft = _peft()
        settings = peft.LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=chosen, lora_dropout=0.0)
        peft.inject_adapter_in_model(settings, backbone)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("adapters need peft; install mmcp[hf], or set model.lora.rank=0") from None
    return peft


def plain_name(name: str) -> str:
    """Return the name that a parameter has without adapters: `up.base_layer.weight` is `up.weight`."""
    return name.replace(BASE, ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return DOWN in name or UP in name


def adapter_of(name: str) -> tuple[str, str]:
    """Return the names of A and B beside a map's weight: `up.weight` -> `up.lora_A.default.weight`, and B."""
    head, _, last = name.rpartition(".")
    return head + DOWN + last, head + UP + last


def draw_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the first values of a whole A (uniform, as in a new linear map) or B (zeros), by seed and name."""
    if UP in name:
        return torch.zeros(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7])
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(key))


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in float32 or wider.

    weight: [rows, in]  down: [rank, in]  up: [rows, rank]   rows: all, or those kept here
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (up.to(wide) @ down.to(wide))
