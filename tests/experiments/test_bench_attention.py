"""mmcp bench attention: runs through in small, its fit by hand, and what it refuses.

Run: python -m pytest tests/experiments/test_bench_attention.py -m full
"""

import json

import pytest

from experiments.bench_attention import LAYERS, memory_fit, zigzag
from mmcp import cli


@pytest.mark.full
def test_it_runs_and_tells_every_layer(capsys, tmp_path):
    assert cli.main(["bench", "attention", "smoke=true", f"folder={tmp_path / 'bench'}", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {row["layer"] for row in made["layers"]} == set(LAYERS) == {fit["layer"] for fit in made["memory_fit"]}
    states = [row["bytes"] for row in made["layers"] if row["layer"] == "gated_delta state"]
    assert len(states) == 3 and len(set(states)) == 1
    assert (tmp_path / "bench_smoke" / "time.png").stat().st_size > 0


def test_the_fit_of_a_line_is_the_line():
    rows = [{"layer": "x", "tokens": tokens, "peak_mib": 3 + tokens / 1024} for tokens in (1024, 2048, 8192)]
    (fit,) = memory_fit(rows)
    assert (round(fit["kib_per_token"], 6), round(fit["mib"], 6), round(fit["r_squared"], 6)) == (1024 / 1024, 3, 1)


def test_zigzag_gives_each_ring_rank_an_early_and_a_late_part():
    assert zigzag(8, 2, 1).tokens == (((0, 2), (6, 8)), ((2, 6),))


def test_an_unknown_measurement_is_refused(capsys):
    assert cli.main(["bench", "atention"]) == 1
    assert "unknown measurement 'atention'; did you mean 'attention'?" in capsys.readouterr().err
