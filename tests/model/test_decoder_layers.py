"""Norm and gated MLP against their formulas through autograd; what they keep for backward is counted.

Run: python -m pytest tests/model/test_decoder_layers.py
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmcp.model import gated_product
from mmcp.model.layers import GatedMLP, RMSNorm


@pytest.mark.parametrize("shape", [(5, 12), (3, 4, 12), (0, 12)])
def test_norm_is_its_formula(shape):
    norm = RMSNorm(12, 1e-3).double()
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = norm.weight.detach().clone().requires_grad_()
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight
    out, pull = norm(x), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grads = torch.autograd.grad(out, (x, norm.weight), pull)
    for got, want in zip(grads, torch.autograd.grad(expected, (x, weight), pull), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


class Adapted(nn.Linear):
    """Stands for what an adapter puts in the place of a linear map."""


@pytest.mark.parametrize("linear", [nn.Linear, Adapted])
@pytest.mark.parametrize("rows", [7, 0])
def test_gated_mlp_is_its_formula(rows, linear, monkeypatch):
    monkeypatch.setattr(gated_product, "BLOCK_NUMBERS", 30)  # three rows at a time
    mlp = GatedMLP(6, 10).double()
    mlp.up.__class__ = linear
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    expected = mlp.down(F.silu(mlp.gate(x)) * mlp.up(x))
    out = mlp(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    leaves = [x, *mlp.parameters()]
    for got, want in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_frozen_mlp_passes_gradients_on():
    mlp = GatedMLP(6, 10).requires_grad_(False)
    x = torch.randn(5, 6, requires_grad=True)
    mlp(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in mlp.parameters())


def test_weight_gradients_of_bfloat16_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(gated_product, "BLOCK_NUMBERS", 32)  # a row at a time
    mlp, x = GatedMLP(16, 32).bfloat16(), torch.randn(2000, 16).bfloat16()
    exact = GatedMLP(16, 32).double()
    exact.load_state_dict({name: value.double() for name, value in mlp.state_dict().items()})
    mlp(x).sum().backward()
    exact(x.double()).sum().backward()
    for got, want in zip(mlp.parameters(), exact.parameters(), strict=True):
        assert (got.grad.double() - want.grad).norm() < 0.01 * want.grad.norm()


def test_the_norm_of_bfloat16_is_computed_in_float32():
    norm, x = RMSNorm(256, 1e-6).bfloat16(), torch.randn(64, 256).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), exact.float().bfloat16())


def test_little_is_kept_for_backward():
    norm, mlp = RMSNorm(32, 1e-6), GatedMLP(32, 64)
    x = torch.randn(100, 32, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mlp(norm(x))
    weights = sum(4 * parameter.numel() for parameter in [*norm.parameters(), *mlp.parameters()])
    assert out.shape == x.shape
    # the norm: x and a root per row; the MLP: its input
    assert sum(kept.values()) - weights == 4 * 100 * (32 + 1 + 32)
