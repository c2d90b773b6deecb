"""`mmcp inspect` over every kind of source: the same sample gives the same plan however it is named.

Compared: the JSON with DESIGN.md's fields and with sums over the row; clip, manifest, shards and run with each other.
Run: python -m pytest tests/experiments/test_inspect.py
"""

import json
import shutil
from pathlib import Path

import pytest

from data_pipelines.prepare import prepare
from experiments.base import RunConfig
from experiments.inspect_plan import SHIPPED, mesh_for
from experiments.inspect_source import ANSWER, QUESTION
from mmcp import cli
from mmcp.config import dump, load
from mmcp.sharding.strategies import STRATEGIES

CASES = Path(__file__).parents[1] / "data" / "cases"
CLIP = CASES / "ref_4s_30fps_aac.mp4"
DEMO = Path(__file__).parent.parent.parent / "experiments" / "configs" / "demo.yaml"
FIELDS = ["tokens", "ranks", "strategy", "per_rank", "imbalance", "makespan_ratio", "plan_ms", "digest"]
PER_RANK = (
    "rank tokens by_modality decode_s encoder_flops linear_flops attention_flops label_rows routed_rows bytes fragments"
)
COSTS = ["decode", "encode", "linear", "attention", "labels", "memory"]


def row(clip: str, question: str, answer: str) -> str:
    user = [{"type": "video", "video": clip}, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, list[str]]:
    """The same conversation about the same clip, named in four ways; plan.json and inspect.json are not there yet."""
    folder = tmp_path_factory.mktemp("inspect")
    shutil.copy(CLIP, folder / "clip.mp4")
    other = row("clip.mp4", "What is it?", "a test")
    (folder / "two.jsonl").write_text(other + row("clip.mp4", QUESTION, ANSWER))
    prepare(folder / "two.jsonl", folder / "shards")
    (folder / "run").mkdir()
    settings = load(RunConfig, SHIPPED, [f"data.train={folder / 'shards'}", "mesh.ulysses=3"])
    (folder / "run" / "config.yaml").write_text(dump(settings))
    return {
        "clip": [str(folder / "clip.mp4")],
        "manifest": [str(folder / "two.jsonl"), "--sample", "1"],
        "shards": [str(folder / "shards"), "--sample", "1"],
        "one shard": [str(folder / "shards" / "shard-*.tar"), "--sample", "1"],
        "run": [str(folder / "run"), "--sample", "1"],
    }


