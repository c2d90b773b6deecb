"""Ring attention: queries stay, keys and values visit, point to point, under the attention to those that came before.

At hop t ring rank i attends to keys of rank i - t, which it gets from their owner, while those of hop t + 1 travel.
Plan and mask tell both sides which keys a hop's queries read: only these are sent, and nothing where there are none,
so that a sliding window costs what it reads. Answers of the hops merge by log-sum-exp in float32 or wider. Backward
goes round again with the merged answer; the owners of keys get back what each visit adds to their gradients.

Liu et al. 2023 (arXiv 2310.01889); without causal imbalance when each rank holds an early and a late part (zigzag).

Keys read at each hop, four ranks of contiguous causal tokens (rank 0 has nothing to read after hop 0):

    hop   rank 0   rank 1   rank 2   rank 3
     0      0        1        2        3
     1      -        0        1        2
     2      -        -        0        1
     3      -        -        -        0
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, RowInfo, SoftmaxAttention
from mmcp.attention.flash_cpu import merge_
from mmcp.attention.pairs import Pairs
from mmcp.masks import Mask, keys_of, restrict
from mmcp.parallel.collectives import Flight, Group, start_swap
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges, size


@dataclass(frozen=True, eq=False)
class Hop:
    """One step of the ring as one rank sees it."""

    source: int
    """Ring rank whose keys are read here."""
    target: int
    """Ring rank that reads keys of this one."""
    sent: Ranges
    """Which of this rank's tokens, counted from 0, the target reads."""
    num_received: int
    """How many of the source's tokens are read here."""
    pairs: Pairs
    """Pairs of this rank's queries and the keys received."""


def hops_of(plan: ShardPlan, mask: Mask, ring_index: int) -> tuple[Hop, ...]:
    """Plan the hops of one ring rank: hop 0 reads its own keys, all of them; nothing of it is sent."""
    here = plan.group_tokens[ring_index]
    hops = [Hop(ring_index, ring_index, (), size(here), Pairs(mask, here, here))]
    for step in range(1, plan.ring):
        source, target = (ring_index - step) % plan.ring, (ring_index + step) % plan.ring
        received = keys_read(plan, mask, ring_index, source)
        sent = _places(keys_read(plan, mask, target, ring_index), here)
        hops.append(Hop(source, target, sent, size(received), Pairs(mask, here, received)))
    return tuple(hops)


def keys_read(plan: ShardPlan, mask: Mask, reader: int, owner: int) -> Ranges:
    """Return the positions held by ring rank `owner` that queries of ring rank `reader` read."""
    return keys_of(restrict(mask.slices, plan.group_tokens[reader], plan.group_tokens[owner]))


def ring_attention(
    core: SoftmaxAttention, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, group: Group
) -> Tensor:
    """Attend to the whole row from this ring rank's tokens.

    inputs: q [n, h, d], k and v [n, k, d]   tokens of this ring index (`plan.group_tokens`), in sequence order
    returns [n, h, d]
    """
    mask = core.visible(info.mask)
    hops = info.once((ring_attention, mask.window, mask.sink), lambda: hops_of(info.plan, mask, group.index))
    return _Ring.apply(inputs["q"], inputs["k"], inputs["v"], core, heads, group, hops)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: SoftmaxAttention, heads: HeadShare, group: Group, hops: Any
    ) -> Tensor:
        ctx.settings = core, heads, group, hops
        visits = _Visits(torch.stack([k, v], dim=1), hops, group, backward=False)
        out, lse = core.partial(q, k, v, hops[0].pairs, heads)
        out = out.to(lse.dtype)
        for step in range(1, len(hops)):
            keys, values = visits.arrive(step)
            if not hops[step].pairs.is_empty:
                merge_(out, lse, *core.partial(q, keys, values, hops[step].pairs, heads))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        core, heads, group, hops = ctx.settings
        visits = _Visits(torch.stack([k, v], dim=1), hops, group, backward=True)
        parts = core.partial_backward(grad, q, k, v, out, lse, hops[0].pairs, heads)
        grad_q = parts[0].to(lse.dtype)
        returns = _Returns(torch.stack(parts[1:], dim=1).to(lse.dtype), hops, group)
        for step in range(1, len(hops)):
            keys, values = visits.arrive(step)
            parts = core.partial_backward(grad, q, keys, values, out, lse, hops[step].pairs, heads)
            grad_q += parts[0]
            returns.leave(step, torch.stack(parts[1:], dim=1).to(lse.dtype))
        grad_k, grad_v = returns.finish().unbind(1)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


class _Visits:
    """Keys and values on their way round: those of the next hop travel while the present ones are read."""

    def __init__(self, kv: Tensor, hops: tuple[Hop, ...], group: Group, *, backward: bool):
        """kv: [n, 2, k, d]  keys and values of this rank, contiguous."""
        self.kv, self.hops, self.group, self.backward = kv, hops, group, backward
        self.buffer, self.flight = kv, Flight()
        self._start(1)

    def arrive(self, step: int) -> tuple[Tensor, Tensor]:
        """Wait for the keys and values of hop `step`, each [m, k, d], and send for those of the next."""
        self.flight.wait()
        keys, values = self.buffer.unbind(1)
        self._start(step + 1)
        return keys, values

    def _start(self, step: int) -> None:
        if step < len(self.hops):
            hop = self.hops[step]
            self.buffer = self.kv.new_empty((hop.num_received, *self.kv.shape[1:]))
            sent, received = [(hop.target, _take(self.kv, hop.sent))], [(hop.source, self.buffer)]
            self.flight = start_swap(sent, received, group=self.group, name="ring keys", backward=self.backward)


class _Returns:
    """Gradients of visiting keys and values on their way home, one hop behind the attention that makes them."""

    def __init__(self, total: Tensor, hops: tuple[Hop, ...], group: Group):
        """total: [n, 2, k, d]  gradients of this rank's own keys and values, so far from its own queries."""
        self.total, self.hops, self.group = total, hops, group
        self.flight, self.buffer = Flight(), total
        self.rows: Ranges = ()

    def leave(self, step: int, visitors: Tensor) -> None:
        """Send home what hop `step` adds: [m, 2, k, d], in the type of the total."""
        self._land()
        hop = self.hops[step]
        self.rows, self.buffer = hop.sent, self.total.new_empty((size(hop.sent), *self.total.shape[1:]))
        sent, received = [(hop.source, visitors)], [(hop.target, self.buffer)]
        self.flight = start_swap(sent, received, group=self.group, name="ring gradients", backward=True)

    def finish(self) -> Tensor:
        """Return the sum over all hops."""
        self._land()
        return self.total

    def _land(self) -> None:
        self.flight.wait()
        before = 0
        for start, stop in self.rows:
            self.total[start:stop] += self.buffer[before : before + stop - start]
            before += stop - start


def _places(positions: Ranges, held: Ranges) -> Ranges:
    """Count positions from 0 inside the held ones that include them: ((5, 7),) of ((0, 2), (4, 8)) -> ((3, 5),)."""
    places, before = [], 0
    for start, stop in held:
        places += [
            (before + max(a, start) - start, before + min(b, stop) - start)
            for a, b in positions
            if max(a, start) < min(b, stop)
        ]
        before += stop - start
    return tuple(places)


def _take(rows: Tensor, ranges: Ranges) -> Tensor:
    """Return some rows, contiguous; a view where they are one range."""
    pieces = [rows[start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else rows[:0]
