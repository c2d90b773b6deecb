"""Features of units that a frozen encoder made before, on disk: bounded, never stale, bit for bit what was stored.

An entry's key covers everything that decides the features: the bytes of the media file, the unit (stream, frames or
samples with their pts, size as encoded), and what the caller says of the encoder (weights, config, types). A file's
digest is remembered by its place, size and times on the file system; of a file written within the last seconds it is
not, since such a file may change without its times telling (as in git's index). An entry whose bytes do not have their
digest counts as missing.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveInt

from data_pipelines.container import ClipIndex
from data_pipelines.decode_units import LogMel, Needed, decode_units
from data_pipelines.media import MediaFile
from data_pipelines.workers import Reply
from mmcp.config import config
from mmcp.sequence import Unit

FORMAT = 1
RACY_NS = 3_000_000_000  # age from which a file's times tell of every change
LOOKS = 64  # the size on disk is looked at again after each such share of the bound
PIECE = 1 << 22


@config
class FeatureCacheConfig:
    """Where features of frozen encoders are kept."""

    folder: str = ""
    """Empty: they are not kept."""
    max_mb: PositiveInt = 10240
    """Most MiB on disk; the entries used longest ago make room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Features of one unit."""

    features: np.ndarray
    """[rows, c] float32 or float64; bfloat16 as uint16."""
    loudest: float
    """Sound: largest raw log-mel value of the unit; else 0."""


class FeatureCache:
    """Entries in a folder that any number of processes share."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._unseen = max_bytes  # bytes written since the size on disk was looked at: look before the first write

    def read(self, key: str) -> Kept | None:
        """Return an entry and note that it was used; None when it is missing or damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        head, _, body = data.partition(b"\n")
        try:
            facts = json.loads(head)
            if facts["key"] != key or facts["sha256"] != hashlib.sha256(body).hexdigest():
                return None
            features = np.frombuffer(body, dtype=facts["dtype"]).reshape(facts["shape"])
        except (ValueError, KeyError, TypeError):
            return None
        return Kept(features=features, loudest=facts["loudest"])

    def write(self, key: str, kept: Kept) -> None:
        """Store an entry, whole or not at all; a full disk stores nothing."""
        body = np.ascontiguousarray(kept.features).tobytes()
        facts: dict[str, Any] = {"key": key, "dtype": kept.features.dtype.str, "shape": list(kept.features.shape)}
        facts |= {"loudest": kept.loudest, "sha256": hashlib.sha256(body).hexdigest()}
        data = json.dumps(facts, allow_nan=False).encode() + b"\n" + body
        if len(data) > self.max_bytes // LOOKS:
            return
        if self._unseen + len(data) > self.max_bytes // LOOKS:
            self._make_room()
            self._unseen = 0
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            return
        self._unseen += len(data)

    def size(self) -> int:
        """Bytes of all entries on disk."""
        return sum(size for _, size, _ in self._entries())

    def _make_room(self) -> None:
        """Delete the entries used longest ago until an eighth of the bound is free; one process at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = sorted(self._entries())
            excess = sum(size for _, size, _ in entries) - self.max_bytes * 7 // 8
            for _, size, path in entries:
                if excess <= 0:
                    return
                Path(path).unlink(missing_ok=True)
                excess -= size

    def _entries(self) -> list[tuple[int, int, str]]:
        """(time of last use, bytes, path) of everything stored."""
        found = []
        for path in self.folder.glob("??/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, str(path)))
        return found

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]


def file_state(file: MediaFile) -> dict[str, Any]:
    """What changes on the file system when the bytes of a file do."""
    stat = os.stat(file.path)
    return {
        "path": os.path.abspath(file.path),
        "range": [file.offset, file.size],
        "file": [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns],
    }


def file_digest(file: MediaFile, folder: Path) -> str:
    """SHA-256 of a file's bytes; remembered in `folder` by its state, once the state can be trusted."""
    state = file_state(file)
    note = folder / "digests" / f"{_digest(state)}.json"
    try:
        return json.loads(note.read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        pass
    digest = hashlib.sha256()
    with file.open() as opened:
        while data := opened.read(PIECE):
            digest.update(data)
    last_change = max(state["file"][3:])
    if file_state(file) == state and time.time_ns() - last_change > RACY_NS:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}.new")
        temporary.write_text(json.dumps({"sha256": digest.hexdigest()}))
        os.replace(temporary, note)
    return digest.hexdigest()


def unit_key(
    content: str, encoder: str, kind: str, stream: int, unit: Unit, index: ClipIndex | None, sound: str
) -> str:
    """Key of a unit's features.

    content: digest of the file      encoder: digest of everything that makes rows of the unit
    sound:   digest of all that is heard of the clip, whose loudest moment decides the features; "" for pictures
    """
    pts = []
    if kind == "video" and index is not None and index.video is not None:
        pts = [str(index.frame_time(frame)) for frame in unit.items]
    facts = [FORMAT, content, encoder, kind, stream, list(unit.items), pts, list(unit.size), list(unit.grid), sound]
    return _digest([*facts, str(unit.start), str(unit.end)])


def sound_digest(units: Sequence[Unit]) -> str:
    """Digest of the stretches of a clip that are heard, and how."""
    return _digest([[list(unit.items), list(unit.size)] for unit in units])


def decode_missing(
    cache: tuple[str, int],
    encoder: str,
    stream: int,
    sound: str,
    kind: str,
    file: MediaFile,
    index: ClipIndex | None,
    units: Sequence[Unit],
    log_mel: LogMel,
    needed: Needed,
    *,
    backend: str = "pyav",
) -> Reply:
    """Read the features of units that are kept and decode the others; runs in a decode worker.

    cache:   folder and most bytes
    backend: reads the pictures of a video; its pixels are its own, so it is part of the keys
    Returns decode_units' header with {"keys": [...], "loudest": [...]}: for each unit the key to store its features
    under, "" for one whose array is its kept features; and an array per unit.
    """
    store = FeatureCache(*cache)
    before = file_state(file)
    content = file_digest(file, store.folder)
    encoder = f"{encoder} by {backend}"
    keys = [unit_key(content, encoder, kind=kind, stream=stream, unit=unit, index=index, sound=sound) for unit in units]
    kept = [store.read(key) for key in keys]
    missing = [unit for unit, found in zip(units, kept, strict=True) if found is None]
    header: dict[str, Any] = {"seconds": 0.0, "frames": 0, "notes": []}
    decoded: list[np.ndarray] = []
    if missing:
        header, decoded = decode_units(kind, file, index, missing, log_mel, needed, backend=backend)
    is_same = file_state(file) == before
    rest = iter(decoded)
    arrays = [next(rest) if found is None else found.features for found in kept]
    header["keys"] = [(key if is_same else "?") if found is None else "" for key, found in zip(keys, kept, strict=True)]
    header["loudest"] = [0.0 if found is None else found.loudest for found in kept]
    return header, arrays


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, allow_nan=False, sort_keys=True).encode()).hexdigest()
