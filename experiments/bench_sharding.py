"""Does the gain that plans promise over other strategies show in the measured time of a step on an hour?

Run:     mmcp bench sharding [rounds=3] [--json]       (an hour of clip; minutes on two cores; again for more)
Smoke:   mmcp bench sharding smoke=true                (a minute of clip)
Expect:  measured step time of each rival over that of `balanced` within 10 percent of what the plans say.
Result:  experiments/LOG.md, entry "sharding on two ranks"

Rates are measured first. Then each round takes one step by each strategy in turn, on the same ranks and weights: every
rank decodes its units, the ranks agree, the step runs forward and backward. Steps of earlier calls are kept in the
folder and count. Told are steps that decode first (a machine without cores to spare) and, from the same seconds, steps
whose decoding would run beside the one before.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from data_pipelines.loader import Loaded
from data_pipelines.workers import WorkerPool
from experiments.base import RunConfig
from experiments.bench_calibrate import CalibrateConfig, calibrate
from experiments.hour_clip import VARIANTS
from experiments.long_clip import LongClip, prepared_clip
from experiments.pipeline import Pipeline, PlannedStep, agree_on, collect
from experiments.runtime import run_runner
from experiments.train_video_lm import with_ranks
from mmcp.config import as_values, config, load
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.parallel.collectives import all_gather_json
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, build_mesh, device_type_for, process_group
from mmcp.report.outcome import Outcome
from mmcp.sharding.balance import balance
from mmcp.sharding.cost import Rates, row_costs
from mmcp.sharding.predict import step_ns_by_rank
from mmcp.training.run_folder import write_json
from mmcp.training.stage_clock import StageClock, seconds_by_stage
from mmcp.training.step import StepRunner

STAGES = ("decode", "encode", "route", "linear", "attention", "loss")
SMOKE_SECONDS = 60


@config
class ShardingBench:
    """What is measured."""

    folder: str = "runs/bench_sharding"
    """Where clip, rates and steps are written."""
    base: str = str(Path(__file__).parent / "configs" / "hour.yaml")
    """Config of the run; data.train, rates, strategy and pattern are this experiment's."""
    changes: tuple[str, ...] = ()
    """Settings `section.key=value` that win over `base`."""
    pattern: str = "mix"
    """Attention of the layers: a name in experiments.hour_clip.VARIANTS."""
    source: LongClip = LongClip()
    ranks: PositiveInt = 2
    strategies: tuple[str, ...] = ("balanced", "contiguous", "frame_count", "replicate")
    """Compared with the first."""
    rounds: PositiveInt = 3
    """Steps by each strategy that this call adds."""
    smoke: bool = False
    """Take a minute of clip, and calibrate in small."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Calibrate unless that was done, take steps, and tell predicted and measured ratios of all steps so far."""
    settings = build(ShardingBench, Source(), overrides)
    if settings.smoke:
        settings = replace(settings, source=replace(settings.source, seconds=SMOKE_SECONDS))
    folder = Path(settings.folder) / settings.source.name / f"{settings.pattern}_{settings.ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    shards = prepared_clip(settings.source, Path(settings.folder) / "clips")
    base = load(RunConfig, settings.base, settings.changes).with_pattern(VARIANTS[settings.pattern])
    base = replace(base, data=replace(base.data, train=str(shards)))
    base = with_ranks(replace(base, rates=known_rates(settings, base, folder)), settings.ranks)
    steps = launch(take_steps, settings.ranks, settings, base)
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(step, allow_nan=False) + "\n" for step in steps)
    every = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    record = summary(settings, every) | {"rates": as_values(base.rates)}
    write_json(folder / "sharding.json", record)
    return Outcome(record=record, tables=_tables(record))


def known_rates(settings: ShardingBench, base: RunConfig, folder: Path) -> Rates:
    """Measure the rates on a minute of the same clip, once for all calls; decoding comes before computing here."""
    file = folder / "rates.json"
    if not file.is_file():
        clip = replace(settings.source, seconds=SMOKE_SECONDS)
        calibration = CalibrateConfig(folder=str(folder), source=clip, tokens=4096, smoke=settings.smoke)
        write_json(file, as_values(calibrate(calibration, with_ranks(base, settings.ranks))))
    return replace(Rates(**json.loads(file.read_text(encoding="utf-8"))), decoders=0)


def take_steps(settings: ShardingBench, base: RunConfig) -> list[dict[str, Any]]:
    """Take the rounds on this rank; returns a record per step, with what every rank measured."""
    records = []
    with process_group(device_type_for(base.parameter_dtype)) as device:
        mesh, tokenizer = build_mesh(base.mesh, device=device), base.tokenizer.build()
        runner = run_runner(base, mesh, vocabulary=tokenizer.vocab_size)
        shards, pool = base.data.open_train(), WorkerPool(base.data.workers, base.data.deadline_s)
        try:
            planned = {}
            for strategy in settings.strategies:
                chosen = replace(base, sharding=replace(base.sharding, strategy=strategy))
                pipeline = Pipeline(chosen, tokenizer, shards, chosen.planner(tokenizer.vocab_size))
                planned[strategy] = (pipeline, pipeline.plan([0]))
            for _ in range(settings.rounds):
                for strategy, (pipeline, step) in planned.items():
                    own = take_step(pipeline, step, runner, mesh, pool)
                    ranks = all_gather_json(own, group=mesh.world, name="measured")
                    loss = sum(rank.pop("loss_share") for rank in ranks)
                    records.append({"strategy": strategy, "loss": loss, **predicted(pipeline, step), "ranks": ranks})
        finally:
            pool.close()
    return records


