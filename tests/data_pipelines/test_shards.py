"""Shards of any origin by index: what webdataset would read, and what it would get wrong, against the right outcome.

python -m pytest tests/data_pipelines/test_shards.py
"""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from data_pipelines.shard_paths import find_shards
from data_pipelines.shards import ShardSet
from data_pipelines.tar_index import index_tar, split_name

CASES = Path(__file__).parents[1] / "data" / "cases"
CLIP = (CASES / "ref_4s_noaudio.mp4").read_bytes()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def keys(shards: ShardSet) -> list[str]:
    return [sample.key for sample in shards.samples]


def test_every_sample_of_four_shards_once():
    shards = ShardSet.open(CASES / "B21_B22_four")
    assert keys(shards) == [f"s{shard}_{sample}" for shard in range(4) for sample in range(4)]
    assert shards.summary() == "16 samples in 4 shards, 0 problems"
    sample, media = shards.load(5)
    assert [(role, [item.text or item.media for item in items]) for role, items in sample.turns] == [
        ("user", ["mp4"]),
        ("assistant", ["caption number 5"]),
    ]
    assert media["mp4"].clip.video.num_frames == 120


def test_an_empty_shard_is_reported_and_not_fatal():
    shards = ShardSet.open(CASES / "B18_few_with_empty")
    assert keys(shards) == ["000"]
    assert len(shards.problems) == 1 and "shard-001.tar: empty shard" in shards.problems[0]
    assert len(ShardSet.open(CASES / "B18_few")) == 4


def test_dotted_names_are_read_rightly_or_refused_by_name():
    shards = ShardSet.open(CASES / "B19_names")
    assert keys(shards) == ["train.v1/\u65e5\u672c\u8a9e \u30af\u30ea\u30c3\u30d7", "plain"]
    assert len(shards.problems) == 6
    assert "'train.v1/Track 2.0 (Clean Version).mp4' is refused" in shards.problems[0]
    assert "'train.v1/22.05.mp4' is refused" in shards.problems[3]
    with pytest.raises(ValueError, match=r"Track 2\.0"):
        ShardSet.open(CASES / "B19_names", strict=True)


def test_damaged_shards_give_what_is_whole_and_are_named():
    shards = ShardSet.open(CASES / "B20_corrupt")
    assert keys(shards) == ["a0", "a1", "a2", "b0"]
    first, second, third = shards.problems
    assert "shard-001.tar: is cut off inside 'b1.mp4'" in first
    assert "shard-002.tar: is not a tar" in second
    assert "shard-003.tar: is compressed (gzip)" in third
    with pytest.raises(ValueError, match=r"shard-001.tar"):
        ShardSet.open(CASES / "B20_corrupt", strict=True)


def test_only_bad_shards_are_an_error(tmp_path):
    shutil.copy(CASES / "B20_corrupt" / "shard-002.tar", tmp_path)
    with pytest.raises(ValueError, match=r"no usable sample in 1 shards of .*shard-002.tar: is not a tar"):
        ShardSet.open(tmp_path)


def test_interleaved_members_are_joined(tmp_path):
    write_tar(tmp_path / "a.tar", [("x.mp4", CLIP), ("y.mp4", CLIP), ("x.txt", b"one"), ("y.txt", b"two")])
    shards = ShardSet.open(tmp_path)
    texts = [shards.load(number)[0].turns[-1][1][0].text for number in range(len(shards))]
    assert texts == ["one", "two"]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("x.mp4", CLIP), ("x.txt", b"1"), ("x.txt", b"2")], "key 'x' has the field 'txt' twice"),
        ([("x.mp4", b""), ("x.txt", b"1")], "key 'x' has an empty field 'mp4'"),
        ([("x.bin", b"1")], "key 'x' has no media, txt or json; its fields: bin"),
        ([("x", b"1")], "member 'x' is refused: its field would be ''"),
    ],
)
def test_wrong_members_are_named(tmp_path, members, problem):
    write_tar(tmp_path / "a.tar", [*members, ("good.txt", b"text")])
    shards = ShardSet.open(tmp_path)
    assert keys(shards) == ["good"]
    assert len(shards.problems) == 1 and problem in shards.problems[0]


