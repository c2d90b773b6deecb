"""GPU attention against the reference where there is a GPU; elsewhere all but its kernels, by stand-ins on the CPU.

FlexAttention runs there uncompiled, which computes in float64 too; flash-attn is a dense module of its signatures.
Run: python -m pytest tests/attention/test_gpu.py
"""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from mmcp.attention import flash_gpu, flex, gpu
from mmcp.attention.base import split_heads
from mmcp.attention.flash_cpu import merge_
from mmcp.attention.pairs import Pairs
from mmcp.attention.softmax import SoftmaxConfig, reference
from mmcp.masks import Mask
from mmcp.sharding.ranges import as_indices, as_ranges
from tests.attention import fake_flash_attn
from tests.attention.eager_flex import eager_flex
from tests.attention.rows import draw_inputs, relative_error, row_info
from tests.sequences import draw_sequence

CPU = torch.device("cpu")
HEADS = split_heads(6, 3, 4)[1]  # query heads 1 and 2 over two key-value heads
GROUPED = split_heads(8, 2, 3)[1]  # a pair of heads, then one of the next group


def drawn_mask(seed: int) -> Mask:
    rng = np.random.default_rng(seed)
    window = int(rng.integers(0, 8))
    mask = Mask.of(draw_sequence(rng))
    return mask.with_window(window, int(rng.integers(0, 3)) if window else 0, cuts_blocks=bool(rng.integers(2)))


