"""Attention to the keys of a row part by part on one device: what a ring does, without its ranks."""

from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, SoftmaxAttention
from mmcp.attention.flash_cpu import merge_
from mmcp.attention.pairs import Pairs


class InParts(torch.autograd.Function):
    """q [s, h, d], k and v [s, k, d] -> [s, h, d], answers to each part of the keys merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: SoftmaxAttention, heads: HeadShare, hops: tuple[Pairs, ...]
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for hop in hops:
            merge_(out, lse, *core.partial(q, _of(hop, k), _of(hop, v), hop, heads))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = core, heads, hops
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        core, heads, hops = ctx.settings
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for hop in hops:
            shares = core.partial_backward(grad, q, _of(hop, k), _of(hop, v), out, lse, hop, heads)
            for total, share in zip((grad_q, _of(hop, grad_k), _of(hop, grad_v)), shares, strict=True):
                total += share
        return *(x.to(q.dtype) for x in (grad_q, grad_k, grad_v)), None, None, None


def _of(hop: Pairs, rows: Tensor) -> Tensor:
    """Return the rows of a part, which are consecutive: a view."""
    ((start, stop),) = hop.keys
    return rows[start:stop]
