"""Decayed linear attention in chunks: matrix products inside a chunk, one state passed between chunks.

    state_i = g state_{i-1} + k_i v_i^T        out_i = q_i state_i        state 0 at the first token of each document

With c tokens a chunk, positions i, j inside it, U a chunk's own contribution and S the state before it:

    out = (q k^T * decay) v  +  (g^{i+1} q) S        U = (g^{c-1-j} k)^T v        S' = g^c S + U

Retentive networks, Sun et al. 2023 (arXiv 2307.08621); Lightning attention, Qin et al. 2024 (2401.04658).

A document may begin anywhere in a chunk. Then the decay is 0 across the border; only tokens of the chunk's last
document add to U; only tokens of the document that was open before the chunk read S; and S does not live on.

Chunks are worked on a group at a time, so that what a group needs stays in the cache at any length of the row; the
state goes from group to group in forward, its gradient from group to group in backward.

Tokens come as runs: contiguous ranges of the row, one after the other, each with the state before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.attention.base import RowInfo
from mmcp.attention.fla import Sequences, cut_sequences, fla_decayed, uses_fla
from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges
from mmcp.sharding.ranges import size as num_tokens

GROUP_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive chunks of a run and the document borders in them: m chunks of c tokens, the run's last one padded."""

    start: int
    """First token, counted over all runs."""
    stop: int
    """Last + 1 token."""
    size: int
    """Tokens of a chunk, c."""
    lengths: Tensor
    """[m] int64: tokens of each chunk without padding."""
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


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tokens, cut for the code that works on them."""

    groups: tuple[tuple[Group, ...], ...]
    """Per run its groups of chunks; none where flash-linear-attention does the work."""
    sequences: Sequences | None
    """What that library's kernels take, where they are used."""


def runs_of(info: RowInfo, runs: Ranges, size: int, tokens: Tensor) -> Runs:
    """Cut the runs that `tokens` [n, ...] belong to into chunks of `size`; equal layers share the result."""
    assert len(tokens) == num_tokens(runs), f"{len(tokens)} tokens in runs of {num_tokens(runs)}"
    on_gpu = uses_fla(tokens)

    def cut() -> Runs:
        if on_gpu:
            return Runs((), cut_sequences(info.mask, runs, tokens.device))
        return Runs(groups_of(info.mask, size, tokens.device, runs), None)

    return info.once(("chunks", size, runs, on_gpu), cut)


def groups_of(mask: Mask, size: int, device: torch.device, runs: Ranges) -> tuple[tuple[Group, ...], ...]:
    """Cut each run into chunks of `size` tokens, and these into groups: per run its groups."""
    bounds, before, listed = set(mask.bounds.tolist()), 0, []
    for start, stop in runs:
        documents = mask.documents[start:stop]
        open_document = -1 if start in bounds else int(documents[0])
        listed.append(_run_groups(documents, open_document, size, before, device))
        before += stop - start
    return tuple(listed)


def _run_groups(
    documents: np.ndarray, open_document: int, size: int, offset: int, device: torch.device
) -> tuple[Group, ...]:
    """documents: [n] of each token   open_document: the one that the state before the run belongs to, -1 if none."""
    step = max(1, GROUP_TOKENS // size)
    document = np.pad(documents, (0, -len(documents) % size), mode="edge").reshape(-1, size)
    last = document[:, -1:]
    before = np.concatenate([[[open_document]], last[:-1]])
    split = (document != last).any(axis=1)
    lengths = np.minimum(size, len(documents) - size * np.arange(len(document)))
    groups = []
    for first in range(0, len(document), step):
        chunks = slice(first, first + step)
        rows, ends, starts = document[chunks], last[chunks], before[chunks]
        splits = np.flatnonzero(split[chunks])
        same = rows[splits, :, None] == rows[splits, None, :]
        arrays = (lengths[chunks], splits, same, rows == ends, rows == starts, (starts == ends)[:, 0])
        stop = min(len(documents), (first + step) * size)
        tensors = (torch.from_numpy(x).to(device) for x in arrays)
        groups.append(Group(offset + first * size, offset + stop, size, *tensors))
    return tuple(groups)


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    *,
    log_decay: Tensor,
    kv_of_query: Sequence[int],
    runs: Runs,
) -> Tensor:
    """Run the recurrence above with q scaled by 1/sqrt(d), with gradients.

    q: [n, h, d_k]  k: [n, k, d_k]  v: [n, k, d_v]   tokens of all runs
    states: [runs, h, d_k, d_v]  before each run, in float32 or the inputs' type, whichever is wider
    log_decay: [h] float64, ln g of each query head, at most 0
    returns [n, h, d_v], in the type of the states
    Keeps q, k, v and the state before each group for backward.
    """
    index = torch.tensor(kv_of_query, device=q.device)
    if runs.sequences is not None:
        return fla_decayed(q, k[:, index], v[:, index], states, log_decay=log_decay, sequences=runs.sequences)[0]
    return _DecayedAttention.apply(q, k, v, states, log_decay, index, runs.groups)


def decayed_state(
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    kv_of_query: Sequence[int],
    runs: Runs,
) -> Tensor:
    """Return the state after each run when the state before it is 0, with gradients: [runs, h, d_k, d_v].

    k: [n, k, d_k]  v: [n, k, d_v]   tokens of all runs
    """
    index = torch.tensor(kv_of_query, device=k.device)
    if runs.sequences is not None:
        wide = torch.promote_types(k.dtype, torch.float32)
        states = k.new_zeros((len(runs.sequences.first), len(index), k.shape[-1], v.shape[-1]), dtype=wide)
        keys = k[:, index]
        return fla_decayed(keys, keys, v[:, index], states, log_decay=log_decay, sequences=runs.sequences)[1]
    return _DecayedState.apply(k, v, log_decay, index, runs.groups)


