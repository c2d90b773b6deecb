"""The loss of a row whose labels lie on several ranks: the sum of all token losses over the labelled tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmcp.parallel.collectives import Group, all_reduce


def token_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """[l, vocabulary], [l] -> [l]: log-probability of each label, in float32 or the logits' type, if wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, labels, reduction="none")


def whole_from_share(share: Tensor, *, group: Group, weight: float) -> Tensor:
    """Give every rank the sum of all ranks' shares as a value, and `weight` times its own share as a gradient.

    share: [...]  of one shape on all ranks, differentiable
    No gradient travels between ranks here: whoever sums or averages the parameters' gradients adds the shares up.
    """
    mine = share * weight
    total = all_reduce(share.detach(), "sum", group=group, name="loss")
    return mine + (total - mine.detach())
