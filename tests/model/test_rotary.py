"""Rotary tables and turns against transformers' and against complex numbers.

Run: python -m pytest tests/model/test_rotary.py
"""

import pytest
import torch

from mmcp.model.rope_scaling import Unscaled
from mmcp.model.rotary import Rotary, frequency_axes, rotate_

NO_LENGTHS = torch.zeros(0, dtype=torch.int64)


def plain(dim: int, theta: float) -> Rotary:
    return Rotary(dim=dim, theta=theta, sections=(), interleaved=False, scaling=Unscaled())


def test_a_turn_is_a_complex_product_and_its_backward_turns_back():
    positions = torch.tensor([[0, 1, 7, 123456]])
    cos, sin = plain(8, theta=100.0).tables(positions, torch.float64, NO_LENGTHS)
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    angles = positions[0][:, None].double() * 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    got = rotate_(x.clone(), cos, sin, head_dim=8)
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: rotate_(x.flatten(1) + 0, cos, sin, head_dim=8), x)


def test_late_positions_are_exact_in_float32():
    late = torch.tensor([[10_000_000]])
    narrow, exact = (plain(64, theta=1e4).tables(late, t, NO_LENGTHS)
                     for t in (torch.bfloat16, torch.float64))  # fmt: skip
    assert narrow[0].dtype == torch.float32
    torch.testing.assert_close(narrow[1].double(), exact[1], rtol=0, atol=1e-7)


def test_layouts_of_the_docstring():
    assert "".join("thw"[i] for i in frequency_axes(8, (4, 2, 2), False)) == "tttthhww"
    assert "".join("thw"[i] for i in frequency_axes(8, (4, 2, 2), True)) == "thwthwtt"
    assert frequency_axes(4, (), True).tolist() == [0] * 4


POSITIONS = torch.tensor([[0, 1, 5, 5, 9, 30], [0, 1, 2, 3, 9, 31], [0, 1, 4, 2, 9, 35]])


PEERS = {
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLRotaryEmbedding", False),
    "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", True),
}


@pytest.mark.parametrize("family", PEERS)
def test_sections_are_those_of(family):
    config_name, module_name, interleaved = PEERS[family]
    package = f"transformers.models.{family}"
    configuration = pytest.importorskip(f"{package}.configuration_{family}")
    module = pytest.importorskip(f"{package}.modeling_{family}")
    sections = (4, 2, 2)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    config = getattr(configuration, config_name)(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope
    )
    cos, sin = getattr(module, module_name)(config)(torch.zeros(1), POSITIONS[:, None])
    tables = Rotary(dim=16, theta=1e4, sections=sections, interleaved=interleaved, scaling=Unscaled()).tables(
        POSITIONS, torch.float32, NO_LENGTHS
    )
    for ours, theirs in zip(tables, (cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :8], rtol=0, atol=1e-5)
