"""Manifest rows: both forms against samples written by hand, and one message for every way a row can be wrong.

python -m pytest tests/data_pipelines/test_manifest.py
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.manifest import Item, RowError, Sample, parse_line, read_lines
from data_pipelines.view import WHOLE, read_view

CASES = Path(__file__).parents[1] / "data" / "cases"


@pytest.fixture
def folder(tmp_path):
    for name in ("a.mp4", "b.mp4", "c.png", "d.wav"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def read(folder: Path, *rows: object) -> list[Sample | RowError]:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "m.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    manifest = str(folder / "m.jsonl")
    return [parse_line(line, manifest=manifest, row=row) for row, line in read_lines(manifest)]


def test_messages(folder):
    content = [{"type": "video", "video": "a.mp4", "audio": False}, {"type": "text", "text": "what <image> is this?"}]
    (sample,) = read(
        folder,
        {
            "id": 7,
            "task": "colour",
            "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}],
        },
    )
    video = Item(kind="video", media=str(folder / "a.mp4"), audio=False)
    assert sample == Sample(
        id="7",
        row=1,
        task="colour",
        turns=(
            ("user", (video, Item(kind="text", text="what <image> is this?"))),
            ("assistant", (Item(kind="text", text="red"),)),
        ),
    )
    assert sample.media == (("video", str(folder / "a.mp4")),)


def test_llava_conversations(folder):
    (sample,) = read(
        folder,
        {
            "videos": ["b.mp4", "a.mp4"],
            "image": "c.png",
            "audio": "d.wav",
            "conversations": [
                {"from": "human", "value": "<video>then<image><video>\nwhich?"},
                {"from": "gpt", "value": "a"},
                {"from": "human", "value": "<audio>"},
            ],
        },
    )
    (first, second, third) = sample.turns
    assert [item.media.rpartition("/")[2] or item.text for item in first[1]] == [
        "b.mp4",
        "then",
        "c.png",
        "a.mp4",
        "\nwhich?",
    ]
    assert second == ("assistant", (Item(kind="text", text="a"),))
    assert third[1] == (Item(kind="audio", media=str(folder / "d.wav")),)


def test_messages_with_media_beside_them(folder):
    texts = [{"role": "user", "content": "<image>then<video>"}, {"role": "assistant", "content": "red"}]
    (sample,) = read(folder, {"messages": texts, "videos": ["a.mp4"], "images": ["c.png"]})
    assert [(item.kind, item.text or Path(item.media).name) for item in sample.items] == [
        ("image", "c.png"),
        ("text", "then"),
        ("video", "a.mp4"),
        ("text", "red"),
    ]


def test_sharegpt(folder):
    turns = [{"role": "human", "content": "<audio>hm?"}, {"from": "chatgpt", "value": "yes"}]
    (sample,) = read(folder, {"system": "be brief", "audios": "d.wav", "conversations": turns})
    assert [role for role, _ in sample.turns] == ["system", "user", "assistant"]
    assert sample.turns[0][1][0].text == "be brief" and sample.items[1].kind == "audio"


def test_options_of_qwens_items(folder):
    options = {"video_start": 1.5, "video_end": "7/3", "fps": 0.1, "max_pixels": 50176, "min_pixels": 784.0}
    counts = {"nframes": 8, "min_frames": 4, "max_frames": 16, "total_pixels": 10**6}
    content = [{"type": "video", "video": "file://a.mp4", **options}, {"video": "b.mp4", **counts}, {"image": "c.png"}]
    (sample,) = read(folder, {"messages": [{"role": "user", "content": content}]})
    first, second, third = (item.view for item in sample.items)
    assert (first.video_start, first.video_end, first.fps) == (Fraction(3, 2), Fraction(7, 3), Fraction(1, 10))
    assert (first.max_pixels, first.min_pixels) == (50176, 784) and third == WHOLE
    assert {name: getattr(second, name) for name in counts} == counts
    assert [read_view("video", view.to_fields()) for view in (first, second)] == [first, second]


@pytest.mark.parametrize(
    "name",
    ["a b'\"[1]{0..2}*?.mp4", "-x.mp4", "new\nline.mp4", " .mp4", "%d.mp4", "\udcff\udcfe.mp4", "x" * 251 + ".mp4"],
)
def test_every_name_of_a_file(folder, name):
    (folder / name).write_bytes(b"x")
    (sample,) = read(folder, {"messages": [{"role": "user", "content": [{"type": "video", "video": name}]}]})
    assert sample.items[0].media == str(folder / name)


SAY = {"role": "user", "content": "hi"}
WRONG = {
    "no object": ([1], "is a JSON list, not an object"),
    "no form": ({"id": "x", "text": "y"}, "needs the field 'messages' or 'conversations', has neither"),
    "both forms": ({"messages": [SAY], "conversations": []}, "has both"),
    "empty": ({"messages": []}, "has an empty conversation"),
    "nothing said": ({"messages": [{"role": "user", "content": ""}]}, "is an empty conversation: no text and no media"),
    "no list": ({"messages": "hi"}, "that is no list of objects"),
    "role": ({"messages": [{"role": "robot", "content": "hi"}]}, "role 'robot' in message 0"),
    "no content": ({"messages": [{"role": "user"}]}, "no field 'content' in message 0"),
    "type": ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "type 'smell' in message 0"),
    "no path": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "image item without the field 'image'",
    ),
    "option": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "fsp": 2}]}]},
        "unknown field 'fsp' in a video item",
    ),
    "audio flag": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "audio": 1}]}]},
        "use true or false",
    ),
    "missing file": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "gone.mp4"}]}]},
        "names the file 'gone.mp4', which is not there",
    ),
    "media beside": ({"video": "a.mp4", "messages": [SAY]}, "0 <video> marks for 1 file"),
    "media beside and inside": (
        {"video": "a.mp4", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        "content in message 0 that is no text",
    ),
    "address": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "https://x.org/a.png"}]}]},
        "names 'https://x.org/a.png', which is an address or data",
    ),
    "data": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
            ]
        },
        "which is an address or data",
    ),
    "frames": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": ["1.png", "2.png"]}]}]},
        "a video that is a list of 2 frames",
    ),
    "height": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "c.png", "resized_height": 5}]}]},
        "has the field 'resized_height' in a image item, which is not read; write max_pixels",
    ),
    "end": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "video_start": 3, "video_end": 2}]}]},
        "has video_end 2 not after video_start 3",
    ),
    "rate": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "fps": "fast"}]}]},
        "has fps 'fast', which is no number",
    ),
    "count": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "nframes": 2.5}]}]},
        "has nframes 2.5; use a whole number",
    ),
    "option of sound": (
        {"messages": [{"role": "user", "content": [{"audio": "d.wav", "fps": 1}]}]},
        "unknown field 'fps' in a audio item; known options: none",
    ),
    "system": ({"system": 3, "conversations": [{"from": "human", "value": "hi"}]}, "a field 'system' that is no text"),
    "more marks": (
        {"video": "a.mp4", "conversations": [{"from": "human", "value": "<video><video>"}]},
        "2 <video> marks for 1 file;",
    ),
    "fewer marks": (
        {"video": ["a.mp4", "b.mp4"], "conversations": [{"from": "human", "value": "<video>"}]},
        "1 <video> marks for 2 files",
    ),
    "no marks": (
        {"image": "c.png", "conversations": [{"from": "human", "value": "hi"}]},
        "0 <image> marks for 1 file;",
    ),
    "from": ({"conversations": [{"from": "cat", "value": "hi"}]}, "'from' 'cat' in turn 0"),
    "value": ({"conversations": [{"from": "human"}]}, "no text in the field 'value' of turn 0"),
    "both media": (
        {"video": "a.mp4", "videos": [], "conversations": [{"from": "human", "value": "x"}]},
        "has both fields",
    ),
    "media type": ({"video": 3, "conversations": [{"from": "human", "value": "<video>"}]}, "neither a path nor a list"),
    "task": ({"task": 3, "messages": [SAY]}, "has task 3"),
    "json": (b'{"id": "x", ', "is not valid JSON"),
    "nan": (b'{"messages": [], "x": NaN}', "holds NaN"),
    "twice": (b'{"id": 1, "id": 2}', "has the field 'id' twice"),
    "bytes": (b'{"id": "\xff"}', "is not UTF-8"),
    "byte range": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "bytes": [0, 2]}]}]},
        "has bytes [0, 2] in a video item of a file of 1 bytes",
    ),
    "no byte range": (
        {"messages": [{"role": "user", "content": [{"video": "a.mp4", "bytes": 5}]}]},
        "has bytes 5 in a video item; write [first byte, number of bytes]",
    ),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "nul in path": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a\0b"}]}]},
        "which is not there",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named_and_the_others_go_on(folder, name):
    row, message = WRONG[name]
    before, error, after = read(folder, {"messages": [SAY]}, row, {"messages": [SAY]})
    assert isinstance(before, Sample) and isinstance(after, Sample) and after.row == 3
    assert isinstance(error, RowError) and error.row == 2
    assert str(error).startswith(f"{folder / 'm.jsonl'}, row 2")
    assert message in str(error)


def test_an_error_carries_id_and_file(folder):
    row = {"id": "k9", "video": "gone.mp4", "conversations": [{"from": "human", "value": "<video>"}]}
    (error,) = read(folder, row)
    assert (error.id, error.file) == ("k9", "gone.mp4") and "(id 'k9')" in str(error)


def test_texts_of_all_kinds(folder):
    rows = [json.loads(line) for line in (CASES / "B48_texts.jsonl").read_text().splitlines()]
    read_rows = read(
        folder, *({"id": row["id"], "messages": [{"role": "user", "content": row["text"]}]} for row in rows)
    )
    for row, sample in zip(rows, read_rows, strict=True):
        if row["id"] == "empty":
            assert isinstance(sample, RowError) and "no text and no media" in sample.what
            continue
        text = sample.turns[0][1][0].text
        text.encode()
        assert sample.replaced == (row["id"] == "lone_surrogate")
        assert text == row["text"].replace("\ud83d", "\ufffd")


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["messages", "conversations", "role", "content", "type", "text", "video", "from", "value", "id"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda data: json.dumps(data).encode())
)
def test_no_row_raises(line):
    assert isinstance(parse_line(line, manifest="m.jsonl", row=1), Sample | RowError)


def test_the_manifest_of_the_page_can_be_read(folder):
    page = (Path(__file__).parents[2] / "docs" / "bring_your_clips.md").read_text()
    for name in ("clip.mp4", "page.png", "talk.opus"):
        (folder / name).touch()
    rows = [json.loads(line) for line in page.split("```json\n")[1].split("```")[0].splitlines()]
    assert [[item.kind for item in sample.items] for sample in read(folder, *rows)] == [
        *[["video", "text", "text"]] * 3,
        ["image", "audio", "text", "text"],
        ["text", "text"],
    ]


def test_a_manifest_that_is_not_there():
    with pytest.raises(ValueError, match=r"manifest nowhere.jsonl cannot be read"):
        list(read_lines("nowhere.jsonl"))
