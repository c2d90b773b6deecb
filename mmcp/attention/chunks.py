"""Decayed linear attention in chunks: matrix products inside a chunk, one state passed between chunks.

    state_i = g state_{i-1} + k_i v_i^T        out_i = q_i state_i        state 0 at the first token of each document

With c tokens a chunk, positions i, j inside it, U a chunk's own contribution and S the state before it:

    out = (q k^T * decay) v  +  (g^{i+1} q) S        U = (g^{c-1-j} k)^T v        S' = g^c S + U

Retentive networks, Sun et al. 2023 (arXiv 2307.08621); Lightning attention, Qin et al. 2024 (2401.04658).

A document may begin anywhere in a chunk. Then the decay is 0 across the border; only tokens of the chunk's last
document add to U; only tokens of the document that was open before the chunk read S; and S does not live on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.masks import Mask


@dataclass(frozen=True, eq=False)
class Borders:
    """Where documents begin, seen chunk by chunk; n chunks of c tokens, the last one padded."""

    size: int
    """Tokens of a chunk, c."""
    split_chunks: Tensor
    """[splits] int64: chunks that hold tokens of more than one document."""
    same_document: Tensor
    """[splits, c, c] bool: whether two tokens of such a chunk share a document."""
    adds: Tensor
    """[n, c] bool: tokens that add to the state after the chunk."""
    reads: Tensor
    """[n, c] bool: tokens that read the state before the chunk."""
    lives_on: Tensor
    """[n] bool: whether the state before the chunk is still part of the one after it."""

    @staticmethod
    def of(mask: Mask, size: int, device: torch.device) -> "Borders":
        """Look at a row's documents in chunks of `size` tokens."""
        document = np.pad(mask.documents, (0, -mask.num_tokens % size), mode="edge" if mask.num_tokens else "constant")
        document = document.reshape(-1, size)
        last = document[:, -1:]
        before = np.concatenate([np.full((min(1, len(last)), 1), -1), last[:-1]])
        split = np.flatnonzero((document != last).any(axis=1))
        same = document[split, :, None] == document[split, None, :]
        arrays = (split, same, document == last, document == before, (before == last)[:, 0])
        return Borders(size, *(torch.from_numpy(x).to(device) for x in arrays))


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, kv_of_query: Sequence[int], borders: Borders
) -> Tensor:
    """Run the recurrence above with q scaled by 1/sqrt(d), with gradients, keeping only q, k and v for backward.

    q: [s, h, d]  k, v: [s, k, d]  log_decay: [h] float64, ln g of each query head, at most 0
    returns [s, h, d], in float32 or the inputs' type, whichever is wider
    """
    index = torch.tensor(kv_of_query, device=q.device)
    return _DecayedAttention.apply(q, k, v, log_decay, index, borders)


@dataclass(frozen=True, eq=False)
class _Factors:
    """Powers of the decay, zero across borders."""

    inside: Tensor
    """[h, 1, c, c]: from key j to query i of a chunk, times 1/sqrt(d)."""
    read: Tensor
    """[h, n, c, 1]: from the state before the chunk to query i, times 1/sqrt(d)."""
    add: Tensor
    """[h, n, c, 1]: from key j to the end of the chunk."""
    carry: Tensor
    """[n, h, 1, 1]: from the state before the chunk to the one after it."""

    @staticmethod
    def of(log_decay: Tensor, borders: Borders, head_dim: int, dtype: torch.dtype) -> "_Factors":
        i = torch.arange(borders.size, dtype=torch.float64, device=log_decay.device)
        gap = i[:, None] - i[None, :]
        log, scale = log_decay[:, None], 1 / math.sqrt(head_dim)
        inside = torch.exp(log[..., None] * gap.clamp(min=0)).tril() * scale
        read = torch.exp(log * (i + 1))[:, None] * borders.reads * scale
        add = torch.exp(log * (borders.size - 1 - i))[:, None] * borders.adds
        carry = torch.exp(log_decay * borders.size) * borders.lives_on[:, None]
        return _Factors(
            inside[:, None].to(dtype),
            read[..., None].to(dtype),
            add[..., None].to(dtype),
            carry[..., None, None].to(dtype),
        )


