"""Parts that the encoders share: blocks over one unit, sine positions, the projector, initial weights.

Shapes: n units, p patches (or steps of sound) of one unit, c channels.
"""

from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class UnitAttention(nn.Module):
    """Attention inside each unit, both ways."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, p, c] -> [n, p, c]."""
        q, k, v = rearrange(self.qkv(x), "n p (three h d) -> three n h p d", three=3, h=self.heads)
        # Attention kernels are not made for 0 units; v keeps qkv in the graph.
        mixed = scaled_dot_product_attention(q, k, v) if len(x) else v
        return self.out(rearrange(mixed, "n h p d -> n p (h d)"))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, channels: int, heads: int, mlp_ratio: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = UnitAttention(channels, heads)
        self.mlp_norm = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, mlp_ratio * channels)
        self.contract = nn.Linear(mlp_ratio * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, p, c] -> [n, p, c]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(nn.functional.gelu(self.expand(self.mlp_norm(x))))


class Projector(nn.Module):
    """Two linear layers from the features of one row to the model's width, after a norm if asked for."""

    def __init__(self, features: int, width: int, *, norm: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(features) if norm else nn.Identity()
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, rows, features] -> [n * rows, e]."""
        return self.second(nn.functional.gelu(self.first(self.norm(x.flatten(0, 1)))))


class Kept(Protocol):
    """Features of units that were encoded in an earlier step."""

    def complete(self, features: Tensor) -> Tensor:
        """features: [m, rows, c] of the units encoded now -> [n, rows, c] of all units."""


class FeatureEncoder(nn.Module):
    """An encoder in two parts that can be frozen, and its features kept, apart: features of units, and their projector.

    `features` builds no graph when nothing that it uses trains.
    """

    projector: nn.Module

    def features(self, x: Tensor) -> Tensor:
        """x: units of one size, as `Encoder` says -> [n, rows, c]; n may be 0."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """features: [n, rows, c] -> [n * rows, e], unit by unit."""
        return self.projector(features)

    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        """x: units of one size -> [n * rows, e], those of `kept` among them."""
        features = self.features(x)
        return self.project(features if kept is None else kept.complete(features))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or `dtype` where that is wider."""
    return torch.promote_types(dtype, torch.float32)


AMPLITUDE = 0.1  # of positions: as large as the features of a new network, they drown them and slow learning


def sine_positions(positions: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of whole positions at wavelengths from 2 pi to 2 pi 10000, as in "Attention is all you need".

    positions: [p] integers
    returns:   [p, channels] of `dtype`, within AMPLITUDE of 0, computed in float32 or wider
    """
    half = torch.arange(channels // 2, device=positions.device, dtype=wide(dtype))
    angles = positions[:, None].to(wide(dtype)) * 10000.0 ** (-2 * half / channels)
    return (AMPLITUDE * torch.cat([angles.sin(), angles.cos()], dim=-1)).to(dtype)


def initialise(module: nn.Module, layers: int) -> None:
    """Draw weights: normal with deviation 1/sqrt(inputs), less by sqrt(2 layers) where a block adds to its stream."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() >= 2:
            adds = name.endswith(("attention.out.weight", "contract.weight"))
            nn.init.normal_(parameter, std=(parameter[0].numel() * (2 * layers if adds else 1)) ** -0.5)
