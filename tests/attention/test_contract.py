"""Every registered variant against its own reference: outputs and all gradients, on drawn rows, heads and types.

Run: python -m pytest tests/attention/test_contract.py
"""

import dataclasses

import numpy as np
import pytest
import torch

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.base import ATTENTION, Attention, HeadShare, LocalAttention, RowInfo, split_heads
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info
from tests.sequences import draw_sequence

VARIANTS = {
    "softmax": SoftmaxConfig(),
    "window": SoftmaxConfig(window=5),
    "sink": SoftmaxConfig(window=3, sink=2),
    "linear": LinearConfig(chunk=8),
    "lightning": LinearConfig(feature_map="silu", rotary=False, chunk=5, shortest_memory=2.0),
    "kernelised": KernelisedConfig(chunk=8),
    "softmax features": KernelisedConfig(chunk=5, feature_map="softmax"),
    "delta": GatedDeltaConfig(chunk=8),
    "wide delta": GatedDeltaConfig(convolution=7),
    "delta alone": GatedDeltaConfig(convolution=1, chunk=16),
    "positive": LinearConfig(feature_map="elu", chunk=16, longest_memory=1e9),
}


def test_every_registered_variant_is_tried():
    assert {type(variant) for variant in VARIANTS.values()} == set(ATTENTION.values())
    assert all(ATTENTION[variant.name] is type(variant) for variant in VARIANTS.values())


def build(variant, heads: int, kv_heads: int, *, dtype=torch.float64) -> Attention:
    torch.manual_seed(0)
    return variant.build(heads=heads, kv_heads=kv_heads, head_dim=8).to(dtype)


def compare(variant, mask: Mask, heads: HeadShare, *, of: tuple[int, int], seed: int, dtype=torch.float64) -> float:
    """Largest relative error of the output and of the gradient of each input and parameter; `of`: heads in all."""
    core = build(variant, *of, dtype=dtype)
    inputs = draw_inputs(core, mask.num_tokens, heads, seed=seed, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    out = core(inputs, row_info(mask), heads)
    expected = core.reference(exact, mask, heads)
    assert out.shape == expected.shape and out.dtype == dtype
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = list(core.parameters())
    grads = torch.autograd.grad((out * weight.to(dtype)).sum(), [*inputs.values(), *weights])
    expected_grads = torch.autograd.grad((expected * weight).sum(), [*exact.values(), *weights])
    pairs = zip([out, *grads], [expected, *expected_grads], strict=True)
    return max(relative_error(got, want, of=expected_grads) for got, want in pairs)


def drawn_case(seed: int) -> tuple[Mask, HeadShare, tuple[int, int]]:
    rng = np.random.default_rng(seed)
    sequence = draw_sequence(rng, segments=int(rng.integers(0, 9)))
    num_heads = int(rng.choice([1, 2, 6, 12]))
    kv_heads = int(rng.choice([k for k in (1, 2, 3, 4, 6) if num_heads % k == 0]))
    ranks = int(rng.integers(1, min(num_heads, 5) + 1))
    return Mask.of(sequence), split_heads(num_heads, kv_heads, ranks)[int(rng.integers(ranks))], (num_heads, kv_heads)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(s, marks=pytest.mark.full) for s in range(12, 100))])
def test_fast_is_the_reference(name, seed):
    mask, heads, of = drawn_case(seed)
    if not isinstance(VARIANTS[name], SoftmaxConfig):
        mask = dataclasses.replace(mask, blocks=mask.blocks[:0])
    assert compare(VARIANTS[name], mask, heads, of=of, seed=seed) < 1e-10


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_narrow_types_stay_near(name, dtype, bound):
    mask = Mask.causal([70, 1, 30])
    assert compare(VARIANTS[name], mask, split_heads(6, 2, 1)[0], of=(6, 2), seed=3, dtype=dtype) < bound


