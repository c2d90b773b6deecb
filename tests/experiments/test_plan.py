"""The verb `mmcp plan`: what it prints, and what it refuses.

Run: python -m pytest tests/experiments/test_plan.py
"""

import json

import pytest

from mmcp import cli

PARTS = ("parameters", "gradients", "optimizer", "activations", "attention", "loss", "encoder", "media", "total")


def test_the_record_of_a_number_of_tokens(capsys):
    words = ["plan", "--model", "qwen3-0.6b", "--tokens", "32768", "--gpus", "8", "--rows", "4", "--json"]
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] and record["step_seconds"] > 0 and record["traffic_bytes"] > 0
    assert set(record["per_rank_bytes"]) == set(PARTS)
    assert record["per_rank_bytes"]["total"] == sum(record["per_rank_bytes"][part] for part in PARTS[:-1])
    mesh = record["mesh"]
    assert mesh["dp_replicate"] * mesh["dp_shard"] * mesh["ring"] * mesh["ulysses"] == 8
    assert {"text": "one matrix for embedding and head", "offered": False} in record["assumptions"]


def test_a_clip_that_does_not_exist_yet_simulated(capsys):
    words = ["plan", "--model", "Qwen3-0.6B", "--clip", "20s@1fps", "--simulate", "4", "--json"]
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["per_rank_bytes"]["encoder"] > 0 and record["per_rank_bytes"]["media"] > 0
    assert record["simulation"]["ranks"] == 4 and record["simulation"]["disagreements"] == []
    assert record["simulation"]["slowest_rank_seconds"] >= record["simulation"]["mean_rank_seconds"] > 0


def test_the_tables_name_choice_and_assumptions(capsys):
    assert cli.main(["plan", "--tokens", "100000", "--gpus", "4", "--gpu", "H200"]) == 0
    text = capsys.readouterr().out
    assert "choice" in text and "assumed 1" in text and "why 1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "9"], "name the devices: --gpus N"),
        (["--gpus", "8"], "either --clip 1h@1fps (or a file) or --tokens N"),
        (["--gpus", "0", "--tokens", "9"], "--gpus 0: use at least 1"),
        (["--gpus", "8", "--tokens", "9", "--gpu", "B9"], "--gpu B9: unknown; use one of A100, H100, H200"),
        (["--gpus", "8", "--tokens", "9", "--model", "GPT"], "--model GPT: neither a folder with config.json"),
        (["--gpus", "8", "--clip", "1h@1"], "--clip 1h@1: neither a file nor a length such as 1h@1fps"),
        (["--gpus", "8", "--tokens", "9", "--offload", "disk"], "--offload disk: unknown; use optimizer or"),
        (["--gpus", "8", "--tokens", "9", "--simulate", "4"], "give both the same number"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(words, message, capsys):
    assert cli.main(["plan", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
