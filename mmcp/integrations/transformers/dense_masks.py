"""Recognise a mask that is given pair by pair: a user's 4-D mask, or a function that nothing is known of."""

import numpy as np
import torch
from torch import Tensor

from mmcp.masks import Mask

LONGEST = 4096  # tokens of a row whose pairs are written out


def mask_of_pairs(allowed: np.ndarray) -> tuple[Mask, np.ndarray]:
    """Find the `Mask` of exactly these pairs: (mask of the tokens that are read, [s] bool which those are).

    allowed: [s, s] bool  whether a query, down, may read a key, across; a key that nobody reads is padding
    Raises ValueError for pairs that are no `Mask`.
    """
    kept: np.ndarray = np.any(allowed, axis=0)
    pairs = allowed[np.ix_(kept, kept)]
    size = len(pairs)
    if not size:
        return Mask.causal([]), kept
    last = size - 1 - pairs[:, ::-1].argmax(axis=1)
    reach = np.arange(size) - pairs.argmax(axis=1) + 1
    shape = Mask(_documents(pairs), _blocks(last))
    window = int(reach.max())
    for mask in (shape, *(shape.with_window(window, cuts_blocks=cuts) for cuts in (False, True))):
        if np.array_equal(mask.dense(), pairs):
            return mask, kept
    raise ValueError(
        f"a mask of {size} tokens is not causal documents with both-ways blocks and at most a sliding window, which is "
        "what can be split over ranks; pass position_ids that start anew at each document, or none of your own"
    )


def allowed_pairs(mask: Tensor) -> np.ndarray:
    """Read one row of a user's mask as [s, s] bool.

    mask: [heads, s, s]  bool, True where a key is read, or added to the scores: 0 where it is read, else very negative
    Raises ValueError for heads with masks of their own, values in between (a bias), and rows too long to look at.
    """
    if mask.shape[-1] > LONGEST or mask.shape[-1] != mask.shape[-2]:
        raise ValueError(
            f"a 4-D mask of {mask.shape[-2]} x {mask.shape[-1]} tokens: only square masks of at most {LONGEST} tokens "
            "are looked at pair by pair; pass position_ids that start anew at each document instead"
        )
    if not torch.equal(mask, mask[:1].expand_as(mask)):
        raise ValueError("a 4-D mask that differs between heads cannot be split over ranks; give all heads one mask")
    pairs = mask[0].detach().cpu()
    if pairs.dtype == torch.bool:
        return pairs.numpy()
    lowest = torch.finfo(pairs.dtype).min if pairs.is_floating_point() else -1
    if not bool(((pairs == 0) | (pairs <= lowest / 2)).all()) or not pairs.is_floating_point():
        raise ValueError(
            f"a 4-D mask of type {pairs.dtype} holds values other than 0 and the lowest one: a bias on the scores "
            "cannot be split over ranks; use a boolean mask"
        )
    return (pairs == 0).numpy()


def _documents(pairs: np.ndarray) -> np.ndarray:
    """First token of each document, then their number: no pair crosses a bound."""
    crossing = np.array([pairs[i:, :i].any() or pairs[:i, i:].any() for i in range(1, len(pairs))], dtype=bool)
    return np.concatenate([[0], 1 + np.flatnonzero(~crossing), [len(pairs)]]).astype(np.int64)


def _blocks(last: np.ndarray) -> np.ndarray:
    """[blocks, 2]: runs of queries that read up to one and the same key, further than themselves."""
    blocks, i = [], 0
    while i < len(last):
        stop = max(i, int(last[i])) + 1
        if stop > i + 1:
            blocks.append((i, stop))
        i = stop
    return np.array(blocks, dtype=np.int64).reshape(-1, 2)
