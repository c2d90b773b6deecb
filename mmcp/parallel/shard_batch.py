"""Cut one row for one rank: every tensor the forward needs, from metadata and the plan; nothing is communicated."""

import numpy as np
import torch

from mmcp.attention.base import RowInfo
from mmcp.masks import Mask
from mmcp.model.vlm import RankRow
from mmcp.sequence import NO_ID, NO_LABEL, TokenSequence
from mmcp.sharding.plan import ShardPlan


def rank_row(
    sequence: TokenSequence,
    plan: ShardPlan,
    *,
    rank: int,
    positions: np.ndarray,
    device: torch.device,
    void: frozenset[int] = frozenset(),
) -> RankRow:
    """Take `rank`'s share of a row.

    positions: [axes, s] int64 or float64 rotary positions of the whole row
    void:      documents whose media could not be read; their labels do not count
    """

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    held = plan.positions(rank)
    ids = sequence.ids[held]
    return RankRow(
        ids=tensor(ids[ids != NO_ID]),
        text=tensor(np.flatnonzero(ids != NO_ID)),
        media=tensor(np.flatnonzero(ids == NO_ID)),
        positions=tensor(positions[:, held]),
        labels=tensor(counted_labels(sequence, void)[plan.scorer == rank]),
        info=RowInfo(mask=Mask.of(sequence), plan=plan, rank=rank),
    )


def counted_labels(sequence: TokenSequence, void: frozenset[int] = frozenset()) -> np.ndarray:
    """Return [labels] int64: the row's labels in order, NO_LABEL for those of void documents."""
    labels = sequence.labels[sequence.label_positions]
    if not void:
        return labels
    lost = np.isin(sequence.documents[sequence.label_positions], sorted(void))
    return np.where(lost, NO_LABEL, labels)