@pytest.mark.parametrize("name", VARIANTS)
def test_another_document_does_not_move_a_bit(name):
    lengths, changed = [9, 23, 1, 40], slice(9, 32)
    mask, heads = Mask.causal(lengths), split_heads(6, 2, 1)[0]
    core = build(VARIANTS[name], 6, 2)
    inputs = draw_inputs(core, mask.num_tokens, heads, seed=0)
    moved = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
    with torch.no_grad():
        for x in moved.values():
            x[changed] += 3.0
    others = torch.ones(mask.num_tokens, dtype=torch.bool)
    others[changed] = False
    results = []
    for tensors in (inputs, moved):
        out = core(tensors, row_info(mask), heads)
        results.append([out, *torch.autograd.grad(out[others].square().sum(), list(tensors.values()))])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[others], after[others])
    assert not torch.equal(results[0][0][changed], results[1][0][changed])


@pytest.mark.parametrize("name", VARIANTS)
def test_documents_packed_are_documents_alone(name):
    lengths, heads = [5, 17, 1, 1, 26, 64], split_heads(4, 2, 1)[0]
    core = build(VARIANTS[name], 4, 2)
    inputs = draw_inputs(core, sum(lengths), heads, seed=1)
    packed = core(inputs, row_info(Mask.causal(lengths)), heads)
    parts = zip(*(x.split(lengths) for x in inputs.values()), strict=True)
    alone = [
        core(dict(zip(inputs, part, strict=True)), row_info(Mask.causal([length])), heads)
        for part, length in zip(parts, lengths, strict=True)
    ]
    assert relative_error(packed, torch.cat(alone), of=()) < 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_heads_split_over_ranks_are_the_heads_together(name):
    mask = Mask.causal([30, 11])
    whole, shares = split_heads(6, 2, 1)[0], split_heads(6, 2, 4)
    core = build(VARIANTS[name], 6, 2)
    inputs = draw_inputs(core, mask.num_tokens, whole, seed=2)
    parts = []
    for share in shares:
        present = {"query": list(share.query_heads), "kv": list(share.kv_heads)}
        picked = {spec.name: inputs[spec.name][:, present[spec.heads]] for spec in core.tensors}
        parts.append(core(picked, row_info(mask), share))
    assert relative_error(torch.cat(parts, dim=1), core(inputs, row_info(mask), whole), of=()) < 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_strided_views_and_expanded_gradients_are_taken_as_they_are(name):
    mask, heads = Mask.causal([12, 7]), split_heads(4, 2, 1)[0]
    core = build(VARIANTS[name], 4, 2)
    widths = [{"query": 4, "kv": 2}[spec.heads] * spec.dim for spec in core.tensors]
    fused = torch.randn(19, sum(widths), dtype=torch.float64, requires_grad=True)
    columns = zip(core.tensors, fused.split(widths, dim=1), strict=True)
    views = {spec.name: column.unflatten(1, (-1, spec.dim)) for spec, column in columns}
    out = core(views, row_info(mask), heads)
    copies = {key: x.detach().clone() for key, x in views.items()}
    assert relative_error(out, core(copies, row_info(mask), heads), of=()) < 1e-14  # strides choose the CPU's loop
    out.sum().backward()
    assert fused.grad.isfinite().all() and fused.grad.abs().sum() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_without_tokens_stays_in_the_graph(name):
    heads = split_heads(4, 2, 1)[0]
    core = build(VARIANTS[name], 4, 2)
    inputs = draw_inputs(core, 0, heads, seed=0)
    LocalAttention(core, heads)(inputs, row_info(Mask.causal([]))).sum().backward()
    assert all(x.grad is not None for x in inputs.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_costs_are_integers_and_follow_the_heads(name):
    variant, mask = VARIANTS[name], Mask.causal([100, 28])
    assert variant.flops(mask, heads=6, head_dim=8) == 6 * variant.flops(mask, heads=1, head_dim=8) > 0
    assert isinstance(variant.state_bytes(heads=6, head_dim=8), int)
    assert variant.layout in ("any", "contiguous")


def test_info_is_shared_between_layers():
    heads, mask = split_heads(2, 2, 1)[0], Mask.causal([6])
    info = row_info(mask)
    assert isinstance(info, RowInfo)
    core = build(SoftmaxConfig(), 2, 2)
    core(draw_inputs(core, 6, heads, seed=0), info, heads)
    assert list(info.memo) == [("tiling", 0, 0)]
