"""What a parallelised model answers: the loss of the whole batch, and on request the fields that TRL asks for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from mmcp.integrations.transformers.loss import token_log_probabilities, whole_from_share
from mmcp.integrations.transformers.whole_row import WholeRow
from mmcp.parallel.collectives import Group, all_reduce
from mmcp.sharding.plan import ShardPlan


@dataclass
class ParallelOutput(ModelOutput):
    """The same on every rank of the group; logits of a whole batch are on no rank."""

    loss: Tensor | None = None
    """Sum of all token losses / labelled tokens, or / num_items_in_batch where that is given."""
    log_probs: Tensor | None = None
    """[b, s]: log-probability of the label that each token predicts, 0 without one; with fused_lm_head only."""
    entropy: Tensor | None = None
    """[b, s]: entropy of that prediction."""
    is_top1: Tensor | None = None
    """[b, s] bool: whether the label was the most likely id."""
    label_mask: Tensor | None = None
    """[b, s] bool: whether the token predicts a label."""


def scored_output(
    logits: Tensor, batch: dict[str, Any], whole: WholeRow, plan: ShardPlan, *, group: Group, weight: float
) -> ParallelOutput:
    """Score this rank's label rows and join them with those of the other ranks.

    logits: [l, vocabulary]  of the rows that this rank scores   weight: of its share in the gradient
    """
    mine = plan.scorer == group.index
    targets = torch.from_numpy(whole.sequence.labels[plan.label_positions[mine]]).to(logits.device)
    log_probs = token_log_probabilities(logits, targets)
    count = batch.get("num_items_in_batch", max(1, plan.num_labels))
    if not batch.get("fused_lm_head"):
        return ParallelOutput(loss=-whole_from_share(log_probs.sum(), group=group, weight=weight) / count)
    places = torch.from_numpy(whole.places[plan.label_positions]).to(logits.device)
    in_batch = _Placed(places[torch.from_numpy(mine).to(places.device)], batch["input_ids"].shape)
    joined = whole_from_share(in_batch(log_probs), group=group, weight=weight)
    with torch.no_grad():
        shares = torch.log_softmax(logits.to(log_probs.dtype), dim=-1)
        entropy = in_batch(-(shares.exp() * shares).sum(-1))
        top1 = in_batch((logits.argmax(-1) == targets).to(log_probs.dtype))
    label_mask = torch.zeros(joined.numel(), dtype=torch.bool, device=joined.device)
    label_mask[places] = True
    return ParallelOutput(
        loss=-joined.sum() / count,
        log_probs=joined,
        entropy=all_reduce(entropy, "sum", group=group, name="loss"),
        is_top1=all_reduce(top1, "sum", group=group, name="loss").bool(),
        label_mask=label_mask.view_as(joined),
    )


@dataclass(frozen=True)
class _Placed:
    """Puts one value per scored row where its token stands in the batch: [l] -> [b, s]."""

    places: Tensor
    shape: torch.Size

    def __call__(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.shape.numel()).index_copy(0, self.places, values).view(self.shape)
