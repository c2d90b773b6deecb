"""Turn a manifest and its media into webdataset shards with an index; can be stopped and run again.

Each shard is written under a temporary name, with its records, and renamed when it is whole; its .jsonl comes last and
makes it count. A second run takes up after the last row of the last shard that counts. `unfinished.json` stands in
the folder until `index.json` does.

A media file that several rows use is stored once, with the first of them; the others name it in their json
("media": "00000000.video0.mp4", key and field).
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import webdataset

from data_pipelines.examine import Media, examine, facts_to_json
from data_pipelines.manifest import RowError, Sample, parse_line, read_lines
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.shards import FORMAT, INDEX, UNFINISHED, read_records, sample_to_json

REJECTS = "rejects.jsonl"

Progress = Callable[[int, int], None]
"""Called with the rows done and the rows in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `prepare` did. accepted + rejected = rows of the manifest."""

    rows: int
    accepted: int
    rejected: int
    shards: int
    media: int
    """Distinct media files stored."""
    bytes: int
    """Size of all shards."""
    notes: int
    """Media files that are damaged and were taken with a note."""
    replaced: int
    """Lone surrogates in texts that became U+FFFD."""
    rejects: str
    """The file that lists every rejected row: row, id, file, reason."""


Names = dict[tuple[str, str], str]
"""(kind, path of the file) -> name in the shard set."""


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

    def add_media(self, name: str, media: Media) -> None:
        """Copy a media file in, piece by piece, and note where it and its facts lie."""
        info = tarfile.TarInfo(name)
        info.mode = self.writer.mode
        with media.file.open() as file:
            info.size = file.size
            place = [self._contents_at(info), info.size]
            self.writer.tarstream.addfile(info, file)
        facts = facts_to_json(media).encode()
        entry = {"name": name, "kind": media.kind, "at": place, "facts": [self.facts.tell(), len(facts)]}
        notes = media.clip.notes if media.clip is not None else ()
        self.records.append({"media": {**entry, "source": media.file.path, "notes": list(notes)}})
        self.facts.write(facts)

    def add_sample(self, key: str, sample: Sample, names: Names) -> None:
        """Write a sample's json and note where it lies."""
        row = sample_to_json(sample, names)
        start = self._contents_at(tarfile.TarInfo(f"{key}.json"))
        self.writer.write({"__key__": key, "json": row})
        entry = {"key": key, "row": sample.row, "json": [start, len(row)], "replaced": sample.replaced}
        self.records.append({"sample": {**entry, "media": list(dict.fromkeys(names[used] for used in sample.media))}})
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
        _write_lines(self._temporary(".jsonl"), [*self.records, {"last_row": last_row}])
        for suffix in (".tar", ".facts", ".jsonl"):
            os.replace(self._temporary(suffix), self.folder / f"shard-{self.number:06d}{suffix}")

    def _temporary(self, suffix: str) -> Path:
        return self.folder / f"shard-{self.number:06d}{suffix}.part"

    def _contents_at(self, info: tarfile.TarInfo) -> int:
        return self.size + len(info.tobuf(tarfile.GNU_FORMAT))


