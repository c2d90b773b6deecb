"""Attention variants: one file each, with its slow reference. A new variant is imported here to be registered."""

from typing import Annotated

from mmcp.attention.base import ATTENTION, Variant
from mmcp.attention.linear import LinearConfig
from mmcp.attention.softmax import SoftmaxConfig
from mmcp.config import OneOf

__all__ = ["ATTENTION", "AttentionConfig", "LinearConfig", "SoftmaxConfig", "Variant"]

AttentionConfig = Annotated[Variant, OneOf(ATTENTION)]
"""Any variant's config, told apart by `name`."""
