"""What a training run writes down on the way: metrics, the first plan, progress for people."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.base import RunConfig
from experiments.pipeline import Pipeline
from mmcp.parallel.collectives import all_gather_json
from mmcp.parallel.mesh import Mesh
from mmcp.sharding.balance import Balance, balance, inspect_record
from mmcp.sharding.cost import row_costs
from mmcp.sharding.predict import step_ns_by_rank
from mmcp.sharding.step import StepPlan
from mmcp.training.metrics import MetricsWriter, rss_mb
from mmcp.training.run_folder import write_json
from mmcp.training.stage_clock import BACKBONE
from mmcp.training.timeline import TimelineWriter
from mmcp.training.train import Counters, LoadedStep

REDUCED_SHOWN = 3  # samples told by name to be seen less finely than asked; the others are counted


def in_seconds(nanoseconds: Mapping[str, int], update_ns: int) -> dict[str, float]:
    """Name what a rank is predicted to take as it is measured: the backbone's stages also together, and the update."""
    priced = {**nanoseconds, "optimizer": update_ns, "total": nanoseconds["total"] + update_ns}
    priced["backbone"] = sum(priced[stage] for stage in BACKBONE)
    return {stage: each / 1e9 for stage, each in priced.items()}


def ratios(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float | None]:
    """Measured over predicted seconds by stage; None where nothing is predicted."""
    return {stage: round(measured[stage] / each, 4) if each else None for stage, each in predicted.items()}


class RunLog:
    """Log of one run, used by every rank as a context manager; rank 0 writes.

    num_updated: numbers of the parameters that this rank keeps and trains
    """

    def __init__(
        self,
        settings: RunConfig,
        folder: Path,
        mesh: Mesh,
        *,
        pipeline: Pipeline,
        counters: Counters,
        start: int,
        num_updated: int,
    ):
        self.folder, self.mesh, self.planner, self.counters = folder, mesh, pipeline.planner, counters
        self.is_writer = mesh.rank == 0
        self.told: set[str] = set()
        self.num_reduced = 0
        self.start, self.total = start, settings.optim.total_steps
        self.num_updated = num_updated
        self.timelines = TimelineWriter(folder, every=settings.train.timeline_every)
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        shown = [TextColumn(column) if isinstance(column, str) else column for column in columns]
        self.progress = Progress(*shown, console=Console(stderr=True), disable=not self.is_writer)

    def __enter__(self) -> "RunLog":
        self.progress.start()
        self.task = self.progress.add_task("train", total=self.total, completed=self.start)
        self.writer = MetricsWriter(self.folder, resume_step=self.start) if self.is_writer else None
        if self.is_writer:
            self.timelines.forget(self.start)
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        if self.writer:
            self.writer.__exit__(*error)
            self._say_losses()

    def step(self, metrics: dict[str, Any], loaded: LoadedStep) -> None:
        """Write one step's line; every rank calls it, since each tells its memory and its damage."""
        told = {"rss_mb": rss_mb(), "notes": sorted(set(loaded.notes) - self.told)}
        timeline = metrics.pop("timeline")
        if self.timelines.wants(loaded.step):
            told["timeline"] = timeline
        self.told.update(loaded.notes)
        ranks = all_gather_json(told, group=self.mesh.world, name="log")
        if not self.writer:
            return
        for note in dict.fromkeys(note for rank in ranks for note in rank["notes"]):
            self.progress.console.print(f"warning: {note}", highlight=False, markup=False)
        for text in loaded.reduced[: max(0, REDUCED_SHOWN - self.num_reduced)]:
            self.progress.console.print(f"note: {text}", highlight=False, markup=False)
        self.num_reduced += len(loaded.reduced)
        plan = loaded.work.plan
        costs, balances = self._priced(plan)
        seconds = metrics["seconds"]["total"]
        flops = sum(cost.total_flops for cost in costs) * self.planner.costs.passes
        metrics |= {
            "flops_per_second": flops / seconds,
            **self._compared(plan, balances, metrics),
            "imbalance": balances[0].imbalance if balances else {},
            "rss_mb": [rank["rss_mb"] for rank in ranks],
        }
        self.writer.write(metrics)
        if "timeline" in told:
            self.timelines.write(loaded.step, [rank["timeline"] for rank in ranks])
        if loaded.step == self.start and balances:
            self._write_plan(plan, balances[0])
        self._show(loaded.step + 1, metrics)

    def _show(self, done: int, metrics: dict[str, Any]) -> None:
        """Move the bar on a terminal; elsewhere print a line every twentieth of the run."""
        told = f"train  loss {metrics['loss']:.4f}"
        self.progress.update(self.task, completed=done, description=told)
        if not self.progress.console.is_terminal and (done % max(1, self.total // 20) == 0 or done == self.total):
            left = self.progress.tasks[0].time_remaining
            ends = "" if left is None else f"  {left:.0f} s left"
            print(f"{told}  step {done} of {self.total}{ends}", file=sys.stderr, flush=True)

    def _compared(self, plan: StepPlan, balances: list[Balance], metrics: dict[str, Any]) -> dict[str, Any]:
        """Seconds by stage as the plans price them, of the slowest rank and of each, and the measured over these."""
        costs = self.planner.costs
        update_ns = self.num_updated * costs.rates.update_ns_per_million // 1_000_000
        predicted = [in_seconds(own, update_ns) for own in step_ns_by_rank(plan, balances, costs)]
        slowest = {stage: max(own[stage] for own in predicted) for stage in predicted[0]}
        return {
            "predicted": slowest,
            "predicted_by_rank": predicted,
            "ratio": ratios(metrics["seconds"], slowest),
            "ratio_by_rank": [ratios(*pair) for pair in zip(metrics["seconds_by_rank"], predicted, strict=True)],
        }

    def _priced(self, plan: StepPlan) -> tuple[list, list[Balance]]:
        """Price the step's rows."""
        costs = [row_costs(row, self.planner.costs) for row in plan.rows]
        rows = zip(plan.rows, plan.plans, costs, strict=True)
        return costs, [balance(row, row_plan, cost) for row, row_plan, cost in rows]

    def _write_plan(self, plan: StepPlan, first: Balance) -> None:
        """Keep the first step's plan, and the balance of its first row."""
        (self.folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
        began = time.perf_counter()
        self.planner.row(plan.rows[0])
        took = 1000 * (time.perf_counter() - began)
        write_json(self.folder / "inspect.json", inspect_record(plan.plans[0], first, plan_ms=took))

    def _say_losses(self) -> None:
        """Tell at the end what was not used."""
        counters = self.counters
        print(
            f"{counters.documents} samples came up, {counters.lost} could not be used, "
            f"{counters.skipped_steps} steps had no label",
            file=sys.stderr,
        )
        if self.num_reduced:
            print(f"{self.num_reduced} were seen or heard less finely than asked", file=sys.stderr)
        for message, count in counters.faults.items():
            print(f"  {count} x {message}", file=sys.stderr)
