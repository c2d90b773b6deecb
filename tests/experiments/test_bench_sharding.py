"""mmcp bench calibrate and mmcp bench sharding run through in small; their sums by hand.

Run: python -m pytest tests/experiments/test_bench_sharding.py -m full
"""

import json

import pytest

from experiments.bench_sharding import STAGES, ShardingBench, summary
from mmcp import cli
from mmcp.sharding.cost import DEFAULT_RATES

BASE = "base=tests/training/tiny.yaml"


@pytest.mark.full
def test_calibration_finds_a_rate_for_every_setting(capsys, tmp_path):
    assert cli.main(["bench", "calibrate", "smoke=true", BASE, f"folder={tmp_path}", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)
    assert rates.keys() == set(DEFAULT_RATES["cpu"].__dataclass_fields__)
    assert all(isinstance(rate, int) and rate >= 0 for rate in rates.values())
    assert min(rates[name] for name in rates if name.endswith(("percent", "second"))) > 0


@pytest.mark.full
def test_strategies_take_steps_in_turn_and_earlier_ones_count(capsys, tmp_path):
    command = ["bench", "sharding", "smoke=true", "rounds=1", f"folder={tmp_path}", "--json"]
    for steps in (1, 1):
        assert cli.main(command) == 0
        made = json.loads(capsys.readouterr().out)["strategies"]
        assert [entry["steps"] for entry in made.values()] == [steps] * 4
    losses = [entry["loss"] for entry in made.values()]
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5), "a strategy changes no loss"
    assert made["replicate"]["predicted"]["decode"] > 1.5 * made["balanced"]["predicted"]["decode"]


def test_ratios_are_medians_after_the_first_round_over_those_of_the_first_strategy():
    def step(strategy, decode, encode, loss=1.0):
        rank = dict.fromkeys(STAGES, 0.0) | {"decode": decode, "encode": encode}
        measured = rank | {"compute": encode, "total": decode + encode}
        idle = dict.fromkeys(measured, 0.0)
        return {
            "strategy": strategy,
            "loss": loss,
            "predicted": [rank | {"total": 3.0}] * 2,
            "ranks": [idle, measured],
        }

    steps = [step(name, *seconds) for seconds in ((90, 90), (1, 4), (2, 6), (3, 2)) for name in ("a", "b")]
    steps += [step("b", 30, 30), step("b", 30, 30)]
    found = summary(ShardingBench(strategies=("a", "b")), steps)["strategies"]
    assert found["a"]["steps"] == 3 and found["b"]["steps"] == 5
    assert found["a"]["measured_first"] == 5 and found["a"]["measured_beside"] == 4
    assert found["b"]["measured_first_ratio"] == 8 / 5 and found["b"]["measured_beside_ratio"] == 6 / 4
    assert found["b"]["predicted_first_ratio"] == 1.0
