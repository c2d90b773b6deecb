"""The measurement with a tiny Qwen2.5-VL, at a size that proves nothing but that it runs and counts.

Run: python -m pytest tests/experiments/test_bench_hf.py
"""

import pytest

pytest.importorskip("transformers")

from experiments.bench import run


@pytest.mark.full
def test_frames_are_decoded_and_encoded_once():
    words = ["seconds=10", "layers=1", "rounds=1", "steps=1", "site="]
    outcome = run("hf", words)
    one, ours = outcome.record["rows"]
    assert outcome.is_ok and (one["system"], ours["system"]) == ("one", "mmcp")
    assert one["frames_encoded"] == ours["frames_encoded"] == 20
    assert one["frames_decoded"] <= ours["frames_decoded"] < 1.5 * one["frames_decoded"]
    with pytest.raises(ValueError, match="did you mean 'hf'"):
        run("hg", words)
