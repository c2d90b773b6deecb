"""Softmax attention on a GPU: flash-attn where it knows the mask, FlexAttention for every other mask."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mmcp.attention.base import RowInfo
from mmcp.attention.flash_cpu import head_runs
from mmcp.masks import Mask, count_pairs

HALF = (torch.bfloat16, torch.float16)
BLOCK = 128  # tokens of a FlexAttention block along queries and keys


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kv_of_query: Sequence[int], info: RowInfo) -> Tensor:
    """Attend with gradients.

    q: [s, h, d]  k, v: [s, k, d]   info: keeps what is derived for the next layer of the same row
    returns [s, h, d]
    Raises ValueError for float64, which no GPU kernel takes.
    """
    if q.dtype == torch.float64:
        raise ValueError("no GPU attention kernel takes float64; use float32 or bfloat16, or run on the CPU")
    if not q.numel():
        return q + (k.sum() + v.sum()).to(q.dtype)
    attend = _flash_attn if uses_flash_attn(mask, q.dtype) else _flex
    runs = head_runs(kv_of_query)
    parts = [attend(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], mask, info) for q0, q1, k0, k1 in runs]
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
        in_block = (block[query] == block[key]) & (block[query] >= 0)
        return causal | (in_block & near if mask.window_cuts_blocks else in_block)

    return may_read


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Mask, info: RowInfo) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds = info.once("cu_seqlens", lambda: torch.from_numpy(mask.bounds).to(q.device, torch.int32))
    longest = int((mask.bounds[1:] - mask.bounds[:-1]).max())
    window = (mask.window - 1, 0) if mask.window else (-1, -1)
    return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True, window_size=window)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, info: RowInfo) -> Tensor:
    block_mask = info.once(("block_mask", mask.window, mask.sink), lambda: _block_mask(mask, q.device))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = _compiled_flex()(*heads_first, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _block_mask(mask: Mask, device: torch.device) -> BlockMask:
    pairs = torch.from_numpy(block_pairs(mask, BLOCK)).to(device)
    full = pairs == BLOCK * BLOCK
    count, index = _listed((pairs > 0) & ~full)
    full_count, full_index = _listed(full)
    s = mask.num_tokens
    return BlockMask.from_kv_blocks(
        count, index, full_count, full_index, BLOCK_SIZE=BLOCK, mask_mod=mask_mod(mask, device), seq_lengths=(s, s)
    )


def block_pairs(mask: Mask, size: int) -> np.ndarray:
    """[blocks, blocks] int64: pairs that may be read in each block of `size` queries by `size` keys."""
    blocks = -(-mask.num_tokens // size)
    pairs = np.zeros((blocks, blocks), dtype=np.int64)
    for q0, q1, k0, k1, lowest, highest in mask.slices.tolist():
        rows, columns = (np.arange(start // size, -(-stop // size)) for start, stop in ((q0, q1), (k0, k1)))
        row, column = (grid.ravel() * size for grid in np.meshgrid(rows, columns, indexing="ij"))
        clipped = (row.clip(q0), (row + size).clip(max=q1), column.clip(k0), (column + size).clip(max=k1))
        parts = np.stack([*clipped, np.full_like(row, lowest), np.full_like(row, highest)], axis=1)
        pairs[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += count_pairs(parts).reshape(len(rows), -1)
    return pairs


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [blocks, blocks] bool into FlexAttention's form: how many per row, and their numbers first."""
    count = chosen.sum(-1, dtype=torch.int32)
    index = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
