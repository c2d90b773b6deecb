"""Write one shard of a prepared set: its tar, the facts of its media and its records, whole or not at all."""

import json
import os
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import webdataset

from data_pipelines.examine import Media, facts_to_json
from data_pipelines.manifest import RowError, Sample
from data_pipelines.media import MediaFile
from data_pipelines.shards import sample_to_json

Names = dict[tuple[str, MediaFile], str]
"""(kind, file) -> name in the shard set."""


class Shard:
    """One shard that is being written: tar, facts and records, all under temporary names until it is whole."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self.records: list[dict] = []
        self.num_samples = 0
        self.files = ExitStack()
        self.stream = self.files.enter_context(self._temporary(".tar").open("wb"))
        self.facts = self.files.enter_context(self._temporary(".facts").open("wb"))
        self.writer = webdataset.TarWriter(self.stream, encoder=False, mtime=0, format="GNU_FORMAT")
        self.files.callback(self.writer.close)

    @property
    def size(self) -> int:
        """Bytes of the tar so far."""
        return self.writer.tarstream.offset

    def add_media(self, name: str, media: Media, *, copy: bool) -> None:
        """Copy a media file in, piece by piece, or leave it where it is; note where it and its facts lie."""
        entry: dict = {"name": name, "kind": media.kind}
        if copy:
            info = tarfile.TarInfo(name)
            info.mode = self.writer.mode
            with media.file.open() as file:
                info.size = file.size
                entry["at"] = [self._contents_at(info), info.size]
                self.writer.tarstream.addfile(info, file)
        else:
            with media.file.open() as file:
                entry["outside"] = [os.path.abspath(media.file.path), media.file.offset, file.size]
        facts = facts_to_json(media).encode()
        notes = media.clip.notes if media.clip is not None else ()
        entry |= {"facts": [self.facts.tell(), len(facts)], "source": media.file.path, "notes": list(notes)}
        if media.file.size is not None:
            entry["source_bytes"] = [media.file.offset, media.file.size]
        self.records.append({"media": entry})
        self.facts.write(facts)

    def add_sample(self, key: str, sample: Sample, names: Names) -> None:
        """Write a sample's json and note where it lies."""
        row = sample_to_json(sample, names)
        start = self._contents_at(tarfile.TarInfo(f"{key}.json"))
        self.writer.write({"__key__": key, "json": row})
        entry = {"key": key, "row": sample.row, "json": [start, len(row)], "replaced": sample.replaced}
        self.records.append({"sample": {**entry, "media": list(dict.fromkeys(names[used] for used in sample.files))}})
        self.num_samples += 1

    def add_reject(self, error: RowError) -> None:
        reason = {"row": error.row, "id": error.id, "file": error.file, "reason": error.what}
        self.records.append({"reject": reason})

    def finish(self, last_row: int) -> None:
        """Make the shard whole; its records, which make it count, come last."""
        self.writer.close()
        for file in (self.stream, self.facts):
            file.flush()
            os.fsync(file.fileno())
        self.files.close()
        write_lines(self._temporary(".jsonl"), [*self.records, {"last_row": last_row}])
        for suffix in (".tar", ".facts", ".jsonl"):
            os.replace(self._temporary(suffix), self.folder / f"shard-{self.number:06d}{suffix}")

    def _temporary(self, suffix: str) -> Path:
        return self.folder / f"shard-{self.number:06d}{suffix}.part"

    def _contents_at(self, info: tarfile.TarInfo) -> int:
        return self.size + len(info.tobuf(tarfile.GNU_FORMAT))


def write_lines(path: Path, records: Sequence[dict]) -> None:
    """Write JSON lines: the whole file or nothing. ASCII, so that names of files of any bytes can be told."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="ascii") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
