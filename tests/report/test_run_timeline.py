"""Seconds and spans of a run as pictures and as a trace: every recorded second is there once, on its rank and thread.

Run: python -m pytest tests/report/test_run_timeline.py
"""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from mmcp.report import timeline
from mmcp.report.run_record import RunRecord, step_spans
from mmcp.report.stages import NOT_BY_RANK, NOT_PREDICTED, stage_sections
from mmcp.report.timeline import timeline_sections, write_trace
from tests.report.runs import STAGES, write_times

RECORDED = pytest.mark.parametrize("is_timed", [True, False])


def record_of(folder, **options) -> RunRecord:
    write_times(folder, **options)
    return RunRecord.read(folder)


@RECORDED
def test_a_trace_holds_every_second_once(tmp_path, is_timed):
    record = record_of(tmp_path, ranks=3, steps=4, timeline=is_timed)
    write_trace(tmp_path / "deep" / "trace.json", record)
    trace = json.loads((tmp_path / "deep" / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    seconds = defaultdict(float)
    for event in spans:
        seconds[event["pid"], event["args"]["step"], event["cat"]] += event["dur"] / 1e6
    for step in record.steps:
        for rank, measured in enumerate(step["seconds_by_rank"]):
            for stage in STAGES:
                assert seconds[rank, step["step"], stage] == pytest.approx(measured[stage], abs=1e-5)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    assert ("end to end" in trace["otherData"]["times"]) != is_timed


@RECORDED
def test_spans_of_a_thread_do_not_overlap(tmp_path, is_timed):
    record = record_of(tmp_path, ranks=2, steps=5, timeline=is_timed)
    write_trace(tmp_path / "trace.json", record)
    threads = defaultdict(list)
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {tid for _, tid in threads} == ({0, 1, 2} if is_timed else {0, 1})
    for tid, spans in threads.items():
        spans.sort()
        late = [end - start for (_, end), (start, _) in pairwise(spans)]
        assert max(late) <= 0.01, (tid, late)


def test_a_long_trace_keeps_the_last_steps_and_says_so(tmp_path, monkeypatch):
    record = record_of(tmp_path, ranks=2, steps=9, timeline=False)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 3 * 2 * len(STAGES))
    told = write_trace(tmp_path / "trace.json", record)["trace"]
    assert "48 spans of steps 6 to 8 on 2 ranks, 6 earlier ones left out" in told


def test_a_run_without_seconds_has_no_trace(tmp_path):
    with pytest.raises(ValueError, match="no seconds by rank"):
        write_trace(tmp_path / "trace.json", RunRecord([{"step": 0, "loss": 1.0}], 0, []))
    assert timeline_sections(RunRecord([], 0, [])) == [] == stage_sections(RunRecord([], 0, []))


def test_stages_are_told_once(tmp_path):
    record = record_of(tmp_path, ranks=2)
    assert record.stages == STAGES
    whole = [{"seconds": {"encode": 1.0, "backbone": 2.0, "total": 3.0}}]
    assert RunRecord(whole, 0, []).stages == ("encode", "backbone")


@pytest.mark.parametrize("ranks", [1, 2, 64, 1000])
def test_predicted_stands_beside_measured(tmp_path, ranks):
    by_stage, by_rank, by_step = stage_sections(record_of(tmp_path, ranks=ranks, steps=4))
    assert [trace.name for trace in by_stage.pictures[0].data] == ["measured", "predicted"]
    assert by_stage.table.count("1.25") == len(STAGES)  # each but `wait`, and the total
    assert len(by_rank.pictures) == len(by_step.pictures) == len(STAGES) + 1
    assert all(len(picture.data) == 2 - ("wait" in picture.layout.title.text) for picture in by_rank.pictures)
    assert NOT_PREDICTED not in by_stage.text and NOT_BY_RANK not in by_rank.text


def test_what_was_not_predicted_is_said(tmp_path):
    by_stage, by_rank, _ = stage_sections(record_of(tmp_path, ranks=2, predicted=False))
    assert NOT_PREDICTED in by_stage.text and NOT_BY_RANK in by_rank.text
    assert [trace.name for trace in by_stage.pictures[0].data] == ["measured"]


@pytest.mark.parametrize("ranks", [1, 2, 64, 1000])
@RECORDED
def test_a_timeline_draws_a_bounded_number_of_bars(tmp_path, ranks, is_timed):
    record = record_of(tmp_path, ranks=ranks, steps=4, timeline=is_timed)
    (section,) = timeline_sections(record)
    assert len(section.pictures) == 3
    for picture in section.pictures:
        assert sum(len(trace.x) for trace in picture.data) <= timeline.MOST_BARS
        lanes = picture.layout.yaxis.ticktext
        assert len(lanes) == min(ranks, 32) and max(map(int, lanes)) < ranks
    assert ("end to end" in section.text) != is_timed
    assert ("ranks, 32 are drawn" in section.text) == (ranks > 32)
    assert sum(map(len, step_spans(record)[0].values())) > 0
