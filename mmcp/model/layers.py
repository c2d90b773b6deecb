"""The parts of a decoder block, as in Llama and Qwen3: RMSNorm, gated MLP, attention layer.

Norm and gated MLP keep only their inputs for backward; the norm is computed in float32 or wider.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from mmcp.attention.base import HeadShape, HeadTensor, LocalAttention, RowInfo, Variant, split_heads
from mmcp.model.gated_product import gated_product
from mmcp.model.rotary import rotate_

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467).

    zero_centred: multiply by 1 + weight instead, as Qwen3-Next does, so that decay pulls the product to 1
    """

    def __init__(self, size: int, eps: float, *, zero_centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))
        self.eps, self.zero_centred = eps, zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape and type."""
        weight: Tensor = self.weight
        if self.zero_centred:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return _RMSNorm.apply(x, weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x * scale, grad.to(scale.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s/cp, e] -> [s/cp, e]."""
        maps = self.gate, self.up, self.down
        if any(type(each) is not nn.Linear or each.bias is not None for each in maps):  # adapters, biases
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return gated_product(x, *(each.weight for each in maps))


class AttentionLayer(nn.Module):
    """Project to what the variant takes, norm and turn queries and keys, attend, project back.

    `attention` is called with (inputs, info); a parallel wrapper that answers the same call may take its place.
    """

    def __init__(
        self,
        variant: Variant,
        *,
        width: int,
        shape: HeadShape,
        qk_norm: bool,
        bias: bool,
        out_bias: bool,
        norm: Callable[[int], RMSNorm],
    ):
        super().__init__()
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        core = variant.build(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        count = {"query": heads, "kv": kv_heads}
        self.tensors: tuple[HeadTensor, ...] = core.tensors
        self.project = nn.ModuleDict(
            {spec.name: nn.Linear(width, count[spec.heads] * spec.dim, bias=bias) for spec in core.tensors}
        )
        has_norm = qk_norm and variant.qk_norm
        self.norm = nn.ModuleDict({name: norm(head_dim) for name in "qk"} if has_norm else {})
        self.rotary = variant.rotary
        share = split_heads(heads, kv_heads, 1)[0]
        self.attention: nn.Module = LocalAttention(core, share, mode=variant.mode, chunks=variant.chunks)
        self.gate = nn.Linear(width, heads * core.out_dim, bias=False) if variant.output_gate else None
        self.gate_activation = GATES[variant.gate_activation]
        self.out = nn.Linear(heads * core.out_dim, width, bias=out_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, info: RowInfo) -> Tensor:
        """x: [s/cp, e]  cos, sin: [s/cp, d/2]  ->  [s/cp, e]."""
        inputs = {}
        for spec in self.tensors:
            rows = self.project[spec.name](x)
            if spec.name in self.norm:
                rows = self.norm[spec.name](rearrange(rows, "s (h d) -> s h d", d=spec.dim))
            if self.rotary and spec.name in ("q", "k"):
                rows = rotate_(rows, cos, sin, head_dim=spec.dim)
            inputs[spec.name] = rows.view(len(x), rows.shape[1:].numel() // spec.dim, spec.dim)
        mixed = rearrange(self.attention(inputs, info), "s h d -> s (h d)")
        if self.gate is not None:
            mixed = mixed * self.gate_activation(self.gate(x))
        return self.out(mixed)
