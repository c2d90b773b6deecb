"""What a training run writes down on the way: metrics, the first plan, progress for people."""

import sys
import time
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
from mmcp.sharding.step import StepPlan
from mmcp.training.metrics import MetricsWriter, rss_mb
from mmcp.training.run_folder import write_json
from mmcp.training.train import Counters, LoadedStep

REDUCED_SHOWN = 3  # samples told by name to be seen less finely than asked; the others are counted


class RunLog:
    """Log of one run, used by every rank as a context manager; rank 0 writes."""

    def __init__(
        self, settings: RunConfig, folder: Path, mesh: Mesh, *, pipeline: Pipeline, counters: Counters, start: int
    ):
        self.folder, self.mesh, self.planner, self.counters = folder, mesh, pipeline.planner, counters
        self.is_writer = mesh.rank == 0
        self.told: set[str] = set()
        self.num_reduced = 0
        self.start, self.total = start, settings.optim.total_steps
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        shown = [TextColumn(column) if isinstance(column, str) else column for column in columns]
        self.progress = Progress(*shown, console=Console(stderr=True), disable=not self.is_writer)

    def __enter__(self) -> "RunLog":
        self.progress.start()
        self.task = self.progress.add_task("train", total=self.total, completed=self.start)
        self.writer = MetricsWriter(self.folder, resume_step=self.start) if self.is_writer else None
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        if self.writer:
            self.writer.__exit__(*error)
            self._say_losses()

    def step(self, metrics: dict[str, Any], loaded: LoadedStep) -> None:
        """Write one step's line; every rank calls it, since each tells its memory and its damage."""
        told = {"rss_mb": rss_mb(), "notes": sorted(set(loaded.notes) - self.told)}
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
            "predicted": self._predicted(balances),
            "imbalance": balances[0].imbalance if balances else {},
            "rss_mb": [rank["rss_mb"] for rank in ranks],
        }
        self.writer.write(metrics)
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

    def _predicted(self, balances: list[Balance]) -> dict[str, float]:
        """Seconds of the slowest rank by stage, as the plans price them, summed over the step's rows."""
        costs = self.planner.costs
        stages = {"decode": 0, "encode": 0, "backbone": 0, "loss": 0, "total": 0}
        for each in balances:
            backbone = [sum(pair) for pair in zip(each.linear_flops, each.attention_flops, strict=True)]
            stages["decode"] += max(each.decode_ns)
            stages["encode"] += costs.ns(max(each.encoder_flops))
            stages["backbone"] += costs.ns(max(backbone))
            stages["loss"] += costs.ns(max(each.label_rows) * costs.label_flops)
            stages["total"] += each.step_ns
        return {stage: nanoseconds / 1e9 for stage, nanoseconds in stages.items()}

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
