"""What transformers' `generate` passes from one call of a parallelised model to the next in place of a cache."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmcp.integrations.transformers.whole_row import WholeRow
from mmcp.masks import Mask
from mmcp.parallel.cached_attention import RowCache
from mmcp.parallel.collectives import Group
from mmcp.parallel.new_tokens import NewTokens, new_tokens


class ShardedCache(Cache):
    """Keys, values and states of one batch, split over ranks; transformers asks it for its length alone."""

    is_compileable = False

    def __init__(self, room: int, group: Group):
        """room: most new tokens of a row of the batch."""
        super().__init__(layers=[])
        self.row = RowCache(room, group)
        self.num_columns = 0
        """Columns of the batch that were read: the prompts', padding included, and new ones."""
        self.num_new = 0
        self.prompts = Mask.causal([])
        """Of the prompts, one document for each row of the batch."""
        self.positions = np.zeros((0, 0), np.int64)
        """[axes, b] int64: rotary position of the first new token of each row."""

    def begin(self, prompts: Mask, positions: np.ndarray, num_columns: int) -> None:
        """Note what is read first.

        prompts: mask of the packed row   positions: [axes, s] int64 of its tokens   num_columns: of the batch
        """
        self.prompts, self.num_columns = prompts, num_columns
        last = np.maximum.reduceat(positions.max(axis=0), prompts.bounds[:-1])
        self.positions = np.broadcast_to(last + 1, (len(positions), len(last)))

    def read(self, ids: Tensor) -> tuple[NewTokens, Tensor]:
        """Count one more column, [b, 1] int64: what layers are told of it, and its rotary positions [axes, b]."""
        assert ids.shape == (len(self.prompts.bounds) - 1, 1), f"{tuple(ids.shape)} new ids"
        info = new_tokens(self.prompts, tuple(range(len(ids))), self.num_new)
        positions = torch.from_numpy(self.positions + self.num_new).to(ids.device)
        self.num_columns, self.num_new = self.num_columns + 1, self.num_new + 1
        return info, positions

    @property
    def is_linear(self) -> list[bool]:
        """Tell transformers that length has a meaning."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns that were read."""
        return self.num_columns

    def update(self, *_: Any, **__: Any) -> Any:
        """Never called: the layers of a parallelised model keep what they need themselves."""
        raise AssertionError("a layer of a parallelised model asked transformers for a cache")


def prompts_alone(batch: dict[str, Any], *, has_tower: bool) -> dict[str, Any]:
    """Leave out what `generate` adds to its first call; positions of a model with pixels are made from these."""
    added = ("cache", "use_cache", "logits_to_keep", "position_ids" if has_tower else "")
    return {name: value for name, value in batch.items() if name not in added}


def check_prompts(whole: WholeRow, ids: Tensor) -> None:
    """Raise ValueError for prompts that are not one document in each row of the batch, up to its last column."""
    ends = np.arange(1, len(ids) + 1) * ids.shape[1] - 1
    if not np.isin(ends, whole.places).all():
        raise ValueError(
            "a row of the prompts ends with padding, and new tokens follow the last column; pad on the left "
            "(padding_side='left')"
        )
    if any(len(mask.bounds) != len(ids) + 1 for mask in whole.masks):
        raise ValueError("a row of the prompts packs several documents; give each a row of its own to continue it")
