"""How many held-out questions does a run answer, per kind of question, beside the best constant answer?

Run:     mmcp eval runs/demo                 (writes runs/demo/eval.json and the report)
         mmcp eval runs/demo --blank         (picture black, sound silent: only what text gives away is left)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from data_pipelines.clip import build_sequence
from data_pipelines.loader import Loaded
from data_pipelines.manifest import Sample
from data_pipelines.shards import ShardSet
from data_pipelines.workers import WorkerPool
from experiments.base import RunConfig
from experiments.check_run import check_heads
from experiments.pipeline import Document, Pipeline, PlannedStep, Samples, agree_on, collect, read_steps
from experiments.runtime import run_runner
from experiments.train_video_lm import with_ranks
from mmcp.config import load
from mmcp.generate import GREEDY, Sampling, generate
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import build_mesh, device_type_for, process_group
from mmcp.report.outcome import Outcome
from mmcp.report.run import write_run_report
from mmcp.sequence import TokenSequence
from mmcp.training import checkpoint
from mmcp.training.evaluate import Graded, grade
from mmcp.training.run_folder import write_json
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork

ROOM = 16  # tokens an answer may have


def run(run: Path, *, blank: bool = False, ranks: int | None = None) -> Outcome:
    """Evaluate the latest checkpoint of a run on `data.held_out`. Raises ValueError for what is missing."""
    settings, saved = open_run(run, ranks)
    if not settings.data.held_out:
        raise ValueError(f"{run / 'config.yaml'}: data.held_out is empty; name the shards to evaluate on")
    ShardSet.open(settings.data.held_out)
    tasks, lost = launch(evaluate, settings.mesh.world, settings, saved, blank)
    record = {
        "tasks": tasks,
        "checkpoint": saved.name,
        "ranks": settings.mesh.world,
        "blank": blank,
        "lost": lost,
    }
    write_json(run / ("eval_blank.json" if blank else "eval.json"), record)
    write_run_report(run)
    return Outcome(record=record, tables=[_table(record), *lost])


def open_run(run: Path, ranks: int | None) -> tuple[RunConfig, Path]:
    """Return the config of a run, for `ranks` ranks, and its latest checkpoint."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"'{run}' is no run: there is no {file.resolve()}; give a folder that `mmcp train` wrote")
    settings = with_ranks(load(RunConfig, file, ()), ranks)
    check_heads(settings)
    saved = checkpoint.latest(run / "checkpoints")
    if saved is None:
        raise ValueError(f"no complete checkpoint in {(run / 'checkpoints').resolve()}; train first")
    return settings, saved


def evaluate(settings: RunConfig, saved: Path, blank: bool) -> tuple[dict[str, dict[str, float | int]], list[str]]:
    """Answer every held-out question on this rank's part; return the grades and what could not be used."""
    with Answering(settings, saved, ShardSet.open(settings.data.held_out), blank=blank) as answering:
        graded = [
            Graded(document.sample.task or "all", reference(document.sample), answer)
            for document, answer in answering.answer_all()
            if answer is not None
        ]
        return grade(graded), answering.refused


def reference(sample: Sample) -> str:
    """Return the text of the answer that ends a sample. Raises ValueError when none does."""
    role, items = sample.turns[-1] if sample.turns else ("", ())
    if role != "assistant":
        raise ValueError(f"sample '{sample.id}' does not end with an assistant's answer; nothing to compare with")
    return "".join(item.text for item in items if item.kind == "text")


class Answering:
    """A model on this rank that answers the questions of some shards; use as a context manager, on every rank."""

    def __init__(
        self,
        settings: RunConfig,
        saved: Path,
        shards: Samples,
        *,
        blank: bool = False,
        room: int = ROOM,
        sampling: Sampling = GREEDY,
    ):
        self.settings, self.saved, self.shards = settings, saved, shards
        self.blank, self.room, self.sampling = blank, room, sampling
        self.refused: list[str] = []
        """Samples that could not be laid out or read, and why."""

    def __enter__(self) -> "Answering":
        with ExitStack() as stack:
            device = stack.enter_context(process_group(device_type_for(self.settings.parameter_dtype)))
            self.mesh = build_mesh(self.settings.mesh, device=device)
            self.tokenizer = self.settings.tokenizer.build()
            vocabulary = self.tokenizer.vocab_size
            self.runner: StepRunner = run_runner(self.settings, self.mesh, vocabulary=vocabulary, is_filled_later=True)
            checkpoint.load(self.saved, model=self.runner.model, group=self.mesh.world)
            self.pool = WorkerPool(self.settings.data.workers, self.settings.data.deadline_s)
            stack.callback(self.pool.close)
            self.pipeline = Pipeline(self.settings, self.tokenizer, self.shards, self.settings.planner(vocabulary))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def answer_all(self) -> Iterator[tuple[Document, str | None]]:
        """Yield (document, answer) for every sample; the answer is None where a rank could not read it."""
        count, batch = len(self.shards), 4 * self.settings.data.documents_per_step
        batches = [range(i, min(i + batch, count)) for i in range(0, count, batch)]
        plan, steps = (lambda i: self._plan(batches[i])), range(len(batches))
        read = read_steps(self.pipeline, self.mesh, self.pool, plan=plan, steps=steps)
        console, hidden = Console(stderr=True), self.mesh.rank != 0
        for step in track(read, "answer", total=len(batches), console=console, disable=hidden):
            yield from self._answers(step)

    def _plan(self, numbers: Sequence[int]) -> PlannedStep:
        """Lay out questions, without their answers."""
        documents = []
        for number in numbers:
            try:
                documents.append(self._document(number))
            except ValueError as error:
                self.refused.append(str(error))
        return self.pipeline.plan_documents(documents)

    def _document(self, number: int) -> Document:
        sample, media = self.shards.load(number)
        sequence, _ = build_sequence(sample, media, self.settings.clip, rules=self.pipeline.rules, prompt=True)
        reference(sample)
        return Document(
            sample, media, TokenSequence(tuple(replace(part, loss=False) for part in sequence.segments)), ()
        )

    def _answers(self, step: Loaded[PlannedStep]) -> Iterator[tuple[Document, str | None]]:
        work, messages = agree_on(collect(step), self.runner)
        self.refused += messages
        work = blanked(work, self.runner) if self.blank else work
        said = generate(
            self.runner,
            work,
            room=self.room,
            end=self.tokenizer.end,
            clock=StageClock(self.runner.device),
            sampling=self.sampling,
        )
        for number, row in enumerate(step.payload.documents):
            void = work.void.get(number, frozenset())
            for i, document in enumerate(row):
                yield document, None if i in void else self.tokenizer.decode(said[number][i])


def blanked(work: StepWork, runner: StepRunner) -> StepWork:
    """Replace every picture by black and every sound by silence."""
    arrays = {
        number: {unit: _blank(work.plan.rows[number], unit, runner) for unit in row}
        for number, row in work.arrays.items()
    }
    return replace(work, arrays=arrays)


def _blank(row: TokenSequence, unit: int, runner: StepRunner) -> np.ndarray:
    return runner.media.blank(row.unit_segment(unit).kind, row.units[unit].size)


def _table(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['checkpoint']}, {record['ranks']} ranks" + (", blank" if record["blank"] else ""))
    for name in ("task", "questions", "accuracy", "chance", "median error", "of the middle"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for task, row in record["tasks"].items():
        errors = [f"{row[name]:.2f}" if name in row else "" for name in ("median_error", "chance_median_error")]
        table.add_row(task, str(row["n"]), f"{row['accuracy']:.3f}", f"{row['chance']:.3f}", *errors)
    return table
