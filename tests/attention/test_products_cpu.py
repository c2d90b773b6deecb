"""Backward by matrix products against autograd of dense attention in float64, over drawn shapes; bfloat16 too.

Run: python -m pytest tests/attention/test_products_cpu.py
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.attention import products_cpu
from mmcp.attention.flash_cpu import flash_backward, flash_forward
from mmcp.attention.products_cpu import backward_by_products
from tests.attention.rows import relative_error


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    for name, size in (("BLOCK_ROWS", 12), ("BLOCK_KEYS", 10), ("DIAGONAL_KEYS", 3)):
        monkeypatch.setattr(products_cpu, name, size)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[sq, h, d], [sk, k, d] -> out [sq, h, d], lse [sq, h]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1).T


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@settings(deadline=None, max_examples=60)
@given(
    num_queries=st.integers(1, 40),
    num_keys=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_autograd_of_dense_attention(num_queries, num_keys, kv_heads, group, causal, seed):
    shape = num_queries, kv_heads * group, 8
    q, grad, k, v = drawn(seed, shape, shape, *2 * [(num_keys, kv_heads, 8)])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, causal)
    with torch.no_grad():
        got = backward_by_products(grad, q, k, v, out, lse, causal=causal)
    for mine, theirs in zip(got, torch.autograd.grad(out, leaves, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_bfloat16_is_no_further_from_the_truth_than_the_kernel():
    q, grad, k, v = (x.bfloat16() for x in drawn(0, (300, 4, 64), (300, 4, 64), (300, 2, 64), (300, 2, 64)))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    truth = torch.autograd.grad(dense(*exact, True)[0], exact, grad.double())
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = flash_forward(*heads_first, 0.0, True)
    kernel = flash_backward(grad.transpose(0, 1)[None], *heads_first, out, lse, 0.0, True)
    mine = backward_by_products(grad, q, k, v, out[0].transpose(0, 1), lse[0].T, causal=True)
    for got, theirs, want in zip(mine, kernel, truth, strict=True):
        theirs = theirs[0].transpose(0, 1)
        assert got.dtype == torch.float32
        assert relative_error(got, want, of=()) < max(0.01, 1.5 * relative_error(theirs.double(), want, of=()))
