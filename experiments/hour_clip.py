"""Can two ranks train on one hour of video and sound as one sequence, each doing only its part of the work?

Run:     python -m experiments.hour_clip [--json FILE] [key=value ...]     (an hour: some minutes on two cores)
Smoke:   python -m experiments.hour_clip smoke=true                        (four minutes of clip, under a minute)
Expect:  each rank decodes its own part of the clip once, every unit is encoded once, memory stays under 3 GiB a rank,
         linear work and encoding are even, one rank computes the same loss. Anything else exits with 1 and says what.
Result:  experiments/LOG.md, entry "hour"
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.base import RunConfig
from experiments.check_run import check
from experiments.long_clip import LongClip, prepared_clip
from experiments.train_video_lm import train, with_ranks
from experiments.watch import read_watch, watch
from mmcp.attention import LinearConfig, SoftmaxConfig
from mmcp.config import config, load
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.parallel.launch import launch
from mmcp.report.outcome import Outcome
from mmcp.sharding.balance import COSTS
from mmcp.sharding.ranges import size
from mmcp.training.metrics import read_metrics
from mmcp.training.run_folder import open_run_folder, write_json
from mmcp.training.stage_clock import STAGES

VARIANTS = {
    "softmax": (SoftmaxConfig(),),
    "mix": (LinearConfig(), LinearConfig(), SoftmaxConfig()),
}
"""Attention of the first layers, repeated over all."""
SMOKE_SECONDS = 240


@config
class HourConfig:
    """What is measured, and what is required of it."""

    folder: str = "runs/hour"
    """Where clips and runs are written."""
    base: str = str(Path(__file__).parent / "configs" / "hour.yaml")
    """Config of the runs; folder, data.train and the pattern of layers are this experiment's."""
    changes: tuple[str, ...] = ()
    """Settings `section.key=value` that win over `base`."""
    source: LongClip = LongClip()
    ranks: PositiveInt = 2
    min_tokens: PositiveInt = 32768
    max_decoded: PositiveFloat = 1.1
    """Frames that a rank may decode, per source frame between the first and the last that it needs; besides, one group
    of pictures at each cut."""
    max_pss_mb: PositiveFloat = 3072.0
    """Of a rank with its workers."""
    max_imbalance: PositiveFloat = 1.05
    """Of linear work and of encoding."""
    max_loss_error: PositiveFloat = 1e-5
    """Relative difference of the loss between `ranks` ranks and one."""
    smoke: bool = False
    """Take four minutes of clip instead."""


@dataclass(frozen=True)
class Measured:
    """A run as its ranks saw it."""

    ranks: list[list[dict[str, Any]]]
    """Per rank and step: a line of `watch`."""
    imbalance: dict[str, float]
    """Largest over the steps."""

    def of(self, step: int, name: str) -> list:
        """One number of each rank."""
        return [lines[step][name] for lines in self.ranks]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of HourConfig")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    outcome = run(build(HourConfig, Source(), options.overrides))
    outcome.show(as_json=False)
    if options.json:
        write_json(options.json, outcome.record)
    return 0 if outcome.is_ok else 1


def run(settings: HourConfig) -> Outcome:
    """Write the clip, train each variant on all ranks and on one, and check what was measured."""
    if settings.smoke:
        settings = replace(settings, source=replace(settings.source, seconds=SMOKE_SECONDS), min_tokens=2048)
    folder = Path(settings.folder)
    shards = prepared_clip(settings.source, folder / "clips")
    runs = {
        variant: (measure(settings, variant, shards, ranks=settings.ranks), measure(settings, variant, shards, ranks=1))
        for variant in VARIANTS
    }
    steps = [step for variant, (many, _) in runs.items() for step in step_records(variant, many)]
    alone = [step for variant, (many, one) in runs.items() for step in one_rank_records(variant, many, one)]
    faults = [f"{variant}: {fault}" for variant, (many, _) in runs.items() for fault in check_run(settings, many)]
    faults += check_losses(settings, alone)
    record = {
        "ranks": settings.ranks,
        "tokens": steps[0]["tokens"],
        "seconds_of_clip": settings.source.seconds,
        "steps": steps,
        "imbalance": {name: max(many.imbalance[name] for many, _ in runs.values()) for name in COSTS},
        "one_rank": alone,
        "faults": faults,
    }
    tables = [_counts_table(record), _seconds_table(record), _alone_table(record)]
    return Outcome(record=record, tables=[*tables, *faults], is_ok=not faults)


def measure(settings: HourConfig, variant: str, shards: Path, *, ranks: int) -> Measured:
    """Train one variant and return what was seen; what an earlier run of it left is replaced."""
    run_settings = run_config(settings, variant, shards, ranks=ranks)
    check(run_settings)
    shutil.rmtree(run_settings.folder, ignore_errors=True)
    folder = open_run_folder(run_settings.folder, resume=False)
    launch(train, ranks, run_settings, folder, False, partial(watch, folder=folder))
    lines = [read_watch(folder, rank) for rank in range(ranks)]
    metrics = read_metrics(folder)
    worst = {name: max(line["imbalance"][name] for line in metrics) for name in metrics[0]["imbalance"]}
    return Measured(lines, worst)


def run_config(settings: HourConfig, variant: str, shards: Path, *, ranks: int) -> RunConfig:
    """Return the config of one run."""
    base = with_ranks(load(RunConfig, settings.base, settings.changes), ranks)
    return replace(
        base.with_pattern(VARIANTS[variant]),
        folder=f"{settings.folder}/{settings.source.name}/{variant}_{ranks}",
        data=replace(base.data, train=str(shards)),
    )


