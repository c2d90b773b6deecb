"""The chunked head against torch's cross entropy: sum, both gradients, void labels, no rows.

python -m pytest tests/model/test_head.py
"""

import pytest
import torch
from torch.nn import functional

from mmcp.model.head import LMHead
from mmcp.sequence import NO_LABEL


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_sum_and_gradients_equal_cross_entropy(rows, chunk):
    torch.manual_seed(rows)
    head = LMHead(16, 50, std=0.25).double()
    hidden = torch.randn(rows, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (rows,))
    labels[::3] = NO_LABEL
    got = head(hidden, labels, chunk=chunk) / 7
    got_grads = torch.autograd.grad(got, [hidden, head.weight])
    logits = hidden @ head.weight.T
    expected = functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum") / 7
    expected_grads = torch.autograd.grad(expected, [hidden, head.weight])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for grad, other in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def test_bfloat16_sums_in_float32():
    head = LMHead(8, 20, std=0.35).bfloat16()
    loss = head(torch.randn(300, 8).bfloat16(), torch.zeros(300, dtype=torch.int64))
    assert loss.dtype == torch.float32


def test_most_likely_takes_the_smallest_id_on_a_tie():
    head = LMHead(4, 6, std=0.5)
    torch.nn.init.zeros_(head.weight)
    assert head.most_likely(torch.randn(3, 4), chunk=2).tolist() == [0, 0, 0]
    assert head.most_likely(torch.randn(0, 4)).tolist() == []
