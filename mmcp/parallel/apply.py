"""Make a one-rank model parallel: attention over context-parallel ranks, parameters over all ranks.

The model itself knows nothing of it. Order: `wrap_attention`, then `shard_parameters`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mmcp.attention.base import LocalAttention
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.ulysses import Ulysses


def wrap_attention(model: nn.Module, mesh: Mesh) -> None:
    """Replace every LocalAttention inside `model` by Ulysses around the same core; nothing to do on one rank.

    Names of parameters stay as they are. Raises ValueError when a layer's heads do not fit the mesh.
    """
    if mesh.cp.size == 1:
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LocalAttention):
                heads, kv_heads = len(child.heads.query_heads), len(child.heads.kv_heads)
                setattr(parent, name, Ulysses(child.core, mesh, num_heads=heads, num_kv_heads=kv_heads))


def shard_parameters(
    model: nn.Module,
    mesh: Mesh,
    *,
    units: Iterable[nn.Module],
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard parameters and their gradients by FSDP2 over dp_shard x ring x ulysses, in dp_replicate copies.

    Gradients are summed, not averaged, over all ranks: each rank's loss is already divided by the labels of the step.

    units: modules gathered and freed as one (blocks, encoders); what is outside them belongs to the root
    compute_dtype: type in which parameters are gathered and gradients computed, for instance bfloat16; parameters and
        the sums of gradients stay in their own type. None: as they are. Inputs of modules are not cast, so that
        rotary tables keep their precision.
    Raises ValueError for a compute type without torch.distributed, which FSDP2 needs on one rank too.
    """
    if mesh.world.size == 1 and compute_dtype is None:
        return
    if mesh.fsdp.handle is None:
        raise ValueError(f"compute type {compute_dtype} needs FSDP2; run inside process_group(), on one rank too")
    options = {
        "mesh": _parameter_mesh(mesh),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32, cast_forward_inputs=False
        ),
    }
    for module in [*units, model]:
        fully_shard(module, **options)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale inside a reduction


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before.

    returns []  the L2 norm over all parameters of all ranks, equal on every rank
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _parameter_mesh(mesh: Mesh) -> DeviceMesh:
    """Describe the mesh to FSDP2: [fsdp], or [dp_replicate, fsdp] when there are copies."""
    device_type, handle = mesh.device.type, mesh.fsdp.handle
    if mesh.dp_replicate.size == 1:
        return DeviceMesh.from_group(handle, device_type, mesh_dim_names=("fsdp",))
    ranks = torch.arange(mesh.world.size).view(mesh.dp_replicate.size, mesh.fsdp.size)
    handles = [mesh.dp_replicate.handle, handle]
    return DeviceMesh.from_group(handles, device_type, mesh=ranks, mesh_dim_names=("dp_replicate", "fsdp"))
