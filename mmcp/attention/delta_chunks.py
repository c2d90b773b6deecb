"""The gated delta rule in chunks: matrix products inside a chunk, one state passed between chunks.

    S_i = a_i (1 - b_i k_i k_i^T) S_{i-1} + b_i k_i v_i^T      out_i = q_i^T S_i / sqrt(d_k)      a_i = exp(g_i)

Queries and keys are divided by their norms first. What token i writes along its key is v_i less what the state says of
that key already: w_i = b_i (v_i - a_i k_i^T S_{i-1}). With e_i = a_1 ... a_i inside a chunk of c tokens, S the state
before it, and D_ij = e_i / e_j for j <= i, all w of the chunk solve one unit lower triangular system:

    (1 + A) w = b (v - e (k S))                A_ij = b_i (k_i . k_j) D_ij for j < i
    out = (e q) S + (q k^T * D) w              S' = e_c S + (e_c / e * k)^T w

Yang et al. 2024 (arXiv 2406.06484) call it the WY form with the UT transform (1 + A)^-1; with decay: Yang et al. 2024
(2412.06464). D is the exponential of differences of sums of g, so that nothing overflows however strong the decay.

A document may begin anywhere in a chunk. Then sums of g start anew, D is 0 across the border, only tokens of the
document that was open before the chunk read S, only tokens of the chunk's last document add to S', and S does not live
on.

Forward keeps the inputs and the state before each group of chunks; backward computes a group again, last one first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.chunks import Group, Runs
from mmcp.attention.fla import fla_gated_delta

NORM_EPS = 1e-6  # added to the squared norm of a query or key, as in Qwen3-Next


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    states: Tensor,
    *,
    key_of_value: Sequence[int],
    runs: Runs,
) -> Tensor:
    """Run the recurrence above, with gradients.

    q, k: [n, k, d_k]  v: [n, h, d_v]   tokens of all runs
    log_decay, strength: [n, h, 1]  g, at most 0, and b, from 0 to 1, of each token and value head
    states: [runs, h, d_k, d_v]  before each run, in float32 or the inputs' type, whichever is wider
    key_of_value: for each value head its key head
    returns [n, h, d_v], in the type of the states
    """
    index = torch.tensor(key_of_value, device=v.device)
    if runs.sequences is not None:
        keys = q[:, index], k[:, index]
        return fla_gated_delta(*keys, v, log_decay, strength, states, sequences=runs.sequences)[0]
    out, _ = _GatedDelta.apply(q, k, v, log_decay, strength, states, index, runs.groups)
    return out


def gated_delta_state(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    states: Tensor,
    *,
    key_of_value: Sequence[int],
    runs: Runs,
) -> Tensor:
    """Return the state after each run, [runs, h, d_k, d_v], with gradients; arguments as for `gated_delta`."""
    index = torch.tensor(key_of_value, device=v.device)
    if runs.sequences is not None:
        keys = k[:, index]
        return fla_gated_delta(keys, keys, v, log_decay, strength, states, sequences=runs.sequences)[1]
    _, after = _GatedDelta.apply(None, k, v, log_decay, strength, states, index, runs.groups)
    return after


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    states: Tensor,
    *,
    key_of_value: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Run the recurrence for one token of each of n documents, outside autograd.

    q, k: [n, k, d_k]  v: [n, h, d_v]  log_decay, strength: [n, h, 1]  states: [n, h, d_k, d_v] before
    returns [n, h, d_v] and the states after, in the type of the states
    """
    index, kind = list(key_of_value), states.dtype
    q, k = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
        for x in (q[:, index].to(kind), k[:, index].to(kind))
    )
    states = states * log_decay.to(kind).exp()[..., None]
    news = strength.to(kind) * (v.to(kind) - (k[..., None, :] @ states)[..., 0, :])
    states = torch.addcmul(states, k[..., None], news[..., None, :])
    return (q[..., None, :] @ states)[..., 0, :] / math.sqrt(q.shape[-1]), states


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, Tensor]:
        q, k, v, log_decay, strength, states, index, groups_of_run = inputs
        out = None if q is None else torch.empty(v.shape, dtype=states.dtype, device=v.device)
        after, before = torch.empty_like(states), states.new_empty((sum(map(len, groups_of_run)), *states.shape[1:]))
        number = 0
        for run, groups in enumerate(groups_of_run):
            state = states[run]
            for group in groups:
                before[number] = state
                tokens = _Tokens.of(group, index, k, v, log_decay, strength, states.dtype)
                written, inner = tokens.scan(state)
                if out is not None:
                    result = tokens.read_out(_unit(q, group, states.dtype)[0], written, inner)
                    out[group.start : group.stop] = _unchunk(result, group)
                state, number = inner[-1], number + 1
            after[run] = state
        ctx.save_for_backward(q, k, v, log_decay, strength, index, before)
        ctx.groups_of_run = groups_of_run
        return out, after

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, strength, index, before = ctx.saved_tensors
        grads: list[Any] = [None if x is None else torch.empty_like(x) for x in (q, k, v, log_decay, strength)]
        grad_states, number = grad_after.clone(), len(before)
        for run, groups in reversed(list(enumerate(ctx.groups_of_run))):
            for group in reversed(groups):
                number -= 1
                tokens = _Tokens.of(group, index, k, v, log_decay, strength, before.dtype)
                parts: tuple[Any, ...] = tokens.backward(q, grad_out, before[number], grad_states[run])
                grad_states[run] = parts[-1]
                for total, part in zip(grads, parts[:-1], strict=True):
                    if total is not None:
                        total[group.start : group.stop] = _unchunk(part, group)
        return *grads, grad_states, None, None


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The tokens of a group in m chunks of c; k key heads, of which h value heads each read one."""

    group: Group
    index: Tensor
    """[h] key head of each value head."""
    k: Tensor
    """[m, k, c, d_k] of norm 1."""
    k_norm: Tensor
    """[m, k, c, 1] what they were divided by, inverted."""
    v: Tensor
    """[m, h, c, d_v]"""
    strength: Tensor
    """[m, h, c, 1]: b."""
    inside: Tensor
    """[m, h, c, c]: D."""
    reads: Tensor
    """[m, h, c, 1]: decay from the state before the chunk to token i."""
    adds: Tensor
    """[m, h, c, 1]: decay from token j to the end of the chunk."""
    carry: Tensor
    """[m, h, 1, 1]: decay of the state over the chunk."""
    overlap: Tensor
    """[m, h, c, c]: (k_i . k_j) D_ij."""
    solve: Tensor
    """[m, h, c, c]: (1 + A)^-1."""

    @staticmethod
    def of(
        group: Group, index: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, dtype: torch.dtype
    ) -> "_Tokens":
        keys, k_norm = _unit(k, group, dtype)
        rate = _chunk(strength, group, dtype)
        decay = _sums(_chunk(log_decay, group, dtype)[..., 0], group)
        last = decay[..., -1:]
        inside = _decay_between(decay, group)
        overlap = (keys @ keys.mT)[:, index].mul_(inside)
        eye = torch.eye(group.size, dtype=dtype, device=k.device)
        return _Tokens(
            group=group,
            index=index,
            k=keys,
            k_norm=k_norm,
            v=_chunk(v, group, dtype),
            strength=rate,
            inside=inside,
            reads=(decay.exp() * group.reads[:, None])[..., None],
            adds=((last - decay).clamp(max=0).exp() * group.adds[:, None])[..., None],  # above 0 across a border only
            carry=(last.exp() * group.lives_on[:, None, None])[..., None],
            overlap=overlap,
            solve=torch.linalg.solve_triangular(overlap * rate, eye, upper=False, unitriangular=True),
        )

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the state along: [h, d_k, d_v] -> w [m, h, c, d_v], states before each chunk and after [m + 1, ...]."""
        keys = self.k[:, self.index]
        reading, adding, written = keys * (self.reads * self.strength), keys * self.adds, self.v * self.strength
        states = state.new_empty((len(keys) + 1, *state.shape))
        states[0] = state
        for chunk, (read, add, w) in enumerate(zip(reading, adding, written, strict=True)):
            news = torch.baddbmm(w, read, states[chunk], alpha=-1)
            torch.bmm(self.solve[chunk], news, out=w)
            torch.mul(states[chunk], self.carry[chunk], out=states[chunk + 1]).baddbmm_(add.mT, w)
        return written, states

    def read_out(self, q: Tensor, written: Tensor, states: Tensor) -> Tensor:
        """q: [m, k, c, d_k] of norm 1, and what `scan` gave -> out [m, h, c, d_v]."""
        out = (q @ self.k.mT)[:, self.index].mul_(self.inside) @ written
        out += (q[:, self.index] * self.reads) @ states[:-1]
        return out.mul_(1 / math.sqrt(q.shape[-1]))

    def backward(
        self, q: Tensor | None, grad_out: Tensor | None, state: Tensor, grad_state: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, log_decay and strength, in chunks, and of the state before the group.

        q: [n, k, d_k] and grad_out: [n, h, d_v] of all runs, or None when nothing is read out
        state, grad_state: [h, d_k, d_v]  before the group, after it
        """
        written, states = self.scan(state)
        keys = self.k[:, self.index]
        if q is None or grad_out is None:
            grad_q, as_read = None, torch.zeros_like(keys)
            grad_written, grad_states = torch.zeros_like(written), torch.zeros_like(states[1:])
            flows = _Flows.none(self.strength)
        else:
            grad_q, grad_written, grad_states, as_read, flows = self._read_out_backward(q, grad_out, written, states)
        grad_news, grad_after, grad_state = self._scan_backward(grad_written, grad_states, grad_state)
        grad_overlap = (grad_news @ written.mT).tril_(-1).neg_()  # over strength, as is the next
        flows.add_between((grad_overlap * self.strength).mul_(self.overlap))
        grad_overlap *= self.inside
        from_state = (grad_news @ states[:-1].mT).mul_(self.reads).neg_()
        flows.into += (from_state * keys).sum(-1).mul_(self.strength[..., 0])
        as_reader = (grad_overlap @ keys).add_(from_state)
        grad_strength = (grad_news * self.v).sum(-1, keepdim=True) + (as_reader * keys).sum(-1, keepdim=True)
        as_reader *= self.strength
        grad_overlap *= self.strength
        to_state = (written @ grad_after.mT).mul_(self.adds)
        flows.out += (to_state * keys).sum(-1)
        flows.over += (states[:-1] * grad_after).sum((-1, -2)).mul_(self.carry[..., 0, 0])
        grad_k = (grad_overlap.mT @ keys).add_(to_state).add_(as_read).add_(as_reader)
        grad_k = _unit_backward(self._sum_heads(grad_k), self.k, self.k_norm)
        grad_log_decay = _sums_backward(flows.grad_decay(), self.group)[..., None]
        return grad_q, grad_k, grad_news.mul_(self.strength), grad_log_decay, grad_strength, grad_state

    def _read_out_backward(
        self, q: Tensor, grad_out: Tensor, written: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, "_Flows"]:
        """Return the gradients of q, of w, of the states read and of the keys, and what decays on the way to them."""
        unit, norm = _unit(q, self.group, written.dtype)
        queries = unit[:, self.index]
        grad = _chunk(grad_out, self.group, written.dtype).mul_(1 / math.sqrt(q.shape[-1]))
        scores = torch.matmul(unit, self.k.mT)[:, self.index].mul_(self.inside)
        grad_scores = grad @ written.mT
        flows = _Flows.none(self.strength)
        flows.add_between((grad_scores * scores).tril_(-1))
        grad_scores *= self.inside
        from_state = (grad @ states[:-1].mT).mul_(self.reads)
        flows.into += (from_state * queries).sum(-1)
        grad_queries = (grad_scores @ self.k[:, self.index]).add_(from_state)
        grad_states = (queries * self.reads).mT @ grad
        grad_q = _unit_backward(self._sum_heads(grad_queries), unit, norm)
        return grad_q, scores.mT @ grad, grad_states, grad_scores.mT @ queries, flows

    def _scan_backward(
        self, grad_written: Tensor, grad_states: Tensor, grad_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pass the gradient of the state back: what reads gave of w and of the states, what comes after the group.

        returns the gradients of v - e (k S) over strength [m, h, c, d_v], of the state after each chunk, and of the
        state before the group
        """
        keys = self.k[:, self.index]
        reading, adding = keys * (self.reads * self.strength), keys * self.adds
        grad_after, solve = torch.empty_like(grad_states), self.solve.mT
        for chunk in reversed(range(len(keys))):
            grad_after[chunk] = grad_state
            grad_w = torch.baddbmm(grad_written[chunk], adding[chunk], grad_state)
            news = torch.bmm(solve[chunk], grad_w, out=grad_written[chunk])
            grad_state = torch.addcmul(grad_states[chunk], grad_state, self.carry[chunk])
            grad_state.baddbmm_(reading[chunk].mT, news, alpha=-1)
        return grad_written, grad_after, grad_state

    def _sum_heads(self, x: Tensor) -> Tensor:
        """[m, h, c, d] -> [m, k, c, d], over the value heads of each key head."""
        return torch.zeros_like(self.k).index_add_(1, self.index, x)


@dataclass(eq=False)
class _Flows:
    """Everything that decays on a way inside a chunk, times its gradient: what the sums of g at both ends are moved by.

    Each way is counted in both of its ends, which cancel in the sums over later tokens. They do so exactly in double,
    because it is one number that is added and taken away.
    """

    ends: Tensor
    """[m, h, c] float64: of ways between two tokens, those that end at a token less those that begin there."""
    into: Tensor
    """[m, h, c] float64: from the state before the chunk to a token."""
    out: Tensor
    """[m, h, c] float64: from a token to the state after the chunk."""
    over: Tensor
    """[m, h] float64: from the state before the chunk to the one after it."""

    @staticmethod
    def none(like: Tensor) -> "_Flows":
        """Start with nothing, for tokens like [m, h, c, 1]."""
        tokens = like[..., 0].double()
        ends, into, out = (torch.zeros_like(tokens) for _ in range(3))
        return _Flows(ends, into, out, torch.zeros_like(tokens[..., 0]))

    def add_between(self, pairs: Tensor) -> None:
        """Add ways from token j to token i: [m, h, c (i), c (j)], 0 but for j < i."""
        self.ends += pairs.sum(-1, dtype=torch.float64)
        self.ends -= pairs.sum(-2, dtype=torch.float64)

    def grad_decay(self) -> Tensor:
        """[m, h, c] float64: gradient of the sums of g at each token."""
        grad = self.ends + self.into - self.out
        grad[..., -1] += self.out.sum(-1) + self.over
        return grad


def _decay_between(decay: Tensor, group: Group) -> Tensor:
    """[m, h, c] sums of g -> [m, h, c, c]: D, from token j to token i of a chunk; 0 before j and across borders."""
    later = torch.full((group.size, group.size), -torch.inf, dtype=decay.dtype, device=decay.device).triu_(1)
    inside = torch.sub(decay[..., :, None], decay[..., None, :]).add_(later).exp_()
    if len(group.split_chunks):
        inside[group.split_chunks] = inside[group.split_chunks].masked_fill(~group.same_document[:, None], 0)
    return inside


def _sums(log_decay: Tensor, group: Group) -> Tensor:
    """[m, h, c]: sums of g up to each token of a chunk, from the start of its document or of the chunk."""
    exact = log_decay.double()
    sums = exact.cumsum(-1)
    if len(group.split_chunks):
        sums[group.split_chunks] = exact[group.split_chunks] @ group.same_document.triu().double()
    return sums.to(log_decay.dtype)


def _sums_backward(grad: Tensor, group: Group) -> Tensor:
    """Transpose of `_sums`: [m, h, c] float64 -> [m, h, c] float64."""
    sums = grad.flip(-1).cumsum(-1).flip(-1)
    if len(group.split_chunks):
        sums[group.split_chunks] = grad[group.split_chunks] @ group.same_document.tril().double()
    return sums


def _unit(x: Tensor, group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Chunk and divide by norms: [n, heads, d] -> [m, heads, c, d], and 1 / norm [m, heads, c, 1]."""
    x = _chunk(x, group, dtype)
    scale = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x.mul_(scale), scale


def _unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of what `unit` was made from, in place."""
    return grad.addcmul_(unit, (grad * unit).sum(-1, keepdim=True), value=-1).mul_(scale)


def _chunk(x: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """[n, heads, d] -> a copy of the group's rows, [m, heads, c, d], padded with zeros."""
    rows = x[group.start : group.stop]
    chunks = len(group.lives_on)
    out = torch.zeros((chunks, x.shape[1], group.size, x.shape[2]), dtype=dtype, device=x.device)
    whole = len(rows) // group.size
    out[:whole] = rows[: whole * group.size].unflatten(0, (whole, group.size)).transpose(1, 2)
    if whole < chunks:
        out[whole, :, : len(rows) - whole * group.size] = rows[whole * group.size :].transpose(0, 1)
    return out


def _unchunk(x: Tensor, group: Group) -> Tensor:
    """[m, heads, c, d] -> [rows, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)[: group.stop - group.start]
