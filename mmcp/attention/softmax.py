"""Softmax attention, with an optional sliding window and sink.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j        over the keys j that the mask lets query i read

Vaswani et al. 2017 (arXiv 1706.03762); grouped heads: Ainslie et al. 2023 (2305.13245); sink: Xiao et al. 2023
(2309.17453).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from mmcp.attention.base import ATTENTION, HeadShare, RowInfo, SoftmaxAttention, Variant, check_chunks, qkv_tensors
from mmcp.attention.flash_cpu import head_runs, partial_attention, partial_attention_backward, tiled_attention
from mmcp.attention.gpu import check_type, gpu_attention, gpu_partial, gpu_partial_backward
from mmcp.attention.pairs import Pairs
from mmcp.attention.tiles import tile
from mmcp.config import config
from mmcp.masks import Mask


@ATTENTION.register("softmax")
@config
class SoftmaxConfig(Variant):
    name: Literal["softmax"] = "softmax"
    window: int = 0
    """Tokens a query sees looking back, itself included; 0: all of its document."""
    sink: int = 0
    """First tokens of a document that stay visible beyond the window; needs a window."""
    rotary: bool = True
    """Turn queries and keys by their positions."""
    output_gate: bool = False
    """Multiply the output by sigmoid(gate(x)), as in Qwen3-Next."""
    mode: Literal["ulysses", "ring", "allgather"] = "ulysses"
    """Over several ranks: trade tokens for heads, or pass keys and values along the ring axis, or gather them there."""
    chunks: int = 1
    """Mode `ulysses`: groups of heads whose exchange runs under the attention of another group."""

    def __post_init__(self):
        Mask.causal([]).with_window(self.window, self.sink)
        check_chunks(self.mode, self.chunks)

    def build(self, *, heads: int, kv_heads: int, head_dim: int) -> "Softmax":
        """Make the core; `heads` query heads in the whole layer, of `head_dim`."""
        return Softmax(self, head_dim=head_dim)

    def pair_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one query head for one visible (query, key) pair: two products of 2 d."""
        return 4 * head_dim

    def flops(self, mask: Mask, *, heads: int, head_dim: int) -> int:
        """Count the forward FLOPs of `heads` query heads on one row."""
        return self.pair_flops(head_dim) * mask.with_window(self.window, self.sink).pairs() * heads


class Softmax(SoftmaxAttention):
    """Softmax attention over the mask of the row; flash kernels on CPU and GPU."""

    def __init__(self, settings: SoftmaxConfig, *, head_dim: int):
        super().__init__()
        self.window, self.sink = settings.window, settings.sink
        self.tensors = qkv_tensors(head_dim)
        self.out_dim = head_dim

    def check_type(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError for float64 on a GPU."""
        if device.type == "cuda":
            check_type(dtype)

    def forward(self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare) -> Tensor:
        """q: [s, h, d]  k, v: [s, k, d]  ->  [s, h, d]."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        mask = self.visible(info.mask)
        assert len(q) == mask.num_tokens, f"{len(q)} tokens in a row of {mask.num_tokens}"
        if q.is_cuda:
            return gpu_attention(q, k, v, mask, heads.kv_of_query, info)
        tiling = info.once(("tiling", self.window, self.sink), lambda: tile(mask.slices))
        return tiled_attention(q, k, v, tiling, heads.kv_of_query)

    def visible(self, mask: Mask) -> Mask:
        """Narrow the row's mask by the window."""
        return mask.with_window(self.window, self.sink)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, heads: HeadShare) -> tuple[Tensor, Tensor]:
        """q: [sq, h, d]  k, v: [sk, k, d]  ->  out [sq, h, d], lse [sq, h]."""
        if q.is_cuda:
            return gpu_partial(q, k, v, pairs, heads.kv_of_query)
        return partial_attention(q, k, v, pairs.tiling, head_runs(heads.kv_of_query))

    def partial_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        pairs: Pairs,
        heads: HeadShare,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """grad, q, out: [sq, h, d]  k, v: [sk, k, d]  lse: [sq, h]  ->  gradients of q, k and v."""
        if q.is_cuda:
            return gpu_partial_backward(grad, q, k, v, out, lse, pairs, heads.kv_of_query)
        return partial_attention_backward(grad, q, k, v, out, lse, pairs.tiling, head_runs(heads.kv_of_query))

    @torch.no_grad()
    def decode(self, q: Tensor, k: Tensor, v: Tensor, readable: Tensor | None) -> tuple[Tensor, Tensor]:
        """q: [h, d]  k, v: [k, n, d]  readable: [n] bool  ->  out [h, d], lse [h]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.unflatten(0, (len(k), -1)) / math.sqrt(q.shape[-1])
        scores = (queries @ k.mT).to(wide)  # [k, h/k, n]
        if readable is not None:
            scores = scores.masked_fill(~readable, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(wide).min)[..., None])
        return (weights.to(v.dtype) @ v).to(wide).flatten(0, 1), lse.flatten()

    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        """Run `reference` under this layer's window."""
        return reference(inputs, self.visible(mask), heads)


def reference(inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
    """The specification: a dense float64 loop over heads; [s, h, d]."""
    q, k, v = (inputs[name].double() for name in "qkv")
    allowed = torch.from_numpy(mask.dense()).to(q.device)
    outs = []
    for head, kv in enumerate(heads.kv_of_query):
        scores = q[:, head] @ k[:, kv].T / math.sqrt(q.shape[-1])
        outs.append(torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1) @ v[:, kv])
    return torch.stack(outs, dim=1)
