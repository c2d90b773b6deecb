"""Turn a manifest and its media into webdataset shards with an index; can be stopped and run again.

Each shard is written under a temporary name, with its records, and renamed when it is whole; its .jsonl comes last and
makes it count. A second run takes up after the last row of the last shard that counts. `unfinished.json` stands in
the folder until `index.json` does, and is locked by the process that writes there (where the file system has locks).
Media are examined by worker processes ahead of the rows that use them, but rows are
written in their order: the shards do not depend on the number of workers, nor on when a run was killed.

A media file that several rows use is stored once, with the first of them; the others name it in their json
("media": "00000000.video0.mp4", key and field). Large files can stay where they are: the index then holds their path
and byte range, and they are read in place.

Many machines share a manifest by parts: part i of n takes the i-th of n equal runs of rows and writes the folder
part-000i-of-000n inside the output folder. The output folder, with all parts in it, is one data set.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.examine import Examiner, Media
from data_pipelines.manifest import RowError, Sample, parse_line, read_lines
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.shard_paths import part_name
from data_pipelines.shard_writer import Names, Shard, write_lines
from data_pipelines.shards import FORMAT, INDEX, UNFINISHED, read_records
from data_pipelines.workers import WorkerPool

REJECTS = "rejects.jsonl"
DEADLINE_S = 1800.0  # of examining one media file
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AHEAD = 8  # rows examined ahead, for each worker

Progress = Callable[[int, int], None]
"""Called with the rows done and the rows in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `prepare` did. accepted + rejected = rows of the manifest, or of its part."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What decides the shards; an interrupted run goes on only with the same."""

    manifest: str
    rows: int
    """Of the manifest."""
    digest: str
    """Of the manifest's lines."""
    shard_bytes: int
    outside_bytes: int | None
    part: tuple[int, int]

    @property
    def lines(self) -> tuple[int, int]:
        """First and last + 1 of the rows of this part, counted from 0."""
        number, parts = self.part
        return (number - 1) * self.rows // parts, number * self.rows // parts

    @property
    def key(self) -> str:
        """What keys of this part begin with: nothing when there is one part."""
        return "" if self.part == (1, 1) else f"{self.part[0]:04d}-"

    def record(self) -> dict:
        """Return what is written down of it."""
        fields = {"manifest_sha256": self.digest, "shard_bytes": self.shard_bytes, "part": list(self.part)}
        return {"format": FORMAT, **fields, "outside_bytes": self.outside_bytes}

    def is_outside(self, media: Media) -> bool:
        """Whether a file is so large that it stays where it is."""
        return self.outside_bytes is not None and media.file.num_bytes >= self.outside_bytes


def prepare(
    manifest: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    shard_bytes: int = 1 << 30,
    outside_bytes: int | None = None,
    strict: bool = False,
    workers: int = 0,
    part: tuple[int, int] = (1, 1),
    progress: Progress | None = None,
) -> Prepared:
    """Check every row of a manifest and its media, and write them as shards into the folder `out`.

    shard_bytes:   a shard is closed when the next sample would make it larger; a single sample may be
    outside_bytes: media files of at least this size are not copied but read where they are; None: all are copied
    strict:        raise RowError at the first row that cannot be used, instead of listing it in rejects.jsonl
    workers:       processes that examine media; 0: this one does, and a decoder that hangs hangs it
    part:          (i, n): only the i-th of n equal runs of rows, into a folder of its own below `out`
    Raises ValueError: no such manifest, no usable row, `out` holds something else than an unfinished prepare of it, or
    another process is writing there.
    """
    manifest = os.fspath(manifest)
    rows, digest = _fingerprint(manifest)
    number, parts = part
    if not 1 <= number <= parts <= rows:
        raise ValueError(f"part {number}/{parts} of {rows} rows: give i/n with i from 1 to n and n at most the rows")
    folder = Path(out) if part == (1, 1) else Path(out) / part_name(number, parts)
    job = _Job(
        manifest=manifest, rows=rows, digest=digest, shard_bytes=shard_bytes, outside_bytes=outside_bytes, part=part
    )
    with ExitStack() as stack:
        _claim(folder, job.record(), stack)
        pool = WorkerPool(workers, DEADLINE_S) if workers else None
        if pool is not None:
            stack.callback(pool.close)
        try:
            _write_shards(job, folder, Examiner(pool), strict=strict, progress=progress, ahead=AHEAD * max(1, workers))
            return _finish(job, folder)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            reason = f"'{folder}' cannot be written ({error.strerror})"
            raise ValueError(f"{reason}; make room and run the same again, it goes on from there") from None


def _fingerprint(manifest: str) -> tuple[int, str]:
    """Number of rows, and what tells this manifest from another."""
    digest, rows = hashlib.sha256(), 0
    for _, line in read_lines(manifest):
        digest.update(line)
        rows += 1
    if not rows:
        raise ValueError(f"manifest '{manifest}' has no rows")
    return rows, digest.hexdigest()


def _claim(folder: Path, job: dict, held: ExitStack) -> None:
    """Take an empty folder, or one in which the same job was interrupted; its mark is locked until `held` ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_finished(folder)
        if not (folder / UNFINISHED).exists() and any(folder.iterdir()):
            raise ValueError(f"'{folder}' is not empty; choose another folder")
        mark = os.open(folder / UNFINISHED, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"'{folder}' cannot be written ({error.strerror}); choose another folder") from None
    held.callback(os.close, mark)
    _lock(mark, folder)
    _refuse_finished(folder)
    line = os.pread(mark, 1 << 16, 0)
    if not line.endswith(b"\n"):  # new, or lost in a crash before anything was written
        os.ftruncate(mark, 0)
        os.pwrite(mark, json.dumps(job, allow_nan=False).encode() + b"\n", 0)
        os.fsync(mark)
    elif json.loads(line) != job:
        raise ValueError(
            f"'{folder}' holds an unfinished prepare of another manifest or with other options; choose another folder"
        )


def _refuse_finished(folder: Path) -> None:
    if (folder / INDEX).exists():
        raise ValueError(f"'{folder}' already holds a prepared set; choose another folder or delete it")


def _lock(mark: int, folder: Path) -> None:
    """Lock the mark until it is closed; a file system without locks is trusted."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise ValueError(
                f"another `mmcp prepare` is writing into '{folder}'; let it finish, or choose another folder or part"
            ) from None


