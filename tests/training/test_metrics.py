"""What is written against what is read back, by json and by TensorBoard's own reader, also after a kill and a resume.

Run: python -m pytest tests/training/test_metrics.py
"""

import json
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmcp.training.metrics import MetricsWriter, memory_mb, read_metrics


def line(step: int, loss: float = 0.5) -> dict:
    return {"step": step, "loss": loss, "seconds": {"decode": 0.25, "total": 1.0}, "rss_mb": [1.0, 2.0]}


def test_lines_and_events_are_read_back_equal(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(line(step))
            assert read_metrics(tmp_path) == [line(done) for done in range(step + 1)], "a line is there at once"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "seconds/decode", "seconds/total"}
    assert [(event.step, event.value) for event in events.Scalars("seconds/decode")] == [
        (0, 0.25),
        (1, 0.25),
        (2, 0.25),
    ]


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            {"step": 0, "loss": float("nan"), "seconds": {"decode": float("inf")}, "rss_mb": [1, float("nan")]}
        )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 0,
        "loss": None,
        "seconds": {"decode": None},
        "rss_mb": [1, None],
        "not_finite": ["loss", "seconds.decode", "rss_mb.1"],
    }


def test_a_resume_replaces_later_lines_and_a_line_cut_short(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(line(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.write(line(4, loss=0.1))
    assert read_metrics(tmp_path) == [line(0), line(1), line(2), line(3), line(4, loss=0.1)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3, 4]


def test_a_field_that_readers_do_not_know_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match=r"metrics need `step`.*got lr, step, x"):
        writer.write({"step": 0, "lr": 1.0, "x": 1})


def test_memory_counts_the_processes_started_and_shared_pages_once():
    alone = memory_mb()
    assert 0 < alone["pss"] <= alone["rss"]
    size = 200
    code = f"x = bytearray({size} * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        assert memory_mb()["pss"] > alone["pss"] + 0.75 * size
        child.communicate("\n")
