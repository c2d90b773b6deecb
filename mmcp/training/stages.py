"""Begin a stage of training with the weights of the stage before, with adapters or without on either side.

before      now            what happens
none        none or new    weights are read; new adapters begin as drawn, and change nothing
adapters    the same       weights and adapters are read
adapters    none or other  adapters are added into the weights: W + scale B A
"""

import json
from pathlib import Path

import pydantic
import torch
from torch import Tensor, nn

from mmcp.model.adapters import BASE, LoraConfig, adapter_of, is_adapter, merged, plain_name
from mmcp.parallel.collectives import Group
from mmcp.parallel.pretrained import local_rows
from mmcp.training import checkpoint


def last_checkpoint(run: str | Path) -> Path:
    """Return the last checkpoint of a run's folder. Raises ValueError when there is none."""
    saved = checkpoint.latest(Path(run) / "checkpoints")
    if saved is None:
        raise ValueError(
            f"start_from='{run}' holds no complete checkpoint ({Path(run).resolve()}); name a finished run"
        )
    return saved


def lora_of(saved: Path) -> LoraConfig:
    """Return the adapters of the run that saved a checkpoint."""
    values = checkpoint.read_state(saved)["config"]["model"]["lora"]
    return pydantic.TypeAdapter(LoraConfig).validate_json(json.dumps(values))


@torch.no_grad()
def start_from(model: nn.Module, saved: Path, lora: LoraConfig, *, group: Group) -> None:
    """Fill a model, sharded or not, with the weights of a checkpoint; every rank calls it.

    lora: the adapters that the model has
    Raises ValueError listing tensors that the checkpoint has not or has in another shape or type.
    """
    before, known = lora_of(saved), checkpoint.contents(saved)
    keeps_adapters = before == lora
    direct: dict[str, Tensor] = {}
    adapted: dict[str, Tensor] = {}
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if is_adapter(name):
            direct |= {f"model.{name}": tensor.detach()} if keeps_adapters and before.rank else {}
            continue
        plain = plain_name(name)
        head, _, last = plain.rpartition(".")
        with_base = f"model.{head}{BASE}{last}"
        direct[with_base if with_base in known else f"model.{plain}"] = tensor.detach()
        if f"model.{adapter_of(plain)[0]}" in known and not keeps_adapters:
            adapted[plain] = tensor
    checkpoint.read_tensors(saved, direct, group=group)
    for plain, tensor in adapted.items():
        local, start = local_rows(tensor)
        down, up = read_adapter(saved, plain, group=group)
        local.copy_(merged(local, down, up[start : start + len(local)], before.scale))


def read_adapter(saved: Path, plain: str, *, group: Group) -> tuple[Tensor, Tensor]:
    """Return A and B, whole, beside the map whose weight is named `plain`; every rank calls it."""
    known = checkpoint.contents(saved)
    names = [f"model.{name}" for name in adapter_of(plain)]
    pair = {name: torch.empty(known[name][1], dtype=known[name][0]) for name in names}
    checkpoint.read_tensors(saved, pair, group=group)
    return pair[names[0]], pair[names[1]]
