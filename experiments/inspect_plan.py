"""How does a sequence lie over the ranks, and how even is the work? Planned from metadata; nothing is decoded.

Run:     mmcp inspect clip.mp4 --ranks 8 --compare --html balance.html
Source:  a clip; a manifest (.jsonl) or shards, with --sample N; a run, whose first step is shown; or --workload NAME
"""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import inspect_workload
from experiments.base import RunConfig
from experiments.inspect_source import Row, find_row, run_row
from mmcp.config import load
from mmcp.masks import Mask
from mmcp.parallel.mesh import MeshConfig
from mmcp.report.explained import explain_lines, explain_section, explain_units
from mmcp.report.figures import save_comparison, save_shards
from mmcp.report.outcome import Outcome
from mmcp.report.run import time_sections
from mmcp.report.run_record import RunRecord
from mmcp.report.shards import Shown, View, write_shard_report
from mmcp.report.terminal import balance_table, comparison_table, facts_grid
from mmcp.report.timeline import write_trace
from mmcp.sequence import TokenSequence
from mmcp.sharding.balance import balance, inspect_record
from mmcp.sharding.cost import RowCosts, row_costs
from mmcp.sharding.layout import UNCAPPED
from mmcp.sharding.needs import layer_needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.strategies import STRATEGIES

