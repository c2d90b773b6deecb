"""The mask of a batch of whole rows: what transformers' mask interface gives a model that is only asked for its masks.

Every way by which a mask reaches a layer ends here: a composition of mask functions, a 2-D padding mask, a user's 4-D
mask. What cannot be told as a `Mask` is refused by name; nothing is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from mmcp.integrations.transformers.dense_masks import LONGEST, allowed_pairs, mask_of_pairs
from mmcp.integrations.transformers.mask_functions import Untranslatable, mask_of_function
from mmcp.masks import Mask


@dataclass(frozen=True, eq=False)
class WholeMask:
    """One mask per row of a batch."""

    rows: tuple[Mask, ...]
    """Per row: the mask over its kept tokens if `is_over_kept`, else over all of them."""
    kept: np.ndarray
    """[b, s] bool: tokens that are not padding."""
    is_over_kept: bool = False

    def packed(self) -> Mask:
        """Join the rows' kept tokens into one packed row: row after row, each with documents of its own.

        Raises ValueError for a window over a row with padding between its tokens: distances would change.
        """
        bounds, blocks, offset = [np.zeros(1, np.int64)], [np.zeros((0, 2), np.int64)], 0
        for mask, kept in zip(self.rows, self.kept, strict=True):
            kept = np.ones(mask.num_tokens, dtype=bool) if self.is_over_kept else kept
            place = np.concatenate([[0], np.cumsum(kept)])
            if mask.window and int(np.diff(np.flatnonzero(kept)).max(initial=1)) > 1:
                raise ValueError(
                    "attention_mask has zeros between the tokens of a row, and a layer has a sliding window; pad "
                    "before or after the tokens only"
                )
            bounds.append(offset + place[mask.bounds[1:]])
            blocks.append(offset + place[mask.blocks])
            offset += int(place[-1])
        joined = np.concatenate(blocks)
        first = self.rows[0]
        return replace(
            first, bounds=np.unique(np.concatenate(bounds)), blocks=joined[joined[:, 0] < joined[:, 1]]
        ).with_window(first.window, cuts_blocks=any(mask.window_cuts_blocks for mask in self.rows))


def whole_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_options: Any,
) -> WholeMask:
    """Answer transformers' mask interface (see `AttentionMaskInterface`) for whole rows.

    attention_mask: [b, s] bool  False at padding
    Raises ValueError for a mask that is no `Mask`, by the name of its function, and for one over a cache.
    """
    if (q_length, q_offset, kv_offset) != (kv_length, 0, 0):
        raise ValueError(
            f"a mask of {q_length} queries at {q_offset} over {kv_length} keys at {kv_offset}: a cache is not split "
            "over ranks here; call the model on whole rows with use_cache=False"
        )
    assert mask_function is not None
    kept = np.ones((batch_size, q_length), dtype=bool)
    if attention_mask is not None:
        kept = attention_mask.detach().cpu().numpy().astype(bool)
    try:
        rows = [mask_of_function(mask_function, num_tokens=q_length, row=row) for row in range(batch_size)]
    except Untranslatable as error:
        if q_length > LONGEST:
            raise ValueError(
                f"the mask holds {error}, which cannot be split over ranks, and {q_length} tokens are too many to look "
                f"at pair by pair (at most {LONGEST}); use causal, sliding, chunked or blockwise masks"
            ) from error
        rows = list(_look_at_pairs(mask_function, batch_size, q_length, use_vmap, str(error)))
    return WholeMask(tuple(rows), kept)


def mask_of_tensor(mask: Tensor, batch_size: int) -> WholeMask:
    """Read a user's 4-D mask, [1 or b, 1 or heads, s, s]; a key that nobody reads is padding."""
    found = [mask_of_pairs(allowed_pairs(mask[min(row, len(mask) - 1)])) for row in range(batch_size)]
    return WholeMask(tuple(mask for mask, _ in found), np.stack([kept for _, kept in found]), is_over_kept=True)


def _look_at_pairs(function: Callable, batch_size: int, length: int, use_vmap: bool, why: str) -> Sequence[Mask]:
    pairs = sdpa_mask(
        batch_size,
        length,
        length,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=torch.device("cpu"),
    )
    assert pairs is not None, "skipping was not allowed"
    masks = []
    for allowed in pairs[:, 0].numpy():
        try:
            mask, kept = mask_of_pairs(allowed)
        except ValueError as error:
            raise ValueError(f"the mask holds {why}; {error}") from error
        if not kept.all():
            raise ValueError(f"the mask holds {why}, which hides tokens from all; say so by a 2-D attention_mask")
        masks.append(mask)
    return masks
