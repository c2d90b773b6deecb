"""Which shards a data argument names: a folder or its parts, a file, a list, a glob, braces; none found is an error."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

MOST_NAMES = 100_000
BRACES = re.compile(r"\{([^{}]*)\}")
PART = re.compile(r"part-(\d{4,})-of-(\d{4,})")
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_shards(spec: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """Return the paths of the shards that `spec` names, those of a folder or a glob sorted by name.

    A path that exists is taken literally, whatever characters are in it. Raises ValueError quoting the pattern.
    """
    if not isinstance(spec, str | os.PathLike):
        paths = [path for part in spec for path in find_shards(part)]
        if not paths:
            raise ValueError(f"{spec!r} names no shard; give a folder, a file, a glob or a list of these")
        repeated = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else set()
        if repeated:
            raise ValueError(f"shard {min(repeated)} is named twice in {spec!r}; list the data once")
        return paths
    spec = os.fspath(spec)
    if os.path.isfile(spec):
        return [spec]
    if os.path.isdir(spec):
        folders = part_folders(spec)
        if folders:
            return [path for folder in folders for path in find_shards(folder)]
        paths = sorted(entry.path for entry in os.scandir(spec) if entry.name.endswith(".tar") and entry.is_file())
        if not paths and not os.path.isfile(os.path.join(spec, "index.json")):
            raise ValueError(
                f"folder '{spec}' holds no .tar file ({os.path.abspath(spec)}); name a folder that `mmcp prepare` wrote"
            )
        return paths
    paths = [path for pattern in _expand_braces(spec) for path in _matches(pattern, spec)]
    if not paths:
        raise ValueError(f"pattern '{spec}' matches no file ({os.path.abspath(spec)}); check the path")
    return paths


def part_name(number: int, parts: int) -> str:
    """Name the folder of one part of a data set that several machines prepared."""
    return f"part-{number:04d}-of-{parts:04d}"


def part_folders(folder: str) -> list[str]:
    """Return the folders of all parts below `folder`, in order; none when it has no parts.

    Raises ValueError when some are missing, or belong to divisions into different numbers of parts.
    """
    found = {entry.name: PART.fullmatch(entry.name) for entry in os.scandir(folder) if entry.is_dir()}
    counts = {int(match[2]) for match in found.values() if match}
    if not counts:
        return []
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"folder '{folder}' holds parts of {numbers}; keep those of one division only")
    (parts,) = counts
    names = [part_name(number, parts) for number in range(1, parts + 1)]
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"folder '{folder}' lacks {', '.join(missing[:5])}; prepare these parts, or name single parts")
    return [os.path.join(folder, name) for name in names]


def _matches(pattern: str, spec: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern))
    if not found and pattern != spec:
        raise ValueError(f"pattern '{spec}' names '{pattern}', which is not there")
    return found


def _expand_braces(pattern: str) -> Iterator[str]:
    """`a-{00..02}.tar` -> a-00.tar, a-01.tar, a-02.tar; `{x,y}` -> x, y. Bounded before anything is built."""
    pieces = BRACES.split(pattern)
    choices: list[Sequence[str] | range] = []
    widths: list[int] = []
    for body in pieces[1::2]:
        bounds = RANGE.fullmatch(body)
        if bounds:
            first, last = int(bounds[1]), int(bounds[2])
            choices.append(range(first, last + 1) if first <= last else range(first, last - 1, -1))
            widths.append(len(bounds[1]) if bounds[1].startswith("0") else 0)
        else:
            choices.append(body.split(",") if "," in body else ["{" + body + "}"])
            widths.append(0)
    count = prod(abs(c.stop - c.start) if isinstance(c, range) else len(c) for c in choices)
    if count > MOST_NAMES:
        raise ValueError(f"pattern '{pattern}' stands for {count} names, at most {MOST_NAMES} are allowed; use a glob")
    for values in product(*choices):
        texts = (str(value).zfill(width) for value, width in zip(values, widths, strict=True))
        yield "".join(piece + text for piece, text in zip(pieces[::2], (*texts, ""), strict=True))
