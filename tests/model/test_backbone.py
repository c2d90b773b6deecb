"""The backbone against itself: documents, empty shares, checkpointing, counts.

Run: python -m pytest tests/model/test_backbone.py
"""

import numpy as np
import pytest
import torch

from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from mmcp.masks import Mask
from mmcp.model.backbone import BackboneConfig
from mmcp.sequence import Segment, TokenSequence
from tests.attention.rows import row_info
from tests.model.tiny import MIX, SIZES, build, draw_hidden

SHAPES = {
    "softmax": {},
    "mix": {"pattern": MIX},
    "gated": {"pattern": (SoftmaxConfig(output_gate=True, window=4), LinearConfig(output_gate=False, rotary=False))},
    "delta": {"pattern": (GatedDeltaConfig(chunk=8, value_heads=6, key_heads=3, head_dim=4), SoftmaxConfig())},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "mrope": {"positions": "mrope", "mrope_sections": (2, 1, 1)},
}


def run(backbone, hidden, lengths):
    positions = np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])
    axes = 3 if backbone.settings.positions == "mrope" else 1
    positions = torch.from_numpy(np.broadcast_to(positions, (axes, len(positions))).copy())
    return backbone(hidden, positions, row_info(Mask.causal(lengths)))


@pytest.mark.parametrize("name", SHAPES)
def test_documents_of_a_row_are_documents_alone(name):
    backbone, hidden = build(**SHAPES[name]), draw_hidden(30)
    packed = run(backbone, hidden, [11, 1, 18])
    alone = torch.cat([run(backbone, part, [len(part)]) for part in hidden.split([11, 1, 18])])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_checkpointing_changes_nothing(name):
    grads = []
    for checkpointing in (False, True):
        backbone, hidden = build(**SHAPES[name], checkpointing=checkpointing), draw_hidden(20)
        out = run(backbone, hidden, [9, 11])
        grads.append(torch.autograd.grad(out.square().sum(), [hidden, *backbone.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_tokens_give_zero_gradients(name, checkpointing):
    backbone, hidden = build(**SHAPES[name], checkpointing=checkpointing), draw_hidden(0)
    out = run(backbone, hidden, [])
    assert out.shape == (0, 24)
    out.sum().backward()
    for parameter in backbone.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_matters_and_is_counted(name):
    backbone = build(**SHAPES[name])
    run(backbone, draw_hidden(20), [20]).square().sum().backward()
    assert all(parameter.grad.any() for parameter in backbone.parameters())
    assert backbone.settings.parameters() == sum(parameter.numel() for parameter in backbone.parameters())
    matrices = sum(parameter.numel() for parameter in backbone.parameters() if parameter.dim() == 2)
    assert backbone.settings.flops_per_token() == 2 * matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_stay_near_float64(dtype):
    exact = run(build(pattern=MIX), draw_hidden(40), [40])
    backbone = build(pattern=MIX, dtype=dtype)
    out = run(backbone, draw_hidden(40, dtype=dtype), [40])
    assert out.dtype == dtype
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in backbone.parameters())


def test_weights_follow_the_callers_generator():
    first, second, third = build(seed=1), build(seed=1), build(seed=2)
    pairs = zip(first.parameters(), second.parameters(), third.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)


def test_variants_repeat_over_layers_and_their_costs_add():
    config = BackboneConfig(**SIZES | {"layers": 5, "pattern": (*MIX[:1] * 2, MIX[1])})
    assert [variant.name for variant in config.variants] == ["linear", "linear", "softmax", "linear", "linear"]
    mask = Mask.causal([50])
    expected = 4 * MIX[0].flops(mask, heads=4, head_dim=8) + MIX[1].flops(mask, heads=4, head_dim=8)
    assert config.attention_flops(mask) == expected


def test_positions_are_those_the_model_reads():
    row = TokenSequence((Segment(kind="text", ids=(1, 2)),))
    assert BackboneConfig(**SIZES).positions_of(row).shape == (1, 2)
    assert BackboneConfig(**SIZES, positions="mrope", mrope_sections=(2, 1, 1)).positions_of(row).shape == (3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "not a multiple of 3"),
        ({"head_dim": 7}, "heads of head_dim=7 cannot turn in pairs"),
        ({"pattern": ()}, "pattern is empty"),
        ({"positions": "mrope"}, "sum to 4 frequencies"),
        ({"mrope_sections": (2, 1, 1)}, "drop them or set"),
        ({"layers": 0}, "layers=0"),
        ({"pattern": (GatedDeltaConfig(value_heads=4, key_heads=3),)}, "4 query heads are not a multiple of 3"),
    ],
)
def test_what_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BackboneConfig(**SIZES | change)
