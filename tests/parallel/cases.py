"""What tests of parallel code share: the group of all ranks, plans from owners, a small dense attention to wrap."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mmcp.attention.base import Attention, HeadShare, HeadTensor, RowInfo
from mmcp.masks import Mask
from mmcp.parallel.collectives import Group
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_ranges


def whole_group() -> Group:
    """Return the group of all ranks that run; without torch.distributed this process alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group()
    return Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def plan_of_owners(owners: list[int], ranks: int, *, ring: int = 1) -> ShardPlan:
    """Make a plan in which token i is on rank owners[i], without media or labels."""
    tokens = tuple(as_ranges(np.flatnonzero(np.array(owners) == rank)) for rank in range(ranks))
    none: tuple = ((),) * ranks
    return ShardPlan("test", ring, ranks // ring, tokens, none, none, none, none, (), ())


class DenseAttention(Attention):
    """Causal softmax inside each document, gated per query head; key and value heads of different size."""

    def __init__(self, dim: int, out_dim: int):
        super().__init__()
        self.out_dim = out_dim
        self.tensors = (
            HeadTensor("q", "query", dim),
            HeadTensor("k", "kv", dim),
            HeadTensor("v", "kv", out_dim),
            HeadTensor("gate", "query", 1),
        )

    def forward(self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare) -> Tensor:
        return self.reference(inputs, info.mask, heads)

    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        q, k, v, gate = (inputs[name] for name in ("q", "k", "v", "gate"))
        scores = torch.einsum("qhd,khd->hqk", q, k[:, heads.kv_of_query]) * self.tensors[0].dim ** -0.5
        visible = torch.from_numpy(mask.dense())
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v[:, heads.kv_of_query]) * gate.sigmoid()


def relative_error(value: Tensor, reference: Tensor) -> float:
    """L2 norm of the difference over that of the reference, at least 1e-3."""
    value, reference = value.detach(), reference.detach()
    return float((value - reference).norm() / max(float(reference.norm()), 1e-3))
