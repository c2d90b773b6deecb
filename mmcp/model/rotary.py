"""Rotary position embedding for one or three position axes (Su et al. 2021, arXiv 2104.09864; M-RoPE: 2409.12191).

Frequency i of d/2 turns the pair (x_i, x_{i + d/2}) by position * theta^(-2i/d), scaled as `rope_scaling` says;
where d is less than the size of a head, the rest of the head stays as it is. With three axes each frequency belongs to
one of them; sections (4, 2, 2) give, for time, height and width:

    contiguous   t t t t h h w w      Qwen2.5-VL
    interleaved  t h w t h w t t      Qwen3-VL
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.model.rope_scaling import RopeScaling

BLOCK_TOKENS = 256  # turned at a time


def frequency_axes(num_frequencies: int, sections: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """Say which position axis turns each frequency: [d/2] int64; no sections: all are turned by axis 0."""
    if not sections:
        return np.zeros(num_frequencies, dtype=np.int64)
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    axes = np.zeros(num_frequencies, dtype=np.int64)
    for axis in range(1, len(sections)):
        axes[axis : sections[axis] * len(sections) : len(sections)] = axis
    return axes


class Rotary:
    """Makes the cos and sin tables of a row, once per forward for all layers.

    dim: numbers of a head that turn
    """

    def __init__(self, *, dim: int, theta: float, sections: tuple[int, ...], interleaved: bool, scaling: RopeScaling):
        self.dim, self.theta, self.scaling = dim, theta, scaling
        self.axes = frequency_axes(dim // 2, sections, interleaved)

    def tables(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of every angle, computed in float64.

        positions: [axes, s/cp] int64 or float64
        lengths:   [s/cp] int64  tokens of each token's document; may be empty where the scaling looks at none
        returns two [s/cp, d/2], in float32 or `dtype`, whichever is wider
        """
        axes = torch.from_numpy(self.axes).to(positions.device)
        angles = positions[axes].T * self.scaling.frequencies(self.dim, self.theta, lengths)
        wide, amplitude = torch.promote_types(dtype, torch.float32), self.scaling.amplitude
        return (angles.cos() * amplitude).to(wide), (angles.sin() * amplitude).to(wide)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, head_dim: int) -> Tensor:
    """Turn each head by the position of its token, in place; keeps nothing but the tables for backward.

    x: [s/cp, heads * head_dim] or [s/cp, heads, head_dim]  contiguous, no view, kept by nobody for backward
    cos, sin: [s/cp, at most head_dim / 2]
    returns x
    """
    return _Rotate.apply(x, cos, sin, head_dim)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.head_dim = head_dim
        ctx.mark_dirty(x)
        heads = x.view(_heads(x, head_dim))
        _turn(heads, cos, sin, out=heads)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        turned = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        heads = _heads(grad, ctx.head_dim)
        _turn(grad.reshape(heads), cos, -sin, out=turned.view(heads))
        return turned, None, None, None


def _heads(x: Tensor, head_dim: int) -> tuple[int, int, int]:
    """Shape of the heads of each token; there may be no token."""
    return len(x), x.shape[1:].numel() // head_dim, head_dim


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Write turned heads to `out`, which may be x, a few tokens at a time, to stay in the cache.

    x, out: [s/cp, heads, head_dim]
    """
    half = cos.shape[-1]
    if out is not x:
        out[..., 2 * half :] = x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    for start in range(0, len(x), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        first, second = x[rows, :, : 2 * half].to(cos.dtype).split(half, dim=-1)
        turned_first = (first * cos[rows]).addcmul_(second, sin[rows], value=-1)
        turned_second = (second * cos[rows]).addcmul_(first, sin[rows])
        out[rows, :, :half] = turned_first
        out[rows, :, half : 2 * half] = turned_second
