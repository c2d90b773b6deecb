"""The config decorator, fields chosen from a registry, and what a field's annotation allows."""

import dataclasses
import types
import typing
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic_core import core_schema

from mmcp.registry import Registry

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, pydantic.Field))
def config(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass that checks types strictly and refuses unknown keys and NaN.

    pydantic, not OmegaConf: it reports every error of a file at once, with its path. The check is built at first
    use, so that a registry a field chooses from may still grow after the class is written.
    """
    strict = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, slots=True, config=strict)(cls)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """Mark a field whose value is one of a registry's config classes, told apart by their `name`.

    attention: Annotated[Any, OneOf(ATTENTION)] = SoftmaxConfig()

    Each entry is a config class with `name: Literal["its registered name"]`.
    """

    registry: Registry

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        for name, cls in self.registry.items():
            allowed = typing.get_args(typing.get_type_hints(cls).get("name"))
            assert allowed == (name,), f"{cls.__name__} is registered as '{name}' but its field `name` allows {allowed}"
        choices = {name: handler.generate_schema(cls) for name, cls in self.registry.items()}
        return core_schema.tagged_union_schema(choices, discriminator="name")


def is_config(value: Any) -> bool:
    """Tell whether `value` is a config class or an instance of one."""
    return hasattr(value, "__pydantic_fields__") and dataclasses.is_dataclass(value)


def field_types(cls: type) -> dict[str, Any]:
    """Return name -> annotation of the fields that a file may set, `Annotated` kept."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def choices(annotation: Any) -> OneOf | None:
    """Return the marker of an annotation that chooses from a registry, else None."""
    if typing.get_origin(annotation) is Annotated:
        return next((extra for extra in annotation.__metadata__ if isinstance(extra, OneOf)), None)
    members = union_members(annotation)
    return choices(members[0]) if len(members) == 1 and members[0] is not annotation else None


def union_members(annotation: Any) -> list[Any]:
    """Return the members of a union without None; of anything else, itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) if member is not type(None)]
    return [annotation]


def config_classes(annotation: Any) -> list[type]:
    """Return the config classes that a value of this annotation is made of, inside lists and unions too."""
    marker = choices(annotation)
    if marker:
        return list(marker.registry.values())
    if isinstance(annotation, type) and is_config(annotation):
        return [annotation]
    return [cls for argument in typing.get_args(annotation) for cls in config_classes(argument)]
