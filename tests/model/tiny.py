"""A tiny backbone and a row for it: the smallest sizes at which heads, groups and chunks all differ."""

import torch
from torch import Tensor

from mmcp.attention import LinearConfig, SoftmaxConfig
from mmcp.model.backbone import Backbone, BackboneConfig

SIZES = dict(width=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=40)
MIX = (LinearConfig(chunk=8), SoftmaxConfig())


def build(*, dtype: torch.dtype = torch.float64, seed: int = 0, **settings) -> Backbone:
    """Build a tiny backbone with drawn weights, norms and biases included."""
    torch.manual_seed(seed)
    backbone = BackboneConfig(**(SIZES | settings)).build()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return backbone.to(dtype)


def draw_hidden(num_tokens: int, *, width: int = 24, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Draw a row of hidden states that asks for gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, dtype=torch.float64, generator=generator)
    return hidden.to(dtype).requires_grad_()