def inspect(capsys, *arguments: object) -> dict:
    code = cli.main(["inspect", *map(str, arguments), "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


def test_the_record_has_the_fields_of_the_design(capsys, sources):
    record = inspect(capsys, *sources["clip"], "--ranks", "3")
    assert list(record) == FIELDS and list(record["imbalance"]) == COSTS
    assert [entry["rank"] for entry in record["per_rank"]] == [0, 1, 2] and record["ranks"] == 3
    for entry in record["per_rank"]:
        assert list(entry) == PER_RANK.split()
        assert sum(entry["by_modality"].values()) == entry["tokens"]
    assert sum(entry["tokens"] for entry in record["per_rank"]) == record["tokens"]
    assert sum(entry["label_rows"] for entry in record["per_rank"]) == len(ANSWER) + 1
    assert min(record["imbalance"].values()) >= 1 and record["strategy"] == "balanced"


def test_however_a_sample_is_named_its_plan_is_the_same(capsys, sources):
    digests = {name: inspect(capsys, *source, "--ranks", 3)["digest"] for name, source in sources.items()}
    assert len(set(digests.values())) == 1, digests


def test_another_budget_may_be_tried(capsys, sources):
    full = inspect(capsys, *sources["clip"])["tokens"]
    few = inspect(capsys, *sources["clip"], "--budget", full - 20)["tokens"]
    assert full - 40 < few <= full - 20
    assert inspect(capsys, *sources["clip"], "--budget", full)["tokens"] == full


def test_all_strategies_are_compared(capsys, sources):
    records = inspect(capsys, *sources["shards"], "--ranks", 4, "--compare")
    assert [record["strategy"] for record in records] == sorted(STRATEGIES)
    alone = inspect(capsys, *sources["shards"], "--ranks", 4, "--strategy", "contiguous")
    compared = next(record for record in records if record["strategy"] == "contiguous")
    assert {**alone, "plan_ms": 0} == {**compared, "plan_ms": 0}


def test_a_run_shows_its_first_step(capsys, sources):
    folder = sources["run"][0]
    record = inspect(capsys, folder)
    assert record["ranks"] == 3 and record["tokens"] > 0
    assert inspect(capsys, folder, "--ranks", 3)["digest"] == record["digest"]


def test_a_run_that_stored_its_plan_needs_no_data(capsys, tmp_path, sources):
    settings = load(RunConfig, SHIPPED, ["data.train=gone"])
    (tmp_path / "config.yaml").write_text(dump(settings))
    record = inspect(capsys, sources["run"][0])
    plan = planned_step(sources["run"][0])
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "inspect.json").write_text(json.dumps(record))
    assert inspect(capsys, tmp_path, "--html", tmp_path / "page.html") == record
    assert "as stored in" in (tmp_path / "page.html").read_text()
    assert cli.main(["inspect", str(tmp_path), "--ranks", "2"]) == 1
    assert "'gone' matches no file" in capsys.readouterr().err


def planned_step(folder: str):
    from experiments.pipeline import Pipeline

    settings = load(RunConfig, Path(folder) / "config.yaml")
    shards, tokenizer = settings.data.open_train(), settings.tokenizer.build()
    pipeline = Pipeline(settings, tokenizer, shards, settings.planner(tokenizer.vocab_size))
    return pipeline.plan(shards.order(settings.seed).take(settings.data.documents_per_step)).plan


def test_tables_page_and_figure(capsys, tmp_path, sources):
    page, figure = tmp_path / "deep" / "page.html", tmp_path / "figure.png"
    arguments = ["inspect", *sources["manifest"], "--config", str(DEMO), "--compare"]
    assert cli.main([*arguments, "--html", str(page), "--png", str(figure)]) == 0
    shown = capsys.readouterr().out
    assert str(DEMO.name) in shown and "balanced: " in shown and "contiguous: " in shown and "imbalance" in shown
    assert "4 frames a second" in shown and figure.stat().st_size > 1000
    text = page.read_text(encoding="utf-8")
    assert "Strategies side by side" in text and "4 frames a second" in text


def test_each_frame_is_explained(capsys, sources):
    record = inspect(capsys, *sources["clip"], "--ranks", 3, "--explain")
    units = record["units"]
    assert [unit["kind"] for unit in units].count("video") == 4 and units[0]["frames"] == [0, 15]
    assert [unit["times_s"] for unit in units if unit["kind"] == "video"][1] == [1.0, 1.5]
    for unit in units:
        assert unit["why"] and unit["encoded_by"] in range(3) and set(unit["held_by"]) <= set(range(3))
    assert sum(unit["tokens"] for unit in units) == sum(
        entry["by_modality"]["video"] + entry["by_modality"]["audio"] for entry in record["per_rank"]
    )
    assert inspect(capsys, *sources["run"], "--explain")["units"][0]["times_s"] == [0.0, 0.5]
    assert cli.main(["inspect", *sources["clip"], "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "frames 0, 15 at 0.00, 0.50 s, 64x96, 6 tokens, encoded by rank 0" in shown and "halved 2 times" in shown


def test_a_cap_on_memory_is_kept_and_drawn(capsys, tmp_path, sources):
    most = max(entry["bytes"] for entry in inspect(capsys, *sources["clip"], "--ranks", 2)["per_rank"])
    page = tmp_path / "page.html"
    inspect(capsys, *sources["clip"], "--ranks", 2, "--cap-bytes", most, "--html", page)
    assert "the cap on memory" in page.read_text(encoding="utf-8")
    assert cli.main(["inspect", *sources["clip"], "--ranks", "2", "--cap-bytes", "1000"]) == 1
    assert "the cap is 1,000" in capsys.readouterr().err
    records = inspect(capsys, "--workload", "few_frames", "--ranks", 2, "--cap-bytes", 10**12)
    assert records[0]["ranks"] == 2


def test_a_run_is_shown_with_its_data_and_its_times(capsys, tmp_path, sources):
    from tests.report.runs import write_times

    folder, page, trace = tmp_path / "run", tmp_path / "page.html", tmp_path / "trace.json"
    shutil.copytree(sources["run"][0], folder)
    (folder / "inspect.json").write_text(json.dumps(inspect(capsys, folder)))
    (folder / "plan.json").write_text(planned_step(str(folder)).to_json())
    write_times(folder, ranks=3)
    inspect(capsys, folder, "--html", page, "--trace", trace)
    text = page.read_text(encoding="utf-8")
    assert "The mask over the ranks" in text and "Predicted beside measured, by rank" in text and "Timeline" in text
    assert ("What is it?" in text or QUESTION in text) and "clip times, text and mask" not in text
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2}


def test_more_ranks_than_heads_go_on_the_ring_axis():
    settings = load(RunConfig, SHIPPED)
    meshes = {ranks: mesh_for(settings, ranks) for ranks in (1, 8, 12, 64, 34)}
    assert {ranks: (mesh.ring, mesh.ulysses) for ranks, mesh in meshes.items()} == {
        1: (1, 1), 8: (1, 8), 12: (1, 12), 64: (4, 16), 34: (17, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.mp4"], "'gone.mp4' matches no file"),
        (["CLIP", "--sample", "1"], "is one clip; leave the option out"),
        (["SHARDS", "--sample", "2"], "--sample 2: there are 2 samples, numbered from 0"),
        (["MANIFEST", "--sample", "-1"], "--sample -1: "),
        (["MANIFEST", "--sample", "7"], "two.jsonl has no such row"),
        (["RUN", "--config", "x.yaml"], "has a config of its own"),
        (["CLIP", "--ranks", "0"], "--ranks 0: a plan needs at least one rank"),
        (["CLIP", "--strategy", "balance"], "unknown sharding strategy 'balance'; registered: balanced"),
        (["CLIP", "--html", "/proc/1/x.html"], "'/proc/1/x.html' cannot be written"),
        (["CLIP", "--config", "none.yaml"], "none.yaml: no such file"),
        (["CLIP", "--trace", "x.json"], "is no run, nothing has been timed; name a run"),
        (["RUN", "--explain"], "packs several samples; name one with --sample N"),
        (["CLIP", "--explain", "--compare"], "leave out --compare"),
        (["--workload", "few_frames", "--explain"], "is drawn, not read or run: leave out"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(capsys, sources, arguments, message):
    names = {
        "CLIP": sources["clip"],
        "SHARDS": sources["shards"],
        "MANIFEST": sources["manifest"],
        "RUN": sources["run"],
    }
    words = [names[word][0] if word in names else word for word in arguments]
    assert cli.main(["inspect", *words]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and message in output.err


def test_a_clip_too_long_for_the_budget_names_both_counts(capsys, sources):
    small = sources["clip"][0] + ".yaml"
    Path(small).write_text(DEMO.read_text().replace("tokens: 1024", "tokens: 64"))
    assert cli.main(["inspect", *sources["clip"], "--config", small]) == 1
    assert "are needed at the one setting, the budget allows 64" in capsys.readouterr().err
