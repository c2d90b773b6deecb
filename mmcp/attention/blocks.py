"""Token-wise functions a block of tokens at a time: temporaries stay in the cache, whatever the length of the row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_NUMBERS = 1 << 16


def blocks_of(x: Tensor) -> list[tuple[int, int]]:
    """Cut the rows of x, [n, ...], into blocks of about BLOCK_NUMBERS numbers: first and last + 1 row of each."""
    step = max(1, BLOCK_NUMBERS // max(1, x.shape[1:].numel()))
    return [(start, min(start + step, len(x))) for start in range(0, len(x), step)]


def by_blocks(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute function(x, *parameters), which treats every token alike, with gradients.

    x: [n, ...]  ->  [n, ...]
    Keeps x and the parameters for backward, which runs `function` again.
    """
    return _ByBlocks.apply(function, x, *parameters)


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.function = function
        shape = function(x[:0], *parameters)
        out = shape.new_empty((len(x), *shape.shape[1:]))
        for start, stop in blocks_of(x):
            out[start:stop] = function(x[start:stop], *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        grad_x, totals = torch.empty_like(x), [torch.zeros_like(parameter) for parameter in parameters]
        for start, stop in blocks_of(x):
            leaves = [leaf.detach().requires_grad_() for leaf in (x[start:stop], *parameters)]
            with torch.enable_grad():
                out = ctx.function(*leaves)
            grad_x[start:stop], *parts = torch.autograd.grad(out, leaves, grad[start:stop])
            for total, part in zip(totals, parts, strict=True):
                total += part
        return None, grad_x, *totals
