"""Backward of softmax attention on the CPU, by matrix products over blocks of queries and keys that stay in the cache.

With z = log2(e) / sqrt(d), q' = [z q, -log2(e) lse], k' = [k, 1], g' = [g, -sum(g out)] and v' = [v, 1], a block is

    P = 2^(q' k'^T)      dS = P (g' v'^T)      dV += P^T g      dK += dS^T q / sqrt(d)      dQ += dS k / sqrt(d)

so that lse and the sums are subtracted inside a product, and all query heads of a key-value head are one tall block.
torch raises 2 to a power faster than e, and its flash kernel multiplies by transposed blocks, which is slow: dV and dK
are summed transposed here. Scores, P and sums over blocks are in float32 or wider; in bfloat16 the other products are
not, and a sum that is subtracted there stands in three columns, which together carry all of its digits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 512  # of a block: query tokens times the query heads of a key-value head
BLOCK_KEYS = 512
DIAGONAL_KEYS = 128  # of a block on a causal diagonal, half of which is computed in vain
LOG2_E = 1 / math.log(2)


def backward_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of these keys in the gradients of q, k and v.

    grad, q, out: [sq, h, d]  k, v: [sk, k, d]  lse: [sq, h]   of the answer merged over all keys; lse is finite
    causal: query i reads keys up to i only
    returns gradients shaped as q, k and v, in float32 or wider
    """
    group, wide = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = (torch.empty_like(x, dtype=wide) for x in (q, k, v))
    tokens, scale = max(1, BLOCK_ROWS // group), 1 / math.sqrt(q.shape[-1])
    for head in range(k.shape[1]):
        heads, keys = slice(head * group, (head + 1) * group), _Keys.of(k[:, head], v[:, head])
        for start in range(0, len(q), tokens):
            rows = slice(start, min(start + tokens, len(q)))
            queries = _Queries.of(*(x[rows, heads] for x in (grad, q, out, lse)))
            for block in _blocks(rows.start, rows.stop, len(k), causal=causal):
                _add_block(queries, keys, block)
            torch.mul(queries.grad.view(-1, group, q.shape[-1]), scale, out=grad_q[rows, heads])
        keys.write(grad_k[:, head], grad_v[:, head], scale)
    return grad_q, grad_k, grad_v


@dataclass(frozen=True)
class _Block:
    """Keys that a block of queries reads."""

    skipped: int
    """First query tokens of the block that read none of them."""
    start: int
    stop: int
    on_diagonal: bool
    """Query `skipped` + i reads the first i + 1 of them only."""


def _blocks(start: int, stop: int, num_keys: int, *, causal: bool) -> Iterator[_Block]:
    """Cut the keys that queries start..stop read; no block crosses a multiple of BLOCK_KEYS."""
    diagonal, end = (min(start, num_keys), min(stop, num_keys)) if causal else (num_keys, num_keys)
    first = 0
    while first < end:
        border = first - first % BLOCK_KEYS + BLOCK_KEYS
        if first < diagonal:
            last = min(border, diagonal)
            yield _Block(0, first, last, False)
        else:
            last = min(border, end, first + DIAGONAL_KEYS)
            yield _Block(first - start, first, last, True)
        first = last


@dataclass(frozen=True, eq=False)
class _Queries:
    """A block of query tokens of some heads, as rows: token by token, head by head."""

    group: int
    """Heads."""
    scoring: Tensor
    """[rows, d + 1], q'."""
    grading: Tensor
    """[rows, d + columns], g'."""
    plain: Tensor
    """[rows, d], q."""
    grad: Tensor
    """[rows, d], the sum of dS k so far."""

    @classmethod
    def of(cls, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> "_Queries":
        """grad, q, out: [tokens, heads, d]  lse: [tokens, heads]."""
        (_, group, d), wide = q.shape, lse.dtype
        grad, plain, out, lse = grad.reshape(-1, d), q.reshape(-1, d), out.reshape(-1, d), lse.reshape(-1)
        scoring = lse.new_empty(len(lse), d + 1)
        torch.mul(plain, LOG2_E / math.sqrt(d), out=scoring[:, :d])
        torch.mul(lse, -LOG2_E, out=scoring[:, d])
        rest = (grad.to(wide) * out).sum(-1).neg_()
        grading = grad.new_empty(len(lse), d + _sum_columns(q.dtype))
        grading[:, :d] = grad
        for column in range(d, grading.shape[1]):
            grading[:, column] = rest
            rest -= grading[:, column]
        return cls(group, scoring, grading, plain, torch.zeros_like(plain, dtype=wide))


@dataclass(frozen=True, eq=False)
class _Keys:
    """All keys and values of one head, and the sums of their gradients so far, BLOCK_KEYS by BLOCK_KEYS."""

    scoring: Tensor
    """[sk, d + 1], k'."""
    grading: Tensor
    """[sk, d + columns], v'."""
    plain: Tensor
    """[sk, d], k."""
    grad_k: Tensor
    """[cells, d, BLOCK_KEYS], transposed."""
    grad_v: Tensor
    """[cells, d, BLOCK_KEYS], transposed."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "_Keys":
        """k, v: [sk, d]."""
        wide = torch.promote_types(k.dtype, torch.float32)
        scoring, grading = _with_ones(k, 1, wide), _with_ones(v, _sum_columns(v.dtype), v.dtype)
        plain = scoring[:, :-1] if k.dtype == wide else k.contiguous()
        sums = scoring.new_zeros(2, -(-len(k) // BLOCK_KEYS), k.shape[1], BLOCK_KEYS)
        return cls(scoring, grading, plain, *sums)

    def write(self, grad_k: Tensor, grad_v: Tensor, scale: float) -> None:
        """Write the sums, [sk, d] each, that of the keys times `scale`."""
        for cell, rows in zip(self.grad_k, grad_k.split(BLOCK_KEYS), strict=True):
            torch.mul(cell[:, : len(rows)].T, scale, out=rows)
        for cell, rows in zip(self.grad_v, grad_v.split(BLOCK_KEYS), strict=True):
            rows.copy_(cell[:, : len(rows)].T)


def _add_block(queries: _Queries, keys: _Keys, block: _Block) -> None:
    """Add what one block gives to the gradients of its queries and keys."""
    rows, columns = slice(block.skipped * queries.group, None), slice(block.start, block.stop)
    cell, place = divmod(block.start, BLOCK_KEYS)
    place_in_cell = slice(place, place + block.stop - block.start)
    weights = queries.scoring[rows] @ keys.scoring[columns].T
    if block.on_diagonal:
        _hide_later_keys_(weights, queries.group)
    torch.exp2(weights, out=weights)
    plain, grading = queries.plain[rows], queries.grading[rows]
    weights = weights.to(plain.dtype)
    add_product(keys.grad_v[cell][:, place_in_cell], grading[:, : plain.shape[1]].T, weights)
    grad_scores = (grading @ keys.grading[columns].T).mul_(weights)
    add_product(queries.grad[rows], grad_scores, keys.plain[columns])
    add_product(keys.grad_k[cell][:, place_in_cell], plain.T, grad_scores)


def _hide_later_keys_(scores: Tensor, group: int) -> None:
    """scores: [tokens * group, n]; query token i reads the first i + 1 keys."""
    later = scores.new_ones(scores.shape[1], scores.shape[1], dtype=torch.bool).triu_(1)
    scores[: group * len(later)].view(-1, group, len(later)).masked_fill_(later[:, None], -torch.inf)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, [n, m], to a total of the same type or a wider one, in place."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _sum_columns(dtype: torch.dtype) -> int:
    """Columns of this type that a float32 or wider number is split into."""
    return 1 if torch.promote_types(dtype, torch.float32) == dtype else 3


def _with_ones(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """x: [n, d] -> [n, d + columns]."""
    wider = x.new_ones(len(x), x.shape[1] + columns, dtype=dtype)
    wider[:, : x.shape[1]] = x
    return wider
