"""Parts of an answer merged against the whole, head groups by eye, and memory that grows with tokens, not their square.

Run: python -m pytest tests/attention/test_flash_cpu.py
"""

import numpy as np
import pytest
import torch

from mmcp.attention.flash_cpu import (
    head_runs,
    merge_,
    partial_attention,
    partial_attention_backward,
    tiled_attention,
)
from mmcp.attention.tiles import tile
from mmcp.masks import Mask
from tests.attention.rows import relative_error


def test_runs_of_head_groups():
    assert head_runs((0, 0, 1, 1)) == ((0, 4, 0, 2),)
    assert head_runs((0, 1, 1, 2, 2, 3)) == ((0, 1, 0, 1), (1, 5, 1, 3), (5, 6, 3, 4))
    with pytest.raises(AssertionError, match="ascend"):
        head_runs((0, 2))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("mask", [Mask.causal([20, 13]), Mask.causal([33]).with_window(6, 2)])
def test_blocks_of_keys_computed_apart_are_the_whole(mask):
    """As a ring does: each block of keys gives a part; backward takes the merged output and logsumexp."""
    q, k, v, grad = drawn(33, 4, 8), drawn(33, 2, 8), drawn(33, 2, 8).flip(0), drawn(33, 4, 8).flip(0)
    runs = head_runs((0, 0, 1, 1))
    out, lse = torch.zeros_like(q), torch.full((33, 4), -torch.inf, dtype=q.dtype)
    parts = []
    for start, stop in ((0, 10), (10, 27), (27, 33)):
        block = mask.slices.copy()
        block[:, 2:4] = np.clip(block[:, 2:4], start, stop)
        parts.append(tile(block[block[:, 2] < block[:, 3]]))
        rows = slice(min(t.q0 for t in parts[-1].tiles), max(t.q1 for t in parts[-1].tiles))
        part, part_lse = partial_attention(q, k, v, parts[-1], runs)
        assert (part_lse[: rows.start] == -torch.inf).all() and not part[: rows.start].any()
        merge_(out[rows], lse[rows], part[rows], part_lse[rows])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = tiled_attention(*leaves, tile(mask.slices), (0, 0, 1, 1))
    assert relative_error(out, whole, of=()) < 1e-12
    shares = [partial_attention_backward(grad, q, k, v, out, lse, part, runs) for part in parts]
    for got, want in zip(map(sum, zip(*shares, strict=True)), torch.autograd.grad(whole, leaves, grad), strict=True):
        assert relative_error(got, want, of=()) < 1e-12


@pytest.mark.parametrize("mask", [Mask.causal([4096]), Mask.causal([4000, 96]).with_window(512, 4)])
def test_no_square_matrix_is_kept_or_made(mask):
    q, k, v = (torch.randn(mask.num_tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        tiled_attention(q, k, v, tile(mask.slices), (0, 0, 1, 1)).sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 4 * mask.num_tokens * 1024  # the square of one head would be four times this


def test_merging_keeps_float32_under_bfloat16():
    mask = Mask.causal([512]).with_window(16)
    q, k, v = (torch.randn(512, 2, 16).bfloat16() for _ in range(3))
    out, lse = partial_attention(q, k, v, tile(mask.slices), head_runs((0, 1)))
    assert out.dtype == lse.dtype == torch.float32
    assert tiled_attention(q, k, v, tile(mask.slices), (0, 1)).dtype == torch.bfloat16
