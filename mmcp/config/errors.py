"""Turn what is wrong with a config file into lines that say where, what, why and what to write instead."""

import difflib
import json
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic_core import ErrorDetails

from mmcp.config.source import Path, Source, Written, trap
from mmcp.config.typed import choices, config_classes, field_types, is_config, union_members


class ConfigError(ValueError):
    """A config that cannot be used; `problems` holds one line per error."""

    def __init__(self, file: str, problems: list[str]):
        self.problems = problems
        head = f"{file}: " if len(problems) == 1 else f"{file}: {len(problems)} problems\n  "
        super().__init__(head + "\n  ".join(problems))


def explain(cls: type, source: Source, errors: list[ErrorDetails]) -> list[str]:
    """Return one line per error, in the order of the file, each saying place, value, reason and remedy."""
    lines: dict[Path, tuple[str, list[str]]] = {}
    for path, reason in source.problems:
        lines.setdefault(path, (_place(source, path), []))[1].append(reason)
    for error in errors:
        path, section = _locate(cls, error["loc"])
        lines.setdefault(path, (_place(source, path), []))[1].append(_reason(cls, source, error, path, section))
    order = {path: number for number, path in enumerate(source.written)}
    found = sorted(lines.items(), key=lambda item: order.get(item[0], len(order)))
    return [f"{place}: {'; also: '.join(dict.fromkeys(reasons))}" for _, (place, reasons) in found]


def _place(source: Source, path: Path) -> str:
    written = source.written.get(path)
    name = ".".join(map(str, path)) or "top level"
    if written is None:
        return name
    text = json.dumps(written.text, ensure_ascii=False) if written.quoted else written.text
    text = f" = {text}" if text else ""
    return f"{written.where}: {name}{text}"


def _locate(cls: type, location: tuple[str | int, ...]) -> tuple[Path, Any]:
    """Turn pydantic's location into a path of the file, leaving out the names it adds for members of unions.

    Returns the path and the annotation of what stands above its last part.
    """
    path: list[str | int] = []
    here: Any = cls
    above: Any = cls
    for part in location:
        marker, members = choices(here), union_members(here)
        if marker:
            here = marker.registry.get(str(part))
            continue
        if len(members) > 1:
            here = None
            continue
        above = here = members[0]
        path.append(part)
        if isinstance(here, type) and is_config(here):
            here = field_types(here).get(str(part))
        else:
            here = _item_type(here, part)
    return tuple(path), above


def _item_type(annotation: Any, part: str | int) -> Any:
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    if typing.get_origin(annotation) is dict:
        return arguments[1]
    if len(arguments) > 1 and isinstance(part, int):
        return arguments[part] if part < len(arguments) else None
    return arguments[0] if arguments else None


def _reason(cls: type, source: Source, error: ErrorDetails, path: Path, section: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return _unknown_key(cls, str(path[-1]), path[:-1], section)
    if kind in ("missing", "missing_keyword_only_argument", "missing_argument"):
        return "is required and missing; add it"
    if kind == "union_tag_not_found":
        return "its `name` is missing; give one of the registered names"
    if kind == "union_tag_invalid":
        names = [name.strip("'") for name in context["expected_tags"].split(", ")]
        return f"name '{context['tag']}' is unknown;{_near(context['tag'], names)} known: {', '.join(sorted(names))}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"]))
    reason = error["msg"].replace("Input should be", "expected").replace("a valid integer", "an integer")
    reason = reason.replace("valid ", "")
    return f"{reason}{_remedy(source.written.get(path), error)}"


def _remedy(written: Written | None, error: ErrorDetails) -> str:
    """Say what to write instead where the text shows why it was not taken."""
    if written is None:
        return f", got {json.dumps(error['input'], default=str)}"
    if error["type"] == "string_type" and written.text:
        return f'; in quotes it is text: "{written.text}"'
    if isinstance(error["input"], str) and not error["type"].startswith("string"):
        if trap(written):
            return f"; {trap(written)}"
        if written.quoted:
            return "; it stands in quotes, which make it text"
    return "" if written.text else f", got {json.dumps(error['input'])}"


def _unknown_key(cls: type, key: str, above: Path, section: Any) -> str:
    names = list(field_types(section)) if isinstance(section, type) and is_config(section) else []
    elsewhere = [".".join(path) for path in _paths(cls, ()) if path[-1] == key and path[:-1] != above]
    where = f"section '{'.'.join(map(str, above))}'" if above else "the top level"
    known = f"{where} has: {', '.join(names)}"
    if elsewhere:
        return f"unknown key; it belongs at {' or '.join(dict.fromkeys(elsewhere))}; {known}"
    deeper = {path[-1]: ".".join(path) for path in _paths(cls, ())}
    near = _near(key, names) or _near(key, list(deeper), deeper)
    return f"unknown key;{near} {known}"


def _near(key: str, names: list[str], shown: dict[str, str] | None = None) -> str:
    near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=2, cutoff=0.6)
    return f" did you mean {' or '.join((shown or {}).get(name, name) for name in near)}?" if near else ""


def _paths(cls: type, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Walk the names of all fields, sections inside lists and registries included."""
    for name, annotation in field_types(cls).items():
        yield (*above, name)
        for section in config_classes(annotation):
            yield from _paths(section, (*above, name))
