"""How fast does the loader deliver, and does training on an hour ever wait for it?

Run:     mmcp bench loader [--json] [key=value ...]       (an hour-long clip; some minutes on two idle cores)
Smoke:   mmcp bench loader smoke=true                     (four minutes of clip, no requirement checked)
Expect:  of a step on two ranks over one hour of video and sound, less than 5 percent is spent waiting for data.
         Anything else exits with 1.
Result:  experiments/LOG.md, entry "loader"
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from data_pipelines.workers import WorkerPool
from experiments.base import RunConfig
from experiments.long_clip import LongClip, prepared_clip
from experiments.pipeline import Pipeline, collect, read_steps
from experiments.train_video_lm import train, with_ranks
from mmcp.config import config, load
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.report.outcome import Outcome
from mmcp.training.metrics import read_metrics
from mmcp.training.run_folder import open_run_folder, write_json
from mmcp.training.step import StepRunner
from mmcp.training.train import LoadedStep, OnStep

SMOKE_SECONDS = 240


@config
class LoaderBench:
    """What is measured, and what is required of it."""

    folder: str = "runs/bench_loader"
    """Where the clip and the run are written."""
    base: str = str(Path(__file__).parent / "configs" / "hour.yaml")
    """Config of the run; folder, data.train and the number of ranks are this experiment's."""
    changes: tuple[str, ...] = ()
    """Settings `section.key=value` that win over `base`."""
    source: LongClip = LongClip()
    ranks: PositiveInt = 2
    steps: PositiveInt = 4
    """Of training; the first, before which nothing could be decoded, is told apart."""
    loaded_steps: PositiveInt = 4
    """Steps that are read alone, without a model, on one rank."""
    max_waited: PositiveFloat = 0.05
    """Share of the steps after the first that a rank may wait for data."""
    smoke: bool = False
    """Take four minutes of clip instead."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure with the settings written as key=value."""
    return bench(build(LoaderBench, Source(), overrides))


def bench(settings: LoaderBench) -> Outcome:
    """Write the clip, read it without a model, train on it, and tell rates and waits."""
    if settings.smoke:
        settings = replace(settings, source=replace(settings.source, seconds=SMOKE_SECONDS))
    folder = Path(settings.folder) / settings.source.name
    shards = prepared_clip(settings.source, Path(settings.folder) / "clips")
    base = load(RunConfig, settings.base, [*settings.changes, f"optim.total_steps={settings.steps}"])
    base = replace(base, data=replace(base.data, train=str(shards)), folder=str(folder / "run"))
    record: dict[str, Any] = {"clip": settings.source.name, "alone": alone(settings, base)}
    record["training"] = waits(settings, with_ranks(base, settings.ranks))
    late = max(record["training"]["waited_share"])
    record["faults"] = []
    if late > settings.max_waited and not settings.smoke:
        record["faults"] = [f"a rank waits {late:.1%} of its steps, at most {settings.max_waited:.0%} is allowed"]
    write_json(folder / "loader.json", record)
    return Outcome(record=record, tables=_tables(record), is_ok=not record["faults"])


def alone(settings: LoaderBench, base: RunConfig) -> dict[str, float]:
    """Read steps on one rank as fast as its workers decode."""
    base = replace(base, mesh=MeshConfig())
    tokenizer, shards = base.tokenizer.build(), base.data.open_train()
    pipeline = Pipeline(base, tokenizer, shards, base.planner(tokenizer.vocab_size))
    order, batch = shards.order(base.seed), base.data.documents_per_step
    pool = WorkerPool(base.data.workers, base.data.deadline_s)
    began, tokens, num_bytes, decode_s = time.monotonic(), 0, 0, 0.0
    try:
        steps = read_steps(
            pipeline,
            build_mesh(base.mesh),
            pool,
            plan=lambda step: pipeline.plan(order.samples(step * batch, batch)),
            steps=range(settings.loaded_steps),
        )
        for loaded in map(collect, steps):
            tokens += sum(row.num_tokens for row in loaded.work.plan.rows)
            num_bytes += sum(array.nbytes for arrays in loaded.work.arrays.values() for array in arrays.values())
            decode_s += loaded.decode_s
    finally:
        pool.close()
    seconds = time.monotonic() - began
    return {
        "workers": base.data.workers,
        "seconds": seconds,
        "clip_seconds_per_second": settings.loaded_steps * settings.source.seconds / seconds,
        "tokens_per_second": tokens / seconds,
        "mib_per_second": num_bytes / seconds / 2**20,
        "busy": decode_s / seconds / base.data.workers,
    }


def waits(settings: LoaderBench, run_settings: RunConfig) -> dict[str, Any]:
    """Train, and tell what each rank waited."""
    shutil.rmtree(run_settings.folder, ignore_errors=True)
    folder = open_run_folder(run_settings.folder, resume=False)
    launch(train, settings.ranks, run_settings, folder, False, partial(note_waits, folder=folder))
    waited = [[float(line) for line in _file(folder, rank).read_text().split()] for rank in range(settings.ranks)]
    totals = [line["seconds"]["total"] for line in read_metrics(folder)]
    return {
        "ranks": settings.ranks,
        "tokens": read_metrics(folder)[0]["tokens"],
        "step_seconds": totals,
        "waited_seconds": waited,
        "waited_share": [sum(own[1:]) / max(1e-9, sum(totals[1:])) for own in waited],
    }


@contextmanager
def note_waits(runner: StepRunner, *, folder: Path) -> Iterator[OnStep]:
    """Write a line a step: the seconds this rank waited for its data."""
    with _file(folder, runner.mesh.rank).open("w") as file:

        def note(_: dict[str, Any], loaded: LoadedStep) -> None:
            print(loaded.waited_s, file=file, flush=True)

        yield note


def _file(folder: Path, rank: int) -> Path:
    return folder / f"waited_{rank}.txt"


def _tables(record: dict[str, Any]) -> list[Table | str]:
    alone, training = record["alone"], record["training"]
    rates = Table(title=f"loader alone, {record['clip']}", box=SIMPLE_HEAD)
    for name in alone:
        rates.add_column(name.replace("_", " "), justify="right")
    rates.add_row(*(f"{value:,.2f}" for value in alone.values()))
    waits = Table(title=f"training on {training['ranks']} ranks, {training['tokens']:,} tokens a step", box=SIMPLE_HEAD)
    for name in ("step", "seconds", *(f"waited by rank {rank}" for rank in range(training["ranks"]))):
        waits.add_column(name, justify="right")
    for step, total in enumerate(training["step_seconds"]):
        waits.add_row(str(step), f"{total:.2f}", *(f"{own[step]:.3f}" for own in training["waited_seconds"]))
    waits.add_row("share", "", *(f"{share:.2%}" for share in training["waited_share"]))
    return [rates, waits, *record["faults"]]
