"""The learning rate against a table, AdamW against its formula in plain Python, bfloat16 compute against float32.

Run: python -m pytest tests/training/test_optim.py
"""

import math

import pytest
import torch
from torch import nn

from mmcp.training.optim import OptimConfig, apply_update


def tiny(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    optim = OptimConfig(learning_rate=1.0, warmup_steps=2, total_steps=6, min_rate_ratio=0.0)
    expected = [1 / 3, 2 / 3, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0, 0.0]
    assert [optim.rate(step) for step in range(8)] == pytest.approx(expected, abs=1e-15)
    constant = OptimConfig(learning_rate=0.3, min_rate_ratio=1.0, total_steps=3)
    assert [constant.rate(step) for step in range(5)] == [0.3] * 5


def test_updates_follow_the_formula_of_adamw():
    optim = OptimConfig(learning_rate=0.1, warmup_steps=1, total_steps=5, weight_decay=0.2, clip_norm=0.5)
    model = tiny().double()
    optimizer = optim.build(model)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(5):
        model(torch.randn(3, 6, dtype=torch.float64)).square().sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        scale = min(1.0, 0.5 / (norm + 1e-6))
        rate = optim.rate(step)
        for name, gradient in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * scale * gradient
            second[name] = 0.95 * second[name] + 0.05 * (scale * gradient) ** 2
            direction = first[name] / (1 - 0.9 ** (step + 1))
            direction = direction / ((second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.2 if expected[name].ndim == 2 else 0.0
            expected[name] = expected[name] * (1 - rate * decay) - rate * direction
        assert apply_update(optimizer, optim, step) == pytest.approx(norm, rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)
            assert parameter.grad is None


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_touched():
    model = tiny()
    optim = OptimConfig()
    optimizer = optim.build(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.full((1, 6), float("nan"))).sum().backward()
    with pytest.raises(FloatingPointError, match="nan at step 3"):
        apply_update(optimizer, optim, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 10, "total_steps": 10}, "leaves none of total_steps=10"),
        ({"learning_rate": 0.0}, "greater than 0"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"learning_rate": float("inf")}, "finite"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)


def test_weights_that_would_lose_updates_or_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0.weight is torch.bfloat16.*MixedPrecisionPolicy"):
        OptimConfig().build(tiny().bfloat16())
    with pytest.raises(ValueError, match="no parameter is trained"):
        OptimConfig().build(tiny().requires_grad_(False))
