"""The ablation: its smoke run leaves run folders, tables and figures, whose numbers are computed again from the runs.

The run is one rank in this process. Run: pytest tests/experiments/test_ablate_attention.py
"""

import csv
import json
import socket
import statistics
from pathlib import Path

import pytest

from experiments.ablate_attention import AblateConfig, run
from experiments.base import RunConfig
from experiments.compare_runs import compare
from mmcp.config import ConfigError, load

CONFIG = Path(__file__).parents[2] / "experiments" / "configs" / "ablate.yaml"
VARIANTS = "variants={softmax: [{name: softmax}], mix: [{name: linear}, {name: softmax}]}"


@pytest.fixture
def one_rank_here(monkeypatch):
    """Let `launch` call its function in this process, as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.chdir(CONFIG.parents[2])


def ablate(folder: Path) -> dict:
    return run(CONFIG, ["smoke=true", f"folder={folder}/ablation", VARIANTS], ranks=1).record


def test_smoke(one_rank_here, tmp_path, capsys):
    record = ablate(tmp_path)
    assert capsys.readouterr().out == "", "with --json the record is all that is printed"
    folder = tmp_path / "ablation_smoke"
    assert record["seeds"] == 2 and record["steps"] == 2 and list(record["variants"]) == ["softmax", "mix"]
    runs = {name: [folder / name / f"seed_{seed}" for seed in (0, 1)] for name in record["variants"]}
    for name, folders in runs.items():
        losses, rights = [], []
        for each in folders:
            lines = [json.loads(text) for text in (each / "metrics.jsonl").read_text().splitlines()]
            losses.append(lines[-1]["held_out_loss"])
            tasks = json.loads((each / "eval.json").read_text())["tasks"].values()
            rights.append(sum(round(task["accuracy"] * task["n"]) for task in tasks) / sum(t["n"] for t in tasks))
            assert (each / "config.yaml").is_file() and (each / "report" / "index.html").is_file()
        found = record["variants"][name]
        assert found["loss"] == {"mean": pytest.approx(statistics.mean(losses)), "std": statistics.stdev(losses)}
        assert found["accuracy"]["mean"] == pytest.approx(statistics.mean(rights))
        assert found["peak_mb"]["mean"] > 100 and found["tokens_per_second"]["mean"] > 0
    softmax, mix = record["variants"]["softmax"], record["variants"]["mix"]
    backbone = load(RunConfig, runs["mix"][0] / "config.yaml").model.backbone
    gates = (
        sum(variant.output_gate for variant in backbone.variants) * backbone.width * backbone.heads * backbone.head_dim
    )
    assert mix["parameters"]["mean"] - softmax["parameters"]["mean"] == gates > 0
    assert mix["flops"]["mean"] != softmax["flops"]["mean"]
    assert json.loads((folder / "table.json").read_text()) == record
    with (folder / "table.csv").open() as file:
        rows = {(row["variant"], row["figure"]): float(row["mean"]) for row in csv.DictReader(file)}
    assert rows["mix", "loss"] == mix["loss"]["mean"] and ("mix", "accuracy/color") in rows
    table = (folder / "table.md").read_text().splitlines()
    assert table[0] == "|  | softmax | mix | chance |" and len(table) == 2 + 6 + len(record["chance"])
    assert all((folder / name).stat().st_size > 1000 for name in ("loss.png", "accuracy.png"))

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/seed_*/*.json*")}
    assert ablate(tmp_path) == record
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/seed_*/*.json*")} == before

    with pytest.raises(ValueError, match=r"softmax/seed_0' holds a run of other settings"):
        run(
            CONFIG,
            ["smoke=true", f"folder={tmp_path}/ablation", VARIANTS, 'changes=["seed=7", "dtype=float64"]'],
            ranks=1,
        )

    cut = folder / "mix" / "seed_1" / "metrics.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ValueError, match="different numbers of tokens"):
        compare({name: folders for name, folders in runs.items()})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("variants={}", "variants"),
        ("variants={a/b: [{name: softmax}]}", "a/b"),
        ("variants={a: []}", "'a'"),
        ("variants={a: [{name: sofmax}]}", "softmax"),
        ("seeds=[1, 1]", "repeat"),
        ("seeds=[]", "seeds"),
        ("steps=0", "steps"),
        ("stepz=3", "steps"),
    ],
)
def test_what_cannot_be_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load(AblateConfig, CONFIG, [override])
