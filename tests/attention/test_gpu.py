"""GPU attention against the reference where there is a GPU; its mask predicate and its choice of kernel anywhere.

Run: python -m pytest tests/attention/test_gpu.py
"""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from mmcp.attention import gpu
from mmcp.attention.base import split_heads
from mmcp.attention.softmax import SoftmaxConfig, reference
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info
from tests.sequences import draw_sequence


def drawn_mask(seed: int) -> Mask:
    rng = np.random.default_rng(seed)
    window = int(rng.integers(0, 8))
    return Mask.of(draw_sequence(rng)).with_window(window, int(rng.integers(0, 3)) if window else 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_predicate_is_the_dense_mask(seed):
    mask, cpu = drawn_mask(seed), torch.device("cpu")
    if mask.num_tokens:
        s = mask.num_tokens
        made = create_mask(gpu.mask_mod(mask, cpu), None, None, s, s, device="cpu")
        np.testing.assert_array_equal(made[0, 0].numpy(), mask.dense())


@pytest.mark.parametrize("seed", range(20))
def test_block_counts_are_those_of_the_dense_mask(seed):
    mask, size = drawn_mask(seed), 5
    padded = np.pad(mask.dense(), (0, -mask.num_tokens % size))
    blocks = len(padded) // size
    expected = padded.reshape(blocks, size, blocks, size).sum(axis=(1, 3))
    np.testing.assert_array_equal(gpu.block_pairs(mask, size), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_flex_forward_on_the_cpu_is_the_reference(seed, monkeypatch):
    monkeypatch.setattr(gpu, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr(gpu, "BLOCK", 8)
    mask, heads = drawn_mask(seed), split_heads(6, 3, 4)[1]
    core = SoftmaxConfig().build(heads=6, kv_heads=2, head_dim=16)
    inputs = draw_inputs(core, mask.num_tokens, heads, seed=seed, dtype=torch.float32)
    out = gpu.gpu_attention(*(x.detach() for x in inputs.values()), mask, heads.kv_of_query, row_info(mask))
    assert relative_error(out, reference(inputs, mask, heads), of=()) < 1e-5


def test_flash_attn_is_for_documents_and_windows_in_half(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    plain, blocks = Mask.causal([8]), Mask(np.array([0, 8]), np.array([[0, 4]]))
    assert gpu.uses_flash_attn(plain, torch.bfloat16) and gpu.uses_flash_attn(plain.with_window(3), torch.float16)
    assert not gpu.uses_flash_attn(plain, torch.float32)
    assert not gpu.uses_flash_attn(plain.with_window(3, 1), torch.bfloat16)
    assert not gpu.uses_flash_attn(blocks, torch.bfloat16)


def test_float64_is_refused_by_name():
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64; use float32"):
        gpu.gpu_attention(x, x, x, Mask.causal([1]), (0,), row_info(Mask.causal([1])))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-2), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("variant", [SoftmaxConfig(), SoftmaxConfig(window=100), SoftmaxConfig(window=50, sink=4)])
def test_gpu_kernels_are_the_reference(variant, dtype, bound):
    mask, heads = Mask.causal([300, 1, 211]), split_heads(6, 2, 4)[1]
    core = variant.build(heads=6, kv_heads=2, head_dim=64)
    leaves = draw_inputs(core, mask.num_tokens, heads, seed=0, dtype=dtype)
    inputs = {name: x.detach().cuda().requires_grad_() for name, x in leaves.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    out, expected = core(inputs, row_info(mask), heads), core.reference(exact, mask, heads)
    grads = torch.autograd.grad(out.float().square().sum(), list(inputs.values()))
    wanted = torch.autograd.grad(expected.square().sum(), list(exact.values()))
    for got, want in zip([out, *grads], [expected, *wanted], strict=True):
        assert relative_error(got.cpu(), want, of=wanted) < bound
