"""Attention variants: one file each, with its slow reference. A new variant is imported here to be registered."""

from typing import Annotated

from pydantic import Field

from mmcp.attention.gated_delta import GatedDeltaConfig
from mmcp.attention.linear import LinearConfig
from mmcp.attention.softmax import SoftmaxConfig

AttentionConfig = Annotated[SoftmaxConfig | LinearConfig | GatedDeltaConfig, Field(discriminator="name")]
"""Any variant's config, told apart by `name`."""
