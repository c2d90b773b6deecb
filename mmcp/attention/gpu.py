"""Softmax attention on a GPU: flash-attn where it knows the mask, FlexAttention for every other mask."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmcp.attention.base import RowInfo
from mmcp.attention.flash_cpu import head_runs
from mmcp.attention.flash_gpu import MOST_CALLS, Placed, flash_partial, flash_partial_backward, placed_calls, takes
from mmcp.attention.flex import flex, flex_partial, flex_partial_backward
from mmcp.attention.pairs import Pairs
from mmcp.masks import Mask


def check_type(dtype: torch.dtype) -> None:
    """Raise ValueError for float64, which no GPU kernel takes."""
    if dtype == torch.float64:
        raise ValueError("no GPU attention kernel takes float64; use float32 or bfloat16, or run on the CPU")


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kv_of_query: Sequence[int], info: RowInfo) -> Tensor:
    """Attend with gradients.

    q: [s, h, d]  k, v: [s, k, d]   info: keeps what is derived for the next layer of the same row
    returns [s, h, d]
    Raises ValueError for float64.
    """
    check_type(q.dtype)
    if not q.numel():
        return q + (k.sum() + v.sum()).to(q.dtype)
    runs = head_runs(kv_of_query)
    if not uses_flash_attn(mask, q.dtype, q.shape[-1]):
        return flex(q, k, v, info.once(("pairs", mask.window, mask.sink), lambda: Pairs.whole(mask)), runs)
    parts = [_flash_attn(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], mask, info) for q0, q1, k0, k1 in runs]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def gpu_partial(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, kv_of_query: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attend to the keys that are here, as `SoftmaxAttention.partial` does."""
    if pairs.is_empty:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    calls, runs = _few_calls(q, pairs), head_runs(kv_of_query)
    return flash_partial(q, k, v, calls, runs) if calls else flex_partial(q, k, v, pairs, runs)


def gpu_partial_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Pairs,
    kv_of_query: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of these keys in the gradients, as `SoftmaxAttention.partial_backward` does."""
    if pairs.is_empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    calls, runs = _few_calls(q, pairs), head_runs(kv_of_query)
    if calls:
        return flash_partial_backward(grad, q, k, v, out, lse, calls, runs)
    return flex_partial_backward(grad, q, k, v, out, lse, pairs, runs)


def uses_flash_attn(mask: Mask, dtype: torch.dtype, head_dim: int) -> bool:
    """Say whether flash-attn is here and knows this mask: packed causal documents with at most a window."""
    return takes(dtype, head_dim) and not len(mask.blocks) and not mask.sink


def _few_calls(q: Tensor, pairs: Pairs) -> tuple[Placed, ...]:
    """Return flash-attn's calls for these pairs; none where it takes no such tensors, or they would be many."""
    if not takes(q.dtype, q.shape[-1]):
        return ()
    calls = placed_calls(pairs, q.device)
    return calls if len(calls) <= MOST_CALLS else ()


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Mask, info: RowInfo) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds = info.once("cu_seqlens", lambda: torch.from_numpy(mask.bounds).to(q.device, torch.int32))
    longest = int((mask.bounds[1:] - mask.bounds[:-1]).max())
    window = (mask.window - 1, 0) if mask.window else (-1, -1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return flash_attn_varlen_func(
        q, k, v, bounds, bounds, longest, longest, causal=True, window_size=window, deterministic=deterministic
    )
