"""Bring the hidden states of the last token of each document to every rank."""

import torch
from torch import Tensor

from mmcp.attention.base import RowInfo
from mmcp.parallel.collectives import Group, all_reduce


def last_tokens(hidden: Tensor, info: RowInfo, group: Group) -> Tensor:
    """hidden: [s/cp, e] of this rank's tokens -> [documents, e] on all ranks; not differentiable."""
    plan, rank = info.plan, info.rank
    last = info.mask.bounds[1:] - 1
    mine = plan.owner[last] == rank
    rows = hidden.new_zeros(len(last), hidden.shape[1])
    local = torch.from_numpy(plan.local(rank, last[mine])).to(hidden.device)
    rows[torch.from_numpy(mine).to(hidden.device)] = hidden[local]
    return all_reduce(rows, "sum", group=group, name="last tokens")
