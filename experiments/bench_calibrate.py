"""What does one rank of this machine do in a second? The `rates` that plans are priced with, measured on rank 0.

Run:     mmcp bench calibrate [base=experiments/configs/demo.yaml] [video=FILE] [--json]      (idle machine, a minute)
Smoke:   mmcp bench calibrate smoke=true
Expect:  predicted seconds of the compute stages of a run within 25 percent of the measured ones (its `ratio`).
Result:  printed as settings `rates.*`. Put them into a run's config: they are saved with it and kept when it resumes.

Computed are steps of the config's own model, in its type, over a clip and a text whose every token has a label; once
with the layers of the config that attend by pairs, once with those that hand on a state. Decoding is the library's own.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import PositiveInt
from rich.table import Table

from data_pipelines.loader import Loaded
from experiments.base import RunConfig
from experiments.calibrate_decoding import decode_rates
from experiments.inspect_source import clip_sample
from experiments.long_clip import LongClip, write_clip
from experiments.pipeline import Pipeline, collect
from experiments.runtime import num_updated, run_runner
from experiments.train_video_lm import with_ranks
from mmcp.attention import AttentionConfig
from mmcp.config import as_values, config, load
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.parallel.collectives import exchange
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, device_type_for, process_group
from mmcp.report.outcome import Outcome
from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.cost import Rates, RowCosts, row_costs
from mmcp.training.optim import apply_update
from mmcp.training.run_folder import write_json
from mmcp.training.stage_clock import StageClock, seconds_by_stage
from mmcp.training.step import StepWork

LINK_BYTES = 8 << 20
"""Sent between two ranks to time their link."""


@config
class CalibrateConfig:
    """What is measured."""

    base: str = str(Path(__file__).parent / "configs" / "demo.yaml")
    """Config of the run that the rates are for."""
    changes: tuple[str, ...] = ()
    """Settings `section.key=value` that win over `base`."""
    folder: str = "runs/calibrate"
    """Where the clip and what was measured are written."""
    video: str = ""
    """A file with picture and sound like those to train on; empty: `source`, written for it."""
    source: LongClip = LongClip(seconds=60)
    tokens: PositiveInt = 2048
    """Tokens of the text that is computed beside the clip."""
    repeats: PositiveInt = 5
    """Times that everything is done: the median of steps, the quickest of decoding."""
    smoke: bool = False
    """Do all of it once, in small."""


@dataclass(frozen=True)
class StageRate:
    """FLOPs that a stage really computed, and the seconds that they took."""

    flops: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.flops / self.seconds


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure the rates of one rank of this machine."""
    settings = build(CalibrateConfig, Source(), overrides)
    if settings.smoke:
        settings = replace(settings, source=replace(settings.source, seconds=8), tokens=64, repeats=1)
    run_settings = load(RunConfig, settings.base, settings.changes)
    record = as_values(calibrate(settings, run_settings))
    write_json(Path(settings.folder) / "rates.json", record)
    table = Table("setting", "measured", "default")
    for name, value in record.items():
        table.add_row(f"rates.{name}", f"{value:,}", f"{getattr(run_settings.rates, name):,}")
    return Outcome(record=record, tables=[table, " ".join(f"rates.{name}={value}" for name, value in record.items())])


def calibrate(settings: CalibrateConfig, run_settings: RunConfig) -> Rates:
    """Measure the rates of a run on this machine."""
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(settings.video) if settings.video else folder / f"{settings.source.name}.mp4"
    if not file.exists():
        write_clip(settings.source, file)
    rates = launch(measure_rates, 1, settings, with_ranks(run_settings, 1), file, folder)
    rates = replace(rates, decoders=free_decoders(run_settings))
    if device_type_for(run_settings.parameter_dtype) == "cpu" or torch.cuda.device_count() > 1:
        rates = replace(rates, link_bytes_per_second=launch(measure_link, 2, settings, run_settings))
    return rates


