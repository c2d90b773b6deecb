"""Decayed linear attention in chunks: matrix products inside a chunk, one state passed between chunks.

    state_i = g state_{i-1} + k_i v_i^T        out_i = q_i state_i        state 0 at the first token of each document

With c tokens a chunk, positions i, j inside it, U a chunk's own contribution and S the state before it:

    out = (q k^T * decay) v  +  (g^{i+1} q) S        U = (g^{c-1-j} k)^T v        S' = g^c S + U

Retentive networks, Sun et al. 2023 (arXiv 2307.08621); Lightning attention, Qin et al. 2024 (2401.04658).

A document may begin anywhere in a chunk. Then the decay is 0 across the border; only tokens of the chunk's last
document add to U; only tokens of the document that was open before the chunk read S; and S does not live on.

Chunks are worked on a group at a time, so that what a group needs stays in the cache at any length of the row; the
state goes from group to group in forward, its gradient from group to group in backward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.masks import Mask

GROUP_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive chunks of a row and the document borders in them: m chunks of c tokens, the row's last one padded."""

    start: int
    """First token."""
    stop: int
    """Last + 1 token."""
    size: int
    """Tokens of a chunk, c."""
    split_chunks: Tensor
    """[splits] int64: chunks that hold tokens of more than one document."""
    same_document: Tensor
    """[splits, c, c] bool: whether two tokens of such a chunk share a document."""
    adds: Tensor
    """[m, c] bool: tokens that add to the state after their chunk."""
    reads: Tensor
    """[m, c] bool: tokens that read the state before their chunk."""
    lives_on: Tensor
    """[m] bool: whether the state before the chunk is still part of the one after it."""


def groups_of(mask: Mask, size: int, device: torch.device) -> tuple[Group, ...]:
    """Cut a row into chunks of `size` tokens, and these into groups."""
    s, step = mask.num_tokens, max(1, GROUP_TOKENS // size)
    if not s:
        return ()
    document = np.pad(mask.documents, (0, -s % size), mode="edge").reshape(-1, size)
    last = document[:, -1:]
    before = np.concatenate([[[-1]], last[:-1]])
    split = (document != last).any(axis=1)
    groups = []
    for first in range(0, len(document), step):
        chunks = slice(first, first + step)
        rows, ends, starts = document[chunks], last[chunks], before[chunks]
        splits = np.flatnonzero(split[chunks])
        same = rows[splits, :, None] == rows[splits, None, :]
        arrays = (splits, same, rows == ends, rows == starts, (starts == ends)[:, 0])
        stop = min(s, (first + step) * size)
        groups.append(Group(first * size, stop, size, *(torch.from_numpy(x).to(device) for x in arrays)))
    return tuple(groups)


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, kv_of_query: Sequence[int], groups: tuple[Group, ...]
) -> Tensor:
    """Run the recurrence above with q scaled by 1/sqrt(d), with gradients.

    q: [s, h, d]  k, v: [s, k, d]  log_decay: [h] float64, ln g of each query head, at most 0
    returns [s, h, d], in float32 or the inputs' type, whichever is wider
    Keeps q, k, v and the state before each group for backward.
    """
    return _DecayedAttention.apply(q, k, v, log_decay, torch.tensor(kv_of_query, device=q.device), groups)


@dataclass(frozen=True, eq=False)
class _Factors:
    """Powers of the decay, zero across borders."""

    inside: Tensor
    """[h, 1, c, c]: from key j to query i of a chunk, times 1/sqrt(d)."""
    read: Tensor
    """[h, m, c, 1]: from the state before the chunk to query i, times 1/sqrt(d)."""
    add: Tensor
    """[h, m, c, 1]: from key j to the end of the chunk."""
    carry: Tensor
    """[m, h, 1, 1]: from the state before the chunk to the one after it."""

    @staticmethod
    def of(log_decay: Tensor, group: Group, head_dim: int, dtype: torch.dtype) -> "_Factors":
        i = torch.arange(group.size, dtype=torch.float64, device=log_decay.device)
        log, scale = log_decay[:, None], 1 / math.sqrt(head_dim)
        inside = torch.exp(log[..., None] * (i[:, None] - i).clamp(min=0)).tril() * scale
        read = torch.exp(log * (i + 1))[:, None] * group.reads * scale
        add = torch.exp(log * (group.size - 1 - i))[:, None] * group.adds
        carry = torch.exp(log_decay * group.size) * group.lives_on[:, None]
        shaped = inside[:, None], read[..., None], add[..., None], carry[..., None, None]
        return _Factors(*(x.to(dtype) for x in shaped))


