"""Fill a sharded model with weights of a folder: each rank reads the rows it keeps and no others.

model on the meta device -> shard_parameters -> materialise -> fill, draw_adapters
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mmcp.model.adapters import draw_adapter, is_adapter, plain_name
from mmcp.model.pretrained import ModelFolder


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device storage, of this rank's size and unfilled; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        assert not any(buffer.is_meta for buffer in module.buffers(recurse=False)), "a buffer would be left unfilled"
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                new = made.get(id(parameter))
                if new is None:
                    empty = torch.empty_like(parameter, device=device)
                    new = made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module.register_parameter(name, new)


@torch.no_grad()
def fill(model: nn.Module, folder: ModelFolder) -> None:
    """Read this rank's rows of every parameter that the folder holds, one parameter at a time.

    The caller has checked the folder. Asserts that it holds every parameter of the model's decoder.
    """
    parameters = {
        plain_name(name): value
        for name, value in model.named_parameters()
        if not name.startswith("encoders.") and not is_adapter(name)
    }
    assert parameters.keys() == folder.rows.keys(), f"{sorted(parameters.keys() ^ folder.rows.keys())[:5]} differ"
    for name in folder.rows:
        parameter = parameters[name]
        local, start = local_rows(parameter)
        if len(local):
            local.copy_(folder.read(name, tuple(parameter.shape), start, start + len(local)))


@torch.no_grad()
def draw_adapters(model: nn.Module, seed: int) -> None:
    """Give every adapter its first values, the same whatever the mesh."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            local, start = local_rows(parameter)
            local.copy_(draw_adapter(name, parameter.shape, seed)[start : start + len(local)])


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return what this rank keeps of a parameter, in place, and which of its rows comes first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    assert tuple(local.shape) == tuple(shape) and not any(offset[1:]), f"{parameter.placements} cut other than rows"
    return local, offset[0]
