"""FlexAttention: any mask on a GPU, forward, and in parts that merge by log-sum-exp.

Dong et al. 2024 (arXiv 2412.05496). Blocks without a pair are skipped, whole blocks are not masked; the rest ask a
predicate. A part is differentiated through its log-sum-exp: with out = sum_p w_p out_p and w_p = exp(lse_p - lse),

    gradient of out_p = w_p g        gradient of lse_p = w_p g . (out_p - out)

so backward computes the part again; its kernel gives the rest.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmcp.attention.flash_cpu import HeadRun
from mmcp.attention.pairs import Pairs
from mmcp.masks import count_pairs
from mmcp.sharding.ranges import as_indices

BLOCK = 128  # tokens of a FlexAttention block along queries and keys
NO_WINDOW = 2**31 - 1


def flex(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, runs: Sequence[HeadRun]) -> Tensor:
    """Attend with gradients: q [sq, h, d], k and v [sk, k, d] -> [sq, h, d]."""
    outs = [_attend(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], pairs)[0] for q0, q1, k0, k1 in runs]
    return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]


def flex_partial(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, runs: Sequence[HeadRun]) -> tuple[Tensor, Tensor]:
    """Attend to the keys that are here, as `SoftmaxAttention.partial` does."""
    outs, lses = zip(*(_attend(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], pairs) for q0, q1, k0, k1 in runs), strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def flex_partial_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, runs: Sequence[HeadRun]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of these keys in the gradients, as `SoftmaxAttention.partial_backward` does."""
    shares = []
    for q0, q1, k0, k1 in runs:
        heads, kv = slice(q0, q1), slice(k0, k1)
        whole = grad[:, heads], out[:, heads], lse[:, heads]
        shares.append(_backward(*whole, q[:, heads], k[:, kv], v[:, kv], pairs))
    grad_q, grad_k, grad_v = (torch.cat(parts, dim=1) for parts in zip(*shares, strict=True))
    return grad_q, grad_k, grad_v


def mask_mod(pairs: Pairs, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as FlexAttention's predicate (batch, head, query, key) -> bool; both count inside their sets."""
    mask = pairs.mask
    query_at, key_at = as_indices(pairs.queries), as_indices(pairs.keys)

    def on_device(numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(device, torch.int32)

    query_places, query_documents, query_blocks = (
        on_device(x) for x in (query_at, mask.documents[query_at], mask.block_ids[query_at])
    )
    key_places, key_documents, key_blocks = (
        on_device(x) for x in (key_at, mask.documents[key_at], mask.block_ids[key_at])
    )
    key_depths = on_device(key_at - mask.bounds[mask.documents[key_at]])  # tokens before it in its document
    window, sink, cuts_blocks = mask.window or NO_WINDOW, mask.sink, mask.window_cuts_blocks

    def may_read(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = query_places[query] - key_places[key]
        near = (back < window) | (key_depths[key] < sink)
        causal = (back >= 0) & (query_documents[query] == key_documents[key]) & near
        in_block = (query_blocks[query] == key_blocks[key]) & (query_blocks[query] >= 0)
        return causal | (in_block & near if cuts_blocks else in_block)

    return may_read


def block_pairs(pairs: Pairs, block: int) -> np.ndarray:
    """[query blocks, key blocks] int64: pairs that may be read in each block of `block` queries by `block` keys."""
    counts = np.zeros((-(-pairs.num_queries // block), -(-pairs.num_keys // block)), dtype=np.int64)
    for q0, q1, k0, k1, lowest, highest in pairs.slices.tolist():
        rows, columns = (np.arange(start // block, -(-stop // block)) for start, stop in ((q0, q1), (k0, k1)))
        row, column = (grid.ravel() * block for grid in np.meshgrid(rows, columns, indexing="ij"))
        clipped = (row.clip(q0), (row + block).clip(max=q1), column.clip(k0), (column + block).clip(max=k1))
        parts = np.stack([*clipped, np.full_like(row, lowest), np.full_like(row, highest)], axis=1)
        counts[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += count_pairs(parts).reshape(len(rows), -1)
    return counts


def _attend(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """q: [sq, h, d]  k, v: [sk, k, d], h a multiple of k  ->  out [sq, h, d], lse [sq, h]; 0 and -inf without a key."""
    block_mask = pairs.once(("block_mask", q.device), lambda: _block_mask(pairs, q.device))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    aux = AuxRequest(lse=True)
    out, found = _kernel()(*heads_first, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux)
    return out[0].transpose(0, 1), found.lse[0].transpose(0, 1)


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs
) -> tuple[Tensor, ...]:
    """grad, out: [sq, h, d], lse: [sq, h] of the merged answer  ->  gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        part, part_lse = _attend(q, k, v, pairs)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    weight = torch.exp(part_lse.detach() - finite)[..., None]
    pulled = (weight * grad).to(part.dtype)
    pulled_lse = (pulled * part.detach() - weight * grad * out).sum(-1, dtype=lse.dtype)
    return torch.autograd.grad((part, part_lse), (q, k, v), (pulled, pulled_lse))


def _block_mask(pairs: Pairs, device: torch.device) -> BlockMask:
    counts = torch.from_numpy(block_pairs(pairs, BLOCK)).to(device)
    full = counts == BLOCK * BLOCK
    count, index = _listed((counts > 0) & ~full)
    full_count, full_index = _listed(full)
    return BlockMask.from_kv_blocks(
        count,
        index,
        full_count,
        full_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(pairs, device),
        seq_lengths=(pairs.num_queries, pairs.num_keys),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [blocks, blocks] bool into FlexAttention's form: how many per row, and their numbers first."""
    count = chosen.sum(-1, dtype=torch.int32)
    index = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]


@cache
def _kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention)
