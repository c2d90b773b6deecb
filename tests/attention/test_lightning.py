"""Decayed linear attention against the Lightning attention of transformers' MiniMax: outputs and all gradients.

In float32 as it is (1e-6, gradients 3e-6), in float64 with its tables of decays made in float64 (1e-10).
Run: python -m pytest tests/attention/test_lightning.py
"""

import math

import pytest
import torch

from mmcp.attention.chunks import decayed_attention, decayed_state, runs_of
from mmcp.masks import Mask
from tests.attention.rows import relative_error, row_info

theirs = pytest.importorskip("transformers.models.minimax.modeling_minimax")

HEADS, DIM, TOKENS = 4, 8, 150


class Recorded(torch.nn.Module):
    """Stand in for the norm after attention and keep what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x


def peer(dtype: torch.dtype, block: int) -> torch.nn.Module:
    """Make their layer; in float64 its tables of decays are computed again in that type."""
    torch.manual_seed(0)
    config = theirs.MiniMaxConfig(
        hidden_size=24, num_attention_heads=HEADS, head_dim=DIM, num_hidden_layers=2, block_size=block,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    layer = theirs.MiniMaxLightningAttention(config, 0).to(dtype)
    layer.norm = Recorded()
    if dtype == torch.float64:
        exponent = torch.arange(1, HEADS + 1, dtype=dtype) * -8 / HEADS
        layer.slope_rate = (2**exponent * (1 + 1e-5))[:, None, None]
        tables = layer.decay_factors(layer.slope_rate)
        layer.query_decay, layer.key_decay, layer.diagonal_decay = tables
    return layer


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("block", "chunk"), [(32, 64), (256, 16)])
def test_decayed_attention_is_lightning_attention(dtype, bound, block, chunk):
    layer = peer(dtype, block)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 24, generator=generator, dtype=torch.float64).to(dtype)
    projected = layer.qkv_proj(hidden).detach().requires_grad_()
    layer.qkv_proj.forward = lambda _: projected[None]
    layer(hidden[None], None, None)
    expected = layer.norm.seen[0].unflatten(-1, (HEADS, DIM))

    q, k, v = torch.nn.functional.silu(projected).unflatten(-1, (HEADS, 3 * DIM)).split(DIM, dim=-1)
    runs = runs_of(row_info(Mask.causal([TOKENS])), ((0, TOKENS),), chunk, q)
    settings = {"log_decay": -layer.slope_rate.flatten().double(), "kv_of_query": range(HEADS), "runs": runs}
    states = torch.zeros(1, HEADS, DIM, DIM, dtype=dtype)
    out = decayed_attention(q, k, v, states, **settings) * math.sqrt(DIM)
    assert relative_error(out, expected, of=()) < bound

    pull = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    (grad,) = torch.autograd.grad((out * pull).sum(), projected, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * pull).sum(), projected)
    assert relative_error(grad, wanted, of=()) < 3 * bound
    assert decayed_state(k, v, **settings).shape == states.shape
