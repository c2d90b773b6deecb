"""Read a config from a YAML file and overrides, and write a resolved one: `load(cls, text of dump(x)) == x`."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails, PydanticUndefined
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from mmcp.config.errors import ConfigError, explain
from mmcp.config.source import Source, Written, read_text, set_value, trap
from mmcp.config.typed import choices, config_classes, field_types, is_config, union_members

T = TypeVar("T")


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a config file; `overrides` are `section.key=value`, by the same rules, and win over the file.

    The file wins over the defaults, also inside a section whose default is a config of its own.
    Raises ConfigError with every problem of the file and the overrides at once.
    """
    file = Path(path).resolve()
    try:
        source = read_text(_read(file))
    except ValueError as error:
        raise ConfigError(str(file), [str(error)]) from None
    return build(cls, source, overrides, str(file))


def build(cls: type[T], source: Source, overrides: Sequence[str] = (), file: str = "overrides") -> T:
    """Check a source against a config class; `file` is named in errors."""
    refused: list[str] = []
    for assignment in overrides:
        try:
            set_value(source, assignment)
        except ValueError as error:
            refused.append(str(error))
    errors: list[ErrorDetails] = []
    adapter = pydantic.TypeAdapter(cls)
    try:
        filled = _fill(source.values, cls)
    except ValueError as error:
        raise ConfigError(file, [*refused, str(error)]) from None
    try:
        made = adapter.validate_json(json.dumps(filled, allow_nan=False))
    except pydantic.ValidationError as error:
        errors = error.errors()
    problems = explain(cls, source, errors) + refused
    if problems:
        raise ConfigError(file, problems)
    return made


def as_values(config: Any) -> dict[str, Any]:
    """Turn a config into nested dicts and lists of None, bool, int, float and str."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")


def dump(config: Any) -> str:
    """Write a config, defaults included, as YAML that YAML 1.1 and 1.2 read alike."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(as_values(config), text)
    return text.getvalue()


class _Representer(SafeRepresenter):
    """Quote every text that one of the two YAML versions would not read as text."""


def _represent_text(representer: SafeRepresenter, text: str) -> ScalarNode:
    style = '"' if trap(Written(text, "")) or text != text.strip() or not text.isprintable() else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _represent_text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise ValueError("is a folder; name the YAML file inside it") from None
    except FileNotFoundError:
        raise ValueError("no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def _fill(given: dict[str, Any], cls: type) -> dict[str, Any]:
    """Complete the sections that are given in part with the values of their default config, not of their class.

    A class may say by `defaults_for(given)` that other values decide its defaults: a model folder, for instance.
    """
    own = cls.defaults_for(given) if hasattr(cls, "defaults_for") else {}
    filled = dict(given)
    for name, annotation in field_types(cls).items():
        if isinstance(given.get(name), dict):
            filled[name] = _fill_section(given[name], annotation, own.get(name, _default(cls, name)))
        elif name in own and name not in given:
            filled[name] = as_values(own[name]) if is_config(own[name]) else own[name]
    return filled


def _fill_section(given: dict[str, Any], annotation: Any, default: Any) -> dict[str, Any]:
    if is_config(default) and given.get("name", getattr(default, "name", None)) == getattr(default, "name", None):
        inner = {name: value for name, value in given.items() if isinstance(value, dict)}
        types = field_types(type(default))
        sections = {
            name: _fill_section(value, types[name], getattr(default, name))
            for name, value in inner.items()
            if name in types
        }
        return {**as_values(default), **given, **sections}
    marker = choices(annotation)
    if marker:
        cls = dict(marker.registry).get(given.get("name", ""))
        return _fill(given, cls) if cls else given
    classes = config_classes(annotation) if len(union_members(annotation)) == 1 else []
    return _fill(given, classes[0]) if classes == union_members(annotation) else given


def _default(cls: type, name: str) -> Any:
    default = cls.__pydantic_fields__[name].get_default(call_default_factory=True)  # type: ignore[attr-defined]
    return None if default is PydanticUndefined else default
