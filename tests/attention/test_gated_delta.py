"""The gated delta rule against transformers: the recurrence, its chunks, and the whole Qwen3-Next layer with gradients.

In float32 as transformers computes (1e-6, a layer 1e-5), in float64 with its casts to float32 taken out (1e-10).
Run: python -m pytest tests/attention/test_gated_delta.py
"""

import pytest
import torch

from mmcp.attention import GatedDeltaConfig
from mmcp.attention.base import HeadShape, split_heads
from mmcp.attention.chunks import runs_of
from mmcp.attention.delta_chunks import gated_delta, gated_delta_state
from mmcp.masks import Mask
from mmcp.model.layers import AttentionLayer, RMSNorm
from tests.attention.rows import draw_inputs, relative_error, row_info

theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

PRECISIONS = [(torch.float32, 1e-6), (torch.float64, 1e-10)]


class WideTorch:
    """torch, with float64 where the code asks for float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def without_casts(monkeypatch, dtype):
    if dtype == torch.float64:
        monkeypatch.setattr(theirs, "torch", WideTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def draw(dtype: torch.dtype, *, tokens: int, key_heads: int = 2, value_heads: int = 6, d_k: int = 16, d_v: int = 24):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(key_heads, d_k), (key_heads, d_k), (value_heads, d_v), (value_heads, 1), (value_heads, 1)]
    q, k, v, decay, strength = (
        torch.randn(tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    leaves = q, k, v, -torch.nn.functional.softplus(decay - 1), strength.sigmoid()
    return [x.to(dtype).requires_grad_() for x in leaves]


def ours(leaves, *, chunk: int = 64, lengths: tuple[int, ...] = ()):
    tokens, heads, d_v = leaves[2].shape
    runs = runs_of(row_info(Mask.causal(list(lengths) or [tokens])), ((0, tokens),), chunk, leaves[0])
    states = torch.zeros(1, heads, leaves[0].shape[2], d_v, dtype=leaves[0].dtype)
    index = split_heads(heads, leaves[0].shape[1], 1)[0].kv_of_query
    after = gated_delta_state(*leaves[1:], states, key_of_value=index, runs=runs)
    return gated_delta(*leaves, states, key_of_value=index, runs=runs), after


def chunked_theirs(leaves):
    """Run their chunks on leaves like ours, a key head for each value head."""
    heads, key_heads = leaves[2].shape[1], leaves[0].shape[1]
    q, k = (x.repeat_interleave(heads // key_heads, 1) for x in leaves[:2])
    v, decay, strength = leaves[2], leaves[3][..., 0], leaves[4][..., 0]
    tensors = (x[None] for x in (q, k, v, decay, strength))
    out, state = theirs.torch_chunk_gated_delta_rule(*tensors, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out[0], state


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("name", ["recurrent", "chunk"])
def test_the_rule_is_theirs(name, dtype, bound, without_casts):
    leaves = draw(dtype, tokens=150)
    rule = getattr(theirs, f"torch_{name}_gated_delta_rule")
    q, k, v, decay, strength = (x[None] for x in leaves)
    expected, expected_state = rule(
        q, k, v, decay[..., 0], strength[..., 0], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, state = ours(leaves)
    assert relative_error(out, expected[0], of=()) < bound
    assert relative_error(state, expected_state, of=()) < bound
    pull, pull_state = torch.randn_like(out), torch.randn_like(state)
    grads = torch.autograd.grad((out * pull).sum() + (state * pull_state).sum(), leaves)
    wanted = torch.autograd.grad((expected[0] * pull).sum() + (expected_state * pull_state).sum(), leaves)
    for got, want in zip(grads, wanted, strict=True):
        assert relative_error(got, want, of=wanted) < 3 * bound


NAMES = {"log_rate": "A_log", "decay_bias": "dt_bias", "norm": "norm.weight"}


def peer_of(layer: AttentionLayer, shape: HeadShape, width: int, dtype: torch.dtype) -> torch.nn.Module:
    """Make their layer with our weights: theirs stand per key head, as q k (v ..) (z ..) and (b ..) (a ..)."""
    config = theirs.Qwen3NextConfig(
        hidden_size=width, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6,
        linear_num_value_heads=shape.heads, linear_num_key_heads=shape.kv_heads,
        linear_key_head_dim=shape.head_dim, linear_value_head_dim=shape.head_dim,
    )  # fmt: skip
    peer = theirs.Qwen3NextGatedDeltaNet(config, 0).to(dtype)
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    peer.load_state_dict(as_theirs(weights, shape))
    return peer


def as_theirs(weights: dict[str, torch.Tensor], shape: HeadShape) -> dict[str, torch.Tensor]:
    """Rename and join weights, or their gradients, of our layer."""

    def per_key_head(*names: str) -> torch.Tensor:
        return torch.cat([weights[name].unflatten(0, (shape.kv_heads, -1)) for name in names], dim=1).flatten(0, 1)

    filters = [weights[f"attention.core.filters.{name}"].flatten(0, 1)[:, None] for name in "qkv"]
    return {
        "in_proj_qkvz.weight": per_key_head("project.q.weight", "project.k.weight", "project.v.weight", "gate.weight"),
        "in_proj_ba.weight": per_key_head("project.strength.weight", "project.decay.weight"),
        "conv1d.weight": torch.cat(filters),
        "out_proj.weight": weights["out.weight"],
    } | {theirs_name: weights[f"attention.core.{name}"] for name, theirs_name in NAMES.items()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_layer_is_the_layer_of_qwen3_next(dtype, bound, without_casts):
    torch.manual_seed(0)
    shape, width = HeadShape(heads=6, kv_heads=3, head_dim=8), 20
    layer = AttentionLayer(
        GatedDeltaConfig(), width=width, shape=shape, qk_norm=True, bias=False, out_bias=False,
        norm=lambda size: RMSNorm(size, 1e-6),
    ).to(dtype)  # fmt: skip
    peer = peer_of(layer, shape, width, dtype)
    hidden = torch.randn(90, width, dtype=dtype)
    empty = torch.zeros(90, 4, dtype=dtype)
    out, expected = layer(hidden, empty, empty, row_info(Mask.causal([90]))), peer(hidden[None])[0]
    assert relative_error(out, expected, of=()) < bound
    pull = torch.randn_like(out)
    out.backward(pull)
    expected.backward(pull)
    grads = as_theirs({name: value.grad for name, value in layer.named_parameters()}, shape)
    wanted = {name: value.grad for name, value in peer.named_parameters()}
    assert set(grads) == set(wanted)
    for name, want in wanted.items():
        assert relative_error(grads[name], want, of=wanted.values()) < bound, name


@pytest.mark.parametrize("chunk", [1, 7, 100, 1500])
def test_the_chunk_size_changes_no_result(chunk):
    """2,300 tokens are several groups of chunks."""
    leaves = draw(torch.float64, tokens=2300, value_heads=2, key_heads=1, d_k=4, d_v=4)
    results = []
    for size in (chunk, 32):
        out, state = ours(leaves, chunk=size)
        loss = out.square().sum() + state.square().sum()
        results.append([out, state, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want, of=()) < 1e-10


@pytest.mark.parametrize("decay", [0.0, -1e-4, -1.0, -60.0])
def test_equal_keys_and_any_decay_stay_accurate_in_float32(decay):
    """Equal keys written at full strength make the worst systems to solve; products of decays of -60 underflow.

    The state then holds the last value alone, so the true gradient of the decay is 0 and what is left of it is rounding
    (5e-4 of the yardstick in their chunks): nothing may be farther off than theirs.
    """
    leaves = draw(torch.float64, tokens=300)
    q, k, v, g, b = (x.detach() for x in leaves)
    exact = [q, k[:1].expand_as(k), v, torch.full_like(g, decay), torch.ones_like(b)]
    exact = [x.clone().requires_grad_() for x in exact]
    narrow = [x.detach().float().requires_grad_() for x in exact]
    results = []
    for rule, inputs in ((ours, exact), (ours, narrow), (chunked_theirs, narrow)):
        out, _ = rule(inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for want, got, peer in zip(*results, strict=True):
        error, allowed = (relative_error(x, want, of=results[0][1:]) for x in (got, peer))
        assert error < max(1e-6, 1.5 * allowed)


def test_strong_decay_does_not_overflow_across_a_border():
    """A first document that decays by exp(-400) in a chunk, a second that hardly does: float32 against each alone."""
    leaves = draw(torch.float64, tokens=24)
    with torch.no_grad():
        leaves[3][:16], leaves[3][16:] = -25.0, -1e-3
    narrow = [x.detach().float().requires_grad_() for x in leaves]
    out, state = ours(narrow, lengths=(16, 8))
    grads = torch.autograd.grad(out.sum() + state.sum(), narrow)
    parts = [ours([x[start:stop] for x in leaves]) for start, stop in ((0, 16), (16, 24))]
    expected = torch.cat([part for part, _ in parts])
    wanted = torch.autograd.grad(expected.sum() + parts[1][1].sum(), leaves)
    for got, want in zip((out, state, *grads), (expected, parts[1][1], *wanted), strict=True):
        assert relative_error(got, want, of=wanted) < 1e-5


def test_new_layers_forget_at_the_rates_of_mamba():
    core = GatedDeltaConfig().build(heads=64, kv_heads=8, head_dim=4)
    steps = torch.nn.functional.softplus(core.decay_bias.detach())
    assert 1e-3 <= float(steps.min()) < 0.01 < float(steps.max()) <= 0.1 + 1e-6
    assert float(core.log_rate.min()) >= 0 and float(core.log_rate.exp().max()) <= 16


def test_a_layer_may_have_heads_of_its_own():
    backbone = HeadShape(heads=4, kv_heads=2, head_dim=32)
    assert GatedDeltaConfig().shape(backbone) == backbone
    own = GatedDeltaConfig(value_heads=32, key_heads=16, head_dim=128)
    assert own.shape(backbone) == HeadShape(heads=32, kv_heads=16, head_dim=128)
    assert own.state_bytes(heads=32, head_dim=128) == 4 * 2**20


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="convolution=0 tokens; use at least 1"):
        GatedDeltaConfig(convolution=0)
    with pytest.raises(ValueError, match="key_heads=-1"):
        GatedDeltaConfig(key_heads=-1)


def test_little_is_kept_for_backward():
    """The inputs of the rule and a state per 1,024 tokens, whatever the chunks; nothing of a chunk squared."""
    leaves = draw(torch.float32, tokens=4096, key_heads=1, value_heads=2, d_k=16, d_v=16)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        core_inputs = [x for x in leaves]
        ours(core_inputs)
    inputs = sum(x.numel() * 4 for x in leaves)
    states = 2 * 4 * (2 * 16 * 16) * 4  # two calls of four groups
    assert sum(kept.values()) <= inputs + states + 2 * 2 * 8


def test_blocks_that_see_both_ways_are_refused():
    import numpy as np

    heads, mask = split_heads(2, 2, 1)[0], Mask(np.array([0, 8]), np.array([[2, 5]]))
    core = GatedDeltaConfig().build(heads=2, kv_heads=2, head_dim=4).double()
    with pytest.raises(ValueError, match="tokens 2 to 4 attend both ways"):
        core(draw_inputs(core, 8, heads, seed=0), row_info(mask), heads)
