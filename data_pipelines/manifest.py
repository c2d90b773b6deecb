"""Rows of a JSONL manifest as typed samples. The forms that are read, told apart by their fields:

    {"id": "a", "task": "colour", "messages": [                  (messages; content items as Qwen writes them)
        {"role": "user", "content": [{"type": "video", "video": "clip.mp4", "video_start": 10, "fps": 2, "audio": true},
                                     {"type": "text", "text": "Which colour flashed?"}]},
        {"role": "assistant", "content": "red"}]}

    {"id": "b", "videos": ["clip.mp4"], "messages": [            (messages with media beside them: LLaMA-Factory, swift)
        {"role": "user", "content": "<video>Which colour flashed?"}, {"role": "assistant", "content": "red"}]}

    {"id": "c", "video": "clip.mp4", "conversations": [          (LLaVA, ShareGPT)
        {"from": "human", "value": "<video>\\nWhich colour flashed?"}, {"from": "gpt", "value": "red"}]}

`"bytes": [first, count]` in a media item means these bytes of the file: a member of an archive, read where it lies.

Text is data: only where media stand beside the conversation, or in `conversations`, do the marks <video>, <image> and
<audio> stand for media, in the order of the row's fields video(s), image(s) and audio(s). Paths are relative to the
manifest's folder; `file://` before one is left out, addresses are refused. Options of items are those of
`data_pipelines.view`. `captions` of a video or audio item names a subtitle file, or is true for the text stream inside
the media file; with `"train_captions": true` its words are trained. Lone surrogates in text, which no tokenizer can
encode, become U+FFFD and are counted; in names of files they stand for bytes that are not UTF-8, as Python writes them.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipelines.demux import read_index
from data_pipelines.examine import MEDIA_KINDS
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.timed_text import Cue, read_cues, read_embedded_cues
from data_pipelines.view import WHOLE, View, read_view

ROLES = ("system", "user", "assistant")
LLAVA_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "chatgpt", "bard", "bing", "model"), "assistant"),
}
ADDRESS = re.compile("[a-zA-Z][a-zA-Z0-9+.-]+:")
MARKS = re.compile(f"<({'|'.join(MEDIA_KINDS)})>")
CAPTION_FIELDS = ("captions", "train_captions")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Resolve = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One piece of a turn: text, or one media file."""

    kind: str
    """text, image, video or audio."""
    text: str = ""
    media: str = ""
    """The file, or its name among the media of a shard set."""
    part: tuple[int, int] | None = None
    """First byte and number of bytes of the file; None: all of it."""
    audio: bool = True
    """Video: whether the sound of the file is used, when it has any."""
    view: View = WHOLE
    """Which stretch of the file, and how finely."""
    captions: tuple[Cue, ...] = ()
    """Video and audio: words at their times."""
    train_captions: bool = False
    """Whether the captions are trained; otherwise they are given, as a question is."""

    @property
    def file(self) -> MediaFile:
        """Media of a manifest: where its bytes lie."""
        return MediaFile(self.media) if self.part is None else MediaFile(self.media, *self.part)

    @property
    def name(self) -> str:
        """What tells this media file from the others of a sample."""
        return str(self.file)


