"""Families of checkpoints: a registry by the `model_type` of a config.json."""

from dataclasses import fields, replace
from typing import Any, Protocol

from mmcp.attention import AttentionConfig, GatedDeltaConfig
from mmcp.model.backbone import BackboneConfig
from mmcp.model.pretrained.fields import Fields
from mmcp.model.pretrained.rows import Decoder, Rows
from mmcp.registry import Registry

FAMILIES = Registry("model family")
NOT_IN_A_FOLDER = ("checkpointing",)
"""Fields of a backbone that change no result."""


class Family(Protocol):
    """Models whose folders are read and written in one way; register it with `@FAMILIES.register(model_type)`."""

    ignored: str
    """Pattern of names of tensors that hold no weights of the decoder."""

    def read(self, config: Fields) -> Decoder:
        """Return the decoder that a config.json describes. Raises ValueError for what is not supported."""

    def write(self, decoder: Decoder) -> dict[str, Any]:
        """Return the config.json of a decoder. Raises ValueError when theirs computes another model."""

    def rows(self, decoder: Decoder) -> dict[str, Rows]:
        """Say, by name of a VideoLM's parameter, where each parameter of the decoder lies."""


def family_of(config: Fields) -> Family:
    """Return the family of a config.json. Raises ValueError for one that is not known."""
    model_type = config.get("model_type", str)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{config.where}: model_type '{model_type}' is not supported; known: {known}")
    return FAMILIES[model_type]()


def family_for(decoder: Decoder) -> tuple[str, dict[str, Any]]:
    """Return the first family that computes exactly this decoder, and its config.json.

    Raises ValueError with every family's reason when there is none.
    """
    reasons = []
    for name in FAMILIES:
        try:
            return name, FAMILIES[name]().write(decoder)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
    raise ValueError(f"no model family of transformers computes this decoder; {'; '.join(reasons)}")


def check_shape(written: Decoder, decoder: Decoder) -> None:
    """Raise ValueError naming what a family cannot say of a decoder: where it reads another one from what it wrote."""
    ours, theirs = (_resolved(x) for x in (decoder, written))
    differing = [name for name, value in ours.items() if value != theirs[name]]
    if differing:
        told = ", ".join(f"{name}={ours[name]!r}" for name in differing)
        raise ValueError(f"its models cannot have {told}")


def _resolved(decoder: Decoder) -> dict[str, Any]:
    """Return a decoder's fields, the pattern written out and what changes no result left out."""
    backbone = decoder.backbone
    values = {field.name: getattr(backbone, field.name) for field in fields(backbone)}
    values |= {"pattern": tuple(_resolved_variant(backbone, variant) for variant in backbone.variants)}
    values |= {"vocabulary": decoder.vocabulary, "tied_head": decoder.tied_head, "rotary_dim": backbone.turned}
    unused = (*NOT_IN_A_FOLDER, *(("mrope_interleaved", "tokens_per_second") if backbone.positions == "1d" else ()))
    return {name: value for name, value in values.items() if name not in unused}


def _resolved_variant(backbone: BackboneConfig, variant: AttentionConfig) -> AttentionConfig:
    """Return the attention of a layer with its heads written out, and at one way and speed of computing it."""
    alike: Any = replace(variant, mode="ulysses", chunks=1)  # type: ignore[type-var]
    if isinstance(variant, GatedDeltaConfig):
        shape = backbone.shape(variant)
        heads, keys, dim = shape.heads, shape.kv_heads, shape.head_dim
        return replace(alike, chunk=64, value_heads=heads, key_heads=keys, head_dim=dim)
    return alike
