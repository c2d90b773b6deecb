"""Make a one-rank model parallel: attention over context-parallel ranks, parameters over all ranks.

The model itself knows nothing of it. Order: `wrap_attention`, then `shard_parameters`.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmcp.attention.base import LocalAttention
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.ulysses import Ulysses


def wrap_attention(model: nn.Module, mesh: Mesh) -> None:
    """Replace every LocalAttention inside `model` by its mode around the same core; nothing to do on one rank.

    Names of parameters stay as they are. Raises ValueError when a layer's heads or mode do not fit the mesh.
    """
    if mesh.cp.size == 1:
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LocalAttention):
                heads, kv_heads = len(child.heads.query_heads), len(child.heads.kv_heads)
                layer = Ulysses(
                    child.core,
                    mesh,
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    mode=child.mode,
                    chunks=child.chunks,
                )
                setattr(parent, name, layer)


def shard_parameters(
    model: nn.Module,
    mesh: Mesh,
    *,
    units: Iterable[nn.Module],
    compute_dtype: torch.dtype | None = None,
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
    device_mesh = _parameter_mesh(mesh)
    reduce_dtype = None if compute_dtype is None else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in [*units, model]:
        sharded = fully_shard(module, mesh=device_mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale inside a reduction


def _parameter_mesh(mesh: Mesh) -> DeviceMesh:
    """Describe the mesh to FSDP2: [fsdp], or [dp_replicate, fsdp] when there are copies."""
    assert mesh.fsdp.handle is not None
    if mesh.dp_replicate.handle is None:
        return DeviceMesh.from_group(mesh.fsdp.handle, mesh.device.type, mesh_dim_names=("fsdp",))
    return DeviceMesh.from_group(
        [mesh.dp_replicate.handle, mesh.fsdp.handle],
        mesh.device.type,
        mesh=torch.arange(mesh.world.size).view(mesh.dp_replicate.size, mesh.fsdp.size),
        mesh_dim_names=("dp_replicate", "fsdp"),
    )