def check_run(settings: HourConfig, run: Measured) -> Iterator[str]:
    """Say what is not as it has to be."""
    for step in range(len(run.ranks[0])):
        for fault in (*check_parts(run, step), *check_load(settings, run, step)):
            yield f"step {step}: {fault}"
    for name in ("linear", "encode"):
        if run.imbalance[name] > settings.max_imbalance:
            yield f"imbalance '{name}' is {run.imbalance[name]:.3f}, at most {settings.max_imbalance} is allowed"


def check_parts(run: Measured, step: int) -> Iterator[str]:
    """Every unit is decoded and encoded on exactly one rank, and each rank's are one span of the clip."""
    for kind, total in run.of(step, "num_units")[0].items():
        spans = sorted(tuple(span) for units in run.of(step, "units") for span in units[kind])
        ends = [0, *(stop for _, stop in spans)]
        if len(spans) != len(run.ranks) or [start for start, _ in spans] != ends[:-1] or ends[-1] != total:
            yield f"the ranks' {kind} units {spans} are not one span each that together cover 0..{total} once"
    decoded = [sum(size(ranges) for ranges in units.values()) for units in run.of(step, "units")]
    if run.of(step, "units_encoded") != decoded:
        yield f"the ranks decoded {decoded} units, but encoded {run.of(step, 'units_encoded')}"


def check_load(settings: HourConfig, run: Measured, step: int) -> Iterator[str]:
    """Little is decoded beyond what is needed; the sequence is long, memory small."""
    spans, clip = run.of(step, "frames"), settings.source
    for rank, ((first, last), decoded) in enumerate(zip(spans, run.of(step, "frames_decoded"), strict=True)):
        cuts = (first > min(span[0] for span in spans)) + (last < max(span[1] for span in spans))
        allowed = settings.max_decoded * (last - first + 1) + cuts * clip.group_of_pictures
        if not 0 < decoded <= allowed:
            yield f"rank {rank} decoded {decoded} frames to show some of {first}..{last}; {allowed:.0f} are allowed"
    for rank, pss in enumerate(run.of(step, "pss_mb")):
        if pss > settings.max_pss_mb:
            yield f"rank {rank} and its workers took {pss:.0f} MiB, at most {settings.max_pss_mb:.0f} are allowed"
    if run.of(step, "tokens")[0] < settings.min_tokens:
        yield f"the sequence has {run.of(step, 'tokens')[0]} tokens, at least {settings.min_tokens} are required"


def check_losses(settings: HourConfig, alone: list[dict[str, Any]]) -> list[str]:
    """Say where one rank computes another loss."""
    return [
        f"{entry['variant']}, step {entry['step']}: the loss on one rank, {entry['loss']}, is {entry['error']:.1e} off"
        for entry in alone
        if not entry["error"] <= settings.max_loss_error
    ]


def step_records(variant: str, run: Measured) -> list[dict[str, Any]]:
    """The figures of each step: what `--json` holds under `steps`; lists have one entry per rank."""
    names = ("frames_decoded", "units_encoded", "rows_routed", "pss_mb", "frames", "units")
    return [
        {
            "variant": variant,
            "step": step,
            "loss": line["loss"],
            "tokens": line["tokens"],
            "seconds_by_rank": run.of(step, "seconds"),
            **{name: run.of(step, name) for name in names},
        }
        for step, line in enumerate(run.ranks[0])
    ]


def one_rank_records(variant: str, many: Measured, one: Measured) -> list[dict[str, Any]]:
    """The losses of one rank, and how far those of all ranks are from them."""
    return [
        {
            "variant": variant,
            "step": step,
            "loss": line["loss"],
            "error": abs(many.ranks[0][step]["loss"] - line["loss"]) / abs(line["loss"]),
            "pss_mb": line["pss_mb"],
            "seconds": line["seconds"],
        }
        for step, line in enumerate(one.ranks[0])
    ]


def _counts_table(record: dict[str, Any]) -> Table:
    title = f"{record['seconds_of_clip']} s of clip, {record['tokens']:,} tokens, {record['ranks']} ranks"
    table = _table(title, "variant", "step", "rank", "loss", "frames", "units", "routed", "PSS MiB")
    for step in record["steps"]:
        for rank in range(record["ranks"]):
            counts = (str(step[name][rank]) for name in ("frames_decoded", "units_encoded", "rows_routed"))
            head = (step["variant"], str(step["step"]), str(rank), f"{step['loss']:.6f}")
            table.add_row(*head, *counts, f"{step['pss_mb'][rank]:.0f}")
    table.caption = "imbalance: " + "   ".join(f"{name} {value:.4f}" for name, value in record["imbalance"].items())
    return table


def _seconds_table(record: dict[str, Any]) -> Table:
    stages = (*STAGES, "total")
    table = _table("seconds by stage; decoding runs beside the others", "variant", "step", "rank", *stages)
    for step in record["steps"]:
        for rank, seconds in enumerate(step["seconds_by_rank"]):
            times = (f"{seconds[stage]:.1f}" for stage in stages)
            table.add_row(step["variant"], str(step["step"]), str(rank), *times)
    return table


def _alone_table(record: dict[str, Any]) -> Table:
    headings = ("variant", "step", "loss", "relative difference", "total s", "PSS MiB")
    table = _table("the same steps on one rank", *headings)
    for entry in record["one_rank"]:
        figures = (f"{entry['loss']:.6f}", f"{entry['error']:.1e}", f"{entry['seconds']['total']:.2f}")
        table.add_row(entry["variant"], str(entry["step"]), *figures, f"{entry['pss_mb']:.0f}")
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


if __name__ == "__main__":
    sys.exit(main())
