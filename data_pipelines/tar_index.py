"""Where the members of a tar lie, and which of them make up a sample: read from its headers, without its contents.

A sample is all members of one key. The key is the path up to the first dot of its last part, what follows is the
field, as webdataset has it: `train.v1/clip_7.mp4` is key `train.v1/clip_7`, field `mp4`. A name such as
`Track 2.0 (Clean).mp4`, whose field would be `0 (clean).mp4`, is refused: the dot rule splits it where its author did
not mean to.
"""

import os
import re
import tarfile
from dataclasses import dataclass, field

FIELD = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z0-9_-]+)*")
SIDE_FILES = frozenset((".DS_Store", "Thumbs.db", "desktop.ini", ".directory"))
SIDE_FOLDERS = frozenset(("__MACOSX", "@eaDir", ".Trashes", ".Spotlight-V100", "$RECYCLE.BIN"))
BLOCK = tarfile.BLOCKSIZE
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True)
class Member:
    """One file in a tar."""

    name: str
    offset: int
    """Byte of the tar at which its contents begin."""
    size: int


@dataclass(slots=True)
class TarIndex:
    """What one tar holds, and what of it cannot be used."""

    path: str
    samples: dict[str, dict[str, Member]] = field(default_factory=dict)
    """Key -> field -> member, in the order of first appearance."""
    problems: list[str] = field(default_factory=list)


def index_tar(path: str | os.PathLike[str]) -> TarIndex:
    """Group the members of a tar into samples. A damaged tar gives what lies before the damage, and a problem."""
    index = TarIndex(os.fspath(path))
    refused: set[str] = set()
    for member in _members(index):
        if _is_side_file(member.name):
            continue
        key, name = split_name(member.name)
        fields = index.samples.setdefault(key, {})
        if not FIELD.fullmatch(name):
            reason = f"its field would be '{name}'; rename it so that the only dots are before field names"
            index.problems.append(f"{path}: member '{member.name}' is refused: {reason}")
            refused.add(key)
        elif name in fields:
            index.problems.append(f"{path}: key '{key}' has the field '{name}' twice; the sample is refused")
            refused.add(key)
        else:
            fields[name] = member
    for key in refused:
        index.samples.pop(key)
    for key in [key for key, fields in index.samples.items() if any(member.size == 0 for member in fields.values())]:
        empty = next(name for name, member in index.samples.pop(key).items() if member.size == 0)
        index.problems.append(f"{path}: key '{key}' has an empty field '{empty}'; the sample is refused")
    if not index.samples and not index.problems:
        index.problems.append(f"{path}: empty shard, it holds no sample")
    return index


def split_name(name: str) -> tuple[str, str]:
    """Key and field of a member: `./a.b/c.d.e` -> ("a.b/c", "d.e"). Fields are lower case."""
    folder, _, last = name.removeprefix("./").rpartition("/")
    stem, _, extension = last.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def _is_side_file(name: str) -> bool:
    """Files that other systems leave in archives."""
    parts = name.split("/")
    return parts[-1].startswith("._") or parts[-1] in SIDE_FILES or not SIDE_FOLDERS.isdisjoint(parts[:-1])


def _members(index: TarIndex) -> list[Member]:
    """Regular files in the order of the tar; what is wrong goes to the problems."""
    path = index.path
    members: list[Member] = []
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(8)
            compressed = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
            if compressed:
                index.problems.append(f"{path}: is compressed ({compressed}); unpack it, members are read in place")
                return []
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for info in tar:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                    if info.offset_data + info.size > size:
                        missing = info.offset_data + info.size - size
                        index.problems.append(f"{path}: is cut off inside '{info.name}' ({missing} bytes missing)")
                        return members
                    if info.isreg():
                        members.append(Member(info.name, info.offset_data, info.size))
                end = tar.offset
            file.seek(end)
            if file.read(BLOCK).strip(b"\0"):
                index.problems.append(f"{path}: has a damaged header at byte {end}; nothing after it is read")
    except tarfile.TarError as error:
        index.problems.append(f"{path}: is not a tar ({error})")
    except OSError as error:
        index.problems.append(f"{path}: cannot be read ({error.strerror})")
    return members
