"""The decoder: blocks whose attention follows a repeated pattern, and a final norm; no embedding, no head."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mmcp.attention import AttentionConfig, SoftmaxConfig
from mmcp.attention.base import HeadShape, RowInfo, split_heads
from mmcp.config import OneOf, config
from mmcp.masks import Mask
from mmcp.model.block import Block
from mmcp.model.layers import AttentionLayer, GatedMLP, RMSNorm
from mmcp.model.rope_scaling import ROPE_SCALINGS, Unscaled
from mmcp.model.rotary import Rotary
from mmcp.positions import positions_1d, positions_mrope, positions_time_aligned
from mmcp.sequence import TokenSequence


@config
class BackboneConfig:
    width: int
    """Size of a token's row, e."""
    layers: int
    heads: int
    """Query heads of each layer."""
    kv_heads: int
    """Key-value heads of each layer; a divisor of `heads`."""
    head_dim: int
    """Size of a head; even."""
    mlp_width: int
    """Hidden size of the gated MLP."""
    pattern: tuple[AttentionConfig, ...] = (SoftmaxConfig(),)
    """Attention of the first layers, repeated over all: three linear and one softmax make a 3:1 hybrid."""
    positions: Literal["1d", "mrope", "time_aligned"] = "1d"
    """One count of tokens; or time, height and width, as in Qwen-VL, or as in Qwen-Omni, sound timed with picture."""
    fractional_positions: bool = False
    """time_aligned: do not round times down to whole steps, as in Qwen3-Omni."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[Any, OneOf(ROPE_SCALINGS)] = Unscaled()
    """How the frequencies are stretched for rows longer than were trained."""
    rotary_dim: int = 0
    """Leading numbers of a head that turn with the position, even; 0: all of them."""
    mrope_sections: tuple[int, ...] = ()
    """mrope: how many of the rotary frequencies, two numbers of a head each, turn with time, height and width."""
    mrope_interleaved: bool = True
    """mrope: deal the frequencies out in turn, as in Qwen3-VL, not in three runs, as in Qwen2.5-VL."""
    tokens_per_second: int = 2
    """mrope, time_aligned: steps of time per second; 2 in Qwen2.5-VL, 25 in Qwen2.5-Omni, 13 in Qwen3-Omni."""
    qk_norm: bool = True
    """Norm queries and keys per head, as in Qwen3."""
    qkv_bias: bool = False
    """Give the projections to queries, keys and values a bias, as in Qwen2."""
    out_bias: bool = False
    """Give the projection after attention a bias."""
    mlp_bias: bool = False
    """Give the three maps of the MLP biases."""
    zero_centred_norms: bool = False
    """Let norms multiply by 1 + weight, as in Qwen3-Next, but for the norm inside a recurrent layer."""
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of new weights, embedding and head included; those that write to the residual stream are
    1 / sqrt(2 layers) of it."""
    checkpointing: bool = False
    """Keep only the input of each block for backward."""

    def __post_init__(self):
        for name in ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "tokens_per_second"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use at least 1")
        for shape in (self._own_shape, *map(self.shape, self.pattern)):
            split_heads(shape.heads, shape.kv_heads, 1)
        if self.turned % 2 or not 0 < self.turned <= self.head_dim:
            raise ValueError(
                f"{self.turned} numbers of heads of head_dim={self.head_dim} cannot turn in pairs; use an even "
                "rotary_dim of at most head_dim, or 0 with an even head_dim"
            )
        if not self.pattern:
            raise ValueError("pattern is empty; name at least one attention variant")
        sections, frequencies = self.mrope_sections, self.turned // 2
        if self.positions != "1d" and (len(sections) != 3 or min(sections) < 0 or sum(sections) != frequencies):
            raise ValueError(f"mrope_sections={sections} must be three counts that sum to {frequencies} frequencies")
        if self.positions == "1d" and sections:
            raise ValueError(f"mrope_sections={sections} with positions='1d'; drop them or set positions='mrope'")
        if self.fractional_positions and self.positions != "time_aligned":
            raise ValueError(f"fractional_positions with positions='{self.positions}'; only time_aligned has fractions")
        if self.positions != "1d" and self.rope_scaling.by_length:
            raise ValueError(
                f"rope scaling '{self.rope_scaling.name}' follows the number of tokens, positions='"
                f"{self.positions}' do not count tokens; use another scaling"
            )

    @property
    def turned(self) -> int:
        """Numbers of a head that turn with the position."""
        return self.rotary_dim or self.head_dim

    @property
    def variants(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer."""
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(self.layers))

    def positions_of(self, sequence: TokenSequence) -> np.ndarray:
        """Return the row's positions as the model reads them: [1 or 3, s] int64, float64 where fractional."""
        if self.positions == "1d":
            return positions_1d(sequence)
        rate = Fraction(self.tokens_per_second)
        if self.positions == "mrope":
            return positions_mrope(sequence, rate)
        return positions_time_aligned(sequence, rate, is_fractional=self.fractional_positions)

    def shape(self, variant: AttentionConfig) -> HeadShape:
        """Return the heads of a layer with this attention."""
        return variant.shape(self._own_shape)

    def parameters(self) -> int:
        """Count the parameters of the built model."""
        return self._sum_blocks(lambda block: sum(x.numel() for x in block.parameters())) + self.width

    def flops_per_token(self) -> int:
        """Count the forward FLOPs of one token in the matrix products; attention itself is `attention_flops`."""
        return 2 * self._matrix_weights()

    def activation_bytes_per_token(self, element_size: int) -> int:
        """Bytes that a token keeps for backward, at `element_size` bytes a number, attention of its heads included.

        Per layer the inputs of both norms and of the projections after them (4 e), the MLP's three products (3 f), and
        q, k, v, the output and its logarithm of sums; with checkpointing one input a layer and one layer's worth.
        """
        shapes = [self.shape(variant) for variant in self.variants]
        layers = [
            4 * self.width + 3 * self.mlp_width + (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim + shape.heads
            for shape in shapes
        ]
        return element_size * (self.layers * self.width + max(layers) if self.checkpointing else sum(layers))

    def attention_flops(self, mask: Mask) -> int:
        """Count the forward FLOPs of attention on one row, over all layers and heads."""
        shapes = [(variant, self.shape(variant)) for variant in self.variants]
        return sum(variant.flops(mask, heads=shape.heads, head_dim=shape.head_dim) for variant, shape in shapes)

    def build(self) -> "Backbone":
        """Make the model, with new weights drawn from torch's generator as the caller left it."""
        return Backbone(self)

    @property
    def _own_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def _matrix_weights(self) -> int:
        return self._sum_blocks(
            lambda block: sum(x.weight.numel() for x in block.modules() if isinstance(x, nn.Linear))
        )

    def _sum_blocks(self, count: Callable[[Block], int]) -> int:
        """Sum what `count` finds in the block of each layer; blocks are built without storage."""
        with torch.device("meta"):
            counts = {variant: count(_build_block(self, variant)) for variant in set(self.variants)}
        return sum(counts[variant] for variant in self.variants)


class Backbone(nn.Module):
    """Blocks and the final norm, on this rank's tokens of one packed row."""

    def __init__(self, settings: BackboneConfig):
        super().__init__()
        self.settings = settings
        self.rotary = Rotary(
            dim=settings.turned,
            theta=settings.rope_theta,
            sections=settings.mrope_sections,
            interleaved=settings.mrope_interleaved,
            scaling=settings.rope_scaling,
        )
        self.blocks = nn.ModuleList(_build_block(settings, variant) for variant in settings.variants)
        self.norm = _norm(settings)(settings.width)
        self._draw_weights()

    def forward(self, hidden: Tensor, positions: Tensor, info: RowInfo) -> Tensor:
        """Run every block, then the final norm.

        hidden: [s/cp, e]  positions: [axes, s/cp] int64 or float64  this rank's tokens
        returns [s/cp, e]
        """
        axes = 1 if self.settings.positions == "1d" else 3
        assert positions.shape == (axes, len(hidden)), f"positions {tuple(positions.shape)} for {len(hidden)} tokens"
        lengths = _document_lengths(info) if self.settings.rope_scaling.by_length else np.zeros(0, np.int64)
        cos, sin = self.rotary.tables(positions, hidden.dtype, torch.from_numpy(lengths).to(hidden.device))
        for block in self.blocks:
            hidden = block(hidden, cos, sin, info)
        return self.norm(hidden)

    def _draw_weights(self) -> None:
        std = self.settings.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("mixer.out", "mlp.down"))
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * self.settings.layers) if writes else std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _build_block(settings: BackboneConfig, variant: AttentionConfig) -> Block:
    mixer = AttentionLayer(
        variant,
        width=settings.width,
        shape=settings.shape(variant),
        qk_norm=settings.qk_norm,
        bias=settings.qkv_bias,
        out_bias=settings.out_bias,
        norm=_norm(settings),
    )
    mlp = GatedMLP(settings.width, settings.mlp_width, bias=settings.mlp_bias)
    return Block(mixer, mlp, norm=partial(_norm(settings), settings.width), checkpointing=settings.checkpointing)


def _norm(settings: BackboneConfig) -> Callable[[int], RMSNorm]:
    """Make norms of a size."""
    return partial(RMSNorm, eps=settings.norm_eps, zero_centred=settings.zero_centred_norms)


def _document_lengths(info: RowInfo) -> np.ndarray:
    """[s/cp] int64: tokens of the document of each token of this rank."""
    mask = info.mask
    return np.diff(mask.bounds)[mask.documents[info.plan.positions(info.rank)]]
