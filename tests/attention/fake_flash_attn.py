"""flash-attn's varlen functions as a dense reference: their signatures, checks and reading of windows, from its source.

Signatures and the reading of windows: flash-attn 2.8.3, `flash_attn_interface.py` and `csrc/flash_attn/flash_api.cpp`.
Rows without a key give 0 and +inf. `install` puts the module where `import flash_attn` finds it.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

NAME = "flash_attn"


def install(monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Let `flash_attn` be this module, which takes tensors of `dtypes`; return the list that names each call."""
    calls: list[str] = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append("forward")
        assert (dropout_p, softcap, alibi_slopes, block_table) == (0.0, 0.0, None, None)
        _check(dtypes, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        window = _window(causal, *window_size, max_seqlen_k)
        out, lse = _dense(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window)
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        calls.append("backward")
        assert (dropout_p, softcap, alibi_slopes, rng_state, zero_tensors) == (0.0, 0.0, None, None, False)
        _check(dtypes, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        wide = torch.promote_types(q.dtype, torch.float32)
        assert out.shape == dout.shape == dq.shape == q.shape and dk.shape == dv.shape == k.shape
        assert all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (dout, out, dq, dk, dv))
        assert softmax_lse.shape == (q.shape[1], q.shape[0]) and softmax_lse.dtype == wide
        assert softmax_lse.is_contiguous() and softmax_lse.isfinite().all()
        window = _window(causal, window_size_left, window_size_right, max_seqlen_k)
        group = q.shape[1] // k.shape[1]
        visible = _visible(cu_seqlens_q, cu_seqlens_k, window)
        q, dout, out, keys, values = (
            x.to(wide).transpose(0, 1)
            for x in (q, dout, out, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        scores = (q @ keys.mT * softmax_scale - softmax_lse[..., None]).masked_fill(~visible, -torch.inf)
        weights = scores.exp()
        grad_scores = weights * (dout @ values.mT - (dout * out).sum(-1, keepdim=True)) * softmax_scale
        dq.copy_((grad_scores @ keys).transpose(0, 1))
        dk.copy_((grad_scores.mT @ q).unflatten(0, (-1, group)).sum(1).transpose(0, 1))
        dv.copy_((weights.mT @ dout).unflatten(0, (-1, group)).sum(1).transpose(0, 1))

    package, interface = ModuleType(NAME), ModuleType(f"{NAME}.flash_attn_interface")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, NAME, package)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return calls


def _check(dtypes, q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int):
    assert q.dtype in dtypes and k.dtype == v.dtype == q.dtype
    assert q.shape[1] % k.shape[1] == 0 and q.shape[2] % 8 == 0 and k.shape == v.shape and k.shape[2] == q.shape[2]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    for bounds, rows, longest in ((bounds_q, q, longest_q), (bounds_k, k, longest_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and len(bounds) > 1
        assert bounds[0] == 0 and bounds[-1] == len(rows) and 0 < int(bounds.diff().max()) <= longest
        assert (bounds.diff() > 0).all(), "an empty sequence"


def _window(causal: bool, left: int, right: int, longest_k: int) -> tuple[int, int]:
    """Read a window as the kernel does."""
    if causal:
        right = 0
    left, right = (-1 if side >= longest_k else side for side in (left, right))
    if left < 0 and right < 0:
        return 1 << 30, 1 << 30
    if left < 0 and right == 0:
        return 1 << 30, 0
    return (longest_k if left < 0 else left), (longest_k if right < 0 else right)


def _visible(bounds_q: Tensor, bounds_k: Tensor, window: tuple[int, int]) -> Tensor:
    """[sum of queries, sum of keys] bool."""
    visible = torch.zeros(int(bounds_q[-1]), int(bounds_k[-1]), dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(bounds_q.unfold(0, 2, 1).tolist(), bounds_k.unfold(0, 2, 1).tolist(), strict=True):
        at = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        key = torch.arange(k1 - k0)[None]
        visible[q0:q1, k0:k1] = (key >= at - window[0]) & (key <= at + window[1])
    return visible


def _dense(q, k, v, bounds_q, bounds_k, scale: float, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    rows, keys, values = (
        x.to(wide).transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    scores = (rows @ keys.mT * scale).masked_fill(~_visible(bounds_q, bounds_k, window), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(wide).min)[..., None])
    return (weights @ values).transpose(0, 1).to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)