def prepare(
    manifest: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    shard_bytes: int = 1 << 30,
    strict: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Check every row of a manifest and its media, and write them as shards into the folder `out`.

    shard_bytes: a shard is closed when the next sample would make it larger; a single sample may be
    strict:      raise RowError at the first row that cannot be used, instead of listing it in rejects.jsonl
    Raises ValueError: no such manifest, no usable row, or `out` holds something else than an unfinished prepare of it.
    """
    manifest, folder = os.fspath(manifest), Path(out)
    rows, digest = _fingerprint(manifest)
    _claim(folder, {"format": FORMAT, "manifest_sha256": digest, "shard_bytes": shard_bytes})
    _write_shards(manifest, folder, shard_bytes=shard_bytes, strict=strict, progress=progress, rows=rows)
    return _finish(manifest, folder, rows=rows, digest=digest)


def _fingerprint(manifest: str) -> tuple[int, str]:
    """Number of rows, and what tells this manifest from another."""
    digest, rows = hashlib.sha256(), 0
    for _, line in read_lines(manifest):
        digest.update(line)
        rows += 1
    if not rows:
        raise ValueError(f"manifest '{manifest}' has no rows")
    return rows, digest.hexdigest()


def _claim(folder: Path, job: dict) -> None:
    """Take an empty folder, or one in which the same job was interrupted."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            raise ValueError(f"'{folder}' already holds a prepared set; choose another folder or delete it")
        mark = folder / UNFINISHED
        if mark.exists():
            if json.loads(mark.read_text()) != job:
                raise ValueError(
                    f"'{folder}' holds an unfinished prepare of another manifest or shard size; choose another folder"
                )
        elif any(folder.iterdir()):
            raise ValueError(f"'{folder}' is not empty; choose another folder")
        else:
            _write_lines(mark, [job])
    except OSError as error:
        raise ValueError(f"'{folder}' cannot be written ({error.strerror}); choose another folder") from None


def _write_shards(
    manifest: str, folder: Path, *, shard_bytes: int, strict: bool, progress: Progress | None, rows: int
) -> None:
    """Write what is not yet in a finished shard."""
    finished = [read_records(path) for path in sorted(folder.glob("shard-*.jsonl"))]
    records = [record for shard in finished for record in shard]
    names: Names = {
        (media["kind"], media["source"]): media["name"] for media in (r["media"] for r in records if "media" in r)
    }
    count = sum("sample" in record for record in records)
    last_row = finished[-1][-1]["last_row"] if finished else 0
    shard: Shard | None = None
    try:
        for done, (row, line) in enumerate(read_lines(manifest), start=1):
            if row > last_row:
                checked = check_row(line, manifest, row, stored=names)
                if strict and isinstance(checked, RowError):
                    raise checked
                added = 0 if isinstance(checked, RowError) else _stored_bytes(checked[1])
                if shard is not None and shard.num_samples and added and shard.size + added > shard_bytes:
                    shard.finish(last_row)
                    shard = Shard(folder, shard.number + 1)
                shard = shard or Shard(folder, len(finished))
                if isinstance(checked, RowError):
                    shard.add_reject(checked)
                else:
                    _add(shard, f"{count:08d}", *checked, names)
                    count += 1
                last_row = row
            if progress is not None:
                progress(done, rows)
        if shard is not None:
            shard.finish(last_row)
    finally:
        if shard is not None:
            shard.files.close()


def check_row(
    line: bytes, manifest: str, row: int, *, stored: Collection[tuple[str, str]] = ()
) -> tuple[Sample, list[Media]] | RowError:
    """Parse a row and examine its media, except those (kind, file) that are `stored` already."""
    sample = parse_line(line, manifest=manifest, row=row)
    if isinstance(sample, RowError):
        return sample
    new = []
    for kind, file in dict.fromkeys(sample.media):
        if (kind, file) not in stored:
            try:
                new.append(examine(kind, MediaFile(file)))
            except MediaError as error:
                return RowError(manifest, row, sample.id, f"its {kind} cannot be used: {error.reason}", error.path)
    return sample, new


def _stored_bytes(media: list[Media]) -> int:
    """Bytes that a sample adds to a tar, about: its json is small."""
    return 1024 + sum(os.path.getsize(item.file.path) + 1024 for item in media)


def _add(shard: Shard, key: str, sample: Sample, media: list[Media], names: Names) -> None:
    """Store a sample, its new media first."""
    for number, item in enumerate(media):
        extension = re.sub("[^a-z0-9]", "", Path(item.file.path).suffix.lower()) or "bin"
        name = f"{key}.{item.kind}{number}.{extension}"
        shard.add_media(name, item)
        names[item.kind, item.file.path] = name
    shard.add_sample(key, sample, names)


def _finish(manifest: str, folder: Path, *, rows: int, digest: str) -> Prepared:
    """Count, list the rejects, and write the index that makes the folder a prepared set."""
    shards: list[dict[str, Any]] = []
    rejects: list[dict[str, Any]] = []
    notes = media = replaced = 0
    for path in sorted(folder.glob("shard-*.jsonl")):
        records = read_records(path)
        samples = [record["sample"] for record in records if "sample" in record]
        tar = path.with_suffix(".tar")
        shards.append({"name": tar.name, "size": tar.stat().st_size, "samples": len(samples)})
        rejects += [record["reject"] for record in records if "reject" in record]
        media += sum("media" in record for record in records)
        notes += sum(bool(record["media"]["notes"]) for record in records if "media" in record)
        replaced += sum(sample["replaced"] for sample in samples)
    accepted = sum(shard["samples"] for shard in shards)
    assert accepted + len(rejects) == rows, f"{accepted} accepted + {len(rejects)} rejected, {rows} rows"
    _write_lines(folder / REJECTS, rejects)
    if not accepted:
        raise ValueError(f"no row of '{manifest}' can be used; the first: {rejects[0]['reason']} (all in {REJECTS})")
    report = Prepared(
        rows=rows,
        accepted=accepted,
        rejected=len(rejects),
        shards=len(shards),
        media=media,
        bytes=sum(shard["size"] for shard in shards),
        notes=notes,
        replaced=replaced,
        rejects=str(folder / REJECTS),
    )
    _write_lines(folder / INDEX, [{"format": FORMAT, "manifest_sha256": digest, **asdict(report), "shards": shards}])
    (folder / UNFINISHED).unlink()
    return report


def _write_lines(path: Path, records: list[dict]) -> None:
    """Write JSON lines: the whole file or nothing."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
