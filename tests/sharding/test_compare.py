"""Records of planned workloads: what they hold, that missed targets are told, and the table made of them.

Run: python -m pytest tests/sharding/test_compare.py
"""

import json

import pytest

from experiments.ablate_sharding import main
from mmcp.sharding.balance import COSTS
from mmcp.sharding.compare import missed_targets, plan_workloads
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import WORKLOADS, reference_mesh


def test_one_record_for_each_family():
    records = [planned.record for planned in plan_workloads("all", 4, length=0.01)]
    assert [record["workload"] for record in records] == sorted(WORKLOADS)
    for record in records:
        assert record["ranks"] == len(record["per_rank"]) == 4 and record["model"] == "softmax"
        assert set(record["bounds"]) == set(COSTS)
        assert record["makespan_bound"] <= record["makespan_ratio"] * (1 + 1e-12)
        encodes_evenly = record["imbalance"]["encode"] <= max(1.05, 1.03 * record["bounds"]["encode"])
        bounded = [cost for cost in COSTS if cost != "decode" or encodes_evenly]
        assert all(record["bounds"][cost] <= record["imbalance"][cost] * (1 + 1e-12) for cost in bounded)
    json.dumps(records, allow_nan=False)


def test_one_record_for_each_strategy():
    planned = plan_workloads("packed_shorts", 16, strategies=tuple(STRATEGIES), model="hybrid", length=0.02)
    records = {each.record["strategy"]: each.record for each in planned}
    assert set(records) == set(STRATEGIES)
    best = min(record["makespan_ratio"] for record in records.values())
    assert records["balanced"]["makespan_ratio"] <= 1.01 * best
    assert records["replicate"]["imbalance"]["decode"] == pytest.approx(16)
    assert records["replicate"]["frames_factor"] == pytest.approx(16)
    assert records["replicate"]["routed_bytes"] == 0


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="lecture_hour"):
        next(plan_workloads("lecture", 2))
    with pytest.raises(KeyError, match="balanced"):
        next(plan_workloads("podcast", 2, strategies=("even",), length=0.01))
    with pytest.raises(ValueError, match="use at least 1"):
        next(plan_workloads("podcast", 0, length=0.01))


def test_meshes_keep_the_kv_heads_whole():
    assert [reference_mesh(ranks) for ranks in (1, 2, 8, 12, 16, 64)] == [
        (1, 1), (1, 2), (1, 8), (3, 4), (2, 8), (8, 8)
    ]  # fmt: skip


def test_targets_bend_to_bounds_only():
    even = dict.fromkeys(COSTS, 1.0)
    record = {"makespan_ratio": 1.0, "makespan_bound": 1.0, "imbalance": even, "bounds": even}
    record |= {"frames_factor": 1.0, "frames_bound": 1.0}
    assert missed_targets(record) == []
    assert missed_targets(record | {"makespan_ratio": 1.04, "frames_factor": 1.2}) == ["makespan", "frames"]
    assert missed_targets(record | {"makespan_ratio": 1.04, "makespan_bound": 1.01}) == []
    assert missed_targets(record | {"imbalance": even | {"decode": 1.06}}) == ["decode"]
    assert missed_targets(record | {"imbalance": even | {"decode": 2.06}, "bounds": even | {"decode": 2.0}}) == []


def test_the_table_of_strategies(tmp_path):
    entries = main(
        ["--ranks", "2", "8", "--workloads", "podcast", "text_only", "--length", "0.02", "--out", str(tmp_path)]
    )
    assert len(entries) == 2 * 2 * len(STRATEGIES)
    written = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert written == entries
    assert all(entry["gain"] == 1.0 for entry in entries if entry["strategy"] == "balanced")
    assert min(entry["gain"] for entry in entries) > 0.98
