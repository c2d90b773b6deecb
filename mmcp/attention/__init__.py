"""Attention variants: one file each, with its slow reference. A new variant is imported here to be registered."""

from typing import Annotated

from mmcp.attention.base import ATTENTION, Variant
from mmcp.attention.gated_delta import GatedDeltaConfig
from mmcp.attention.kernelised import KernelisedConfig
from mmcp.attention.linear import LinearConfig
from mmcp.attention.softmax import SoftmaxConfig
from mmcp.config import OneOf

__all__ = [
    "ATTENTION",
    "AttentionConfig",
    "GatedDeltaConfig",
    "KernelisedConfig",
    "LinearConfig",
    "SoftmaxConfig",
    "Variant",
]

AttentionConfig = Annotated[Variant, OneOf(ATTENTION)]
"""Any variant's config, told apart by `name`."""