def free_decoders(settings: RunConfig) -> int:
    """Decode workers of a rank that find a core of their own beside the ranks of this machine."""
    is_on_cpu = device_type_for(settings.parameter_dtype) == "cpu"
    ranks = settings.mesh.world if is_on_cpu else min(settings.mesh.world, torch.cuda.device_count())
    return max(0, min(settings.data.workers, len(os.sched_getaffinity(0)) // ranks - is_on_cpu))


def measure_rates(settings: CalibrateConfig, run_settings: RunConfig, file: Path, folder: Path) -> Rates:
    """Measure computing, the update and decoding on this rank."""
    with process_group(device_type_for(run_settings.parameter_dtype)) as device:
        mesh = build_mesh(run_settings.mesh, device=device)
        backbone = run_settings.model.backbone
        kinds: dict[str, list[AttentionConfig]] = {}
        for variant in backbone.variants:
            stage = "attention" if variant.pair_flops(backbone.head_dim) else "recurrent"
            kinds.setdefault(stage, []).append(variant)
        measured: dict[str, StageRate] = {}
        for stage, variants in kinds.items():
            found, update, size = measure_steps(settings, run_settings.with_pattern(tuple(variants)), mesh, file, stage)
            measured = found | measured
    linear = measured["linear"].per_second
    percents = {f"{stage}_percent": max(1, round(100 * rate.per_second / linear)) for stage, rate in measured.items()}
    del percents["linear_percent"]
    decoding = decode_rates(file, size=size, folder=folder, repeats=settings.repeats)
    return Rates(flops_per_second=round(linear), update_ns_per_million=update, **percents, **decoding)


def measure_steps(
    settings: CalibrateConfig, run_settings: RunConfig, mesh: Mesh, file: Path, attention: str
) -> tuple[dict[str, StageRate], int, tuple[int, int]]:
    """Run steps of a model whose attention is all of one stage.

    Returns the rate of each stage, nanoseconds to update a million parameters, and the size of the clip's frames.
    """
    tokenizer = run_settings.tokenizer.build()
    runner = run_runner(run_settings, mesh, vocabulary=tokenizer.vocab_size)
    optimizer = run_settings.optim.build(runner.model)
    pipeline = Pipeline(run_settings, tokenizer, clip_sample(file), run_settings.planner(tokenizer.vocab_size))
    work, costs = decoded_row(pipeline, mesh, settings.tokens)
    seconds: dict[str, list[float]] = {}
    for _ in range(settings.repeats + 1):
        clock = StageClock(mesh.device)
        runner.backward(work, clock)
        clock.stretch("update")
        apply_update(optimizer, run_settings.optim, 0)
        clock.mark("optimizer")
        for stage, each in seconds_by_stage(clock.spans()).items():
            seconds.setdefault(stage, []).append(each)
    typical = {stage: statistics.median(each[1:]) for stage, each in seconds.items()}
    flops = stage_flops(costs)
    names = {stage: "attention" if stage == attention else stage for stage in flops}
    rates = {stage: StageRate(each, typical[names[stage]]) for stage, each in flops.items() if each}
    (size,) = {unit.size[1:] for unit in work.plan.rows[0].units if len(unit.size) == 3}
    return rates, round(1e15 * typical["optimizer"] / num_updated(runner.model)), (size[0], size[1])


def decoded_row(pipeline: Pipeline, mesh: Mesh, tokens: int) -> tuple[StepWork, RowCosts]:
    """Lay out and decode the pipeline's sample with a text of so many labelled tokens beside it."""
    document = pipeline.document(0)
    text = Segment(kind="text", ids=(1,) * tokens, loss=True)
    document = replace(document, sequence=TokenSequence((*document.sequence.segments, text)))
    planned = pipeline.plan_documents([document])
    jobs = pipeline.jobs(planned, mesh)
    results = []
    for job in jobs:
        header, arrays = job.function(*job.args)
        results.append((job, ({**header, "began": time.monotonic()}, arrays)))
    work = collect(Loaded(0, planned, tuple(results), 0.0)).work
    return work, row_costs(planned.plan.rows[0], pipeline.planner.costs)


def stage_flops(costs: RowCosts) -> dict[str, int]:
    """FLOPs that a training step of a row computes, by stage."""
    model = costs.model
    forward = {
        "encode": int(costs.flops.sum()),
        "linear": costs.num_tokens * model.linear_flops,
        "loss": costs.num_labels * model.label_flops,
    }
    for layer, pairs in zip(model.layers, costs.pairs, strict=True):
        forward[layer.stage] = forward.get(layer.stage, 0) + layer.flops(layer.heads, pairs, costs.num_tokens)
    return {stage: model.step_percent[stage] * flops // 100 for stage, flops in forward.items()}


def measure_link(settings: CalibrateConfig, run_settings: RunConfig) -> int:
    """Bytes a second that one of two ranks receives from the other."""
    with process_group(device_type_for(run_settings.parameter_dtype)) as device:
        group = build_mesh(MeshConfig(ulysses=2), device=device).cp
        rows = torch.zeros(2, LINK_BYTES, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(settings.repeats + 1):
            clock = StageClock(device)
            clock.stretch("forward")
            exchange(rows, (1, 1), (1, 1), group=group, name="link", backward=False)
            clock.mark("route")
            seconds.append(clock.spans()[0].seconds)
        return round(LINK_BYTES / statistics.median(seconds[1:] or seconds))
