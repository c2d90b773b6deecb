"""Pass the state of a recurrent variant by a parallel scan over runs of tokens: fewer messages than runs.

Each of n runs, in the order of the sequence, maps the state by state' = M state + E. In hop t a run takes the joined
map of the runs up to 2^t before it from that run's rank and joins it with its own (Hillis and Steele 1986), so that
after ceil(log2 (n - 1)) hops each of the first n - 1 knows what all tokens up to its end do to an empty state. A last
hop moves these states on by one run. A map that reaches back to the first run is its E alone: no M travels then.

Five runs; what each knows after each hop, and at the end the state before it:

    0      1      2      3      4
    0     01     12     23      -       from one run before
    0     01    012    0123     -       from two runs before
    -      0     01    012    0123

A rank takes per hop one map for each of its runs, where gathering takes one for each run of the other ranks. Backward
is the same scan from the end, with M transposed, over the gradients of the states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import carry
from mmcp.parallel.collectives import Group, start_swap
from mmcp.parallel.state_passing import RunOrder


@dataclass(frozen=True)
class Move:
    """One map that travels in a hop: from the run at one place of the scan to the run at another."""

    source: int
    target: int
    with_transition: bool
    """Whether M travels with E."""


def hops_of(num_runs: int) -> Iterator[list[Move]]:
    """Plan the hops of a scan over runs 0 .. num_runs - 1; the last moves states on to the next run."""
    step = 1
    while step < num_runs - 1:
        yield [Move(place - step, place, place - step >= step) for place in range(step, num_runs - 1)]
        step *= 2
    if num_runs > 1:
        yield [Move(place - 1, place, False) for place in range(1, num_runs)]


def scanned_states(transition: Tensor, state: Tensor, runs: RunOrder, group: Group) -> Tensor:
    """Turn what each run of this rank does to the state into the state before it, in about log2 as many hops as runs.

    transition: [runs, h] or [runs, h, d_k, d_k]  state: [runs, h, d_k, d_v]  ->  [runs, h, d_k, d_v]
    """
    return _ScannedStates.apply(transition, state, runs, group)


class _ScannedStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transition: Tensor, state: Tensor, runs: RunOrder, group: Group) -> Tensor:
        before = _scan(transition, state, runs, runs.order, group, backward=False)
        ctx.save_for_backward(transition, before)
        ctx.settings = runs, group
        return before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transition, before = ctx.saved_tensors
        runs, group = ctx.settings
        is_matrix = transition.ndim == before.ndim
        transposed = transition.mT if is_matrix else transition
        after = _scan(transposed, grad, runs, runs.order[::-1], group, backward=True)
        grad_transition = after @ before.mT if is_matrix else (after * before).sum((-2, -1))
        return grad_transition, after, None, None


def _scan(
    transition: Tensor, state: Tensor, runs: RunOrder, order: tuple[int, ...], group: Group, *, backward: bool
) -> Tensor:
    """Return what the runs before each of this rank's in `order` do to an empty state, shaped as `state`."""
    places = {place: run - runs.first for place, run in enumerate(order) if runs.holds(run)}
    owners = [runs.owner(run) for run in order]
    known = {place: (transition[index], state[index]) for place, index in places.items()}
    empty = torch.zeros_like(state[:1]).sum(0)
    before = {place: empty for place in places}
    hops = list(hops_of(len(order)))
    for number, hop in enumerate(hops):
        arrived = _travel(known, hop, owners, group, like=(transition, state), backward=backward)
        for place, (earlier_transition, earlier_state) in arrived.items():
            if number == len(hops) - 1:
                before[place] = earlier_state
                continue
            later_transition, later_state = known[place]
            joined = later_transition if earlier_transition is None else _after(later_transition, earlier_transition)
            known[place] = joined, carry(later_transition, earlier_state) + later_state
    result = torch.empty_like(state)
    for place, index in places.items():
        result[index] = before[place]
    return result


def _travel(
    known: dict[int, tuple[Tensor, Tensor]],
    hop: list[Move],
    owners: list[int],
    group: Group,
    *,
    like: tuple[Tensor, Tensor],
    backward: bool,
) -> dict[int, tuple[Tensor | None, Tensor]]:
    """Bring the maps of a hop to this rank's runs: by place, (M or None, E).

    like: transitions and states of this rank's runs, whose shapes all runs share
    """
    here, shapes = group.index, [x.shape[1:] for x in like]
    sent, received = [], []
    arrived: dict[int, tuple[Tensor | None, Tensor]] = {}
    for move in hop:
        source, target = owners[move.source], owners[move.target]
        if source == here == target:
            arrived[move.target] = known[move.source] if move.with_transition else (None, known[move.source][1])
        elif source == here:
            parts = known[move.source] if move.with_transition else known[move.source][1:]
            sent.append((target, torch.cat([part.flatten() for part in parts])))
        elif target == here:
            count = sum(shape.numel() for shape in (shapes if move.with_transition else shapes[1:]))
            received.append((move, (source, like[1].new_empty(count))))
    messages = [message for _, message in received]
    start_swap(sent, messages, group=group, name="states", backward=backward).wait()
    for move, (_, flat) in received:
        transition, state = flat.split([flat.numel() - shapes[1].numel(), shapes[1].numel()])
        arrived[move.target] = (
            transition.view(shapes[0]) if move.with_transition else None,
            state.view(shapes[1]),
        )
    return arrived


def _after(later: Tensor, earlier: Tensor) -> Tensor:
    """Join transitions [h] or [h, d_k, d_k]: first the earlier, then the later."""
    return later @ earlier if later.ndim > 1 else later * earlier