SHIPPED = Path(__file__).parent / "configs" / "long_clips.yaml"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan, as asked for on the command line; None: as the config says."""

    source: str
    config: Path | None = None
    sample: int | None = None
    ranks: int | None = None
    strategy: str | None = None
    compare: bool = False
    budget: int | None = None
    """Tokens the sample may have."""
    cap_bytes: int | None = None
    explain: bool = False

    @property
    def is_run(self) -> bool:
        return (Path(self.source) / "config.yaml").is_file()

    @property
    def config_file(self) -> Path:
        return Path(self.source) / "config.yaml" if self.is_run else self.config or SHIPPED

    @property
    def is_stored(self) -> bool:
        """Whether the plan that a run stored answers it."""
        asked = (self.sample, self.ranks, self.strategy, self.budget, self.cap_bytes)
        as_it_was = asked == (None,) * 5 and not self.compare and not self.explain
        files = (Path(self.source) / name for name in ("plan.json", "inspect.json"))
        return self.is_run and as_it_was and all(file.is_file() for file in files)

    def check(self, trace: Path | None) -> None:
        """Raise ValueError for what does not go together."""
        if self.is_run and self.config:
            raise ValueError(f"--config {self.config}: the run '{self.source}' has a config of its own; leave it out")
        if trace and not self.is_run:
            raise ValueError(f"--trace {trace}: '{self.source}' is no run, nothing has been timed; name a run")
        if self.explain and self.compare:
            raise ValueError("--explain tells the rank of each frame under one strategy; leave out --compare")


def run(
    source: str | None = None,
    *,
    workload: str | None = None,
    config: Path | None = None,
    sample: int | None = None,
    ranks: int | None = None,
    strategy: str | None = None,
    compare: bool = False,
    budget: int | None = None,
    cap_bytes: int | None = None,
    explain: bool = False,
    html: Path | None = None,
    png: Path | None = None,
    trace: Path | None = None,
) -> Outcome:
    """Plan what `source` or `workload` names and show the plan, also in the files named; see Request.

    The record is one object, with `compare` or `workload` a list of them; with `explain` it has `units` too.
    Raises ValueError for what cannot be read, planned or written.
    """
    if (source is None) == (workload is None):
        raise ValueError(f"SOURCE is {source} and --workload {workload}; name one of the two")
    for file in filter(None, (html, png, trace)):
        _check_writable(file)
    if workload is not None:
        if config or sample is not None or budget is not None or explain or trace:
            needless = "--config, --sample, --budget, --explain and --trace"
            raise ValueError(f"--workload {workload} is drawn, not read or run: leave out {needless}")
        files = {"html": html, "png": png}
        return inspect_workload.run(
            workload, ranks=ranks, strategy=strategy, compare=compare, cap_bytes=cap_bytes or 0, **files
        )
    assert source is not None
    request = Request(
        source=source, config=config, sample=sample, ranks=ranks, strategy=strategy, compare=compare,
        budget=budget, cap_bytes=cap_bytes, explain=explain,
    )  # fmt: skip
    request.check(trace)
    views, shown, row = _stored(Path(source), with_row=bool(html or png)) if request.is_stored else _planned(request)
    records = [view.record for view in views]
    units = (
        explain_units(row.sequence, views[0].plan, row.reasons) if row.sequence and row.reasons is not None else None
    )
    record = RunRecord.read(Path(source)) if request.is_run else None
    written = _write(html, png, views, shown, row, units, record)
    if trace and record:
        written |= write_trace(trace, record)
    tables = [facts_grid(row.facts), *map(balance_table, records)]
    tables += [comparison_table(records)] if request.compare else []
    tables += [explain_lines(units)] if units is not None else []
    tables += [facts_grid(written)] if written else []
    if units is not None:
        records[0]["units"] = units
    return Outcome(record=records if request.compare else records[0], tables=tables)


def _write(
    html: Path | None,
    png: Path | None,
    views: list[View],
    shown: Shown,
    row: Row,
    units: list[dict] | None,
    record: RunRecord | None,
) -> dict[str, str]:
    """Write page and figure, and say where."""
    if html:
        more = [] if units is None else [explain_section(units)]
        more += [] if record is None else time_sections(record)
        write_shard_report(html, views, title=row.title, facts=row.facts, shown=shown, more=more)
    if png and len(views) > 1:
        save_comparison(png, [view.record for view in views])
    elif png:
        mask = None if shown.sequence is None else Mask.of(shown.sequence)
        save_shards(png, views[0].record, views[0].plan, mask=mask)
    return {kind: str(file) for kind, file in (("page", html), ("figure", png)) if file}


def _planned(request: Request) -> tuple[list[View], Shown, Row]:
    """Lay the source out and plan it with one strategy or all."""
    overrides = () if request.budget is None else (f"clip.budget.tokens={request.budget}",)
    settings = load(RunConfig, request.config_file, overrides)
    mesh = mesh_for(settings, settings.mesh.cp if request.ranks is None else request.ranks)
    find = run_row if request.is_run else find_row
    row = find(request.source, settings, sample=request.sample, explain=request.explain)
    assert row.sequence is not None, "a row that was laid out has a sequence"
    names = sorted(STRATEGIES) if request.compare else [request.strategy or settings.sharding.strategy]
    shown = _shown_of(row.sequence, settings)
    if request.cap_bytes is not None:
        shown = replace(shown, cap_bytes=request.cap_bytes)
    cap = UNCAPPED if request.compare else shown.cap_bytes
    assert shown.costs is not None, "a row that was laid out has costs"
    views = [plan_view(row.sequence, shown.costs, mesh, name, cap=cap) for name in names]
    used = {"config": str(request.config_file), "mesh": f"ring={mesh.ring} x ulysses={mesh.ulysses}"}
    return views, shown, replace(row, facts={**row.facts, **used})


def _stored(folder: Path, *, with_row: bool) -> tuple[list[View], Shown, Row]:
    """Read the plan and the record that a run kept of its first step; with its row where the data are still there."""
    plans = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["rows"]
    record = json.loads((folder / "inspect.json").read_text(encoding="utf-8"))
    facts = {"row": f"the first of {len(plans)} rows of the run's first step, as stored in {folder / 'plan.json'}"}
    plan = ShardPlan.from_json(json.dumps(plans[0]))
    row, shown = Row(f"{folder.resolve().name}, first step", None, facts), Shown()
    if with_row:
        settings = load(RunConfig, folder / "config.yaml", ())
        sequence = _row_of(plan, folder, settings)
        if sequence is None:
            facts["not shown"] = "clip times, text and mask: the data of the run are not there as they were"
        else:
            shown = _shown_of(sequence, settings)
    return [View(record, plan)], shown, row


def _row_of(plan: ShardPlan, folder: Path, settings: RunConfig) -> TokenSequence | None:
    """Lay out the row of a stored plan again; None where the data are gone or give another."""
    try:
        sequence = run_row(str(folder), settings).sequence
    except (ValueError, OSError):
        return None
    assert sequence is not None, "a row that was laid out has a sequence"
    is_same = plan.unit_ranges == tuple(map(tuple, sequence.unit_ranges.tolist()))
    return sequence if is_same and plan.num_tokens == sequence.num_tokens else None


def _shown_of(sequence: TokenSequence, settings: RunConfig) -> Shown:
    tokenizer = settings.tokenizer.build()
    costs = row_costs(sequence, settings.planner(tokenizer.vocab_size).costs)
    return Shown(sequence=sequence, costs=costs, words=tokenizer.decode, cap_bytes=settings.sharding.cap_bytes)


def mesh_for(settings: RunConfig, ranks: int) -> MeshConfig:
    """Arrange context-parallel ranks: as configured, else as many on the Ulysses axis as there are heads for.

    16 heads: 8 ranks -> ring=1 x ulysses=8, 64 ranks -> ring=4 x ulysses=16
    Raises ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"--ranks {ranks}: a plan needs at least one rank")
    if ranks == settings.mesh.cp:
        return MeshConfig(ring=settings.mesh.ring, ulysses=settings.mesh.ulysses)
    heads = settings.model.backbone.heads
    ulysses = next(size for size in range(min(heads, ranks), 0, -1) if ranks % size == 0)
    return MeshConfig(ring=ranks // ulysses, ulysses=ulysses)


def plan_view(row: TokenSequence, costs: RowCosts, mesh: MeshConfig, strategy: str, *, cap: int) -> View:
    """Plan a row and price the plan. Raises KeyError naming the strategies for one that there is not."""
    needs = layer_needs(costs.model.layers)
    began = time.perf_counter()
    plan = STRATEGIES[strategy](row, (mesh.ring, mesh.ulysses), costs, needs, cap)
    plan_ms = 1e3 * (time.perf_counter() - began)
    return View(inspect_record(plan, balance(row, plan, costs), plan_ms=plan_ms), plan)


def _check_writable(file: Path) -> None:
    """Raise ValueError now for a file that could not be written later."""
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"'{file}' cannot be written ({file.absolute()}); name a file in a folder you may write to")