class _DecayedAttention(torch.autograd.Function):
    """Chunks are [h, n, c, d]; states [h, n, d, d]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, index: Tensor, borders: Borders
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, log_decay, index)
        ctx.borders = borders
        queries, keys, values, factors = _chunked(q, k, v, log_decay, index, borders)
        out = _decay_(queries @ keys.mT, factors, borders) @ values
        states = states_before(contributions(keys, values, factors), factors.carry)
        out += (queries * factors.read) @ states
        return _unchunk(out, len(q))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, index = ctx.saved_tensors
        borders: Borders = ctx.borders
        queries, keys, values, factors = _chunked(q, k, v, log_decay, index, borders)
        grads = _chunk(grad.to(queries.dtype), borders.size)

        weights = _decay_(queries @ keys.mT, factors, borders)
        grad_weights = _decay_(grads @ values.mT, factors, borders)
        states = states_before(contributions(keys, values, factors), factors.carry)
        grad_states = (queries * factors.read).mT @ grads
        grad_added = _states_after(grad_states, factors.carry)

        grad_q = grad_weights @ keys + (grads @ states.mT) * factors.read
        grad_k = grad_weights.mT @ queries + (values @ grad_added.mT) * factors.add
        grad_v = weights.mT @ grads + (keys * factors.add) @ grad_added
        return (
            _unchunk(grad_q, len(q)).to(q.dtype),
            _sum_groups(_unchunk(grad_k, len(q)), index, k),
            _sum_groups(_unchunk(grad_v, len(q)), index, v),
            None,
            None,
            None,
        )


def contributions(keys: Tensor, values: Tensor, factors: _Factors) -> Tensor:
    """What each chunk adds to the state: [h, n, d, d]."""
    return (keys * factors.add).mT @ values


def states_before(added: Tensor, carry: Tensor) -> Tensor:
    """Compose chunks in order: the state before each, from 0.

    added: [h, n, d, d]  carry: [n, h, 1, 1]   returns [h, n, d, d]
    """
    states = torch.zeros_like(added)
    for chunk in range(1, added.shape[1]):
        torch.addcmul(added[:, chunk - 1], states[:, chunk - 1], carry[chunk - 1], out=states[:, chunk])
    return states


def _states_after(grad_states: Tensor, carry: Tensor) -> Tensor:
    """The transpose of `states_before`: from the gradients of the states to those of `added`."""
    added = torch.zeros_like(grad_states)
    for chunk in range(grad_states.shape[1] - 2, -1, -1):
        torch.addcmul(grad_states[:, chunk + 1], added[:, chunk + 1], carry[chunk + 1], out=added[:, chunk])
    return added


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, index: Tensor, borders: Borders
) -> tuple[Tensor, Tensor, Tensor, _Factors]:
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = _chunk(q.to(wide), borders.size)
    keys, values = (_chunk(x[:, index].to(wide), borders.size) for x in (k, v))
    return queries, keys, values, _Factors.of(log_decay, borders, q.shape[-1], wide)


def _decay_(weights: Tensor, factors: _Factors, borders: Borders) -> Tensor:
    """Decay [h, n, c, c] products of queries and keys, in place."""
    weights *= factors.inside
    if len(borders.split_chunks):
        weights[:, borders.split_chunks] *= borders.same_document
    return weights


def _chunk(x: Tensor, size: int) -> Tensor:
    """[s, h, d] -> [h, n, c, d], padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return padded.view(-1, size, *x.shape[1:]).permute(2, 0, 1, 3).contiguous()


def _unchunk(x: Tensor, s: int) -> Tensor:
    """[h, n, c, d] -> [s, h, d]."""
    return x.flatten(1, 2)[:, :s].transpose(0, 1)


def _sum_groups(grad: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a key-value head: [s, h, d] -> [s, k, d]."""
    summed = torch.zeros(like.shape, dtype=grad.dtype, device=grad.device)
    return summed.index_add_(1, index, grad).to(like.dtype)
