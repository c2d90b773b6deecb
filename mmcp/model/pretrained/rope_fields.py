"""Rotary settings of a config.json: `rope_parameters` since transformers 5, `rope_scaling` and `rope_theta` before."""

import math
from typing import Any

from mmcp.model.backbone import BackboneConfig
from mmcp.model.pretrained.fields import Fields
from mmcp.model.rope_scaling import Dynamic, Linear, Llama3, RopeScaling, Unscaled, Yarn

DEFAULT_THETA = 10000.0
FAR = 1 << 18  # positions
BASE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
OF_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def read_rope(config: Fields, *, head_dim: int, turned_share: float = 1.0) -> dict[str, Any]:
    """Return the fields of a BackboneConfig that say how heads are turned.

    turned_share: of a head's numbers that turn, where the file does not say
    Raises ValueError for a rope type that is not among linear, dynamic, llama3 and yarn.
    """
    rope = config.section("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in OF_TYPE:
        raise ValueError(f"{rope.where}: rope type '{kind}' is not supported; known: {', '.join(OF_TYPE)}")
    rope.refuse_unknown(*BASE, *OF_TYPE[kind])
    share = rope.get("partial_rotary_factor", float, config.get("partial_rotary_factor", float, turned_share))
    turned = int(head_dim * share)
    return {
        "rope_theta": rope.get("rope_theta", float, config.get("rope_theta", float, DEFAULT_THETA)),
        "rope_scaling": _scaling(kind, rope, config),
        "rotary_dim": 0 if turned == head_dim else turned,
    }


def _scaling(kind: str, rope: Fields, config: Fields) -> RopeScaling:
    if kind == "default":
        return Unscaled()
    positions = config.get("max_position_embeddings", int)
    # For dynamic scaling transformers takes the model's length, whatever else the file says.
    trained = positions if kind == "dynamic" else rope.get("original_max_position_embeddings", int, positions)
    factor = rope.get("factor", float, positions / trained)
    if kind == "linear":
        return Linear(factor=factor)
    if kind == "dynamic":
        return Dynamic(factor=factor, trained=trained)
    if kind == "llama3":
        low, high = (rope.get(f"{end}_freq_factor", float) for end in ("low", "high"))
        return Llama3(factor=factor, low=low, high=high, trained=trained)
    return Yarn(
        factor=factor,
        trained=trained,
        fast=rope.get("beta_fast", float, 32.0),
        slow=rope.get("beta_slow", float, 1.0),
        whole=rope.get("truncate", bool, True),
        amplitude=rope.get("attention_factor", float, _yarn_amplitude(factor, rope)),
    )


def _yarn_amplitude(factor: float, rope: Fields) -> float:
    """0.1 log(factor) + 1, or the ratio of two such with the weights that DeepSeek's models give."""

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    above, below = (rope.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    return amplitude(above) / amplitude(below) if above and below else amplitude(1.0)


def rope_fields(backbone: BackboneConfig) -> dict[str, Any]:
    """Return the fields of a config.json that say how heads are turned."""
    scaling = backbone.rope_scaling
    values: dict[str, Any] = {"rope_type": scaling.name, "rope_theta": backbone.rope_theta}
    if backbone.rotary_dim:
        values["partial_rotary_factor"] = backbone.rotary_dim / backbone.head_dim
    if not isinstance(scaling, Unscaled):
        values["factor"] = scaling.factor
    if isinstance(scaling, Llama3 | Yarn):
        values["original_max_position_embeddings"] = scaling.trained
    if isinstance(scaling, Llama3):
        values |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if isinstance(scaling, Yarn):
        values |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "truncate": scaling.whole}
        values["attention_factor"] = scaling.amplitude
    return {"rope_parameters": values}


def positions_read(backbone: BackboneConfig) -> int:
    """Return `max_position_embeddings`: how far the model reads where its scaling tells; else far enough for hours."""
    scaling = backbone.rope_scaling
    if isinstance(scaling, Dynamic):
        return scaling.trained
    return int(scaling.trained * scaling.factor) if isinstance(scaling, Llama3 | Yarn) else FAR
