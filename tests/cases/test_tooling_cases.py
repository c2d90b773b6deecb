"""Public bug reports on tools, through the command line: B66, B67, B69, B70, and B09, B18, B20, B21, B22 on data.

A command runs inside this process unless what is tested is the process itself. Elsewhere: B67, value by value, in
tests/config/test_config_load.py; B68, every figure and page without data and without a display, in
tests/report/test_reports.py; B18 to B20, shard by shard, in tests/data_pipelines/test_shards.py.
B22: no transform of this library draws anything, so there is nothing that workers could draw alike.
Run: python -m pytest tests/cases
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipelines.decode import decode_frames
from data_pipelines.sampler import Order
from data_pipelines.shards import ShardSet
from data_pipelines.workers import WorkerPool
from experiments.base import RunConfig
from experiments.pipeline import Pipeline, read_steps
from mmcp import cli
from mmcp.config import load

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "data" / "cases"
DEMO = ROOT / "experiments" / "configs" / "demo.yaml"
ALONE = ["data.held_out=", "train.evaluate_every=0"]


@pytest.fixture
def mmcp(capsys):
    """Return `mmcp(*words)`: run a command, return (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as stopped:  # a command line that cannot be read
            code = int(str(stopped.code))
        return code, *capsys.readouterr()

    return run


def one_line(error: str, folder: Path) -> str:
    """Return the only line of an error; nothing of a run may have been made."""
    lines = [line for line in error.splitlines() if not line.startswith(("data.", "warning:"))]
    assert len(lines) == 1 and lines[0].startswith("error: "), error
    assert not folder.exists()
    return lines[0]


B66 = {
    "typo": ("  learning_rate: 2e-3", "  lerning_rate: 1", "lerning_rate = 1: unknown key; did you mean learning_rate"),
    "wrong level": ("seed: 0", "seed: 0\nlearning_rate: 1", "unknown key; it belongs at optim.learning_rate"),
    "dash": ("  documents_per_step: 8", "  num-workers: 8", "num-workers = 8: unknown key; did you mean workers"),
    "twice": ("  weight_decay: 0.05", "  weight_decay: 0.05\n  weight_decay: 0.1", "duplicate key, first given on"),
    "removed": ("seed: 0", "seed: 0\nzigzag_ring: true", "zigzag_ring = true: unknown key; the top level has: folder"),
    "type": ("  total_steps: 1000", "  total_steps: soon", "total_steps = soon: expected an integer"),
}


@pytest.mark.parametrize("name", B66)
def test_b66_a_wrong_key_stops_the_run_before_any_work(mmcp, tmp_path, name):
    right, wrong, message = B66[name]
    file, text = tmp_path / "my run.yaml", DEMO.read_text()
    assert text.count(right + "\n") == 1
    file.write_text(text.replace(right, wrong))
    code, _, error = mmcp("train", file, f"folder={tmp_path / 'run'}")
    line = one_line(error, tmp_path / "run")
    assert code == 1 and str(file) in line and message in line and "line " in line


def test_b66_a_dry_run_tells_all_mistakes_at_once(mmcp, tmp_path):
    text = DEMO.read_text()
    for right, wrong, _ in B66.values():
        text = text.replace(right + "\n", wrong + "\n", 1)
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    code, output, error = mmcp("train", file, "--dry-run", "optim.lr=1e-3", "data.trian=x")
    assert (code, output) == (1, "") and "Traceback" not in error
    assert all(message in error for _, _, message in B66.values())
    assert (
        "override: optim.lr = 1e-3: unknown key" in error and "data.trian = x: unknown key; did you mean train" in error
    )


def test_b66_a_wrong_option_is_told_with_the_usage(mmcp):
    code, _, error = mmcp("train", DEMO, "--rank", "2", "--learning-rate", "1")
    assert code == 2 and "usage: mmcp train" in error and "--learning-rate" in error


def test_b67_numbers_keep_their_meaning_through_the_command_line(mmcp):
    data = f"data.train={CASES / 'B69_two_shards'}"
    for written, key, shown in (
        ("1e-5", "learning_rate", "1e-05"),
        ("1.0e-5", "learning_rate", "1e-05"),
        ("1E-5", "learning_rate", "1e-05"),
        ("1e-08", "eps", "1e-08"),
        ("1e4", "total_steps", "10000"),
    ):
        code, output, error = mmcp("train", DEMO, "--dry-run", data, "folder=none", *ALONE, f"optim.{key}={written}")
        assert code == 0 and f"\n  {key}: {shown}\n" in output, error
    wrong = (
        "train.strict=off",
        "optim.warmup_steps=010",
        "optim.total_steps=1:30",
        "seed=2024-01-02",
    )
    code, _, error = mmcp("train", DEMO, "--dry-run", data, *ALONE, *wrong)
    assert code == 1 and "4 problems" in error
    assert "write true or false" in error and "octal" in error and "base 60" in error and "date" in error


B69 = {
    "folder": ("my data [v1]", 2),
    "glob": ("my*/shard-*.tar", 2),
    "braces": ("my data [v1]/shard-{000..001}.tar", 2),
    "list": ("my data [v1]/shard-{001,000}.tar", 2),
    "one": ("my data [v1]/shard-001.tar", 1),
    "no match": ("my data [v1]/nothing-*.tar", "pattern 'my data [v1]/nothing-*.tar' matches no file"),
    "explosion": ("{0..9}" * 6, f"pattern '{'{0..9}' * 6}' stands for 1000000 names"),
    "more than there is": ("my*/shard-{000..002}.tar", "pattern 'my*/shard-{000..002}.tar' names 'my*/shard-002.tar'"),
}


@pytest.mark.parametrize("name", B69)
def test_b69_data_are_found_and_counted_or_refused_by_name(mmcp, tmp_path, monkeypatch, name):
    shutil.copytree(CASES / "B69_two_shards", tmp_path / "my data [v1]")
    monkeypatch.chdir(tmp_path)
    spec, found = B69[name]
    code, _, error = mmcp("train", DEMO, "--dry-run", f'data.train="{spec}"', "folder=run", *ALONE)
    if isinstance(found, int):
        assert code == 0 and f"data.train: {found} samples in {found} shards, 0 problems" in error
    else:
        assert code == 1 and f"data.train: {found}" in one_line(error, tmp_path / "run")


ODD = [
    "-leading-dash.mp4", "UPPER.MP4", "a:b.mp4", "brace{0..2}[x].mp4", "percent%03d.mp4", "quote'\".mp4",
    "with space.mp4", "\u00e9\u00fc \u2014 \u65e5\u672c\u8a9e \U0001f600.mp4",
]  # fmt: skip


def test_b69_odd_file_names_survive_from_the_manifest_to_the_report(mmcp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"video": name, "conversations": talk("<video>what?", "that")} for name in ODD]
    Path("manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ODD:
        shutil.copy(CASES / "ref_4s_noaudio.mp4", name)
    code, output, error = mmcp("prepare", "manifest.jsonl", "--out", "out [x]", "--json")
    assert code == 0 and json.loads(output)["accepted"] == 8, error
    records = map(json.loads, Path("out [x]/shard-000000.jsonl").read_text().splitlines())
    assert [record["media"]["source"] for record in records if "media" in record] == ODD
    shards = ShardSet.open("out [x]")
    for number in range(8):
        media = next(iter(shards.load(number)[1].values()))
        assert media.clip is not None and media.clip.video is not None
        assert len(decode_frames(media.file, media.clip, range(120), (8, 8)).pixels) == 120
    for name in ODD:
        code, output, error = mmcp("inspect", name, "--ranks", 2, "--html", "page.html")
        assert code == 0 and name in output.replace("\n", ""), error
    assert ODD[-1] in Path("page.html").read_text(encoding="utf-8")


def talk(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


B70 = {
    "held-out data missing": (["data.held_out=gone"], "data.held_out: pattern 'gone' matches no file (TMP/gone)"),
    "held-out data empty": (["data.held_out=empty"], "data.held_out: folder 'empty' holds no .tar file (TMP/empty)"),
    "training data missing": (["data.train=gone/*.tar"], "data.train: pattern 'gone/*.tar' matches no file"),
    "tokenizer missing": (
        ["tokenizer.file=t.json"],
        "tokenizer.file: tokenizer file 't.json' does not exist (TMP/t.json)",
    ),
    "folder under a file": (["folder=file/run"], "folder: run folder 'file/run' cannot be written (TMP/file/run"),
    "folder read-only": (["folder=/proc/1/run"], "folder: run folder '/proc/1/run' cannot be written (/proc/1/run"),
    "folder full": (["folder=full"], "folder: run folder 'full' already exists (TMP/full)"),
    "nothing to resume": (["--resume"], "folder: no run to resume: 'run' (looked for the folder TMP/run)"),
    "no checkpoint": (["--resume", "folder=full"], "no complete checkpoint to resume in TMP/full/checkpoints"),
    "more ranks than heads": (["--ranks", "5"], "mesh: ulysses=5 ranks for 4 query heads"),
    "ring in a mode that does not cross it": (["mesh.ring=3"], "mesh: ulysses=6 ranks for 4 query heads"),
    "ranks that do not divide": (["--ranks", "3", "mesh.dp_shard=2"], "--ranks 3 is not a multiple of dp_replicate=1"),
    "heads that do not divide": (["model.backbone.kv_heads=3"], "4 query heads are not a multiple of 3"),
    "no room": (["clip.budget.tokens=16"], "data.train: none of 2 samples can be used; the first: sample '000': "),
    "rows too short": (["data.row_tokens=512"], "clip.budget.tokens=1024 lets a sample be longer than data.row_tokens"),
}


@pytest.mark.parametrize("name", B70)
def test_b70_what_would_fail_later_fails_first(mmcp, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "full"):
        (tmp_path / folder).mkdir()
    for file in ("file", "full/x"):
        (tmp_path / file).write_text("")
    words, message = B70[name]
    shards = f"data.train={CASES / 'B69_two_shards'}"
    code, _, error = mmcp("train", DEMO, shards, *ALONE, "folder=run", *words)
    line = one_line(error, tmp_path / "run")
    assert code == 1 and message.replace("TMP", str(tmp_path)) in line and "Traceback" not in error


def test_b70_all_of_it_at_once_and_a_traceback_on_demand(mmcp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = ("data.train=gone", "data.held_out=lost", "tokenizer.file=t.json", "folder=/proc/1/run", "mesh.ulysses=9")
    code, _, error = mmcp("train", DEMO, *wrong, "--dry-run")
    assert code == 1 and f"{DEMO}: 5 problems" in error and "Traceback" not in error
    for field in ("data.train: ", "data.held_out: ", "tokenizer.file: ", "folder: ", "mesh: "):
        assert f"\n  {field}" in error
    assert "Traceback" in mmcp("train", DEMO, *wrong, "--debug")[2]


@pytest.mark.parametrize(("config", "message"), [("gone.yaml", "no such file; check"), (".", "is a folder; name the")])
def test_b70_a_config_that_is_none(mmcp, tmp_path, monkeypatch, config, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = mmcp("train", config)
    assert code == 1 and str((tmp_path / config).resolve()) in error and message in error and error.count("\n") == 1


@pytest.mark.full
def test_b70_processes_of_torchrun_tell_a_wrong_config_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mmcp.cli", "train"]
    settings = ["data.train=gone", *ALONE, f"folder={tmp_path / 'run'}"]
    ended = subprocess.run(
        [*command, str(DEMO), *settings],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode != 0 and ended.stderr.count("error: ") == 1


BAD_ROWS = {
    "missing file": ({"video": "gone.mp4", "conversations": talk("<video>", "x")}, "names the file 'gone.mp4'"),
    "field missing": ({"video": "good.mp4"}, "needs the field 'messages' or 'conversations'"),
    "marks": ({"video": "good.mp4", "conversations": talk("<video><video>", "x")}, "has 2 <video> marks for 1 file;"),
    "empty": ({"conversations": []}, "has an empty conversation"),
    "broken clip": ({"video": "no_moov.mp4", "conversations": talk("<video>", "x")}, "no index (moov missing"),
    "empty clip": ({"video": "zero_bytes.mp4", "conversations": talk("<video>", "x")}, "empty file (0 bytes)"),
    "no picture": ({"video": "audio_only.mp4", "conversations": talk("<video>", "x")}, "no video stream"),
}


def test_bad_rows_are_told_with_row_and_file_and_counted(mmcp, tmp_path):
    shutil.copytree(CASES / "B09_broken", tmp_path, dirs_exist_ok=True)
    shutil.copy(CASES / "B46_silent_track.mp4", tmp_path)
    silent = {"video": "B46_silent_track.mp4", "conversations": talk("<video>", "x")}
    rows = [*(row for row, _ in BAD_ROWS.values()), silent]
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output, _ = mmcp("prepare", manifest, "--out", tmp_path / "out")
    told, joined = output.splitlines(), " ".join(output.split())
    assert code == 1 and f"{len(BAD_ROWS)} rejected rows with their reasons" in joined
    for row, (_, reason) in enumerate(BAD_ROWS.values(), start=1):
        assert any(line.startswith(f"rejected: row {row}: ") for line in told) and reason in joined
    assert mmcp("prepare", manifest, "--out", tmp_path / "again", "--skip-bad")[0] == 0
    code, _, error = mmcp("prepare", manifest, "--out", tmp_path / "strict", "--strict")
    assert code == 1 and error.count("\n") == 1
    assert f"{manifest}, row 1 (id" in error or f"{manifest}, row 1: names the file 'gone.mp4'" in error
    assert mmcp("prepare", manifest, "--out", tmp_path / "out")[0] == 1
    assert mmcp("prepare", manifest, "--out", manifest / "out")[0] == 1


def broken_shard(path: Path, names: list[str]) -> Path:
    """Write clips of B09 as a shard of other origin, with a caption each."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            for member, data in ((name, (CASES / "B09_broken" / name).read_bytes()), (f"{name[:-4]}.txt", b"words")):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


BROKEN = ["html_saved_as.mp4", "no_moov.mp4", "audio_only.mp4", "zero_frames.mp4"]
USABLE = ["good.mp4", "one_frame.mp4", "bitflips.mp4", "cut_tail.mp4"]
SHORT = ["optim.total_steps=3", "optim.warmup_steps=1", "data.documents_per_step=9"]


def train_apart(shard: Path, folder: Path, *settings: str) -> subprocess.CompletedProcess:
    """Train 3 steps on 2 ranks in a process of its own."""
    words = [f"data.train={shard}", f"folder={folder}", *ALONE, *SHORT, *settings]
    return subprocess.run(
        [sys.executable, "-m", "mmcp.cli", "train", str(DEMO), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_b09_training_skips_broken_clips_and_names_them(tmp_path):
    shard = broken_shard(tmp_path / "clips.tar", [*USABLE, "zero_bytes.mp4", *BROKEN])
    ended = train_apart(shard, tmp_path / "run", "train.max_lost_share=1")
    assert ended.returncode == 0, ended.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert f"warning: {shard}: key 'zero_bytes' has an empty field 'mp4'" in ended.stderr
    end = ended.stderr[ended.stderr.index("samples came up") :]
    for name in BROKEN:
        assert f"key '{name[:-4]}'" in end or f"sample '{name[:-4]}'" in end, end
    assert "sample 'bitflips'" in end and "cannot be decoded" in end


def test_b09_strict_training_stops_and_names_the_clip_once(tmp_path):
    shard = broken_shard(tmp_path / "clips.tar", ["good.mp4", "no_moov.mp4"])
    ended = train_apart(shard, tmp_path / "run", "train.strict=true")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"{shard}, key 'no_moov'" in errors[0] and "train.strict is set" in errors[0]


def test_b09_only_broken_clips_stop_before_the_first_step(mmcp, tmp_path):
    shard = broken_shard(tmp_path / "clips.tar", BROKEN)
    code, _, error = mmcp("train", DEMO, f"data.train={shard}", f"folder={tmp_path / 'run'}", *ALONE)
    line = one_line(error, tmp_path / "run")
    assert code == 1 and f"none of {len(BROKEN)} samples can be used; the first: {shard}, key 'html_saved_as'" in line


def test_b20_damaged_shards_are_told_once_each_and_strict_stops(mmcp, tmp_path):
    words = ("train", DEMO, f"data.train={CASES / 'B20_corrupt'}", f"folder={tmp_path / 'run'}", *ALONE, "--dry-run")
    code, _, error = mmcp(*words)
    assert code == 0 and "data.train: 4 samples in 4 shards, 3 problems" in error
    assert [error.count(f"warning: {CASES / 'B20_corrupt' / f'shard-00{i}.tar'}") for i in range(4)] == [0, 1, 1, 1]
    code, _, error = mmcp(*words, "train.strict=true")
    assert code == 1 and "shard-001.tar: is cut off inside 'b1.mp4'" in one_line(error, tmp_path / "run")


LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(("groups", "cp"), LAYOUTS)
@pytest.mark.parametrize(("case", "batch"), [("B21_B22_four", 8), ("B21_B22_four", 5), ("B18_few", 3)])
def test_b18_b21_every_sample_once_an_epoch_on_any_layout(case, batch, groups, cp):
    pipeline, keys = pipeline_of(case, f"mesh.dp_shard={groups}", f"mesh.ulysses={cp}"), keys_of(case)
    order, taken = Order(3, len(keys)), []
    while len(taken) < 2 * len(keys):
        numbers = order.take(batch)
        step = pipeline.plan(numbers)
        ids = {rank: ids_of_rank(pipeline, step, *rank) for rank in np.ndindex(groups, cp)}
        assert all(ids[group, peer] == ids[group, 0] for group, peer in ids)
        assert sorted(name for group in range(groups) for name in ids[group, 0]) == sorted(keys[n] for n in numbers)
        taken += numbers
    first, second = taken[: len(keys)], taken[len(keys) : 2 * len(keys)]
    assert sorted(first) == sorted(second) == list(range(len(keys)))
    assert first != second


def keys_of(case: str) -> list[str]:
    return [sample.key for sample in ShardSet.open(CASES / case).samples]


def ids_of_rank(pipeline: Pipeline, step, group: int, cp: int) -> list[str]:
    """Names of the samples whose rows a rank works on in one step."""
    rows = [row for row in step.plan.groups[group] if row is not None]
    return [document.sample.id for row in rows for document in step.documents[row]]


def pipeline_of(case: str, *overrides: str) -> Pipeline:
    settings = load(RunConfig, DEMO, [f"data.train={CASES / case}", *ALONE, *overrides])
    tokenizer = settings.tokenizer.build()
    shards = ShardSet.open(settings.data.train)
    return Pipeline(settings, tokenizer, shards, settings.planner(tokenizer.vocab_size))


@pytest.mark.parametrize(("case", "workers"), [("B21_B22_four", 1), ("B21_B22_four", 2), ("B18_few_with_empty", 2)])
def test_b18_b21_workers_decode_each_unit_on_one_rank(case, workers):
    pipeline = pipeline_of(case, "mesh.dp_shard=2", "mesh.ulysses=2")
    plan = pipeline.plan(range(len(pipeline.shards)))
    decoded: dict[tuple[int, int], int] = {}
    pool = WorkerPool(workers, 60.0)
    try:
        for group, cp in np.ndindex(2, 2):
            rank = SimpleNamespace(data=SimpleNamespace(index=group), cp=SimpleNamespace(index=cp))
            (step,) = read_steps(pipeline, rank, pool, plan=lambda _: plan, steps=range(1))
            for job, reply in step.results:
                assert isinstance(reply, tuple), reply
                for unit in job.key.units:
                    decoded[job.key.row, unit] = decoded.get((job.key.row, unit), 0) + 1
    finally:
        pool.close()
    units = {(number, unit) for number, row in enumerate(plan.plan.rows) for unit in range(len(row.units))}
    assert decoded == dict.fromkeys(units, 1)
