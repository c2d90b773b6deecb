"""Carry rows between ranks as the plan says: encoder rows to the owners of their tokens, label rows to their scorers.

Each is one uneven differentiable exchange; who sends what is known from the plan, so no lengths are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmcp.parallel.collectives import Group, exchange
from mmcp.sharding.plan import ShardPlan


@dataclass(frozen=True, eq=False)
class RowMap:
    """One exchange of rows as one rank sees it. Rows carry distinct keys and arrive in the order of their keys.

    Rank 0 makes rows 5 2 9 and rank 1 makes row 3; keys under 5 go to rank 0, the others to rank 1:
        rank 0: send 1 0 2   send_sizes (1, 2)   receive_sizes (1, 1)   order 0 1   receives 2 3
        rank 1: send 0       send_sizes (1, 0)   receive_sizes (2, 0)   order 0 1   receives 5 9
    """

    send: Tensor
    """[rows] int64: this rank's rows in the order in which they leave."""
    send_sizes: tuple[int, ...]
    """Per rank: rows that go to it."""
    receive_sizes: tuple[int, ...]
    """Per rank: rows that come from it."""
    order: Tensor
    """[received] int64: the arrivals, rank by rank, in the order of their keys."""


def row_map(keys: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, rank: int, device: torch.device) -> RowMap:
    """Derive the map of `rank`.

    keys: per rank [rows] int64, the numbers of the rows that it has
    targets: per rank [rows] int64, the rank that each of them goes to
    """
    arriving = [np.sort(key[target == rank]) for key, target in zip(keys, targets, strict=True)]
    return RowMap(
        send=torch.from_numpy(np.lexsort((keys[rank], targets[rank]))).to(device),
        send_sizes=tuple(np.bincount(targets[rank], minlength=len(keys)).tolist()),
        receive_sizes=tuple(len(part) for part in arriving),
        order=torch.from_numpy(np.argsort(np.concatenate(arriving))).to(device),
    )


class Router:
    """The two exchanges of rows of one packed row, as the rank at `group.index` of its plan sees them.

    group: the context-parallel ranks that share the row
    """

    def __init__(self, plan: ShardPlan, group: Group, *, device: torch.device):
        assert plan.ranks == group.size, f"the plan is for {plan.ranks} ranks, the group has {group.size}"
        rank = group.index
        self.group = group
        made = [plan.unit_positions(r) for r in range(plan.ranks)]
        self.num_rows = len(made[rank])
        used = [np.flatnonzero(plan.encoder[positions] == r) for r, positions in enumerate(made)]
        made = [positions[kept] for positions, kept in zip(made, used, strict=True)]
        media = row_map(made, [plan.owner[positions] for positions in made], rank=rank, device=device)
        self.media = replace(media, send=torch.from_numpy(used[rank]).to(device)[media.send])
        holder = plan.owner[plan.label_positions]
        held = [np.flatnonzero(holder == r) for r in range(plan.ranks)]
        labels = row_map(held, [plan.scorer[numbers] for numbers in held], rank=rank, device=device)
        positions = torch.from_numpy(plan.local(rank, plan.label_positions[held[rank]])).to(device)
        self.labels = replace(labels, send=positions[labels.send])

    def to_owners(self, rows: Tensor, *, trainable: bool) -> Tensor:
        """Carry encoder rows to the ranks that hold their tokens.

        rows: [n_r, e]  what this rank encoded, in the order of its encoder calls
        trainable: whether rows carry gradients on any rank, known from the config
        returns [m, e]  the rows of this rank's media tokens, ascending
        """
        assert len(rows) == self.num_rows, f"{len(rows)} rows, the plan has {self.num_rows}"
        return _route(rows, self.media, self.group, "route media", trainable)

    def to_scorers(self, hidden: Tensor, *, trainable: bool) -> Tensor:
        """Carry the hidden rows that predict a label to the ranks that score them.

        hidden: [s/cp, e]  this rank's tokens
        trainable: whether hidden carries gradients on any rank, known from the config
        returns [l, e]  one row for each label that this rank scores, ascending
        """
        return _route(hidden, self.labels, self.group, "route labels", trainable)


def _route(rows: Tensor, rows_map: RowMap, group: Group, name: str, trainable: bool) -> Tensor:
    """Exchange rows; with `trainable` the backward exchange runs on every rank, whatever this rank's own rows are."""
    assert trainable or not rows.requires_grad, f"'{name}': rows carry gradients but are said not to be trainable"
    if trainable and torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    return _Route.apply(rows, rows_map, group, name)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, rows_map, group, name):
        ctx.route, ctx.num_rows = (rows_map, group, name), len(rows)
        sent = rows.index_select(0, rows_map.send)
        received = exchange(sent, rows_map.send_sizes, rows_map.receive_sizes, group=group, name=name, backward=False)
        return received.index_select(0, rows_map.order)

    @staticmethod
    def backward(ctx, grad):
        rows_map, group, name = ctx.route
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, rows_map.order, grad)
        received = exchange(sent, rows_map.receive_sizes, rows_map.send_sizes, group=group, name=name, backward=True)
        grad_rows = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return grad_rows.index_copy_(0, rows_map.send, received), None, None, None
