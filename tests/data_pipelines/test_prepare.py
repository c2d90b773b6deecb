"""prepare: every row is in the shards or in the rejects, once, however often the work was interrupted.

python -m pytest tests/data_pipelines/test_prepare.py
"""

import errno
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import webdataset

from data_pipelines.decode import decode_frames, decode_image
from data_pipelines.examine import examine
from data_pipelines.manifest import RowError, parse_line, read_lines
from data_pipelines.media import MediaFile
from data_pipelines.prepare import damaged_files, prepare
from data_pipelines.shard_writer import Shard
from data_pipelines.shards import ShardSet, read_media
from tests.data_pipelines.clips import read_number

CASES = Path(__file__).parents[1] / "data" / "cases"


def question(name: str, text: str = "what?") -> dict:
    path = str(CASES / name)
    kind = "image" if path.endswith((".jpg", ".png")) else "audio" if path.endswith(".wav") else "video"
    content = [{"type": kind, kind: path}, {"type": "text", "text": text}]
    return {"id": text, "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}


ROWS = [
    question("ref_4s_30fps_aac.mp4", "first"),
    question("ref_4s_30fps_aac.mp4", "second"),
    question("B09_broken/zero_bytes.mp4"),
    question("B45_images/exif_6.jpg", "image"),
    question("B10_audio/speech_8k.wav", "sound"),
    {"id": "text", "messages": [{"role": "user", "content": "only\ud800text"}]},
    question("B09_broken/no_moov.mp4"),
    {"id": "none", "messages": []},
    question("B08_vfr.mp4", "third"),
    question("ref_4s_30fps_aac.mp4", "fourth"),
    question("B45_images/truncated.jpg"),
    question("B09_broken/audio_only.mp4"),
]
GOOD = ["first", "second", "image", "sound", "text", "third", "fourth"]


def write(folder: Path, rows: list[dict]) -> Path:
    manifest = folder / "m.jsonl"
    manifest.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return manifest


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_row_is_accepted_or_rejected(tmp_path):
    seen = []
    report = prepare(write(tmp_path, ROWS), tmp_path / "out", progress=lambda done, rows: seen.append((done, rows)))
    assert (report.rows, report.accepted, report.rejected) == (12, 7, 5)
    assert (report.media, report.replaced, report.shards) == (4, 1, 1)
    assert seen == [(done, 12) for done in range(1, 13)]
    rejects = [json.loads(line) for line in Path(report.rejects).read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == [3, 7, 8, 11, 12]
    assert "empty file" in rejects[0]["reason"] and rejects[0]["file"].endswith("zero_bytes.mp4")
    assert "no index" in rejects[1]["reason"] and "empty conversation" in rejects[2]["reason"]
    assert "truncated" in rejects[3]["reason"] and "no video stream" in rejects[4]["reason"]


def test_what_is_read_back_is_what_was_in_the_manifest(tmp_path):
    manifest = write(tmp_path, ROWS)
    prepare(manifest, tmp_path / "out", shard_bytes=20_000)
    shards = ShardSet.open(tmp_path / "out")
    samples = [shards.load(number) for number in range(len(shards))]
    parsed = [parse_line(line, manifest=str(manifest), row=row) for row, line in read_lines(manifest)]
    originals = [row for row in parsed if not isinstance(row, RowError) and row.id in GOOD]
    assert [sample.id for sample, _ in samples] == GOOD
    for (sample, media), original in zip(samples, originals, strict=True):
        assert (sample.row, sample.task, sample.replaced) == (original.row, original.task, original.replaced)
        assert [role for role, _ in sample.turns] == [role for role, _ in original.turns]
        assert [item.text for item in sample.items] == [item.text for item in original.items]
        for (kind, name), (_, path) in zip(sample.media, original.media, strict=True):
            stored, file = media[name], Path(path).read_bytes()
            with stored.file.open() as opened:
                assert opened.read() == file
            assert (stored.clip, stored.image) == (
                examine(kind, MediaFile(path)).clip,
                examine(kind, MediaFile(path)).image,
            )
    video = samples[1][1]["00000000.video0.mp4"]
    assert [read_number(p) for p in decode_frames(video.file, video.clip, [7, 100], (64, 96)).pixels] == [7, 100]
    image = next(iter(samples[2][1].values()))
    assert decode_image(image.file, image.image).shape == (*image.image, 3)


def test_a_file_that_several_rows_use_is_stored_once(tmp_path):
    prepare(write(tmp_path, [question("ref_4s_noaudio.mp4", str(i)) for i in range(20)]), tmp_path / "out")
    tar = tmp_path / "out" / "shard-000000.tar"
    assert tar.stat().st_size < 5503 + 20 * 2048 + 20_000
    assert {name for n in range(20) for name in ShardSet.open(tar).load(n)[1]} == {"00000000.video0.mp4"}


def test_webdataset_reads_the_shards(tmp_path):
    prepare(write(tmp_path, ROWS), tmp_path / "out")
    read = list(webdataset.WebDataset(str(tmp_path / "out" / "shard-000000.tar"), shardshuffle=False))
    assert [sample["__key__"] for sample in read] == [f"{number:08d}" for number in range(7)]
    assert read[0]["video0.mp4"] == (CASES / "ref_4s_30fps_aac.mp4").read_bytes()
    assert json.loads(read[0]["json"])["id"] == "first"


class Killed(Exception):
    """Stands for a kill at a given row."""


@pytest.mark.parametrize("stops", [[1], [4], [9], [2, 5, 8], list(range(1, 13))], ids=str)
def test_interrupted_runs_end_as_one_run_does(tmp_path, stops):
    manifest = write(tmp_path, ROWS)
    prepare(manifest, tmp_path / "whole", shard_bytes=20_000)

    for stop in stops:

        def kill(done: int, rows: int, stop: int = stop) -> None:
            if done == stop:
                raise Killed

        with pytest.raises(Killed):
            prepare(manifest, tmp_path / "out", shard_bytes=20_000, progress=kill)
        with pytest.raises(ValueError, match=r"unfinished prepare|no usable sample|holds no .tar"):
            ShardSet.open(tmp_path / "out")
    report = prepare(manifest, tmp_path / "out", shard_bytes=20_000)
    assert report.accepted + report.rejected == report.rows
    whole, resumed = content(tmp_path / "whole"), content(tmp_path / "out")
    for files in (whole, resumed):
        files["index.json"] = files["index.json"].replace(b"/whole/", b"/out/")
    assert resumed == whole


def test_a_resume_does_not_check_finished_rows_again(tmp_path, monkeypatch):
    manifest = write(tmp_path, ROWS)

    def kill(done: int, rows: int) -> None:
        if done == 10:
            raise Killed

    with pytest.raises(Killed):
        prepare(manifest, tmp_path / "out", shard_bytes=20_000, progress=kill)
    checked = []
    monkeypatch.setattr(
        "data_pipelines.examine.examine", lambda kind, file: checked.append(file) or examine(kind, file)
    )
    prepare(manifest, tmp_path / "out", shard_bytes=20_000)
    assert not any("ref_4s" in file.path for file in checked)


def test_strict_stops_at_the_first_bad_row(tmp_path):
    with pytest.raises(RowError, match=r"m.jsonl, row 3 \(id 'what\?'\): its video cannot be used: empty file"):
        prepare(write(tmp_path, ROWS), tmp_path / "out", strict=True)


def test_folders_that_are_in_use_are_refused(tmp_path):
    manifest = write(tmp_path, ROWS[:1])
    prepare(manifest, tmp_path / "out")
    with pytest.raises(ValueError, match="already holds a prepared set"):
        prepare(manifest, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        prepare(manifest, tmp_path / "other")
    with pytest.raises(ValueError, match="cannot be written"):
        prepare(manifest, tmp_path / "m.jsonl" / "out")
    with pytest.raises(RowError):
        prepare(write(tmp_path, ROWS), tmp_path / "third", strict=True)
    with pytest.raises(ValueError, match="unfinished prepare of another manifest"):
        prepare(write(tmp_path, ROWS[:2]), tmp_path / "third")


def test_no_usable_row_is_an_error_that_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"no row of .* can be used; the first: its video cannot be used: empty file"):
        prepare(write(tmp_path, [ROWS[2], ROWS[6]]), tmp_path / "out")
    (tmp_path / "m.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        prepare(tmp_path / "m.jsonl", tmp_path / "out2")


def test_a_shard_that_was_cut_is_not_read(tmp_path):
    prepare(write(tmp_path, ROWS), tmp_path / "out")
    tar = tmp_path / "out" / "shard-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"shard-000000.tar' is not the one that .*index.json lists"):
        ShardSet.open(tmp_path / "out")


def test_shards_do_not_depend_on_the_number_of_workers(tmp_path):
    manifest = write(tmp_path, ROWS)
    for workers in (0, 2):
        prepare(manifest, tmp_path / f"by{workers}" / "out", shard_bytes=20_000, workers=workers)
    alone, many = content(tmp_path / "by0" / "out"), content(tmp_path / "by2" / "out")
    many["index.json"] = many["index.json"].replace(b"by2", b"by0")
    assert many == alone


PREPARE = """
import sys
from data_pipelines.prepare import damaged_files, prepare
from data_pipelines.shard_writer import Shard
prepare(sys.argv[1], sys.argv[2], shard_bytes=20_000, workers=int(sys.argv[3]))
"""


def kill_and_resume(tmp_path: Path, *, kills: int, seed: int) -> int:
    """Run prepare in a process of its own, kill it at random moments, then let it finish; return the kills it took."""
    rng, rows = random.Random(seed), ROWS * 6
    for row in rows[: len(ROWS)]:
        rows += [{**row, "id": f"again {row['id']}"}]
    manifest, out, done = write(tmp_path, rows), tmp_path / f"killed{seed}", 0
    for _ in range(kills):
        command = [sys.executable, "-c", PREPARE, str(manifest), str(out), str(rng.choice([0, 2]))]
        process = subprocess.Popen(command, start_new_session=True, cwd=Path(__file__).parents[2])
        deadline, target = time.monotonic() + 30, rng.randint(1, 12)
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(out.glob("*"))) >= target:
                time.sleep(rng.uniform(0, 0.05))
                break
            time.sleep(0.002)
        done += process.poll() is None
        process.kill()
        process.wait()
        if (out / "index.json").exists():
            break
    if not (out / "index.json").exists():
        prepare(manifest, out, shard_bytes=20_000)
    prepare(manifest, tmp_path / f"whole{seed}", shard_bytes=20_000)
    killed, whole = content(out), content(tmp_path / f"whole{seed}")
    whole["index.json"] = whole["index.json"].replace(b"whole", b"killed")
    assert killed == whole
    ids = [ShardSet.open(out).load(i)[0].row for i in range(len(ShardSet.open(out)))]
    rejects = [json.loads(line)["row"] for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert sorted(ids + rejects) == list(range(1, len(rows) + 1))
    return done


def test_a_killed_prepare_ends_as_one_that_was_not(tmp_path):
    assert kill_and_resume(tmp_path, kills=2, seed=0) >= 1


@pytest.mark.full
def test_prepare_killed_many_times_ends_as_one_that_was_not(tmp_path):
    assert sum(kill_and_resume(tmp_path, kills=5, seed=seed) for seed in range(1, 5)) >= 8


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_together_are_the_whole(tmp_path, parts):
    manifest = write(tmp_path, ROWS)
    prepare(manifest, tmp_path / "whole")
    with pytest.raises(ValueError, match=f"part {parts + 1}/{parts} of 12 rows"):
        prepare(manifest, tmp_path / "out", part=(parts + 1, parts))
    for number in range(parts, 0, -1):
        if number < parts:
            with pytest.raises(ValueError, match="lacks part-0001-of"):
                ShardSet.open(tmp_path / "out")
        report = prepare(manifest, tmp_path / "out", part=(number, parts))
        assert report.accepted + report.rejected == report.rows
    whole, joined = ShardSet.open(tmp_path / "whole"), ShardSet.open(tmp_path / "out")
    assert [joined.load(i)[0].row for i in range(len(joined))] == [whole.load(i)[0].row for i in range(len(whole))]
    assert len({sample.key for sample in joined.samples}) == len(joined)


def test_large_media_stay_outside_and_are_read_in_place(tmp_path):
    size = (CASES / "ref_4s_30fps_aac.mp4").stat().st_size
    prepare(write(tmp_path, ROWS), tmp_path / "out", outside_bytes=size)
    shards = ShardSet.open(tmp_path / "out")
    video = shards.load(0)[1]["00000000.video0.mp4"]
    assert video.file == MediaFile(str(CASES / "ref_4s_30fps_aac.mp4"), 0, size)
    assert (tmp_path / "out" / "shard-000000.tar").stat().st_size < size + 60_000
    assert [read_number(p) for p in decode_frames(video.file, video.clip, [7, 100], (64, 96)).pixels] == [7, 100]


def archive(folder: Path) -> list[dict]:
    """Write two clips and a picture one after the other into a file, and rows that name them by their bytes."""
    rows, data = [], b"some bytes of something else"
    for name in ("ref_4s_noaudio.mp4", "B45_images/exif_6.jpg", "B08_vfr.mp4", "ref_4s_noaudio.mp4"):
        kind, file = "image" if name.endswith("jpg") else "video", (CASES / name).read_bytes()
        item = {"type": kind, kind: "archive.bin", "bytes": [len(data), len(file)]}
        rows.append({"id": name, "messages": [{"role": "user", "content": [item, {"type": "text", "text": "?"}]}]})
        data += file
    (folder / "archive.bin").write_bytes(data)
    return rows


@pytest.mark.parametrize(("outside", "workers"), [(None, 0), (0, 1)], ids=["copied", "left"])
def test_a_row_may_name_bytes_of_a_larger_file(tmp_path, outside, workers):
    rows = archive(tmp_path)
    prepare(write(tmp_path, rows), tmp_path / "out", outside_bytes=outside, workers=workers, shard_bytes=8000)
    shards = ShardSet.open(tmp_path / "out")
    for number, row in enumerate(rows):
        sample, media = shards.load(number)
        (found,) = media.values()
        with found.file.open() as file:
            assert file.read() == (CASES / row["id"]).read_bytes()
        if outside is not None:
            first, count = row["messages"][0]["content"][0]["bytes"]
            assert found.file == MediaFile(str(tmp_path / "archive.bin"), first, count)
        assert sample.items[0].part is None


def test_a_range_that_is_no_media_names_file_and_bytes(tmp_path):
    rows = archive(tmp_path)
    rows[0]["messages"][0]["content"][0]["bytes"] = [3, 25]
    report = prepare(write(tmp_path, rows), tmp_path / "out")
    (reject,) = map(json.loads, Path(report.rejects).read_text().splitlines())
    assert reject["file"] == f"{tmp_path / 'archive.bin'}[3:28]" and "not a media file" in reject["reason"]


def test_bytes_are_remembered_over_an_interruption(tmp_path):
    manifest = write(tmp_path, archive(tmp_path))

    def kill(done: int, rows: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(manifest, tmp_path / "out", shard_bytes=8000, progress=kill)
    prepare(manifest, tmp_path / "out", shard_bytes=8000)
    prepare(manifest, tmp_path / "whole" / "out", shard_bytes=8000)
    interrupted, whole = content(tmp_path / "out"), content(tmp_path / "whole" / "out")
    whole["index.json"] = whole["index.json"].replace(b"whole/", b"")
    assert interrupted == whole


def test_damaged_files_are_told(tmp_path):
    report = prepare(write(tmp_path, [question("B09_broken/cut_tail.mp4"), ROWS[0]]), tmp_path / "out")
    ((file, notes),) = damaged_files(tmp_path / "out")
    assert report.notes == 1 and file.endswith("cut_tail.mp4") and "cut off by the end of the file" in notes[0]


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    manifest, out, whole = write(tmp_path, ROWS), tmp_path / "out", tmp_path / "whole"

    def again(done: int, _: int) -> None:
        with pytest.raises(ValueError, match=r"another `mmcp prepare` is writing into '.*/out'"):
            prepare(manifest, out, shard_bytes=20_000)

    prepare(manifest, out, shard_bytes=20_000, progress=again)
    prepare(manifest, whole, shard_bytes=20_000)
    assert sorted(content(out)) == sorted(content(whole))
    assert all(content(out)[name] == content(whole)[name] for name in content(out) if name != "index.json")


def test_a_full_disk_says_so_and_a_second_run_goes_on(tmp_path, monkeypatch):
    manifest, room = write(tmp_path, ROWS), [2]

    def full(shard: Shard, last_row: int) -> None:
        room[0] -= 1
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(shard, last_row)

    finish = Shard.finish
    monkeypatch.setattr(Shard, "finish", full)
    with pytest.raises(ValueError, match=r"No space left on device\); make room and run the same again"):
        prepare(manifest, tmp_path / "out", shard_bytes=20_000)
    monkeypatch.undo()
    report = prepare(manifest, tmp_path / "out", shard_bytes=20_000)
    assert (report.rows, report.accepted) == (12, 7)


def test_media_outside_that_changed_are_named(tmp_path):
    shutil.copy(CASES / "ref_4s_noaudio.mp4", tmp_path / "a.mp4")
    row = {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}
    prepare(write(tmp_path, [row]), tmp_path / "out", outside_bytes=0)
    shards = ShardSet.open(tmp_path / "out")
    shards.load(0)
    read_media.cache_clear()
    (tmp_path / "a.mp4").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"a\.mp4: has 3 of the .* bytes it had when it was prepared"):
        shards.load(0)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(ValueError, match=r"a\.mp4.*no such file"):
        shards.load(0)


def test_every_file_name_and_every_option_survives(tmp_path):
    names = ["new\nline.mp4", "\udcff.mp4", "a'b\"[1]{0..2}.mp4"]
    for name in names:
        shutil.copy(CASES / "ref_4s_noaudio.mp4", tmp_path / name)
    asked = {"video_start": 1, "video_end": "5/2", "fps": 2, "max_pixels": 5000}
    rows = [{"messages": [{"role": "user", "content": [{"video": name, **asked}]}]} for name in [*names, "\udcfe.mp4"]]
    assert prepare(write(tmp_path, rows), tmp_path / "out", workers=1).accepted == 3
    shards = ShardSet.open(tmp_path / "out")
    for number in range(3):
        (item,) = shards.load(number)[0].items
        assert item.view.to_fields() == {"video_start": "1", "video_end": "5/2", "fps": "2", "max_pixels": 5000}
