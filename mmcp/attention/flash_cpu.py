"""Softmax attention on the CPU, tile by tile, merged by log-sum-exp: no s x s matrix at any length.

torch's CPU flash kernel returns an output and its logsumexp; its backward takes the *global* ones, so tiles of keys
are computed apart in both directions. Partial results are merged in float32 or the inputs' type, whichever is wider.
The kernel takes strided views and raw GQA heads, aligns `is_causal` at the top left, and must never be given 0 rows.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.products_cpu import backward_by_products
from mmcp.attention.tiles import Tile, Tiling

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

MANY_PAIRS = 1 << 18  # of a tile from which products over blocks are faster than the kernel's backward
FEW_THREADS = 2  # up to which they are: blocks are made one after the other

HeadRun = tuple[int, int, int, int]  # query heads q0..q1 read key-value heads k0..k1, the same number each


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, kv_of_query: Sequence[int]) -> Tensor:
    """Attend with gradients, keeping only q, k, v, the output and its logsumexp for backward.

    q: [s, h, d]  k, v: [s, k, d]   heads of one GQA group stay together, groups may differ in size
    returns [s, h, d]
    """
    return _TiledAttention.apply(q, k, v, tiling, head_runs(kv_of_query))


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, runs: tuple[HeadRun, ...]
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that are here: part of an answer, merged with others by log-sum-exp.

    q: [sq, h, d]  k, v: [sk, k, d]   tiles count rows of these tensors
    returns out [sq, h, d], in float32 or wider where tiles were merged, and lse [sq, h]; 0 and -inf without a key
    """
    (s, h, d), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    if _is_one_call(tiling, runs, q, k):
        out, lse = _call(q, k, v, tiling.tiles[0])
        return out, lse
    out = q.new_zeros((s, h, d), dtype=q.dtype if tiling.is_disjoint else wide)
    lse = q.new_full((s, h), -torch.inf, dtype=wide)
    for tile in tiling.tiles:
        for q0, q1, k0, k1 in runs:
            rows, heads = slice(tile.q0, tile.q1), slice(q0, q1)
            part, part_lse = _call(q[:, heads], k[:, k0:k1], v[:, k0:k1], tile)
            if tiling.is_disjoint:
                out[rows, heads], lse[rows, heads] = part, part_lse
            else:
                merge_(out[rows, heads], lse[rows, heads], part, part_lse)
    return out, lse


def partial_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiling: Tiling, runs: tuple[HeadRun, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's share of the gradients of q, k and v.

    grad, out: [sq, h, d]  lse: [sq, h]   of the whole answer, merged over all parts
    returns gradients shaped as q, k, v, in float32 or wider where tiles were summed
    """
    if _is_one_call(tiling, runs, q, k):
        return _call_backward(grad, q, k, v, out, lse, tiling.tiles[0])
    dtype = q.dtype if tiling.is_disjoint else torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for tile in tiling.tiles:
        for q0, q1, k0, k1 in runs:
            heads, kv = slice(q0, q1), slice(k0, k1)
            parts = _call_backward(grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads], tile)
            grad_q[tile.q0 : tile.q1, heads] += parts[0]
            grad_k[tile.k0 : tile.k1, kv] += parts[1]
            grad_v[tile.k0 : tile.k1, kv] += parts[2]
    return grad_q, grad_k, grad_v


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial answer into (out, lse), in place.

    out, part: [s, h, d]  lse, part_lse: [s, h]   a row without keys is 0 and -inf
    """
    merged = torch.logaddexp(lse, part_lse.to(lse.dtype))
    finite = merged.clamp(min=torch.finfo(merged.dtype).min)
    out.mul_(torch.exp(lse - finite)[..., None])
    out.addcmul_(part.to(out.dtype), torch.exp(part_lse - finite)[..., None])
    lse.copy_(merged)


def head_runs(kv_of_query: Sequence[int]) -> tuple[HeadRun, ...]:
    """Cut query heads into runs in which every key-value head serves the same number of them.

    (0, 1, 1, 2, 2, 3) -> ((0, 1, 0, 1), (1, 5, 1, 3), (5, 6, 3, 4))
    """
    groups = [(kv, len(list(same))) for kv, same in groupby(kv_of_query)]
    assert [kv for kv, _ in groups] == list(range(len(groups))), f"key-value heads must ascend by one: {kv_of_query}"
    runs, q0, k0 = [], 0, 0
    for size, equal in groupby(size for _, size in groups):
        count = len(list(equal))
        runs.append((q0, q0 + size * count, k0, k0 + count))
        q0, k0 = q0 + size * count, k0 + count
    return tuple(runs)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, runs: tuple[HeadRun, ...]) -> Tensor:
        out, lse = partial_attention(q, k, v, tiling, runs)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiling, ctx.runs = tiling, runs
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = partial_attention_backward(grad, q, k, v, out, lse, ctx.tiling, ctx.runs)
        return *(x.to(q.dtype) for x in grads), None, None


def _is_one_call(tiling: Tiling, runs: tuple[HeadRun, ...], q: Tensor, k: Tensor) -> bool:
    if len(tiling.tiles) != 1 or len(runs) != 1:
        return False
    tile = tiling.tiles[0]
    return (tile.q0, tile.q1, tile.k0, tile.k1) == (0, len(q), 0, len(k))


def _call(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Attend within one tile: -> out [rows, h, d] in the inputs' type, lse [rows, h] in float32 or wider."""
    queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
    rows = [_to_kernel(x, tile) for x in (q[queries], k[keys], v[keys])]
    out, lse = flash_forward(*rows, 0.0, tile.causal)
    return _from_kernel(out, tile), _from_kernel(lse[..., None], tile)[..., 0]


def _call_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
    rows = grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]
    if tile.pairs >= MANY_PAIRS and torch.get_num_threads() <= FEW_THREADS:
        flipped = [x.flip(0) for x in rows] if tile.reversed else rows
        grads = backward_by_products(*flipped, causal=tile.causal)
        grad_q, grad_k, grad_v = (x.flip(0) for x in grads) if tile.reversed else grads
        return grad_q, grad_k, grad_v
    *kernel_rows, lse = (_to_kernel(x, tile) for x in (*rows[:-1], rows[-1][..., None]))
    grad_q, grad_k, grad_v = flash_backward(*kernel_rows, lse[..., 0], 0.0, tile.causal)
    return _from_kernel(grad_q, tile), _from_kernel(grad_k, tile), _from_kernel(grad_v, tile)


def _to_kernel(x: Tensor, tile: Tile) -> Tensor:
    """[rows, heads, d] -> [1, heads, rows, d], without a copy unless reversed; the last axis must be contiguous."""
    if tile.reversed:
        x = x.flip(0)
    elif x.stride(-1) != 1:
        x = x.contiguous()
    return x.transpose(0, 1)[None]


def _from_kernel(x: Tensor, tile: Tile) -> Tensor:
    """[1, heads, rows, d] -> [rows, heads, d]."""
    x = x[0].transpose(0, 1)
    return x.flip(0) if tile.reversed else x