Turn = tuple[str, tuple[Item, ...]]
"""A role (system, user or assistant) and its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: a conversation with media in it."""

    id: str
    row: int
    """Line of the manifest, from 1."""
    turns: tuple[Turn, ...]
    task: str = ""
    """The kind of question, for evaluation; empty when the row names none."""
    replaced: int = 0
    """Lone surrogates that became U+FFFD."""

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for _, items in self.turns for item in items)

    @property
    def media(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of every media item, in order."""
        return tuple((item.kind, item.name) for item in self.items if item.kind != "text")

    @property
    def files(self) -> tuple[tuple[str, MediaFile], ...]:
        """(kind, file) of every media item of a manifest's row, in order."""
        return tuple((item.kind, item.file) for item in self.items if item.kind != "text")


class RowError(ValueError):
    """A row that cannot be used: manifest, row, id, what is wrong, and what to do about it."""

    def __init__(self, manifest: str, row: int, id: str, what: str, file: str = ""):
        super().__init__(manifest, row, id, what, file)
        self.manifest, self.row, self.id, self.what, self.file = manifest, row, id, what, file

    def __str__(self) -> str:
        named = f" (id '{self.id}')" if self.id else ""
        return f"{self.manifest}, row {self.row}{named}: {self.what}"


class _Wrong(ValueError):
    """What is wrong with a row, before its place is known."""

    def __init__(self, what: str, file: str = ""):
        super().__init__(what)
        self.file = file


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yield (row, line) of every line that is not blank. Raises ValueError when the manifest cannot be read."""
    try:
        with open(path, "rb") as file:
            for row, line in enumerate(file, start=1):
                if line.strip():
                    yield row, line
    except OSError as error:
        raise ValueError(f"manifest {path} cannot be read ({error.strerror}); give the path of a JSONL file") from None


def parse_line(line: bytes, *, manifest: str, row: int) -> Sample | RowError:
    """Parse one row of the manifest at path `manifest`; its media must exist."""
    folder = Path(manifest).parent
    data: object = None
    try:
        data = load_json(line)
        return parse_row(data, row=row, resolve=lambda name: _existing_file(folder, name))
    except _Wrong as error:
        name = data.get("id", "") if isinstance(data, dict) else ""
        return RowError(manifest, row, _clean(str(name))[0], str(error), error.file)


def load_json(line: bytes) -> object:
    """Strict JSON: UTF-8, no NaN or Infinity, no key twice."""
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise _Wrong(f"is not UTF-8 (byte {error.start}); save the manifest as UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"is not valid JSON ({error.msg} at column {error.colno}); one object a line") from None
    except RecursionError:
        raise _Wrong("is nested too deeply; one object a line") from None


def parse_row(data: object, *, row: int, resolve: Resolve) -> Sample:
    """Make a sample of a row's object. `resolve` turns a media name into a path, or raises."""
    if not isinstance(data, dict):
        raise _Wrong(f"is a JSON {type(data).__name__}, not an object")
    forms = [form for form in ("messages", "conversations") if form in data]
    if len(forms) != 1:
        found = "both" if forms else f"neither (its fields: {', '.join(map(str, data)) or 'none'})"
        raise _Wrong(f"needs the field 'messages' or 'conversations', has {found}")
    media = {kind: _media_field(data, kind) for kind in MEDIA_KINDS}
    rows = _turns_field(data, forms[0])
    if forms == ["messages"] and not any(media.values()):
        turns = _message_turns(rows, resolve)
    elif forms == ["messages"]:
        turns = _marked_turns([_message_words(row, number) for number, row in enumerate(rows)], media, resolve)
    else:
        turns = _marked_turns([_conversation_words(row, number) for number, row in enumerate(rows)], media, resolve)
    if data.get("system"):
        turns = [("system", (Item(kind="text", text=_system(data, turns)),)), *turns]
    if not any(item.text or item.media for _, items in turns for item in items):
        raise _Wrong("is an empty conversation: no text and no media")
    return _cleaned(str(data.get("id", row)), row, turns, data.get("task", ""))


def _cleaned(id: str, row: int, turns: list[Turn], task: object) -> Sample:
    """Put the sample together, lone surrogates replaced."""
    if not isinstance(task, str):
        raise _Wrong(f"has task {task!r}; a task is a name")
    replaced, clean_turns = 0, []
    for role, items in turns:
        clean_items = []
        for item in items:
            text, count = _clean(item.text)
            replaced += count
            clean_items.append(Item(kind="text", text=text) if count else item)
        clean_turns.append((role, tuple(clean_items)))
    return Sample(id=_clean(id)[0], row=row, turns=tuple(clean_turns), task=_clean(task)[0], replaced=replaced)


def _clean(text: str) -> tuple[str, int]:
    return LONE_SURROGATE.subn("\ufffd", text)


def _turns_field(data: dict, name: str) -> list[dict]:
    turns = data[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _Wrong(f"has a field '{name}' that is no list of objects")
    if not turns:
        raise _Wrong(f"has an empty conversation: '{name}' is []")
    return turns


def _media_field(data: dict, kind: str) -> list[str]:
    """The paths in the field `kind` or `kind`s: one path, or a list."""
    names = [name for name in (kind, f"{kind}s") if data.get(name) is not None]
    if len(names) > 1:
        raise _Wrong(f"has both fields '{kind}' and '{kind}s'; use one")
    value = data[names[0]] if names else []
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise _Wrong(f"has a field '{names[0]}' that is neither a path nor a list of paths")
    return paths


def _message_turns(messages: list[dict], resolve: Resolve) -> list[Turn]:
    turns = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise _Wrong(f"has role {role!r} in message {number}; use one of {', '.join(ROLES)}")
        if "content" not in message:
            raise _Wrong(f"has no field 'content' in message {number}")
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise _Wrong(f"has content in message {number} that is neither text nor a list of items")
        turns.append((role, tuple(_content_item(part, number, resolve) for part in parts)))
    return turns


def _content_item(part: object, number: int, resolve: Resolve) -> Item:
    if not isinstance(part, dict):
        raise _Wrong(f"has a content item in message {number} that is no object")
    kind = part.get("type", next((name for name in ("text", *MEDIA_KINDS) if name in part), None))
    if kind == "image_url":
        part, kind = _image_url(part, number), "image"
    if kind not in ("text", *MEDIA_KINDS):
        raise _Wrong(f"has a content item of type {kind!r} in message {number}; use text, {', '.join(MEDIA_KINDS)}")
    value = part.get(kind)
    if isinstance(value, list):
        raise _Wrong(f"has a {kind} that is a list of {len(value)} frames in message {number}; name the {kind} itself")
    if not isinstance(value, str):
        raise _Wrong(f"has a {kind} item without the field '{kind}' in message {number}")
    if kind == "text":
        return Item(kind="text", text=value)
    audio = part.get("audio", True) if kind == "video" else True
    if not isinstance(audio, bool):
        raise _Wrong(f"has audio {audio!r} in a video item; use true or false")
    own = (
        "type",
        kind,
        "bytes",
        *(("audio",) if kind == "video" else ()),
        *(CAPTION_FIELDS if kind != "image" else ()),
    )
    options = {name: value for name, value in part.items() if name not in own}
    try:
        view = read_view(kind, options)
    except ValueError as error:
        raise _Wrong(str(error)) from None
    item = Item(kind=kind, media=resolve(value), audio=audio, view=view)
    if part.get("bytes") is not None:
        item = replace(item, part=_byte_range(part["bytes"], item))
    if kind == "image":
        return item
    captions, train = _captions(part, item, resolve)
    return replace(item, captions=captions, train_captions=train)


def _byte_range(value: object, item: Item) -> tuple[int, int]:
    """Read `bytes` of an item: first byte and number of bytes, all of which are in the file."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(number) is int for number in value):
        raise _Wrong(f"has bytes {value!r} in a {item.kind} item; write [first byte, number of bytes]", item.media)
    first, count = value
    try:
        size = os.path.getsize(item.media)
    except OSError:
        raise _Wrong(f"has bytes in a {item.kind} item of a shard, whose members are named by their fields") from None
    if first < 0 or count < 1 or first + count > size:
        raise _Wrong(f"has bytes {value} in a {item.kind} item of a file of {size} bytes", item.media)
    return first, count


def _captions(part: dict, item: Item, resolve: Resolve) -> tuple[tuple[Cue, ...], bool]:
    """Read the captions that an item names, and whether they are trained."""
    source, train = part.get("captions", False), part.get("train_captions", False)
    if not isinstance(source, str | bool) or not isinstance(train, bool):
        raise _Wrong(
            f"has captions {source!r} and train_captions {train!r} in a {item.kind} item; "
            "captions is a path, or true for the text stream inside the file; train_captions is true or false"
        )
    if not source:
        return (), train
    file = item.file if source is True else MediaFile(resolve(source))
    try:
        return (read_embedded_cues(file, read_index(file)) if source is True else read_cues(file)), train
    except MediaError as error:
        raise _Wrong(f"has captions that cannot be used: {error.reason}", file=error.path) from None


def _image_url(part: dict, number: int) -> dict:
    """An item as OpenAI writes images, made one of ours."""
    url = part.get("image_url")
    name = url.get("url") if isinstance(url, dict) else url
    if not isinstance(name, str) or set(part) - {"type", "image_url"}:
        raise _Wrong(f"has an image_url item in message {number} that is not one file; write type image")
    return {"type": "image", "image": name}


def _message_words(message: dict, number: int) -> tuple[str, str]:
    """Role and text of a message whose media stand beside the conversation."""
    if message.get("role") not in ROLES:
        raise _Wrong(f"has role {message.get('role')!r} in message {number}; use one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise _Wrong(
            f"has media beside the conversation, and content in message {number} that is no text; "
            "write <video>, <image> or <audio> in texts, or all media into content lists"
        )
    return message["role"], message["content"]


def _conversation_words(turn: dict, number: int) -> tuple[str, str]:
    """Role and text of a turn of a LLaVA or ShareGPT conversation; some write role and content there."""
    name, text = ("from", "value") if "from" in turn or "role" not in turn else ("role", "content")
    role = LLAVA_ROLES.get(str(turn.get(name)))
    if role is None:
        raise _Wrong(f"has '{name}' {turn.get(name)!r} in turn {number}; use human, gpt or system")
    if not isinstance(turn.get(text), str):
        raise _Wrong(f"has no text in the field '{text}' of turn {number}")
    return role, turn[text]


def _system(data: dict, turns: list[Turn]) -> str:
    """The text of a ShareGPT row's field `system`."""
    if not isinstance(data["system"], str) or turns[0][0] == "system":
        raise _Wrong("has a field 'system' that is no text, or a system turn besides; use one text")
    return data["system"]


def _marked_turns(words: list[tuple[str, str]], media: dict[str, list[str]], resolve: Resolve) -> list[Turn]:
    """Turns of text in which marks stand for the row's media."""
    turns = []
    left = {kind: iter(paths) for kind, paths in media.items()}
    marks = dict.fromkeys(MEDIA_KINDS, 0)
    for role, text in words:
        items = []
        for i, piece in enumerate(MARKS.split(text)):
            if i % 2:
                marks[piece] += 1
                path = next(left[piece], None)
                items.append(Item(kind=piece, media="" if path is None else resolve(path)))
            elif piece:
                items.append(Item(kind="text", text=piece))
        turns.append((role, tuple(items)))
    for kind in MEDIA_KINDS:
        if marks[kind] != len(media[kind]):
            given = f"{len(media[kind])} file{'s' if len(media[kind]) != 1 else ''}"
            raise _Wrong(f"has {marks[kind]} <{kind}> marks for {given}; write one mark for each file")
    return turns


def _existing_file(folder: Path, name: str) -> str:
    """Find a file by the name a row gives. Whatever characters are in it, the file itself comes before any rule."""
    for candidate in dict.fromkeys((name, name.removeprefix("file://"))):
        path = folder / candidate
        try:
            if path.is_file():
                return str(path)
        except (OSError, ValueError):
            continue
    if ADDRESS.match(name) and not name.startswith("file:"):
        shown = name if len(name) <= 80 else f"{name[:80]}..."
        raise _Wrong(f"names '{shown}', which is an address or data; download it and name the file", file=shown)
    looked = str(folder.absolute() / name)
    raise _Wrong(f"names the file '{name}', which is not there (looked at {looked})", file=name)


def _refuse_constant(name: str) -> None:
    raise _Wrong(f"holds {name}, which JSON does not know")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Wrong(f"has the field '{twice}' twice")
    return data
