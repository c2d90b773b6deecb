"""What a batch costs the ranks, from a model's configuration alone: what the planner balances."""

from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from mmcp.sharding.cost import DEFAULT_RATES, CostModel, LayerCost


def cost_model(config: PreTrainedConfig, linear: list[bool], device_type: str) -> CostModel:
    """Estimate costs of a transformers model.

    linear: per layer, whether it reads in order
    """
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    width, heads, layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    head = getattr(text, "head_dim", None) or width // heads
    kv_width = text.num_key_value_heads * head
    projections = 2 * (2 * width * heads * head + 2 * width * kv_width) + 6 * width * text.intermediate_size
    kinds = ("image", "video") if vision is not None else ()
    flops = {kind: partial(_tower_flops, vision) for kind in kinds}
    softmax = LayerCost(count=linear.count(False), heads=heads, pair_flops=4 * head, token_flops=0)
    state = LayerCost(count=linear.count(True), heads=heads, pair_flops=0, token_flops=8 * head * head)
    return CostModel(
        encoder_flops=flops,
        encoder_bytes={kind: partial(_tower_bytes, vision) for kind in kinds},
        linear_flops=layers * projections,
        layers=tuple(layer for layer in (softmax, state) if layer.count),
        label_flops=2 * width * text.vocab_size,
        token_bytes=layers * 30 * width,
        label_bytes=4 * text.vocab_size,
        row_bytes=4 * width,
        call_tokens=16_384,
        rates=DEFAULT_RATES[device_type],
    )


def _patches(vision: Any, size: tuple[int, ...]) -> int:
    return size[-1] * size[-2] // vision.patch_size**2


def _depth_and_width(vision: Any) -> tuple[int, int]:
    return getattr(vision, "depth", None) or vision.num_hidden_layers, vision.hidden_size


def _tower_flops(vision: Any, size: tuple[int, ...]) -> int:
    """Forward FLOPs of one unit: projections, MLP of `intermediate_size`, attention of all patches with each other."""
    (depth, width), patches = _depth_and_width(vision), _patches(vision, size)
    return depth * patches * (8 * width * width + 4 * width * vision.intermediate_size + 4 * patches * width)


def _tower_bytes(vision: Any, size: tuple[int, ...]) -> int:
    """Resident bytes of one unit: its pixels and about fifteen values per layer, patch and channel."""
    (depth, width), patches = _depth_and_width(vision), _patches(vision, size)
    pixels = 3 * 4 * (size[0] if len(size) == 3 else 1) * size[-1] * size[-2]
    return pixels + 60 * depth * width * patches
