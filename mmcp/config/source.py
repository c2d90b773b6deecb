"""Read YAML 1.2 so that no value changes its meaning silently, keeping each value's text and line for errors."""

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Path = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LARGEST_EXACT = 2.0**53  # whole floats up to here become integers, so that 1e4 fills an integer field

_TRAPS = (
    (
        re.compile(r"(?i)yes|no|on|off|y|n"),
        "YAML 1.1 reads it as a boolean and YAML 1.2 as a word; write true or false",
    ),
    (re.compile(r"[-+]?0[0-9]+"), "YAML 1.1 reads it as octal and YAML 1.2 as decimal; write it without leading zeros"),
    (re.compile(r"0o[0-7]+|0b[01]+"), "only YAML 1.2 or only YAML 1.1 reads it as a number; write it in decimal"),
    (
        re.compile(r"[-+]?[0-9.][0-9_.]*_[0-9_.]*"),
        "YAML 1.1 drops the underscores, YAML 1.2 reads a word; leave them out",
    ),
    (
        re.compile(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?"),
        "YAML 1.1 reads it in base 60 and YAML 1.2 as a word; write one number",
    ),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*"), "YAML 1.1 reads it as a date and YAML 1.2 as a word"),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), "it is not a finite number; write a finite one"),
    (_FLOAT, "it is too large for a float; write a finite number"),
)


@dataclass(frozen=True)
class Written:
    """How a value stands in its source."""

    text: str
    """The text as written; empty for a section or a list."""
    where: str
    """`line 4`, or `override`."""
    quoted: bool = False
    """Whether it stands in quotes or in a block: then it is text, whatever it looks like."""


@dataclass
class Source:
    """A YAML mapping and where each of its values comes from."""

    values: dict[str, Any] = field(default_factory=dict)
    """Nested dicts and lists of None, bool, int, float and str."""
    written: dict[Path, Written] = field(default_factory=dict)
    """Per path of keys and list indices: how the value was written."""
    problems: list[tuple[Path, str]] = field(default_factory=list)
    """Path and reason of what is wrong with the text itself: duplicate keys, tags, cycles."""


def trap(written: Written) -> str:
    """Say why a plain text is not taken as a number, boolean or date; empty when there is no such reason."""
    if written.quoted:
        return ""
    return next((reason for pattern, reason in _TRAPS if pattern.fullmatch(written.text)), "")


def read_text(text: str) -> Source:
    """Read one YAML document whose root is a mapping.

    A plain scalar becomes null, a boolean or a number only where YAML 1.1 and 1.2 agree, or where only the sign or
    dot of an exponent is missing (1e-5, 1E4); everything else stays the text as written, so that a text field gets
    it and any other field refuses it. Whole floats become integers, exactly.
    Raises ValueError with the line when the text is not YAML or not one mapping.
    """
    root = _compose(text)
    if root is None:
        raise ValueError("the file is empty; write at least one `key: value` line")
    if not isinstance(root, MappingNode):
        raise ValueError(f"line {root.start_mark.line + 1}: expected `key: value` lines at the top level")
    source = Source()
    source.values = _build(root, (), source, None, ())
    return source


def set_value(source: Source, assignment: str) -> None:
    """Apply one `section.key=value`; the value is YAML, and no value is the empty text; lists are indexed by number.

    Raises ValueError.
    """
    key, equals, text = assignment.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    if not equals or "" in path or not isinstance(path[0], str):
        raise ValueError(f"override '{assignment}' is not of the form section.key=value")
    try:
        node = _compose(text)
    except ValueError as error:
        raise ValueError(f"override '{assignment}': {error}") from None
    parent = _parent(source.values, path, assignment)
    source.written = {known: how for known, how in source.written.items() if known[: len(path)] != path}
    if node is None:
        source.written[path] = Written("", "override", quoted=True)
        parent[path[-1]] = ""
    else:
        parent[path[-1]] = _build(node, path, source, "override", ())


def _parent(values: Any, path: Path, assignment: str) -> Any:
    """Walk to the container of the last key, adding sections that are not there."""
    for i, part in enumerate(path):
        if isinstance(values, list):
            if not isinstance(part, int) or part >= len(values):
                raise ValueError(f"override '{assignment}': '{part}' is not one of the {len(values)} list indices")
        elif not isinstance(values, dict):
            raise ValueError(f"override '{assignment}': '{'.'.join(map(str, path[:i]))}' is a value, not a section")
        if i == len(path) - 1:
            return values
        values = values[int(part)] if isinstance(values, list) else values.setdefault(str(part), {})
    raise AssertionError("a path has at least one part")


def _compose(text: str) -> Node | None:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{error.problem or error.context}; this is not YAML 1.2") from None
    except YAMLError as error:
        raise ValueError(f"{str(error).splitlines()[0]}; this is not YAML 1.2") from None


def _build(node: Node, path: Path, source: Source, where: str | None, parents: tuple[Node, ...]) -> Any:
    """Turn a node into plain values, noting how each was written."""
    line = where or f"line {node.start_mark.line + 1}"
    if node in parents:
        source.problems.append((path, "an alias may not stand inside what it names"))
        return None
    source.written[path] = Written("", line)
    if str(node.tag) not in _KNOWN_TAGS:
        source.problems.append((path, f"the tag {node.tag} is not allowed; write a plain value"))
        return None
    if isinstance(node, ScalarNode):
        source.written[path] = Written(node.value, line, quoted=node.style is not None)
        return _scalar(node)
    inner = (*parents, node)
    if isinstance(node, SequenceNode):
        return [_build(item, (*path, i), source, where, inner) for i, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        if key in values:
            first = source.written[(*path, key)].where
            source.problems.append(((*path, key), f"duplicate key, first given on {first}; keep one"))
        values[key] = _build(value_node, (*path, key), source, where, inner)
    return values


def _scalar(node: ScalarNode) -> Any:
    tag, text = str(node.tag).removeprefix(_TAG), node.value
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if tag == "int" and _INTEGER.fullmatch(text):
        return int(text, 16 if text.startswith("0x") else 10)
    if tag == "float" and _FLOAT.fullmatch(text) and isfinite(float(text)):
        number = float(text)
        return int(number) if number and abs(number) <= _LARGEST_EXACT and number.is_integer() else number
    return text
