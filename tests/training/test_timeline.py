"""What a run records of its stages: spans in the order of the stages, sums and ratios that agree, lines after a resume.

Run: python -m pytest tests/training/test_timeline.py
"""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from experiments.base import default_rates
from experiments.train_video_lm import with_saved_rates
from mmcp.sharding.predict import PREDICTED
from mmcp.training.stage_clock import BACKBONE, STAGES, StageClock, timed_attention
from mmcp.training.timeline import TimelineWriter, read_timeline
from tests.training.tiny_run import tiny_settings, train_in

STEPS, EVERY = 3, 2
LAYERS = 2


@pytest.fixture(scope="module")
def run(tiny_shards, tmp_path_factory, rank_pool):
    """Metrics and timelines of three steps on two ranks, two micro-batches or more each."""
    folder = tmp_path_factory.mktemp("timeline")
    settings = tiny_settings(
        tiny_shards,
        folder,
        "mesh.ulysses=2",
        "data.documents_per_step=10",
        "data.row_tokens=256",
        "clip.budget.tokens=256",
        f"optim.total_steps={STEPS}",
        "optim.warmup_steps=1",
        f"train.timeline_every={EVERY}",
        "rates.encode_percent=50",
    )
    assert settings.model.backbone.layers == LAYERS
    return train_in(rank_pool, settings), read_timeline(folder)


def test_a_resumed_run_keeps_the_rates_it_was_planned_with(tiny_shards, tmp_path, rank_pool):
    made = tiny_settings(tiny_shards, tmp_path, "optim.total_steps=1", "optim.warmup_steps=0", "rates.seek_ns=7")
    train_in(rank_pool, made)
    resumed = tiny_settings(tiny_shards, tmp_path)
    assert resumed.rates.seek_ns != 7 and with_saved_rates(resumed).rates == made.rates
    other = tiny_settings(tiny_shards, tmp_path, "rates.seek_ns=8")
    assert with_saved_rates(other) == other, "what was given is left, to be refused"
    assert with_saved_rates(tiny_settings(tiny_shards, tmp_path / "new")).rates == default_rates()


def test_spans_follow_the_stages_of_a_step(run):
    _, timelines = run
    assert [line["step"] for line in timelines] == [0, 2]
    blocks = ["linear", "attention"] * LAYERS + ["linear"]
    for line in timelines:
        assert len(line["ranks"]) == 2
        for rank in line["ranks"]:
            spans = [span for span in rank["spans"] if span[1] in ("forward", "backward")]
            batches = sorted({span[2] for span in spans})
            assert batches == list(range(len(batches))) and len(batches) > 1
            for batch in batches:
                for phase, expected in (
                    ("forward", ["encode", "route", *blocks, "route", "loss"]),
                    ("backward", ["loss", "route", *blocks, "route", "encode"]),
                ):
                    found = [span[0] for span in spans if span[1:3] == [phase, batch]]
                    assert found == expected
            assert [span[:3] for span in rank["spans"] if span[1] == "update"] == [["optimizer", "update", None]]


def test_spans_do_not_overlap_and_add_up_to_the_seconds(run):
    metrics, timelines = run
    for line in timelines:
        for rank, measured in zip(line["ranks"], metrics[line["step"]]["seconds_by_rank"], strict=True):
            computing = [span for span in rank["spans"] if span[1] not in ("worker", "load")]
            for (*_, start, seconds), following in pairwise(computing):
                assert start >= 0 and start + seconds <= following[3] + 2e-6
            for stage in (*STAGES, *BACKBONE, "wait"):
                names = BACKBONE if stage == "backbone" else (stage,)
                total = sum(span[4] for span in rank["spans"] if span[0] in names)
                assert total == pytest.approx(measured[stage], abs=1e-6 * len(rank["spans"]))
            assert sum(span[4] for span in computing) <= measured["total"] + 1e-4
            assert any(span[0] == "decode" for rank in line["ranks"] for span in rank["spans"])


def test_each_rank_has_what_was_predicted_and_the_ratio(run):
    metrics, _ = run
    for line in metrics:
        for measured, predicted, ratio in zip(
            line["seconds_by_rank"], line["predicted_by_rank"], line["ratio_by_rank"], strict=True
        ):
            assert predicted.keys() == ratio.keys() == {*PREDICTED, "backbone", "optimizer", "total"}
            assert predicted["backbone"] == pytest.approx(predicted["linear"] + predicted["attention"])
            for stage, each in predicted.items():
                expected = measured[stage] / each if each else None
                assert ratio[stage] == (None if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-4))
        for stage, each in line["predicted"].items():
            assert each == max(own[stage] for own in line["predicted_by_rank"])
        assert line["predicted"]["total"] >= line["predicted"]["encode"] + line["predicted"]["linear"]


def test_a_resume_replaces_later_lines(tmp_path):
    writer = TimelineWriter(tmp_path, every=1)
    ranks = [{"began": 1.0, "spans": [("encode", "forward", 0, 0.1234567, 1.0)]}]
    for step in range(4):
        writer.write(step, ranks)
    writer.forget(2)
    assert [line["step"] for line in read_timeline(tmp_path)] == [0, 1]
    assert json.loads((tmp_path / "timeline.jsonl").read_text().splitlines()[0]) == {
        "step": 0,
        "ranks": [{"began": 1.0, "spans": [["encode", "forward", 0, 0.123457, 1.0]]}],
    }
    assert not TimelineWriter(tmp_path, every=0).wants(0)


class Doubled(nn.Module):
    """Stands for an attention layer: takes (inputs, info), gives a tensor."""

    def forward(self, inputs, info):
        return inputs["q"] * inputs["k"]


def test_attention_is_told_from_what_surrounds_it_forward_and_backward():
    """The last input's gradient, which another path makes, must not end attention a second time."""
    clock, layer = StageClock(torch.device("cpu")), Doubled()
    x = torch.ones(3, requires_grad=True)
    with timed_attention([layer], clock):
        clock.stretch("forward", 0)
        out = layer({"q": x.exp(), "k": x.sin()}, None)
        clock.stretch("backward", 0)
        out.cos().sum().backward()
        clock.mark("encode")
    assert [(span.phase, span.stage) for span in clock.spans()] == [
        ("forward", "linear"),
        ("forward", "attention"),
        ("backward", "linear"),
        ("backward", "attention"),
        ("backward", "encode"),
    ]
    layer({"q": x, "k": x}, None)
    assert len(clock.spans()) == 5, "outside the block nothing is marked"
