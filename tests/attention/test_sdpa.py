"""Softmax attention against torch's scaled_dot_product_attention in float64, under every kind of mask, with gradients.

Run: python -m pytest tests/attention/test_sdpa.py
"""

import numpy as np
import pytest
import torch

from mmcp.attention import SoftmaxConfig
from mmcp.attention.base import split_heads
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info

BOUNDS = np.array([0, 1, 40, 41, 97])
MASKS = {
    "causal": Mask.causal([97]),
    "packed": Mask(BOUNDS, np.zeros((0, 2), dtype=np.int64)),
    "prefix": Mask(BOUNDS, np.array([[1, 9], [41, 60]])),
    "both ways in units": Mask(BOUNDS, np.array([[3, 12], [12, 21], [50, 51], [70, 97]])),
    "prefix and units": Mask(BOUNDS, np.array([[1, 9], [20, 29], [41, 45], [60, 90]])),
}
VARIANTS = [SoftmaxConfig(), SoftmaxConfig(window=6), SoftmaxConfig(window=11, sink=3)]


@pytest.mark.parametrize("variant", VARIANTS, ids=["whole", "window", "sink"])
@pytest.mark.parametrize("name", MASKS)
def test_softmax_is_sdpa_with_the_dense_mask(name, variant):
    mask, heads = MASKS[name], split_heads(6, 2, 1)[0]
    core = variant.build(heads=6, kv_heads=2, head_dim=16)
    inputs = draw_inputs(core, mask.num_tokens, heads, seed=0)
    seen = torch.from_numpy(core.visible(mask).dense())
    q, k, v = (x.transpose(0, 1)[None] for x in inputs.values())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0]
    results = []
    for out in (core(inputs, row_info(mask), heads), expected.transpose(0, 1)):
        results.append([out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want, of=results[1][1:]) < 1e-10
