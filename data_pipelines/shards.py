"""Read webdataset shards by index: any sample at once, members in place, nothing copied.

A folder that `mmcp prepare` wrote holds, beside each `shard-000000.tar`, its `shard-000000.jsonl` (the samples and
media files in order, where each lies) and `shard-000000.facts` (the ClipIndex of each media file), and `index.json`
with the counts. Shards of other origin are indexed by their headers. In these a sample is its `json`, if that is a
row of a manifest whose media are named by field ("mp4") or by member; otherwise the media of its key as a question
and the field `txt` as the answer.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from data_pipelines.examine import Media, examine, facts_from_json
from data_pipelines.manifest import CAPTION_FIELDS, Item, Sample, Turn, load_json, parse_row
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.shard_paths import find_shards
from data_pipelines.tar_index import Member, index_tar, split_name
from data_pipelines.timed_text import cues_from_json, cues_to_json, read_cues
from data_pipelines.view import WHOLE, read_view

FORMAT = 1
INDEX = "index.json"
UNFINISHED = "unfinished.json"
EXTENSIONS = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    "video": ("mp4", "m4v", "mov", "mkv", "webm", "avi", "ts", "mpg", "mpeg", "flv", "wmv"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac"),
}
CAPTIONS = ("vtt", "srt")
KIND_OF = {extension: kind for kind, extensions in EXTENSIONS.items() for extension in extensions}


@dataclass(frozen=True, slots=True)
class StoredMedia:
    """A media file in a shard; `facts` is where its ClipIndex lies, None where it has to be made."""

    kind: str
    file: MediaFile
    facts: MediaFile | None


@dataclass(frozen=True, slots=True)
class StoredSample:
    """Where a sample lies."""

    shard: str
    key: str
    row: MediaFile | None
    """Its json; foreign shards: None when it has none."""
    text: MediaFile | None
    """Foreign shards: its field `txt`."""
    media: dict[str, StoredMedia]
    """Name in the sample -> where it lies."""
    foreign: bool
    captions: MediaFile | None = None
    """Foreign shards: its field `vtt` or `srt`, the captions of its videos and sounds."""


@dataclass(slots=True)
class ShardSet:
    """All samples of some shards, in order."""

    shards: list[str] = field(default_factory=list)
    samples: list[StoredSample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be used, one line each, naming the shard."""

    @classmethod
    def open(cls, spec: str | os.PathLike[str] | Sequence[str], *, strict: bool = False) -> "ShardSet":
        """Index all shards that `spec` names (see find_shards).

        strict: raise at the first problem, instead of listing it in `problems`.
        Raises ValueError: no shard found, no usable sample, an unfinished or changed folder of `mmcp prepare`.
        """
        found = cls(shards=find_shards(spec))
        tables: dict[Path, dict[str, StoredMedia]] = {}
        for shard in found.shards:
            samples, problems = _own_samples(shard, tables) if _is_own(shard) else _foreign_samples(shard)
            if strict and problems:
                raise ValueError(f"{problems[0]}; leave strict mode to skip such shards and samples")
            found.samples += samples
            found.problems += problems
        if not found.samples:
            reason = found.problems[0] if found.problems else "they hold no sample"
            raise ValueError(f"no usable sample in {len(found.shards)} shards of {spec!r}: {reason}")
        return found

    def __len__(self) -> int:
        return len(self.samples)

    def summary(self) -> str:
        """What was found, in one line."""
        return f"{len(self.samples)} samples in {len(self.shards)} shards, {len(self.problems)} problems"

    def load(self, number: int) -> tuple[Sample, dict[str, Media]]:
        """Sample `number`, and what is known of each media file by the name its items give. Raises ValueError."""
        stored = self.samples[number]
        try:
            sample = _foreign_sample(stored, number) if stored.foreign else _read_sample(stored)
            return sample, {name: read_media(stored.media[name]) for _, name in sample.media}
        except ValueError as error:
            raise ValueError(f"{stored.shard}, key '{stored.key}': {error}") from None


@lru_cache(maxsize=16)
def read_media(stored: StoredMedia) -> Media:
    """What was found out about a media file when the shards were prepared; examined now in foreign shards."""
    if stored.facts is None:
        return examine(stored.kind, stored.file)
    with stored.file.open() as file:
        if file.size != stored.file.size:
            reason = f"has {file.size} of the {stored.file.size} bytes it had when it was prepared"
            raise MediaError(stored.file.path, f"{reason}; restore it, or prepare the data again")
    return facts_from_json(stored.kind, stored.file, _read(stored.facts).decode())


def sample_to_json(sample: Sample, names: Mapping[tuple[str, MediaFile], str]) -> bytes:
    """A sample as it stands in a shard.

    names: (kind, file) -> the name under which the shard set knows it
    """
    turns = [[role, [_item_to_json(item, names) for item in items]] for role, items in sample.turns]
    row = {"id": sample.id, "row": sample.row, "task": sample.task, "replaced": sample.replaced, "turns": turns}
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def _item_to_json(item: Item, names: Mapping[tuple[str, MediaFile], str]) -> dict:
    if item.kind == "text":
        return {"type": "text", "text": item.text}
    audio = {"audio": item.audio} if item.kind == "video" else {}
    spoken = {"captions": cues_to_json(item.captions), "train_captions": item.train_captions} if item.captions else {}
    return {"type": item.kind, "media": names[item.kind, item.file], **audio, **spoken, **item.view.to_fields()}


