"""The path to flash-linear-attention: on the CPU with kernels made of our chunks, on a GPU with its own.

Run: python -m pytest tests/attention/test_fla.py
"""

from itertools import pairwise

import pytest
import torch

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, chunks, fla
from mmcp.attention.base import split_heads
from mmcp.attention.chunks import decayed_attention, decayed_state, runs_of
from mmcp.attention.delta_chunks import gated_delta, gated_delta_state
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info

VARIANTS = {
    "gated_delta": GatedDeltaConfig(chunk=8),
    "linear": LinearConfig(chunk=8),
    "kernelised": KernelisedConfig(chunk=8),
}


def alone(tokens: torch.Tensor):
    """One sequence that continues a state: the end of a document of which one token came before."""
    return runs_of(row_info(Mask.causal([len(tokens) + 1])), ((1, len(tokens) + 1),), 8, tokens)


def per_sequence(rule, tensors, initial_state, bounds):
    """Stand in for a kernel: [1, n, ...] tensors, sequence by sequence."""
    outs, states = [], []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        out, state = rule(*(x[0, start:stop] for x in tensors), initial_state[number, None])
        outs.append(out)
        states.append(state)
    return torch.cat(outs)[None], torch.cat(states)


def delta_kernel(q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    assert output_final_state and use_qk_l2norm_in_kernel

    def rule(q, k, v, g, beta, state):
        settings = dict(key_of_value=range(v.shape[1]), runs=alone(v))
        rest = k, v, g[..., None], beta[..., None], state
        return gated_delta(q, *rest, **settings), gated_delta_state(*rest, **settings)

    return per_sequence(rule, (q, k, v, g, beta), initial_state, cu_seqlens.tolist())


def decay_kernel(q, k, v, *, g_gamma, initial_state, output_final_state, cu_seqlens):
    assert output_final_state and q.dtype == k.dtype == v.dtype

    def rule(q, k, v, state):
        settings = dict(log_decay=g_gamma.double(), kv_of_query=range(q.shape[1]), runs=alone(q))
        decayed = (g_gamma * len(q)).exp()[:, None, None] * state
        return decayed_attention(q, k, v, state, **settings), decayed_state(k, v, **settings) + decayed

    return per_sequence(rule, (q, k, v), initial_state, cu_seqlens.tolist())


def run(core, inputs, info, heads, states, runs):
    halo = {
        spec.name: inputs[spec.name].new_zeros(len(runs), spec.halo, *inputs[spec.name].shape[1:])
        for spec in core.tensors
    }
    ready = core.prepare(inputs, info, heads, runs, halo)
    out, (transition, state) = core.finish(ready, info, heads, runs, states), core.summarise(ready, info, heads, runs)
    leaves = [*inputs.values(), states]
    loss = out.square().sum() + state.square().sum() + transition.square().sum()
    return out, transition, state, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernels_are_given_what_the_chunks_are(name, monkeypatch):
    mask, runs, heads = Mask.causal([5, 1, 20, 4]), ((0, 9), (12, 26), (26, 30)), split_heads(4, 2, 3)[2]
    core = VARIANTS[name].build(heads=4, kv_heads=2, head_dim=4).double()
    inputs = draw_inputs(core, 27, heads, seed=0)
    states = torch.randn(3, 2, *core.state_dim, dtype=torch.float64).abs().requires_grad_()
    expected = run(core, inputs, row_info(mask), heads, states, runs)
    inside = [False]  # the stand-ins themselves run on chunks

    def outermost(kernel):
        def call(*tensors, **settings):
            inside[0] = True
            try:
                return kernel(*tensors, **settings)
            finally:
                inside[0] = False

        return lambda: call

    monkeypatch.setattr(chunks, "uses_fla", lambda x: not inside[0])
    monkeypatch.setattr(fla, "delta_kernel", outermost(delta_kernel))
    monkeypatch.setattr(fla, "decay_kernel", outermost(decay_kernel))
    for got, want in zip(run(core, inputs, row_info(mask), heads, states, runs), expected, strict=True):
        assert relative_error(got, want, of=expected) < 1e-12


def test_runs_are_cut_where_documents_begin():
    cut = fla.cut_sequences(Mask.causal([3, 5]), ((1, 4), (4, 8)), torch.device("cpu"))
    assert cut.bounds.tolist() == [0, 2, 3, 7]
    assert (cut.first.tolist(), cut.last.tolist()) == ([0, 2], [1, 2])
    assert cut.continues.flatten().tolist() == [True, True]
    assert not fla.cut_sequences(Mask.causal([3, 5]), ((3, 4),), torch.device("cpu")).continues.any()


def test_the_cpu_and_empty_rows_do_without():
    assert not fla.uses_fla(torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-2), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", VARIANTS)
def test_gpu_kernels_are_the_reference(name, dtype, bound):
    pytest.importorskip("fla")
    mask, heads = Mask.causal([300, 1, 211]), split_heads(6, 2, 4)[1]
    core = VARIANTS[name].build(heads=6, kv_heads=2, head_dim=64).to(dtype)
    leaves = draw_inputs(core, mask.num_tokens, heads, seed=0, dtype=dtype)
    exact = {key: x.detach().double().requires_grad_() for key, x in leaves.items()}
    expected = core.reference(exact, mask, heads)
    wanted = torch.autograd.grad(expected.square().sum(), list(exact.values()))
    inputs = {key: x.detach().cuda().requires_grad_() for key, x in leaves.items()}
    out = core.cuda()(inputs, row_info(mask), heads)
    grads = torch.autograd.grad(out.float().square().sum(), list(inputs.values()))
    for got, want in zip([out, *grads], [expected, *wanted], strict=True):
        assert relative_error(got.cpu(), want, of=wanted) < bound
