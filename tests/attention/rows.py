"""Rows for attention tests: drawn per-head tensors, the info of a row on one rank, the error of the library's rule."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mmcp.attention.base import Attention, HeadShare, RowInfo
from mmcp.masks import Mask
from mmcp.sharding.plan import ShardPlan


def row_info(mask: Mask) -> RowInfo:
    """Describe a row that one rank holds whole."""
    tokens = ((0, mask.num_tokens),) if mask.num_tokens else ()
    plan = ShardPlan(
        strategy="whole", ring=1, ulysses=1, tokens=(tokens,), decode=((),), encode=((),), scored=((),), calls=((),),
        unit_ranges=(), label_ranges=(),
    )  # fmt: skip
    return RowInfo(mask=mask, plan=plan, rank=0)


def draw_inputs(
    core: Attention, num_tokens: int, heads: HeadShare, *, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Draw what the core takes, as leaves that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    count = {"query": len(heads.query_heads), "kv": len(heads.kv_heads)}
    return {
        spec.name: torch.randn(num_tokens, count[spec.heads], spec.dim, dtype=torch.float64, generator=generator)
        .to(dtype)
        .requires_grad_()
        for spec in core.tensors
    }


def relative_error(got: Tensor, want: Tensor, *, of: Iterable[Tensor]) -> float:
    """|got - want| / max(|want|, 1e-3 |of|), L2; `of`: what the tensor is part of, empty for itself alone."""
    scale = max(float(want.detach().norm()), 1e-3 * sum(float(x.norm()) ** 2 for x in of) ** 0.5)
    difference = float((got.detach().double() - want.detach().double()).norm())
    return difference / scale if scale else difference
