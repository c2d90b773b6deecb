"""Gated delta layers of Qwen3-Next over ranks: transformers' projections and parameters, our recurrence.

transformers' own layer would convolve and sum up each rank's tokens alone. Ours also keeps packed documents apart,
which transformers' does not do without its GPU kernels.
"""

from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from mmcp.attention.gated_delta import GatedDelta, GatedDeltaConfig
from mmcp.integrations.transformers.local_row import LocalRow
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.ulysses import Ulysses


class BorrowedGatedDelta(GatedDelta):
    """A gated delta core whose parameters are those of a transformers layer, looked up at each call."""

    def __init__(self, layer: Qwen3NextGatedDeltaNet, mode: Literal["ulysses", "state"]):
        settings = GatedDeltaConfig(convolution=layer.conv_kernel_size, norm_eps=layer.norm.variance_epsilon, mode=mode)
        super().__init__(settings, heads=layer.num_v_heads, kv_heads=layer.num_k_heads, head_dim=layer.head_v_dim)
        for name in ("filters", "log_rate", "decay_bias", "norm"):
            delattr(self, name)

    def borrow(self, layer: Qwen3NextGatedDeltaNet) -> None:
        """View the layer's parameters as this core's, with gradients."""
        q, k, v = layer.conv1d.weight[:, 0].split([layer.key_dim, layer.key_dim, layer.value_dim])
        heads = {"q": layer.num_k_heads, "k": layer.num_k_heads, "v": layer.num_v_heads}
        filters = {name: w.unflatten(0, (heads[name], -1)) for name, w in (("q", q), ("k", k), ("v", v))}
        views = {"filters": filters, "log_rate": layer.A_log[:], "decay_bias": layer.dt_bias[:]}
        for name, view in (views | {"norm": layer.norm.weight[:]}).items():
            setattr(self, name, view)  # of plain tensors: the parameters stay the layer's


def parallelize_layer(layer: Qwen3NextGatedDeltaNet, mesh: Mesh) -> None:
    """Let a layer answer with all tokens of the row read in order.

    Raises ValueError for heads that do not fit the mesh or our recurrence.
    """
    name = f"{type(layer).__name__} (layer {layer.layer_idx})"
    if layer.head_k_dim != layer.head_v_dim:
        raise ValueError(
            f"{name}: linear_key_head_dim {layer.head_k_dim} and linear_value_head_dim {layer.head_v_dim} differ, "
            "which the parallel gated delta rule does not do"
        )
    if layer.activation != "silu" or layer.conv1d.bias is not None:
        raise ValueError(f"{name}: a convolution with activation '{layer.activation}' or a bias is not supported")
    mode: Literal["ulysses", "state"] = "ulysses" if mesh.ring.size == 1 else "state"
    core = BorrowedGatedDelta(layer, mode)
    heads = {"num_heads": layer.num_v_heads, "num_kv_heads": layer.num_k_heads}
    attention = Ulysses(core, mesh, mode=mode, **heads)
    layer.__dict__["mmcp_attention"] = attention  # not a child: the parameters are the layer's own
    layer.forward = MethodType(mix, layer)


def mix(
    layer: Qwen3NextGatedDeltaNet,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    mmcp_row: LocalRow | None = None,
    **_options: Any,
) -> Tensor:
    """Mix this rank's tokens with all before them: [1, s/cp, e] -> [1, s/cp, e]."""
    if mmcp_row is None or cache is not None:
        raise ValueError(
            f"{type(layer).__name__} was called outside of a parallelised model's forward, or with a cache; call the "
            "model itself, with use_cache=False"
        )
    assert attention_mask is None, "padding is not part of a row"
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    )
    inputs = {"q": q[0], "k": k[0], "v": v[0], "decay": a[0, ..., None], "strength": b[0, ..., None]}
    inputs = {name: mmcp_row.without_ghost(x) for name, x in inputs.items()}
    attention: Any = layer.__dict__["mmcp_attention"]
    attention.core.borrow(layer)
    with torch.autocast(hidden_states.device.type, enabled=False):  # its states stay wide
        out = mmcp_row.with_ghost(mmcp_row.attend(layer.layer_idx, inputs, attention))
    gate = F.silu(z[0].to(torch.promote_types(z.dtype, torch.float32)))
    return layer.out_proj((out * gate).to(hidden_states.dtype).flatten(1))[None]
