"""Declared parts against what really trains: gradients, weights after steps, rates, graphs of frozen encoders.

Run: python -m pytest tests/training/test_parts.py
"""

import pytest
import torch

from encoders import ENCODERS
from mmcp.parallel.mesh import build_mesh
from mmcp.training.optim import OptimConfig
from mmcp.training.parts import PartsConfig, part_of
from mmcp.training.stage_clock import StageClock
from tests.encoders.test_encoders import EXAMPLES, draw
from tests.training.exact_cases import Layout, MeshConfig, drawn, run_case, tiny_model, train_case

ALIGN = PartsConfig(image=0, video=0, audio=0, embedding=0, backbone=0, head=0)
ROWS = [["tvtat", "qit"], ["aqvt"]]
STAGES = {"align": ALIGN, "decoder": PartsConfig(image=0, video=0, audio=0), "slow": PartsConfig(backbone=0.5)}


@pytest.mark.parametrize("name", STAGES)
def test_what_is_declared_is_what_moves(name):
    parts, steps = STAGES[name], [drawn(seed, ROWS) for seed in range(2)]
    before = dict(Layout().runner(tiny_model(), build_mesh(MeshConfig())).model.named_parameters())
    after = train_case(tiny_model(), Layout(parts=parts), steps, OptimConfig(total_steps=4)).parameters
    moved = {part_of(parameter) for parameter, value in after.items() if not torch.equal(value, before[parameter])}
    assert moved == {part_of(parameter) for parameter in after if parts.rate(part_of(parameter))}


def test_a_rate_scales_the_update():
    steps, optim = [drawn(0, ROWS)], OptimConfig(total_steps=4, weight_decay=0.0)
    start = dict(Layout().runner(tiny_model(), build_mesh(MeshConfig())).model.named_parameters())
    whole, half = (
        train_case(tiny_model(), Layout(parts=PartsConfig(backbone=rate)), steps, optim).parameters
        for rate in (1.0, 0.5)
    )
    for name, value in start.items():
        scale = 0.5 if part_of(name) == "backbone" else 1.0
        torch.testing.assert_close(half[name] - value, scale * (whole[name] - value), rtol=1e-9, atol=1e-12)


def test_a_gradient_in_a_frozen_part_is_an_error():
    layout = Layout(parts=ALIGN)
    runner = layout.runner(tiny_model(), build_mesh(MeshConfig()))
    runner.model.backbone.blocks[0].mlp.up.weight.requires_grad_()
    runner.backward(layout.work(tiny_model(), drawn(0, ROWS)), StageClock(runner.device))
    with pytest.raises(AssertionError, match=r"backbone\.blocks\.0\.mlp\.up\.weight \(has a gradient\)"):
        layout.parts.check_gradients(runner.model)


def test_gradients_of_a_stage_do_not_depend_on_ranks(rank_pool):
    rows = drawn(1, ROWS)
    one = run_case(tiny_model(), Layout(parts=ALIGN), rows)
    many = rank_pool.run(run_case, tiny_model(), Layout(parts=ALIGN, mesh=MeshConfig(ulysses=2)), rows, ranks=2)[0]
    assert {part_of(name) for name in one.gradients} == {"projectors"}
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(many.gradients[name], gradient, rtol=1e-9, atol=1e-12)
    assert sum(bool(gradient.any()) for gradient in one.gradients.values()) > 8


@pytest.mark.parametrize(("config", "sizes"), EXAMPLES, ids=lambda value: getattr(value, "name", ""))
def test_frozen_encoders_build_no_graph(config, sizes):
    module, x = config.build(8), draw(config, sizes[0], 2)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(part_of(f"encoders.{config.kind}.{name}") == "projectors")
    features = module.features(x)
    assert not features.requires_grad and features.grad_fn is None
    assert module(x).requires_grad
    torch.testing.assert_close(module.project(features), module(x), rtol=0, atol=0)


def test_every_registered_encoder_has_a_projector():
    for config, _ in EXAMPLES:
        names = [name for name, _ in config.build(8).named_parameters()]
        assert {part_of(f"encoders.{config.kind}.{name}") for name in names} == {config.kind, "projectors"}
    assert {config.name for config, _ in EXAMPLES} == set(ENCODERS)


def test_frozen_encoders_are_named():
    assert ALIGN.frozen_encoders == {"image", "video", "audio"}
    assert PartsConfig(audio=0).frozen_encoders == {"audio"} and not PartsConfig().frozen_encoders


def test_nothing_that_trains_is_refused():
    nothing = PartsConfig(image=0, video=0, audio=0, embedding=0, backbone=0, head=0, projectors=0)
    with pytest.raises(ValueError, match="every part of the model has rate 0"):
        Layout(parts=nothing).runner(tiny_model(), build_mesh(MeshConfig()))