def _read_sample(stored: StoredSample) -> Sample:
    assert stored.row is not None, f"{stored.key} was prepared without its json"
    row = json.loads(_read(stored.row))
    turns = tuple(
        (
            role,
            tuple(_item_from_json(item) for item in items),
        )
        for role, items in row["turns"]
    )
    return Sample(id=row["id"], row=row["row"], turns=turns, task=row["task"], replaced=row["replaced"])


def _item_from_json(item: dict) -> Item:
    own = ("type", "text", "media", "audio", *CAPTION_FIELDS)
    options = {name: value for name, value in item.items() if name not in own}
    view = read_view(item["type"], options) if options else WHOLE
    return Item(
        kind=item["type"],
        text=item.get("text", ""),
        media=item.get("media", ""),
        audio=item.get("audio", True),
        view=view,
        captions=cues_from_json(item.get("captions", [])),
        train_captions=item.get("train_captions", False),
    )


def _read(part: MediaFile) -> bytes:
    with part.open() as file:
        data = file.read()
    if len(data) != part.size:
        raise MediaError(str(part), f"is cut off ({len(data)} of {part.size} bytes); prepare the data again")
    return data


def _is_own(shard: str) -> bool:
    folder, records = Path(shard).parent, Path(shard).with_suffix(".jsonl")
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        raise ValueError(f"'{folder}' holds an unfinished prepare; run `mmcp prepare` again, it goes on from there")
    return records.exists() and (folder / INDEX).exists()


def _own_samples(shard: str, tables: dict[Path, dict[str, StoredMedia]]) -> tuple[list[StoredSample], list[str]]:
    """Read the records that `mmcp prepare` wrote beside a shard.

    tables: the media of each folder that was read before; filled here
    """
    folder, samples = Path(shard).parent, []
    index = json.loads((folder / INDEX).read_text())
    known = {entry["name"]: entry["size"] for entry in index["shards"]}
    if known.get(Path(shard).name) != os.path.getsize(shard):
        raise ValueError(f"shard '{shard}' is not the one that {folder / INDEX} lists; prepare the data again")
    if folder not in tables:
        tables[folder] = _media_table(folder)
    media = tables[folder]
    for record in read_records(Path(shard).with_suffix(".jsonl")):
        if "sample" in record:
            entry = record["sample"]
            row = MediaFile(shard, *entry["json"])
            used = {name: media[name] for name in entry["media"]}
            samples.append(StoredSample(shard, entry["key"], row, None, used, foreign=False))
    return samples, []


def _media_table(folder: Path) -> dict[str, StoredMedia]:
    """Every media file of a prepared folder by name; a file that several samples use is stored once."""
    table = {}
    for records in sorted(folder.glob("shard-*.jsonl")):
        shard, facts = str(records.with_suffix(".tar")), str(records.with_suffix(".facts"))
        for record in read_records(records):
            if "media" in record:
                entry = record["media"]
                file = MediaFile(shard, *entry["at"]) if "at" in entry else MediaFile(*entry["outside"])
                fact = MediaFile(facts, *entry["facts"])
                table[entry["name"]] = StoredMedia(entry["kind"], file, fact)
    return table


def read_records(path: Path) -> list[dict]:
    """The records of one shard's .jsonl: {"sample": ...}, {"media": ...} or {"reject": ...}."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _foreign_samples(shard: str) -> tuple[list[StoredSample], list[str]]:
    """Index a shard of other origin by its headers."""
    index, samples = index_tar(shard), []
    for key, fields in index.samples.items():
        media = {
            name: StoredMedia(KIND_OF[name.rpartition(".")[2]], _part(shard, member), None)
            for name, member in fields.items()
            if name.rpartition(".")[2] in KIND_OF
        }
        row, text = (_part(shard, fields[name]) if name in fields else None for name in ("json", "txt"))
        if not media and text is None and row is None:
            index.problems.append(f"{shard}: key '{key}' has no media, txt or json; its fields: {', '.join(fields)}")
            continue
        captions = next((_part(shard, fields[name]) for name in CAPTIONS if name in fields), None)
        samples.append(StoredSample(shard, key, row, text, media, foreign=True, captions=captions))
    return samples, index.problems


def _part(shard: str, member: Member) -> MediaFile:
    return MediaFile(shard, member.offset, member.size)


def _foreign_sample(stored: StoredSample, number: int) -> Sample:
    """Make a sample of a foreign key: its json when that is a row, else its media and its text."""
    data = load_json(_read(stored.row)) if stored.row is not None else None
    if isinstance(data, dict) and ("messages" in data or "conversations" in data):
        return parse_row({"id": stored.key, **data}, row=number + 1, resolve=lambda name: _field_of(stored, name))
    cues = read_cues(stored.captions) if stored.captions is not None else ()
    question = tuple(
        Item(kind=media.kind, media=name, captions=cues if media.kind != "image" else ())
        for name, media in stored.media.items()
    )
    turns: list[Turn] = [("user", question)] if question else []
    if stored.text is not None:
        answer = Item(kind="text", text=_read(stored.text).decode("utf-8", errors="replace"))
        turns.append(("assistant", (answer,)))
    if not turns:
        raise ValueError("has neither media nor text")
    return Sample(id=stored.key, row=number + 1, turns=tuple(turns))


def _field_of(stored: StoredSample, name: str) -> str:
    """The field that a row means by `name`: the field itself, or the member's file name."""
    candidates = (name.lower(), split_name(name)[1])
    found = next((candidate for candidate in candidates if candidate in stored.media), None)
    if found is None:
        raise ValueError(f"names the media '{name}', its fields are {', '.join(stored.media) or 'none'}")
    return found