def take_step(
    pipeline: Pipeline, planned: PlannedStep, runner: StepRunner, mesh: Mesh, pool: WorkerPool
) -> dict[str, float]:
    """Decode, agree, run forward and backward; returns seconds by stage, `compute`, `total`, and `loss_share`."""
    began = time.monotonic()
    jobs = pipeline.jobs(planned, mesh)
    futures = [pool.submit(job.function, *job.args) for job in jobs]
    results = tuple((job, future.result()) for job, future in zip(jobs, futures, strict=True))
    decoded = time.monotonic() - began
    work, faults = agree_on(collect(Loaded(0, planned, results, decoded)), runner)
    assert not faults, faults
    clock = StageClock(mesh.device)
    loss = runner.backward(work, clock).item() / work.label_tokens
    seconds = seconds_by_stage(clock.spans()) | {"decode": decoded}
    computed = sum(seconds[stage] for stage in STAGES) - decoded
    for parameter in runner.model.parameters():
        parameter.grad = None
    return {**{stage: seconds[stage] for stage in STAGES}, "compute": computed, "loss_share": loss} | {
        "total": time.monotonic() - began
    }


def predicted(pipeline: Pipeline, planned: PlannedStep) -> dict[str, Any]:
    """Price the step: seconds of each rank by stage, of computing, and of the step with decoding first or beside."""
    model, plan = pipeline.planner.costs, planned.plan
    balances = [balance(row, each, row_costs(row, model)) for row, each in zip(plan.rows, plan.plans, strict=True)]
    by_rank = step_ns_by_rank(plan, balances, model)
    return {"predicted": [{stage: own[stage] / 1e9 for stage in (*STAGES, "total")} for own in by_rank]}


def summary(settings: ShardingBench, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each strategy's steps, and their ratios to the first strategy's; the first round is left out if more
    than one was taken."""
    first, entries = settings.strategies[0], {}
    for strategy in settings.strategies:
        own = [step for step in steps if step["strategy"] == strategy]
        counted = own[1:] or own
        computed = [max(rank["compute"] for rank in step["ranks"]) for step in counted]
        decoded = [max(rank["decode"] for rank in step["ranks"]) for step in counted]
        prices = own[-1]["predicted"]
        most = {stage: max(rank[stage] for rank in prices) for stage in prices[0]}
        entries[strategy] = {
            "steps": len(counted),
            "loss": own[-1]["loss"],
            "predicted": most,
            "measured": {
                stage: statistics.median(max(rank[stage] for rank in step["ranks"]) for step in counted)
                for stage in (*STAGES, "total")
            },
            "predicted_first": most["total"],
            "predicted_beside": max(most["decode"], most["total"] - most["decode"]),
            "measured_first": statistics.median(
                decode + compute for decode, compute in zip(decoded, computed, strict=True)
            ),
            "measured_beside": statistics.median(map(max, zip(decoded, computed, strict=True))),
        }
    for entry in entries.values():
        for name in ("predicted_first", "measured_first", "predicted_beside", "measured_beside"):
            entry[f"{name}_ratio"] = entry[name] / entries[first][name]
    return {"clip": settings.source.name, "ranks": settings.ranks, "pattern": settings.pattern, "strategies": entries}


def _tables(record: dict[str, Any]) -> list[Table]:
    ratios = Table(
        title=f"step time over that of the first, {record['clip']}, {record['ranks']} ranks", box=SIMPLE_HEAD
    )
    seconds = Table(title="seconds of the slowest rank: predicted / measured", box=SIMPLE_HEAD)
    for table, names in (
        (ratios, ("strategy", "steps", "loss", "first: predicted", "measured", "beside: predicted", "measured")),
        (seconds, ("strategy", *STAGES, "total")),
    ):
        for name in names:
            table.add_column(name, justify="right")
    for strategy, entry in record["strategies"].items():
        shown = (
            f"{entry[f'{name}_{way}_ratio']:.3f}" for way in ("first", "beside") for name in ("predicted", "measured")
        )
        ratios.add_row(strategy, str(entry["steps"]), f"{entry['loss']:.6f}", *shown)
        pairs = (f"{entry['predicted'][stage]:.2f} / {entry['measured'][stage]:.2f}" for stage in (*STAGES, "total"))
        seconds.add_row(strategy, *pairs)
    return [ratios, seconds]
