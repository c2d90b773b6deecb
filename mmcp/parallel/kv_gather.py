"""Attention with the keys and values of all ring ranks gathered: simple, and good for few heads and short rows.

Every rank attends from its own tokens to all keys; memory grows with the row. Backward gathers again instead of
keeping them, and sends each owner what this rank adds to its gradients. As in the context parallelism of Llama 3
(Grattafiori et al. 2024, arXiv 2407.21783).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, RowInfo, SoftmaxAttention
from mmcp.attention.pairs import Pairs
from mmcp.masks import Mask
from mmcp.parallel.collectives import Group, exchange
from mmcp.parallel.gather import gather_rows
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices, size


@dataclass(frozen=True, eq=False)
class Gathering:
    """How keys lie when they arrive, ring rank by ring rank, and what one rank reads of them."""

    lengths: tuple[int, ...]
    """Per ring rank: its tokens."""
    order: Tensor | None
    """[s] int64: global position of each token on arrival; None when that is the order of the sequence."""
    pairs: Pairs
    """Pairs of this rank's queries and all keys of the row."""


def gathering_of(plan: ShardPlan, mask: Mask, ring_index: int, device: torch.device) -> Gathering:
    """Plan the gathering of one ring rank."""
    queries, keys = plan.group_tokens[ring_index], ((0, plan.num_tokens),)
    order = np.concatenate([as_indices(tokens) for tokens in plan.group_tokens])
    in_order = bool(np.all(order[1:] > order[:-1]))
    return Gathering(
        lengths=tuple(size(tokens) for tokens in plan.group_tokens),
        order=None if in_order else torch.from_numpy(order).to(device),
        pairs=Pairs(mask, queries, keys),
    )


def gathered_attention(
    core: SoftmaxAttention, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, group: Group
) -> Tensor:
    """Attend to the whole row from this ring rank's tokens.

    inputs: q [n, h, d], k and v [n, k, d]   tokens of this ring index (`plan.group_tokens`), in sequence order
    returns [n, h, d]
    """
    mask, device = core.visible(info.mask), inputs["q"].device
    gathering = info.once(
        (gathered_attention, mask.window, mask.sink), lambda: gathering_of(info.plan, mask, group.index, device)
    )
    return _Gathered.apply(inputs["q"], inputs["k"], inputs["v"], core, heads, group, gathering)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: SoftmaxAttention, heads: HeadShare, group: Group, plan: Any
    ) -> Tensor:
        ctx.settings = core, heads, group, plan
        keys, values = _gather(k, v, plan, group, backward=False)
        out, lse = core.partial(q, keys, values, plan.pairs, heads)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        core, heads, group, plan = ctx.settings
        keys, values = _gather(k, v, plan, group, backward=True)
        grad_q, *grad_kv = core.partial_backward(grad, q, keys, values, out, lse, plan.pairs, heads)
        parts = torch.stack([part.to(lse.dtype) for part in grad_kv], dim=1)  # [s, 2, k, d]
        parts = parts if plan.order is None else parts.index_select(0, plan.order)
        n = plan.lengths[group.index]
        received = exchange(
            parts, plan.lengths, [n] * group.size, group=group, name="gathered gradients", backward=True
        )
        grad_k, grad_v = received.unflatten(0, (group.size, n)).sum(0).unbind(1)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _gather(k: Tensor, v: Tensor, plan: Gathering, group: Group, *, backward: bool) -> tuple[Tensor, ...]:
    """[n, k, d] each -> keys and values [s, k, d] of the row in sequence order."""
    rows = gather_rows(torch.stack([k, v], dim=1), plan.lengths, group=group, name="gathered keys", backward=backward)
    if plan.order is not None:
        rows = torch.empty_like(rows).index_copy_(0, plan.order, rows)
    return rows.unbind(1)
