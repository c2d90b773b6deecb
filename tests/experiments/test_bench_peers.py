"""What the bench of peers makes of the lines and messages of drivers, on drawn-up examples, and its floor by hand.

Run: python -m pytest tests/experiments/test_bench_peers.py
"""

import pytest

from experiments.bench_peers import json_lines, reason, run, summary
from experiments.step_floor import Ceilings, StepShape, floor_seconds


def line(seconds: float, growth: int) -> dict:
    return {
        "steps": [seconds],
        "step_s_median": seconds,
        "rss_grow_mb": [growth - 7, growth],
        "loss": 9.0,
        "grad_norm": 3.0,
        "grad_rel_err": 1e-7,
    }


def test_medians_are_put_beside_the_fastest_and_the_leanest_peer():
    lines = {
        "reference": [line(1.0, 1)],
        "ds-alst-plain": [line(s, 400) for s in (4.0, 2.0, 3.0)],
        "ds-alst-lean": [line(5.0, 200), {"error": "lost"}],
        "torch-cp-ring": [{"error": "refused"}],
        "mmcp": [line(1.5, 150)],
    }
    reference, plain, lean, stopped, ours = summary(lines, floor=1.2)
    assert (plain["seconds"], plain["growth_mb"], lean["runs"]) == (3.0, 400, [5.0])
    assert (ours["ratio_to_fastest_peer"], ours["growth_to_leanest_peer"], ours["to_floor"]) == (0.5, 0.75, 1.25)
    assert reference["ratio_to_fastest_peer"] == pytest.approx(1 / 3, abs=1e-3)
    assert stopped["seconds"] is None and stopped["error"] == "refused"


def test_only_json_lines_are_read():
    assert list(json_lines('noise\n{\'loss\': 1}\n{"peer": "a"}\n')) == [{"peer": "a"}]


def test_the_reason_is_the_error_before_the_report_of_torchrun():
    said = "E: rank 0\nRuntimeError: head counts differ\ntorch...ChildFailedError: \n=====\nFailures:\n====="
    assert reason(said) == "RuntimeError: head counts differ"
    assert reason("") == "no message"


def test_the_floor_is_flops_at_the_highest_rates():
    ceilings = Ceilings()
    for rate in (1.0, 2.0):
        names = ("qproj", "up", "down", "wgrad_up", "lm_head", "wgrad_head")
        ceilings.add({"what": "gemm", "name": name, "gflops": rate} for name in names)
        ceilings.add([{"what": "sdpa_causal", "fwdbwd_gflops": 4 * rate}])
    shape = StepShape(tokens=8, width=2, layers=1, heads=2, kv_heads=1, head_dim=2, mlp_width=3, vocabulary=5, ranks=1)
    attention, head = 7 * 8 * 8 * 2 * 2 / 8e9, 3 * 2 * 2 * 5 * 8 * 0.1 / 2e9
    products = 6 * shape.block_weights * 8 / 2e9
    assert shape.block_weights == 2 * 2 * 3 * 2 + 3 * 2 * 3
    assert floor_seconds(shape, ceilings) == pytest.approx(attention + head + products)


def test_a_folder_without_drivers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not hold the peers' drivers"):
        run([f"peers={tmp_path}"])
