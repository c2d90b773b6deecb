"""Typed configs: one decorator for every config class of the library."""

import dataclasses
from typing import TypeVar, dataclass_transform

import pydantic

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, pydantic.Field))
def config(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass that checks types strictly and refuses unknown keys.

    pydantic, not OmegaConf: it reports every error of a file at once, with its path.
    """
    strict = pydantic.ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, slots=True, config=strict)(cls)
