"""What each variant refuses, and the numbers of its own that the contract does not see.

Run: python -m pytest tests/attention/test_variants.py
"""

import numpy as np
import pytest
import torch

from mmcp.attention import LinearConfig, SoftmaxConfig
from mmcp.attention.base import split_heads
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="sink=4 without a window"):
        SoftmaxConfig(sink=4)
    with pytest.raises(ValueError, match="are tokens; they must be above 1"):
        LinearConfig(shortest_memory=16.0, longest_memory=8.0)
    with pytest.raises(ValueError, match="chunk=0"):
        LinearConfig(chunk=0)


def test_linear_refuses_a_mask_it_would_ignore():
    heads, mask = split_heads(2, 2, 1)[0], Mask(np.array([0, 8]), np.array([[2, 5]]))
    core = LinearConfig().build(heads=2, kv_heads=2, head_dim=4)
    with pytest.raises(ValueError, match="tokens 2 to 4 attend both ways"):
        core(draw_inputs(core, 8, heads, seed=0), row_info(mask), heads)


def test_a_row_and_its_mask_must_agree():
    heads = split_heads(2, 2, 1)[0]
    for variant in (SoftmaxConfig(), LinearConfig()):
        core = variant.build(heads=2, kv_heads=2, head_dim=4)
        with pytest.raises(AssertionError, match="7 tokens in a row of 8"):
            core(draw_inputs(core, 7, heads, seed=0), row_info(Mask.causal([8])), heads)


def test_softmax_costs_what_its_window_leaves():
    mask = Mask.causal([100])
    assert SoftmaxConfig(window=10).flops(mask, heads=1, head_dim=1) == 4 * (100 * 10 - 45)
    assert SoftmaxConfig().flops(Mask.causal([50, 50]), heads=1, head_dim=1) == 4 * 2 * 50 * 51 // 2


def test_memories_are_spaced_from_the_shortest_to_the_longest():
    decays = LinearConfig(shortest_memory=4.0, longest_memory=64.0).decays(3)
    torch.testing.assert_close(1 / (1 - decays), torch.tensor([4.0, 16.0, 64.0], dtype=torch.float64))


@pytest.mark.parametrize("chunk", [1, 64, 600, 1300])
def test_the_chunk_size_changes_no_result(chunk):
    """2,500 tokens are several groups of chunks, with borders inside them."""
    heads, mask = split_heads(2, 1, 1)[0], Mask.causal([900, 1, 1123, 476])
    results = []
    for size in (chunk, 32):
        core = LinearConfig(chunk=size, longest_memory=1e6).build(heads=2, kv_heads=2, head_dim=4)
        inputs = draw_inputs(core, 2500, heads, seed=0)
        out = core(inputs, row_info(mask), heads)
        results.append([out, *torch.autograd.grad(out.square().sum() + out.sum(), list(inputs.values()))])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want, of=()) < 1e-11


def test_long_rows_are_the_recurrence():
    heads, mask = split_heads(2, 1, 1)[0], Mask.causal([1500, 700])
    core = LinearConfig(longest_memory=1e4).build(heads=2, kv_heads=2, head_dim=4)
    inputs = draw_inputs(core, 2200, heads, seed=0)
    assert relative_error(core(inputs, row_info(mask), heads), core.reference(inputs, mask, heads), of=()) < 1e-11


def test_early_tokens_reach_late_ones_through_the_state():
    heads, mask = split_heads(1, 1, 1)[0], Mask.causal([3000])
    core = LinearConfig(shortest_memory=1e4, longest_memory=1e4).build(heads=1, kv_heads=1, head_dim=4)
    inputs = draw_inputs(core, 3000, heads, seed=0)
    out = core(inputs, row_info(mask), heads)
    (grad,) = torch.autograd.grad(out[-1].sum(), inputs["v"])
    assert grad[0].abs().sum() > 0
