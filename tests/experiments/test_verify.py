"""mmcp verify: what it prints and returns when ranks compute the same, when they do not, and when it cannot run.

Run: python -m pytest tests/experiments/test_verify.py
"""

import json
from dataclasses import replace

import pytest
import torch

import experiments.verify
from experiments.exactness import Computed
from mmcp import cli
from tests.training.tiny_run import CONFIG

FIELDS = [
    "ok",
    "dtype",
    "loss_rel",
    "hidden_rel",
    "grad_rel_max",
    "worst_parameter",
    "ranks",
    "ring",
    "ulysses",
    "attention",
]


def verify(capsys, *arguments: str) -> tuple[int, dict]:
    """Return the exit code of `mmcp verify --json` and what it printed."""
    code = cli.main(["verify", str(CONFIG), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--ranks", "2"), id="prepared samples"),
        pytest.param(("--ranks", "3", "--synthetic"), id="drawn rows", marks=pytest.mark.full),
        pytest.param(("--ranks", "2", "--synthetic", "dtype=float32"), id="float32", marks=pytest.mark.full),
    ],
)
def test_ranks_are_told_to_compute_the_same(capsys, tiny_shards, arguments):
    code, record = verify(capsys, *arguments, f"data.train={tiny_shards}")
    assert list(record) == FIELDS
    assert code == 0 and record["ok"] and record["ranks"] == int(arguments[1])
    limit = {"float64": 1e-10, "float32": 1e-5}[record["dtype"]]
    assert 0 < max(record["loss_rel"], record["hidden_rel"], record["grad_rel_max"]) < limit
    assert record["dtype"] == ("float32" if "dtype=float32" in arguments else "float64")


LAYERS = {
    "ulysses on a 2-D mesh": (2, 2, ("attention=softmax", "mode=ulysses", "mesh.ring=2"), 4),
    "ring": (2, 1, ("attention=softmax", "mode=ring"), 2),
    "allgather": (2, 2, ("attention=softmax", "mode=allgather", "mesh.ring=2"), 4),
    "state": (2, 1, ("attention=linear", "mode=state"), 2),
    "scan": (3, 1, ("attention=gated_delta", "mode=scan"), 3),
    "hybrid": (2, 1, ("attention=gated_delta,kernelised,linear,softmax", "mode=state,scan,ulysses,ring"), 2),
    "hybrid in two dimensions": (2, 2, ("attention=linear,softmax", "mode=scan,ring", "mesh.ring=2"), 4),
}


@pytest.mark.full
@pytest.mark.parametrize("case", LAYERS)
def test_every_mode_and_pattern_is_verified(capsys, case):
    ring, ulysses, words, ranks = LAYERS[case]
    code, record = verify(capsys, "--ranks", str(ranks), "--synthetic", *words)
    assert code == 0 and record["ok"] and (record["ring"], record["ulysses"]) == (ring, ulysses)
    assert 0 < record["grad_rel_max"] < 1e-10


GOOD = Computed(1.5, {0: torch.ones(3, 2)}, {"embedding.weight": torch.ones(4), "head.weight": torch.ones(2)})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (replace(GOOD, loss=1.5001), "loss_rel"),
        (replace(GOOD, hidden={0: torch.full((3, 2), 1.01)}), "hidden_rel"),
        (replace(GOOD, gradients={**GOOD.gradients, "head.weight": torch.tensor([1.0, 1.1])}), "grad_rel_max"),
        (replace(GOOD, gradients={**GOOD.gradients, "head.weight": torch.tensor([1.0, torch.nan])}), "grad_rel_max"),
    ],
)
def test_ranks_that_compute_something_else_are_a_failure(capsys, monkeypatch, wrong, error):
    monkeypatch.setattr(
        experiments.verify, "launch", lambda _, ranks, *args: (GOOD if ranks == 1 else wrong).write(args[-1])
    )
    code, record = verify(capsys, "--ranks", "2", "--synthetic")
    assert code == 1 and record["ok"] is False
    assert record[error] is None or record[error] > 1e-5
    assert record["worst_parameter"] == ("head.weight" if error == "grad_rel_max" else "embedding.weight")
    assert cli.main(["verify", str(CONFIG), "--ranks", "2", "--synthetic"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "2", "data.train=nowhere"), "--synthetic"),
        (("--ranks", "1", "--synthetic"), "--ranks 2 or more"),
        (("--ranks", "5", "--synthetic"), "use ulysses at most 4"),
        (("--ranks", "2", "attention=sofmax"), "attention 'sofmax' is unknown; use one of gated_delta, kernelised"),
        (
            ("--ranks", "2", "attention=linear", "mode=ring"),
            "'linear' works in ulysses or state or scan, not in 'ring'",
        ),
        (("--ranks", "2", "mode=rong"), "mode 'rong' is unknown; attention 'linear' works in ulysses or state or scan"),
        (
            ("--ranks", "2", "attention=linear,softmax", "mode=state,ring,ring"),
            "names 3 modes for the layers linear, so",
        ),
        (("--ranks", "2", "mode=ring", "mode=state"), "give mode once"),
        (("--ranks", "2", "mode="), "names joined by commas, as mode=state,ring"),
        (
            ("--ranks", "6", "--synthetic", "attention=linear,softmax", "mode=state,ulysses"),
            "that crosses it (pattern.1: softmax in mode 'ulysses')",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused_with_a_remedy(capsys, arguments, message):
    assert cli.main(["verify", str(CONFIG), *arguments]) == 1
    assert message in capsys.readouterr().err