def decayed_step(q: Tensor, k: Tensor, v: Tensor, states: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence for one token of each of n documents, outside autograd.

    q, k: [n, h, d_k]  v: [n, h, d_v]  states: [n, h, d_k, d_v] before  decay: [h], g of each head
    returns [n, h, d_v] and the states after, in the type of the states
    """
    q, k, v = (x.to(states.dtype) for x in (q, k, v))
    after = torch.addcmul(decay[:, None, None] * states, k[..., None], v[..., None, :])
    return (q[..., None, :] @ after)[..., 0, :] / math.sqrt(q.shape[-1]), after


def run_decay(mask: Mask, runs: Ranges, log_decay: Tensor) -> Tensor:
    """Return what is left of the state before each run after it: [runs, h] float64, 0 where a document begins."""
    lengths = torch.tensor([stop - start for start, stop in runs], dtype=torch.float64, device=log_decay.device)
    begun = np.searchsorted(mask.bounds, np.array(runs, dtype=np.int64).reshape(-1, 2))
    lives_on = torch.from_numpy(begun[:, 0] == begun[:, 1]).to(log_decay.device)
    return torch.exp(lengths[:, None] * log_decay) * lives_on[:, None]


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
        to_end = (group.lengths[:, None] - 1 - i).clamp(min=0)
        add = torch.exp(log[..., None] * to_end) * group.adds
        carry = torch.exp(log_decay * group.lengths[:, None]) * group.lives_on[:, None]
        shaped = inside[:, None], read[..., None], add[..., None], carry[..., None, None]
        return _Factors(*(x.to(dtype) for x in shaped))


class _DecayedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, states: Tensor, *settings: Any) -> Tensor:
        log_decay, index, groups_of_run = settings
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=states.dtype, device=q.device)
        before = states.new_empty((sum(map(len, groups_of_run)), *states.shape[1:]))
        number = 0
        for state, groups in zip(states, groups_of_run, strict=True):
            for group in groups:
                before[number] = state
                chunks = _chunk(q, group), _chunk(k, group, index), _chunk(v, group, index)
                factors = _Factors.of(log_decay, group, q.shape[-1], out.dtype)
                result, state = _attend(*chunks, state, factors, group)
                out[group.start : group.stop] = _unchunk(result, group)
                number += 1
        ctx.save_for_backward(q, k, v, log_decay, index, before)
        ctx.groups_of_run = groups_of_run
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, index, before = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=before.dtype, device=x.device) for x in (q, k, v)]
        grad_states = before.new_zeros((len(ctx.groups_of_run), *before.shape[1:]))
        number = len(before)
        for run, groups in reversed(list(enumerate(ctx.groups_of_run))):
            for group in reversed(groups):
                number -= 1
                chunks = _chunk(grad, group), _chunk(q, group), _chunk(k, group, index), _chunk(v, group, index)
                factors = _Factors.of(log_decay, group, q.shape[-1], before.dtype)
                *parts, grad_states[run] = _attend_backward(*chunks, before[number], grad_states[run], factors, group)
                rows = slice(group.start, group.stop)
                grads[0][rows] = _unchunk(parts[0], group)
                for total, part in zip(grads[1:], parts[1:], strict=True):
                    total[rows].index_add_(1, index, _unchunk(part, group))
        return *(total.to(x.dtype) for total, x in zip(grads, (q, k, v), strict=True)), grad_states, None, None, None


class _DecayedState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        log_decay, index, groups_of_run = settings
        wide = torch.promote_types(k.dtype, torch.float32)
        states = torch.zeros((len(groups_of_run), len(index), k.shape[-1], v.shape[-1]), dtype=wide, device=k.device)
        for run, groups in enumerate(groups_of_run):
            for group in groups:
                keys, values = _chunk(k, group, index), _chunk(v, group, index)
                factors = _Factors.of(log_decay, group, k.shape[-1], wide)
                _, states[run] = _states_before((keys * factors.add).mT @ values, states[run], factors.carry)
        ctx.save_for_backward(k, v, log_decay, index)
        ctx.groups_of_run = groups_of_run
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v, log_decay, index = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=grad.dtype, device=x.device) for x in (k, v)]
        for grad_state, groups in zip(grad, ctx.groups_of_run, strict=True):
            for group in reversed(groups):
                keys, values = _chunk(k, group, index), _chunk(v, group, index)
                factors = _Factors.of(log_decay, group, k.shape[-1], grad.dtype)
                unread = grad.new_zeros((len(index), len(group.lengths), *grad_state.shape[1:]))
                grad_added, grad_state = _added_after(unread, grad_state, factors.carry)
                rows = slice(group.start, group.stop)
                grads[0][rows].index_add_(1, index, _unchunk(values @ grad_added.mT * factors.add, group))
                grads[1][rows].index_add_(1, index, _unchunk((keys * factors.add) @ grad_added, group))
        return *(total.to(x.dtype) for total, x in zip(grads, (k, v), strict=True)), None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factors: _Factors, group: Group) -> tuple[Tensor, Tensor]:
    """q, k: [h, m, c, d_k]  v: [h, m, c, d_v]  state: [h, d_k, d_v] before the group -> output, state after it."""
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

    q, k: [h, m, c, d_k]  grad, v: [h, m, c, d_v]  state, grad_state: [h, d_k, d_v] before the group, after it
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
    """Compose chunks in order: added [h, m, d_k, d_v], state [h, d_k, d_v] -> state before each, after the last."""
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
