"""The output head: logits only where a label is, a few rows at a time, gradients made on the way."""

import torch
from torch import Tensor, nn

from mmcp.sequence import NO_LABEL


class LMHead(nn.Module):
    """Linear map to the vocabulary, with its summed cross entropy.

    weight: [vocabulary, e]
    """

    def __init__(self, width: int, vocabulary: int, *, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.normal_(self.weight, std=std)

    def forward(self, rows: Tensor, labels: Tensor, *, chunk: int = 1024) -> Tensor:
        """Return the sum of the rows' token losses, in float32 or the rows' type, whichever is wider.

        rows:   [l, e]  hidden states that predict a label; l may be 0, the sum is then 0 and still has a gradient
        labels: [l]     token ids; NO_LABEL counts nothing
        """
        return _SummedCrossEntropy.apply(rows, self.weight, labels, chunk)

    def logits(self, rows: Tensor) -> Tensor:
        """rows: [l, e] -> [l, vocabulary], in float32 or the rows' type, whichever is wider."""
        return (rows @ self.weight.T).to(torch.promote_types(rows.dtype, torch.float32))

    @torch.no_grad()
    def most_likely(self, rows: Tensor, *, chunk: int = 1024) -> Tensor:
        """rows: [l, e] -> [l] int64: the id with the largest logit, the smallest such id on a tie."""
        best = [(rows[i : i + chunk] @ self.weight.T).argmax(dim=-1) for i in range(0, len(rows), chunk)]
        return torch.cat(best) if best else torch.zeros(0, dtype=torch.int64, device=rows.device)


class _SummedCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear map: both gradients are known once a chunk's logits are, so no logits are kept."""

    @staticmethod
    def forward(ctx, rows, weight, labels, chunk):
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((), dtype=wide)
        grad_rows = torch.zeros_like(rows)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(rows), chunk):
            part, target = rows[start : start + chunk], labels[start : start + chunk]
            counted = target != NO_LABEL
            target = target.where(counted, 0)
            logits = (part @ weight.T).to(wide)  # [chunk, vocabulary]
            log_sum = logits.logsumexp(dim=-1)
            picked = logits.gather(1, target[:, None]).squeeze(1)
            total += ((log_sum - picked) * counted).sum()
            if not any(ctx.needs_input_grad):
                continue
            grad_logits = logits.sub_(log_sum[:, None]).exp_()  # softmax
            grad_logits[torch.arange(len(target), device=target.device), target] -= 1
            grad_logits = grad_logits.mul_(counted[:, None]).to(rows.dtype)
            grad_rows[start : start + chunk] = grad_logits @ weight
            if grad_weight is not None and grad_weight.dtype == part.dtype:
                grad_weight.addmm_(grad_logits.T, part)
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_rows, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_rows, grad_weight = ctx.saved_tensors
        return (
            grad_rows * grad_total.to(grad_rows.dtype),
            None if grad_weight is None else grad_weight * grad_total.to(grad_weight.dtype),
            None,
            None,
        )
