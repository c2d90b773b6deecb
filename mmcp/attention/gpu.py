"""Softmax attention on a GPU: flash-attn where it knows the mask, FlexAttention for every other mask."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mmcp.attention.flash_cpu import head_runs
from mmcp.masks import Mask

HALF = (torch.bfloat16, torch.float16)


def gpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kv_of_query: Sequence[int], memo: dict[Any, Any]
) -> Tensor:
    """Attend with gradients.

    q: [s, h, d]  k, v: [s, k, d]   memo: kept for the next layer of the same row
    returns [s, h, d]
    Raises ValueError for float64, which no GPU kernel takes.
    """
    if q.dtype == torch.float64:
        raise ValueError("no GPU attention kernel takes float64; use float32 or bfloat16, or run on the CPU")
    if not q.numel():
        return q + (k.sum() + v.sum()).to(q.dtype)
    attend = _flash_attn if uses_flash_attn(mask, q.dtype) else _flex
    runs = head_runs(kv_of_query)
    parts = [attend(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], mask, memo) for q0, q1, k0, k1 in runs]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def uses_flash_attn(mask: Mask, dtype: torch.dtype) -> bool:
    """Say whether flash-attn is here and knows this mask: packed causal documents with at most a window."""
    return find_spec("flash_attn") is not None and dtype in HALF and not len(mask.blocks) and not mask.sink


def mask_mod(mask: Mask, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as FlexAttention's predicate (batch, head, query, key) -> bool."""
    document, block = (torch.from_numpy(x).to(device) for x in (mask.documents, mask.block_ids))
    start = torch.from_numpy(mask.bounds[:-1]).to(device)
    window, sink = mask.window or mask.num_tokens, mask.sink

    def may_read(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key < window) | (key - start[document[key]] < sink)
        causal = (key <= query) & (document[query] == document[key]) & near
        return causal | ((block[query] == block[key]) & (block[query] >= 0))

    return may_read


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Mask, memo: dict[Any, Any]) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    if "cu_seqlens" not in memo:
        memo["cu_seqlens"] = torch.from_numpy(mask.bounds).to(q.device, torch.int32)
    bounds, longest = memo["cu_seqlens"], int((mask.bounds[1:] - mask.bounds[:-1]).max())
    window = (mask.window - 1, 0) if mask.window else (-1, -1)
    return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True, window_size=window)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, memo: dict[Any, Any]) -> Tensor:
    key = ("block_mask", mask.window, mask.sink)
    if key not in memo:
        memo[key] = _block_mask(mask, q.device)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = _compiled_flex()(*heads_first, block_mask=memo[key], enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _block_mask(mask: Mask, device: torch.device) -> BlockMask:
    s = mask.num_tokens
    return create_block_mask(mask_mod(mask, device), None, None, s, s, device=device, _compile=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
