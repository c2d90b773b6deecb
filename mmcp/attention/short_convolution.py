"""A short causal convolution along the row, one filter per channel, as Qwen3-Next puts before its recurrent layers.

    out_i = silu(sum_t w_t x_{i - W + 1 + t})        x is 0 before the document of token i

Tokens come as runs: contiguous ranges of the row, one after the other, each with the W - 1 tokens before it, its halo.
Two documents of 3 and 2 tokens in runs 0..2 and 2..5, W = 3; what each token reads, h from the halo of its run:

    token 0: . . 0    1: . 0 1    2: h0 h1 2    3: . . 3    4: . 3 4
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmcp.attention.blocks import blocks_of
from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges, as_indices


@dataclass(frozen=True, eq=False)
class Edges:
    """Tokens so near to the start of their run or document that they must not read the W - 1 rows before them."""

    rows: Tensor
    """[edges] int64: their rows, counted over all runs."""
    sources: Tensor
    """[edges, W] int64: what they read: rows of all halos, then rows of the tokens."""
    visible: Tensor
    """[edges, W, 1, 1] bool: whether that is in their document."""


def edges_of(mask: Mask, width: int, device: torch.device, runs: Ranges) -> Edges:
    """Find the tokens of the runs that a convolution of `width` tokens must treat apart."""
    taps = np.arange(width) - (width - 1)
    positions = as_indices(runs)
    starts = np.repeat([start for start, _ in runs], [stop - start for start, stop in runs]).astype(np.int64)
    number = np.repeat(np.arange(len(runs)), [stop - start for start, stop in runs])
    documents = mask.bounds[mask.documents[positions]]
    rows = np.flatnonzero(positions - np.maximum(starts, documents) < width - 1)
    read = positions[rows, None] + taps
    in_halo = (number[rows, None] + 1) * (width - 1) + read - starts[rows, None]
    in_run = len(runs) * (width - 1) + rows[:, None] + taps
    visible = read >= documents[rows, None]
    sources = np.where(visible, np.where(read < starts[rows, None], in_halo, in_run), 0)
    arrays = rows, sources, visible[..., None, None]
    return Edges(*(torch.from_numpy(x).to(device) for x in arrays))


def short_convolution(x: Tensor, weight: Tensor, halo: Tensor, edges: Edges) -> Tensor:
    """Convolve, with gradients.

    x: [n, heads, d]  the tokens of all runs
    weight: [heads, d, W]  the last tap reads the token itself
    halo: [runs, W - 1, heads, d]  the tokens before each run; what lies in another document may be anything finite
    returns [n, heads, d]
    """
    return _ShortConvolution.apply(x, weight, halo, edges)


def convolved_step(x: Tensor, weight: Tensor, halo: Tensor) -> Tensor:
    """Convolve one token of each of n documents, outside autograd.

    x: [n, heads, d]  weight: [heads, d, W]  halo: [n, W - 1, heads, d]  the tokens before, 0 before the document
    returns [n, heads, d]
    """
    taps = _taps(weight, x.dtype)
    window = torch.cat([halo, x[:, None]], dim=1).to(taps.dtype)
    return F.silu((window * taps).sum(1)).to(x.dtype)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, halo: Tensor, edges: Edges) -> Tensor:
        ctx.save_for_backward(x, weight, halo)
        ctx.edges = edges
        taps, out = _taps(weight, x.dtype), torch.empty_like(x, memory_format=torch.contiguous_format)
        for start, stop in blocks_of(x):
            out[start:stop] = F.silu(_mix(_window(x, start, stop, len(taps), taps.dtype), taps))
        out[edges.rows] = F.silu(_mix_edges(_edge_windows(x, halo, edges, taps.dtype), taps)).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, halo = ctx.saved_tensors
        taps, width, edges = _taps(weight, x.dtype), weight.shape[-1], ctx.edges
        before, grad_taps = halo.shape[0] * halo.shape[1], torch.zeros_like(taps)
        grads = torch.zeros((before + len(x), *x.shape[1:]), dtype=taps.dtype, device=x.device)
        grad_halo, grad_x = grads.split([before, len(x)])
        inner = torch.ones(len(x), 1, 1, dtype=taps.dtype, device=x.device)
        inner[edges.rows] = 0
        for start, stop in blocks_of(x):
            window = _window(x, start, stop, width, taps.dtype)
            pulled = _silu_backward(grad[start:stop] * inner[start:stop], _mix(window, taps))
            for tap in range(width):
                grad_taps[tap] += (pulled * window[tap : tap + len(pulled)]).sum(0)
                first = max(start + tap - width + 1, 0)
                last = stop + tap - width + 1
                if first < last:
                    grad_x[first:last].addcmul_(pulled[len(pulled) - (last - first) :], taps[tap])
        windows = _edge_windows(x, halo, edges, taps.dtype)
        pulled = _silu_backward(grad[edges.rows], _mix_edges(windows, taps))[:, None]
        grad_taps += (pulled * windows).sum(0)
        grads.index_add_(0, edges.sources.flatten(), (pulled * taps * edges.visible).flatten(0, 1))
        grad_halo, grad_weight = grad_halo.view(halo.shape), grad_taps.movedim(0, -1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_halo.to(halo.dtype), None


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[heads, d, W] -> [W, heads, d], in float32 or wider."""
    return weight.movedim(-1, 0).to(torch.promote_types(dtype, torch.float32)).contiguous()


def _window(x: Tensor, start: int, stop: int, width: int, dtype: torch.dtype) -> Tensor:
    """Copy rows start - W + 1 .. stop, zeros before the first."""
    first = start - width + 1
    return F.pad(x[max(first, 0) : stop].to(dtype), (0, 0, 0, 0, max(-first, 0), 0))


def _mix(window: Tensor, taps: Tensor) -> Tensor:
    """[rows + W - 1, heads, d] -> [rows, heads, d] before the activation."""
    rows = len(window) - len(taps) + 1
    mixed = window[:rows] * taps[0]
    for tap in range(1, len(taps)):
        mixed.addcmul_(window[tap : tap + rows], taps[tap])
    return mixed


def _edge_windows(x: Tensor, halo: Tensor, edges: Edges, dtype: torch.dtype) -> Tensor:
    """[edges, W, heads, d]: what the edges read, 0 where it is in another document."""
    before = halo.shape[0] * halo.shape[1]
    sources = edges.sources[..., None, None]
    from_halo = (sources < before) if before else torch.zeros_like(sources, dtype=torch.bool)
    windows = x[(edges.sources - before).clamp(min=0)].to(dtype)
    if before:
        windows = torch.where(from_halo, halo.flatten(0, 1)[edges.sources.clamp(max=before - 1)].to(dtype), windows)
    return torch.where(edges.visible, windows, 0)


def _mix_edges(windows: Tensor, taps: Tensor) -> Tensor:
    return (windows * taps).sum(1)


def _silu_backward(grad: Tensor, mixed: Tensor) -> Tensor:
    """Return the gradient of what silu was given."""
    sigmoid = torch.sigmoid(mixed)
    return grad * sigmoid * (1 + mixed * (1 - sigmoid))
