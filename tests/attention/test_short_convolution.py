"""The short convolution against a loop over tokens and against torch's conv1d, whole and cut into runs with halos.

Run: python -m pytest tests/attention/test_short_convolution.py
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmcp.attention import blocks
from mmcp.attention.short_convolution import edges_of, short_convolution
from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges
from tests.attention.rows import relative_error

HEADS, DIM = 2, 3


def by_token(x: Tensor, weight: Tensor, mask: Mask) -> Tensor:
    width, rows = weight.shape[-1], []
    for i, start in enumerate(mask.bounds[mask.documents].tolist()):
        read = range(max(start, i - width + 1), i + 1)
        rows.append(F.silu(sum(weight[..., j - i + width - 1] * x[j] for j in read)))
    return torch.stack(rows) if rows else x + weight.sum()


def in_runs(x: Tensor, weight: Tensor, mask: Mask, runs: Ranges) -> Tensor:
    """Convolve run by run as ranks would, each given the tokens before it, and noise where there are none."""
    width = weight.shape[-1]
    padded = torch.cat([torch.full((width - 1, HEADS, DIM), 1e3, dtype=x.dtype), x])
    halo = torch.stack([padded[start : start + width - 1] for start, _ in runs]) if runs else x.new_zeros(0)
    halo = halo.reshape(len(runs), width - 1, HEADS, DIM)
    edges = edges_of(mask, width, x.device, runs)
    here = torch.cat([x[start:stop] for start, stop in runs]) if runs else x
    return short_convolution(here, weight, halo, edges)


def cut(rng: np.random.Generator, tokens: int, pieces: int) -> Ranges:
    bounds = sorted({0, tokens, *rng.integers(0, tokens + 1, pieces).tolist()})
    return tuple(pairwise(bounds))


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_into_runs_is_the_loop_over_tokens(seed, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NUMBERS", 6 * 5)
    rng = np.random.default_rng(seed)
    mask = Mask.causal(rng.choice([1, 2, 3, 9, 30], int(rng.integers(0, 8))).tolist())
    width = int(rng.choice([1, 2, 4, 7]))
    torch.manual_seed(seed)
    x = torch.randn(mask.num_tokens, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(HEADS, DIM, width, dtype=torch.float64, requires_grad=True)
    runs = cut(rng, mask.num_tokens, int(rng.integers(0, 12))) if mask.num_tokens else ()
    expected, out = by_token(x, weight, mask), in_runs(x, weight, mask, runs)
    pull = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * pull).sum(), (x, weight))
    grads = torch.autograd.grad((out * pull).sum(), (x, weight))
    for got, want in zip([out, *grads], [expected, *wanted], strict=True):
        assert relative_error(got, want, of=()) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_one_document_is_conv1d(dtype, bound):
    x, weight = torch.randn(50, HEADS, DIM).to(dtype), torch.randn(HEADS, DIM, 4).to(dtype)
    out = in_runs(x, weight, Mask.causal([50]), ((0, 50),))
    channels = F.pad(x.double().flatten(1).T, (3, 0))
    expected = F.silu(F.conv1d(channels[None], weight.double().flatten(0, 1)[:, None], groups=HEADS * DIM))[0].T
    assert out.dtype == dtype
    assert relative_error(out.flatten(1), expected, of=()) < bound


def test_the_example_of_the_module():
    edges = edges_of(Mask.causal([3, 2]), 3, torch.device("cpu"), ((0, 2), (2, 5)))
    assert edges.rows.tolist() == [0, 1, 2, 3, 4]
    seen = torch.where(edges.visible[..., 0, 0], edges.sources, -1)  # halos of two runs are rows 0..3
    assert seen.tolist() == [[-1, -1, 4], [-1, 4, 5], [2, 3, 6], [-1, -1, 7], [-1, 7, 8]]


def test_tokens_far_from_any_start_are_no_edges():
    edges = edges_of(Mask.causal([100, 100]), 4, torch.device("cpu"), ((0, 150), (150, 200)))
    assert edges.rows.tolist() == [0, 1, 2, 100, 101, 102, 150, 151, 152]
