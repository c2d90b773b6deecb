"""Recurrent attention on split sequences: ranks tell each other what their tokens do to the state, not the tokens.

A run of tokens maps the state before it to the one after it: state' = M state + E. Every ring rank gathers (M, E) of
all runs, composes those before its own in the order of the sequence, and attends to its own tokens. Bytes do not
depend on the number of tokens. Zigzag is two runs a rank, a document's beginning inside a run is M = 0.

Backward is the same recursion from the end, with M transposed: the gradient of the state after run i is what run i + 1
reads from it plus M' of the gradient after run i + 1. Sun et al. 2024 (LASP-2, arXiv 2502.07563); Yang et al. 2024
for the delta rule (2406.06484).

Runs of two ranks in zigzag, states before each:      rank 0        rank 1          rank 0
                                                       S0 = 0   S1 = E0   S2 = M1 E0 + E1   (rank 0 needs S0 and S2)
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, RecurrentAttention, RowInfo, carry
from mmcp.parallel.collectives import Group
from mmcp.parallel.gather import gather_rows
from mmcp.parallel.halo import Halo, halo_of
from mmcp.sharding.plan import ShardPlan


@dataclass(frozen=True)
class RunOrder:
    """All runs of a row, gathered ring rank by ring rank, and their order in the sequence."""

    counts: tuple[int, ...]
    """Per ring rank: its runs."""
    order: tuple[int, ...]
    """Number of each run on arrival, in sequence order: zigzag on two ranks, runs 0 3 | 1 2 -> (0, 2, 3, 1)."""
    first: int
    """This rank's first run on arrival."""

    last: int
    """Last + 1 of them."""

    @staticmethod
    def of(plan: ShardPlan, ring_index: int) -> "RunOrder":
        """Derive the order that a ring rank needs to know."""
        starts = [start for tokens in plan.group_tokens for start, _ in tokens]
        counts = tuple(len(tokens) for tokens in plan.group_tokens)
        order = tuple(sorted(range(len(starts)), key=starts.__getitem__))
        return RunOrder(counts, order, sum(counts[:ring_index]), sum(counts[: ring_index + 1]))

    def owner(self, run: int) -> int:
        """Return the ring rank of a run, numbered on arrival."""
        return bisect_right(list(accumulate(self.counts)), run)

    def holds(self, run: int) -> bool:
        """Tell whether a run, numbered on arrival, is this rank's."""
        return self.first <= run < self.last


def state_attention(
    core: RecurrentAttention,
    inputs: dict[str, Tensor],
    info: RowInfo,
    heads: HeadShare,
    group: Group,
    *,
    exchange: Callable[[Tensor, Tensor, RunOrder, Group], Tensor],
) -> Tensor:
    """Attend to the whole row from this ring rank's tokens.

    inputs: one [n, heads present, dim] per tensor of the core   tokens of this ring index, in sequence order
    exchange: from what each run does to the state to the state before it, as `gathered_states` or `scanned_states`
    returns [n, h, out_dim]
    """
    runs, length = info.plan.group_tokens[group.index], max(tensor.halo for tensor in core.tensors)
    key, halo_key = (RunOrder, group.index), (Halo, length)
    if key not in info.memo:
        info.memo[key] = RunOrder.of(info.plan, group.index)
    if halo_key not in info.memo:
        device = inputs[core.tensors[0].name].device
        info.memo[halo_key] = halo_of(info.plan, info.mask, group.index, length, device)
    halo = info.memo[halo_key].bring(inputs, core.tensors, group)
    ready = core.prepare(inputs, info, heads, runs, halo)
    transition, state = core.summarise(ready, info, heads, runs)
    before = exchange(transition, state, info.memo[key], group)
    return core.finish(ready, info, heads, runs, before)


def gathered_states(transition: Tensor, state: Tensor, runs: RunOrder, group: Group) -> Tensor:
    """Turn what each run of this rank does to the state into the state before it, every rank knowing all runs.

    transition: [runs, h] or [runs, h, d_k, d_k]  state: [runs, h, d_k, d_v]  ->  [runs, h, d_k, d_v]
    """
    return _GatheredStates.apply(transition, state, runs, group)


class _GatheredStates(torch.autograd.Function):
    """What each run of this rank does to the state -> the state before each of them."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, state: Tensor, runs: RunOrder, group: Group) -> Tensor:
        joined = torch.cat([transition.flatten(1), state.flatten(1)], dim=1)
        gathered = gather_rows(joined, runs.counts, group=group, name="states", backward=False)
        parts = gathered.split([transition.shape[1:].numel(), state.shape[1:].numel()], dim=1)
        transitions, states = parts[0].unflatten(1, transition.shape[1:]), parts[1].unflatten(1, state.shape[1:])
        before, passing = torch.empty_like(state), state.new_zeros(state.shape[1:])
        for run in runs.order:
            if runs.holds(run):
                before[run - runs.first] = passing
            passing = carry(transitions[run], passing) + states[run]
        ctx.save_for_backward(transitions, before)
        ctx.settings = runs, group
        return before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transitions, before = ctx.saved_tensors
        runs, group = ctx.settings
        is_matrix = transitions.ndim == before.ndim
        transposed = transitions.mT if is_matrix else transitions
        grads = gather_rows(grad, runs.counts, group=group, name="states", backward=True)
        after, passing = torch.empty_like(before), before.new_zeros(before.shape[1:])
        for run in reversed(runs.order):
            if runs.holds(run):
                after[run - runs.first] = passing
            passing = carry(transposed[run], passing) + grads[run]
        grad_transition = after @ before.mT if is_matrix else (after * before).sum((-2, -1))
        return grad_transition, after, None, None