class _DecayedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, index: Tensor, groups: tuple[Group, ...]
    ) -> Tensor:
        s, h, d = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty((s, h, d), dtype=wide, device=q.device)
        states = torch.zeros((len(groups) + 1, h, d, d), dtype=wide, device=q.device)
        for number, group in enumerate(groups):
            chunks = _chunk(q, group), _chunk(k, group, index), _chunk(v, group, index)
            factors = _Factors.of(log_decay, group, d, wide)
            result, states[number + 1] = _attend(*chunks, states[number], factors, group)
            out[group.start : group.stop] = _unchunk(result, group)
        ctx.save_for_backward(q, k, v, log_decay, index, states)
        ctx.groups = groups
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, index, states = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=states.dtype, device=x.device) for x in (q, k, v)]
        grad_state = torch.zeros_like(states[0])
        for number, group in reversed(list(enumerate(ctx.groups))):
            chunks = _chunk(grad, group), _chunk(q, group), _chunk(k, group, index), _chunk(v, group, index)
            factors = _Factors.of(log_decay, group, q.shape[-1], states.dtype)
            *parts, grad_state = _attend_backward(*chunks, states[number], grad_state, factors, group)
            rows = slice(group.start, group.stop)
            grads[0][rows] = _unchunk(parts[0], group)
            for total, part in zip(grads[1:], parts[1:], strict=True):
                total[rows].index_add_(1, index, _unchunk(part, group))
        return *(x.to(q.dtype) for x in grads), None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factors: _Factors, group: Group) -> tuple[Tensor, Tensor]:
    """q, k, v: [h, m, c, d]  state: [h, d, d] before the group -> output [h, m, c, d], state after it."""
    out = _decay_(q @ k.mT, factors, group) @ v
    states, state = _states_before((k * factors.add).mT @ v, state, factors.carry)
    out += (q * factors.read) @ states
    return out, state


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    grad_state: Tensor,
    factors: _Factors,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the state before the group.

    grad, q, k, v: [h, m, c, d]  state: [h, d, d] before the group  grad_state: [h, d, d] of the state after it
    """
    added_keys, reading = k * factors.add, q * factors.read
    states, _ = _states_before(added_keys.mT @ v, state, factors.carry)
    grad_added, grad_state = _added_after(reading.mT @ grad, grad_state, factors.carry)
    grad_weights = _decay_(grad @ v.mT, factors, group)
    grad_q = (grad_weights @ k).addcmul_(grad @ states.mT, factors.read)
    grad_k = (grad_weights.mT @ q).addcmul_(v @ grad_added.mT, factors.add)
    weights = _decay_(torch.matmul(q, k.mT, out=grad_weights), factors, group)
    grad_v = (weights.mT @ grad).add_(added_keys @ grad_added)
    return grad_q, grad_k, grad_v, grad_state


def _states_before(added: Tensor, state: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Compose chunks in order: added [h, m, d, d], state [h, d, d] -> state before each, state after the last."""
    states = torch.empty_like(added)
    for chunk in range(added.shape[1]):
        states[:, chunk] = state
        state = torch.addcmul(added[:, chunk], state, carry[chunk])
    return states, state


def _added_after(grad_states: Tensor, grad_state: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of `_states_before`: gradients of the states -> of what was added, and of the first state."""
    grad_added = torch.empty_like(grad_states)
    for chunk in reversed(range(grad_states.shape[1])):
        grad_added[:, chunk] = grad_state
        grad_state = torch.addcmul(grad_states[:, chunk], grad_state, carry[chunk])
    return grad_added, grad_state


def _decay_(weights: Tensor, factors: _Factors, group: Group) -> Tensor:
    """Decay [h, m, c, c] products of queries and keys, in place."""
    weights *= factors.inside
    if len(group.split_chunks):
        weights[:, group.split_chunks] *= group.same_document
    return weights


def _chunk(x: Tensor, group: Group, index: Tensor | None = None) -> Tensor:
    """[s, heads, d] -> the group's [h, m, c, d], padded with zeros, in float32 or wider; index: [h] heads to take."""
    rows = x[group.start : group.stop].to(torch.promote_types(x.dtype, torch.float32))
    rows = rows if index is None else rows[:, index]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % group.size))
    return rows.unflatten(0, (-1, group.size)).permute(2, 0, 1, 3).contiguous()


def _unchunk(x: Tensor, group: Group) -> Tensor:
    """[h, m, c, d] -> [rows, h, d]."""
    return x.flatten(1, 2)[:, : group.stop - group.start].transpose(0, 1)