def test_a_damaged_header_does_not_end_a_shard_silently(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("x.txt", b"1"), ("y.txt", b"2"), ("z.txt", b"3")])
    data = bytearray(path.read_bytes())
    data[1024 + 100] ^= 0xFF
    path.write_bytes(data)
    index = index_tar(path)
    assert list(index.samples) == ["x"]
    assert "damaged header at byte 1024" in index.problems[0]


def test_a_row_in_json_names_its_media_by_field(tmp_path):
    row = {"video": "mp4", "conversations": [{"from": "human", "value": "<video>what?"}, {"from": "gpt", "value": "a"}]}
    gone = {**row, "video": "webm"}
    members = [
        ("x.mp4", CLIP),
        ("x.json", json.dumps(row).encode()),
        ("y.mp4", CLIP),
        ("y.json", json.dumps(gone).encode()),
    ]
    write_tar(tmp_path / "a.tar", members)
    shards = ShardSet.open(tmp_path)
    sample, media = shards.load(0)
    assert sample.id == "x" and list(media) == ["mp4"]
    with pytest.raises(ValueError, match=r"key 'y': names the media 'webm', its fields are mp4"):
        shards.load(1)


def test_side_files_of_other_systems_are_no_samples(tmp_path):
    names = ["._x.txt", "__MACOSX/x.txt", ".DS_Store", "a/Thumbs.db", "a/desktop.ini", "a/@eaDir/x.txt", ".directory"]
    index = index_tar(write_tar(tmp_path / "a.tar", [*((name, b"1") for name in names), ("x.txt", b"1")]))
    assert list(index.samples) == ["x"] and index.problems == []


def test_keys_and_fields():
    assert split_name("./a.b/c.d.E") == ("a.b/c", "d.e")
    assert split_name("plain.mp4") == ("plain", "mp4")
    assert split_name("x") == ("x", "")


def test_ways_to_name_shards(tmp_path, monkeypatch):
    odd = tmp_path / "my data [v1]"
    shutil.copytree(CASES / "B69_two_shards", odd)
    two = [str(odd / "shard-000.tar"), str(odd / "shard-001.tar")]
    assert find_shards(odd) == find_shards(two) == find_shards([two[0], two[1]]) == two
    assert find_shards(two[1]) == two[1:]
    assert find_shards(str(tmp_path / "my*" / "shard-*.tar")) == two
    assert find_shards(str(odd / "shard-{000..001}.tar")) == two
    assert find_shards(str(odd / "shard-{001,000}.tar")) == two[::-1]
    literal = tmp_path / "brace{0..2}[x].tar"
    shutil.copy(two[0], literal)
    assert find_shards(str(literal)) == [str(literal)]
    monkeypatch.chdir(odd)
    assert find_shards("shard-{000..001}.tar") == ["shard-000.tar", "shard-001.tar"]
    assert keys(ShardSet.open(odd)) == ["000", "001"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing-*.tar", r"pattern 'nothing-\*.tar' matches no file"),
        ("shard-{000..003}.tar", r"pattern 'shard-\{000..003\}.tar' names 'shard-002.tar', which is not there"),
        ("{0..9}" * 6, "stands for 1000000 names"),
        ("{0..99999999999999}", "stands for 100000000000000 names"),
        (["shard-000.tar", "shard-00[0].tar"], "shard shard-000.tar is named twice"),
        ([], "names no shard"),
        ("empty", "folder 'empty' holds no .tar file"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_quoted_and_never_built(tmp_path, monkeypatch, spec, message):
    shutil.copytree(CASES / "B69_two_shards", tmp_path, dirs_exist_ok=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        find_shards(spec)
