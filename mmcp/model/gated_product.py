"""The gated MLP a few tokens at a time, which keeps its input alone: two of its products are made again in backward.

    y = (silu(x G^T) * (x U^T)) D^T        x: [s/cp, e]  G, U: [f, e]  D: [e, f]

What lies between the products is three times as wide as a token's row; here it stays in the cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmcp.attention.products_cpu import add_product

BLOCK_NUMBERS = 1 << 18  # of one product; 380 tokens at f = 688


def gated_product(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)), with gradients.

    x: [s/cp, e]  gate, up: [f, e]  down: [e, f]   ->  [s/cp, e]
    """
    return _GatedProduct.apply(x, gate, up, down)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        out = torch.empty_like(x)
        for rows in _blocks(len(x), len(gate)):
            product = F.silu(x[rows] @ gate.T, inplace=True).mul_(x[rows] @ up.T)
            torch.mm(product, down.T, out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down = ctx.saved_tensors
        needs_x, *needs_weights = ctx.needs_input_grad
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_x = torch.empty_like(x) if needs_x else None
        sums = [
            torch.zeros_like(weight, dtype=wide) if needed else None
            for weight, needed in zip((gate, up, down), needs_weights, strict=True)
        ]
        for rows in _blocks(len(x), len(gate)):
            block = None if grad_x is None else grad_x[rows]
            _backward_block(grad[rows], x[rows], (gate, up, down), sums, block)
        return grad_x, *(total if total is None else total.to(x.dtype) for total in sums)


def _backward_block(
    grad: Tensor, x: Tensor, weights: tuple[Tensor, ...], sums: list[Tensor | None], grad_x: Tensor | None
) -> None:
    """Add the share of some tokens to the weights' gradients, and write that of their rows; grad, x: [tokens, e]."""
    gate, up, down = weights
    gates, ups, grads = x @ gate.T, x @ up.T, grad @ down
    sigmoid = torch.sigmoid(gates)
    silu = gates.mul_(sigmoid)
    if sums[2] is not None:
        add_product(sums[2], grad.T, silu * ups)
    slope = sigmoid.addcmul_(silu, 1 - sigmoid)
    grad_gates = slope.mul_(ups).mul_(grads)
    grad_ups = silu.mul_(grads)
    for total, factor in zip(sums, (grad_gates, grad_ups), strict=False):
        if total is not None:
            add_product(total, factor.T, x)
    if grad_x is not None:
        torch.mm(grad_gates, gate, out=grad_x)
        grad_x.addmm_(grad_ups, up)


def _blocks(num_tokens: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK_NUMBERS // width)
    return (slice(start, start + step) for start in range(0, num_tokens, step))