def drawn_pairs(seed: int, *, fewest_runs: int = 1) -> Pairs:
    """Some queries and some keys of a row, scattered in runs."""
    rng, mask = np.random.default_rng(seed), drawn_mask(seed)

    def drawn_tokens():
        runs = rng.integers(0, 2, max(fewest_runs, mask.num_tokens // 5 + 1)).repeat(5)[: mask.num_tokens]
        return as_ranges(np.flatnonzero(runs))

    return Pairs(mask, drawn_tokens(), drawn_tokens())


def dense(pairs: Pairs) -> np.ndarray:
    """[queries, keys] bool."""
    return pairs.mask.dense()[np.ix_(as_indices(pairs.queries), as_indices(pairs.keys))]


@pytest.mark.parametrize("seed", range(20))
def test_the_predicate_is_the_dense_mask(seed):
    pairs = drawn_pairs(seed)
    if pairs.num_queries and pairs.num_keys:
        made = create_mask(flex.mask_mod(pairs, CPU), None, None, pairs.num_queries, pairs.num_keys, device="cpu")
        np.testing.assert_array_equal(made[0, 0].numpy(), dense(pairs))


@pytest.mark.parametrize("seed", range(20))
def test_block_counts_are_those_of_the_dense_mask(seed):
    pairs, block = drawn_pairs(seed), 5
    allowed = dense(pairs)
    padded = np.pad(allowed, [(0, -length % block) for length in allowed.shape])
    rows, columns = (length // block for length in padded.shape)
    expected = padded.reshape(rows, block, columns, block).sum(axis=(1, 3))
    np.testing.assert_array_equal(flex.block_pairs(pairs, block), expected)


@pytest.mark.parametrize("seed", range(20))
def test_calls_cover_each_pair_once(seed):
    pairs = drawn_pairs(seed)
    counts = np.zeros((pairs.num_queries, pairs.num_keys), dtype=int)
    for call in flash_gpu.calls_of(pairs.slices):
        window = fake_flash_attn._window(False, *call.window, call.longest[1])
        for (q0, q1), (k0, k1) in zip(call.queries, call.keys, strict=True):
            one = torch.tensor([0, q1 - q0]), torch.tensor([0, k1 - k0])
            counts[q0:q1, k0:k1] += fake_flash_attn._visible(*one, window).numpy()
    np.testing.assert_array_equal(counts, dense(pairs).astype(int))


def test_packed_documents_are_one_call_and_a_window_two():
    lengths = [64, 1, 100, 37]
    (call,) = flash_gpu.calls_of(Mask.causal(lengths).slices)
    assert call.window == (-1, 0) and len(call.queries) == 4 and call.longest == (100, 100)
    calls = flash_gpu.calls_of(Mask.causal(lengths).with_window(50).slices)
    assert [(call.window, len(call.queries)) for call in calls] == [((49, 0), 2), ((-1, 0), 2)]


def test_more_queries_than_keys_do_not_lose_their_window():
    """Queries 1..9 read keys 1..2 of a causal row: a right window of 7, which the kernel must not take for none."""
    (call,) = flash_gpu.calls_of(Pairs(Mask.causal([10]), ((1, 10),), ((1, 3),)).slices)
    assert call.window == (-1, 7) and call.longest == (9, 8)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_a_row_by_flex_attention_is_the_reference(seed, monkeypatch):
    eager_flex(monkeypatch)
    mask = drawn_mask(seed)
    core = SoftmaxConfig().build(heads=6, kv_heads=2, head_dim=16)
    inputs = draw_inputs(core, mask.num_tokens, HEADS, seed=seed, dtype=torch.float32)
    out = gpu.gpu_attention(*inputs.values(), mask, HEADS.kv_of_query, row_info(mask))
    assert relative_error(out, reference(inputs, mask, HEADS), of=()) < 1e-5


def parts_of(mask: Mask, seed: int, parts: int) -> list[Pairs]:
    """Queries of one rank of a ring, beside the keys of each."""
    owners = np.random.default_rng(seed).integers(0, parts, mask.num_tokens // 4 + 1).repeat(4)[: mask.num_tokens]
    tokens = [as_ranges(np.flatnonzero(owners == rank)) for rank in range(parts)]
    return [Pairs(mask, tokens[0], keys) for keys in tokens]


def merged_error(mask: Mask, seed: int, heads, dtype: torch.dtype, *, parts: int = 3) -> float:
    """Merge the answers of the GPU's code to the keys of each part; the largest error of output and gradients."""
    core = SoftmaxConfig().build(heads=8, kv_heads=4, head_dim=16)
    inputs = draw_inputs(core, mask.num_tokens, heads, seed=seed, dtype=dtype)
    hops = parts_of(mask, seed, parts)
    here = torch.from_numpy(as_indices(hops[0].queries))
    expected = reference(inputs, mask, heads)[here]
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wanted = torch.autograd.grad((expected * grad.double()).sum(), list(inputs.values()))

    q, k, v = (x.detach() for x in inputs.values())
    keys = [torch.from_numpy(as_indices(hop.keys)) for hop in hops]
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros(q[here].shape, dtype=wide), torch.full(q[here].shape[:2], -torch.inf, dtype=wide)
    for hop, at in zip(hops, keys, strict=True):
        merge_(out, lse, *gpu.gpu_partial(q[here], k[at], v[at], hop, heads.kv_of_query))
    out, grads = out.to(dtype), [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
    for hop, at in zip(hops, keys, strict=True):
        shares = gpu.gpu_partial_backward(grad, q[here], k[at], v[at], out, lse, hop, heads.kv_of_query)
        for total, rows, share in zip(grads, (here, at, at), shares, strict=True):
            total.index_add_(0, rows, share.to(wide))
    errors = [relative_error(got, want, of=wanted) for got, want in zip(grads, wanted, strict=True)]
    return max(relative_error(out, expected, of=()), *errors)


MASKS = {
    "causal": Mask.causal([40]),
    "documents": Mask.causal([1, 17, 2, 20]),
    "units": Mask(np.array([0, 3, 40]), np.array([[0, 3], [5, 12], [20, 39]])),
    "window": Mask.causal([9, 31]).with_window(7),
    "window and sink": Mask(np.array([0, 40]), np.array([[4, 20]])).with_window(5, 2),
    "window that cuts units": Mask(np.array([0, 40]), np.array([[4, 20]])).with_window(5, 9, cuts_blocks=True),
    "nothing elsewhere": Mask.causal([1] * 40),
}


QUICK = ("window and sink", "nothing elsewhere")  # torch traces the predicate anew each time, which takes seconds


@pytest.mark.parametrize("mask", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in MASKS])
def test_parts_by_flex_attention_merge_to_the_reference(mask, monkeypatch):
    eager_flex(monkeypatch)
    assert merged_error(MASKS[mask], 0, GROUPED, torch.float64, parts=2) < 1e-12


def test_parts_by_flex_attention_in_float32(monkeypatch):
    eager_flex(monkeypatch)
    assert merged_error(MASKS["documents"], 1, HEADS, torch.float32, parts=2) < 2e-6


@pytest.mark.parametrize("heads", [HEADS, GROUPED], ids=["one of each", "grouped"])
@pytest.mark.parametrize("mask", MASKS)
def test_parts_by_flash_attn_merge_to_the_reference(mask, heads, monkeypatch):
    monkeypatch.setattr(flash_gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "MOST_CALLS", 1000)
    calls = fake_flash_attn.install(monkeypatch, flash_gpu.HALF)
    assert merged_error(MASKS[mask], 0, heads, torch.bfloat16) < 2e-2
    assert calls.count("forward") == calls.count("backward") > 0
    monkeypatch.setattr(flash_gpu, "HALF", (torch.float64,))
    fake_flash_attn.install(monkeypatch, flash_gpu.HALF)
    for seed in range(4):
        assert merged_error(MASKS[mask], seed, heads, torch.float64) < 1e-12


def test_parts_of_many_calls_are_one_of_flex_attention(monkeypatch):
    monkeypatch.setattr(flash_gpu, "find_spec", lambda name: name)
    calls = fake_flash_attn.install(monkeypatch, flash_gpu.HALF)
    eager_flex(monkeypatch)
    mask = Mask.causal([200])
    hops = parts_of(mask, 3, 2)
    assert len(flash_gpu.calls_of(hops[0].slices)) > gpu.MOST_CALLS
    assert merged_error(mask, 3, HEADS, torch.bfloat16, parts=2) < 2e-2 and not calls


def test_a_row_by_flash_attn_is_the_reference(monkeypatch):
    monkeypatch.setattr(flash_gpu, "find_spec", lambda name: name)
    calls = fake_flash_attn.install(monkeypatch, flash_gpu.HALF)
    for mask in (Mask.causal([1, 30, 9]), Mask.causal([40]).with_window(6)):
        core = SoftmaxConfig().build(heads=8, kv_heads=4, head_dim=16)
        inputs = draw_inputs(core, mask.num_tokens, GROUPED, seed=0, dtype=torch.bfloat16)
        out = gpu.gpu_attention(*inputs.values(), mask, GROUPED.kv_of_query, row_info(mask))
        assert relative_error(out, reference(inputs, mask, GROUPED), of=()) < 1e-2
    assert calls == ["forward"] * 4


def test_keys_that_nobody_reads_take_part(monkeypatch):
    """Neither kernel is called for no pair; the answer is 0 and -inf, the gradients are zeros."""
    monkeypatch.setattr(flex, "_kernel", None)
    q, k = torch.randn(3, 2, 8), torch.randn(5, 2, 8)
    for pairs in (Pairs(Mask.causal([8]), ((0, 3),), ((3, 8),)), Pairs(Mask.causal([8]), (), ((3, 8),))):
        rows = q[: pairs.num_queries]
        out, lse = gpu.gpu_partial(rows, k, k, pairs, (0, 1))
        assert not out.any() and (lse == -torch.inf).all()
        grads = gpu.gpu_partial_backward(rows, rows, k, k, out, lse, pairs, (0, 1))
        assert [x.shape for x in grads] == [rows.shape, k.shape, k.shape] and not any(x.any() for x in grads)


def test_flash_attn_is_for_documents_and_windows_in_half(monkeypatch):
    monkeypatch.setattr(flash_gpu, "find_spec", lambda name: name)
    plain, blocks = Mask.causal([8]), Mask(np.array([0, 8]), np.array([[0, 4]]))
    assert gpu.uses_flash_attn(plain, torch.bfloat16, 64)
    assert gpu.uses_flash_attn(plain.with_window(3), torch.float16, 256)
    assert not gpu.uses_flash_attn(plain, torch.float32, 64)
    assert not gpu.uses_flash_attn(plain, torch.bfloat16, 20) and not gpu.uses_flash_attn(plain, torch.bfloat16, 264)
    assert not gpu.uses_flash_attn(plain.with_window(3, 1), torch.bfloat16, 64)
    assert not gpu.uses_flash_attn(blocks, torch.bfloat16, 64)


def test_float64_is_refused_by_name():
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64; use float32"):
        gpu.gpu_attention(x, x, x, Mask.causal([1]), (0,), row_info(Mask.causal([1])))
    core = SoftmaxConfig().build(heads=1, kv_heads=1, head_dim=8)
    core.check_type(torch.float64, CPU)
    with pytest.raises(ValueError, match="float64; use float32"):
        core.check_type(torch.float64, torch.device("cuda"))


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
