"""The measurement of a row of text under Trainer refuses what it lacks; what it sums up of the drivers' lines.

The drivers themselves are not part of this repository. Run: python -m pytest tests/experiments/test_bench_hf_text.py
"""

import pytest

pytest.importorskip("transformers")

from experiments import bench_hf_text
from experiments.bench import run
from experiments.bench_hf_text import OURS_UNDER_TRAINER, REFERENCE, THEIRS
from experiments.bench_peers import Drivers


def test_a_folder_without_drivers_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not hold the peers' drivers"):
        run("hf_text", [f"peers={tmp_path}"])


@pytest.mark.parametrize(("error", "is_ok"), [(1e-6, True), (1e-2, False)])
def test_ours_is_held_to_the_reference(monkeypatch, error, is_ok):
    seconds = {REFERENCE: [3.0, 5.0], THEIRS: [2.0, 4.0], OURS_UNDER_TRAINER: [1.0, 2.0]}

    def step(_drivers: Drivers, name: str, *, is_first: bool) -> dict:
        found = {"steps": seconds[name], "step_s_median": 1.0, "rss_grow_mb": [1, 2], "loss": 1.0, "grad_norm": 1.0}
        return found | ({} if is_first and name == REFERENCE else {"grad_rel_err": error})

    monkeypatch.setattr(bench_hf_text.Drivers, "check", lambda _drivers: None)
    monkeypatch.setattr(bench_hf_text.Drivers, "step", step)
    outcome = run("hf_text", ["rounds=2"])
    assert outcome.record["faster_than_usual"] == 2.0 and outcome.is_ok is is_ok
    assert [row["name"] for row in outcome.record["rows"]] == [REFERENCE, THEIRS, OURS_UNDER_TRAINER]