def _write_shards(
    job: _Job, folder: Path, examiner: Examiner, *, strict: bool, progress: Progress | None, ahead: int
) -> None:
    """Write what is not yet in a finished shard."""
    finished = [read_records(path) for path in sorted(folder.glob("shard-*.jsonl"))]
    records = [record for shard in finished for record in shard]
    stored = [record["media"] for record in records if "media" in record]
    names: Names = {
        (media["kind"], MediaFile(media["source"], *media.get("source_bytes", ()))): media["name"] for media in stored
    }
    count = sum("sample" in record for record in records)
    last_row = finished[-1][-1]["last_row"] if finished else 0
    shard: Shard | None = None
    try:
        for done, row, parsed in _parsed_ahead(job, examiner, names, last_row, ahead):
            if parsed is not None:
                checked = _checked(parsed, job.manifest, examiner, names)
                if strict and isinstance(checked, RowError):
                    raise checked
                added = 0 if isinstance(checked, RowError) else _stored_bytes(job, checked[1])
                if shard is not None and shard.num_samples and added and shard.size + added > job.shard_bytes:
                    shard.finish(last_row)
                    shard = Shard(folder, shard.number + 1)
                shard = shard or Shard(folder, len(finished))
                if isinstance(checked, RowError):
                    shard.add_reject(checked)
                else:
                    _add(shard, f"{job.key}{count:08d}", *checked, names, job)
                    count += 1
                last_row = row
            if progress is not None:
                progress(done, job.lines[1] - job.lines[0])
        if shard is not None:
            shard.finish(last_row)
    finally:
        if shard is not None:
            shard.files.close()


def _parsed_ahead(
    job: _Job, examiner: Examiner, names: Names, last_row: int, ahead: int
) -> Iterator[tuple[int, int, Sample | RowError | None]]:
    """Yield (rows done, row, what it says; None: it is in a finished shard). Media are examined `ahead` rows on."""
    waiting: deque[tuple[int, int, Sample | RowError | None]] = deque()
    for done, (row, line) in enumerate(islice(read_lines(job.manifest), *job.lines), start=1):
        parsed = parse_line(line, manifest=job.manifest, row=row) if row > last_row else None
        if isinstance(parsed, Sample):
            for kind, file in dict.fromkeys(parsed.files):
                if (kind, file) not in names:
                    examiner.start(kind, file)
        waiting.append((done, row, parsed))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _checked(
    parsed: Sample | RowError, manifest: str, examiner: Examiner, stored: Collection[tuple[str, MediaFile]]
) -> tuple[Sample, list[Media]] | RowError:
    """Return a row with those of its media that are not stored yet, or why it cannot be used."""
    if isinstance(parsed, RowError):
        return parsed
    new = []
    for kind, file in dict.fromkeys(parsed.files):
        if (kind, file) not in stored:
            try:
                new.append(examiner.result(kind, file))
            except MediaError as error:
                what = f"its {kind} cannot be used: {error.reason}"
                return RowError(manifest, parsed.row, parsed.id, what, error.path)
    return parsed, new


def check_row(line: bytes, manifest: str, row: int) -> tuple[Sample, list[Media]] | RowError:
    """Parse a row and examine its media."""
    parsed = parse_line(line, manifest=manifest, row=row)
    return _checked(parsed, manifest, Examiner(None), ())


def _stored_bytes(job: _Job, media: list[Media]) -> int:
    """Bytes that a sample adds to a tar, about: its json is small."""
    copied = [item for item in media if not job.is_outside(item)]
    return 1024 + sum(item.file.num_bytes + 1024 for item in copied)


def _add(shard: Shard, key: str, sample: Sample, media: list[Media], names: Names, job: _Job) -> None:
    """Store a sample, its new media first."""
    for number, item in enumerate(media):
        suffix = Path(item.file.path).suffix if item.file.size is None else ""
        extension = re.sub("[^a-z0-9]", "", suffix.lower())[:16] or "bin"
        name = f"{key}.{item.kind}{number}.{extension}"
        shard.add_media(name, item, copy=not job.is_outside(item))
        names[item.kind, item.file] = name
    shard.add_sample(key, sample, names)


def _finish(job: _Job, folder: Path) -> Prepared:
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
    rows = job.lines[1] - job.lines[0]
    accepted = sum(shard["samples"] for shard in shards)
    assert accepted + len(rejects) == rows, f"{accepted} accepted + {len(rejects)} rejected, {rows} rows"
    write_lines(folder / REJECTS, rejects)
    if not accepted and job.part == (1, 1):
        first = rejects[0]["reason"]
        raise ValueError(f"no row of '{job.manifest}' can be used; the first: {first} (all in {REJECTS})")
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
    write_lines(folder / INDEX, [{**job.record(), **asdict(report), "shards": shards}])
    (folder / UNFINISHED).unlink()
    return report


def damaged_files(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the media files of a prepared folder that were taken although something is wrong, and what that is."""
    for path in sorted(folder.glob("shard-*.jsonl")):
        for record in read_records(path):
            if "media" in record and record["media"]["notes"]:
                yield record["media"]["source"], record["media"]["notes"]
