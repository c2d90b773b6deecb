"""Manifest rows: both forms against samples written by hand, and one message for every way a row can be wrong.

python -m pytest tests/data_pipelines/test_manifest.py
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.manifest import Item, RowError, Sample, parse_line, read_lines

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
    "field not read": ({"video": "a.mp4", "messages": [SAY]}, "which the form 'messages' does not read"),
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


def test_a_manifest_that_is_not_there():
    with pytest.raises(ValueError, match=r"manifest nowhere.jsonl cannot be read"):
        list(read_lines("nowhere.jsonl"))
