"""How does a sequence lie over the ranks, and how even is the work? Planned from metadata; nothing is decoded.

Run:     mmcp inspect clip.mp4 --ranks 8 --compare --html balance.html
Source:  a clip; a manifest (.jsonl) or shards, with --sample N; a run, whose first step is shown; or --workload NAME
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from experiments import inspect_workload
from experiments.base import RunConfig
from experiments.inspect_source import Row, find_row, run_row
from mmcp.config import load
from mmcp.parallel.mesh import MeshConfig
from mmcp.report.figures import save_comparison, save_shards
from mmcp.report.outcome import Outcome
from mmcp.report.shards import View, write_shard_report
from mmcp.report.terminal import balance_table, comparison_table, facts_grid
from mmcp.sequence import TokenSequence
from mmcp.sharding.balance import balance, inspect_record
from mmcp.sharding.cost import row_costs
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

    @property
    def is_run(self) -> bool:
        return (Path(self.source) / "config.yaml").is_file()

    @property
    def config_file(self) -> Path:
        return Path(self.source) / "config.yaml" if self.is_run else self.config or SHIPPED

    @property
    def is_stored(self) -> bool:
        """Whether the plan that a run stored answers it."""
        asked = (self.sample, self.ranks, self.strategy, self.budget)
        as_it_was = asked == (None, None, None, None) and not self.compare
        files = (Path(self.source) / name for name in ("plan.json", "inspect.json"))
        return self.is_run and as_it_was and all(file.is_file() for file in files)


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
    html: Path | None = None,
    png: Path | None = None,
) -> Outcome:
    """Plan what `source` or `workload` names and show the plan, also in the files `html` and `png`; see Request.

    The record is one object, with `compare` or `workload` a list of them.
    Raises ValueError for what cannot be read, planned or written.
    """
    if (source is None) == (workload is None):
        raise ValueError(f"SOURCE is {source} and --workload {workload}; name one of the two")
    if workload is not None:
        if config or sample is not None or budget is not None:
            raise ValueError(f"--workload {workload} is drawn, not read: leave out --config, --sample and --budget")
        for file in filter(None, (html, png)):
            _check_writable(file)
        return inspect_workload.run(workload, ranks=ranks, strategy=strategy, compare=compare, html=html, png=png)
    assert source is not None
    request = Request(
        source=source, config=config, sample=sample, ranks=ranks, strategy=strategy, compare=compare, budget=budget
    )
    for file in filter(None, (html, png)):
        _check_writable(file)
    if request.is_run and request.config:
        raise ValueError(f"--config {request.config}: the run '{source}' has a config of its own; leave the option out")
    row, views = _stored(Path(source)) if request.is_stored else _planned(request)
    records = [view.record for view in views]
    if html:
        write_shard_report(html, views, title=row.title, facts=row.facts, sequence=row.sequence)
    if png and request.compare:
        save_comparison(png, records)
    elif png:
        save_shards(png, records[0])
    tables = [facts_grid(row.facts), *map(balance_table, records)]
    tables += [comparison_table(records)] if request.compare else []
    tables += [facts_grid({"written": str(file)}) for file in (html, png) if file]
    return Outcome(record=records if request.compare else records[0], tables=tables)


def _planned(request: Request) -> tuple[Row, list[View]]:
    """Lay the source out and plan it with one strategy or all."""
    overrides = () if request.budget is None else (f"clip.budget.tokens={request.budget}",)
    settings = load(RunConfig, request.config_file, overrides)
    mesh = mesh_for(settings, settings.mesh.cp if request.ranks is None else request.ranks)
    find = run_row if request.is_run else find_row
    row = find(request.source, settings, sample=request.sample)
    assert row.sequence is not None, "a row that was laid out has a sequence"
    names = sorted(STRATEGIES) if request.compare else [request.strategy or settings.sharding.strategy]
    views = [plan_view(row.sequence, settings, mesh, name) for name in names]
    used = {"config": str(request.config_file), "mesh": f"ring={mesh.ring} x ulysses={mesh.ulysses}"}
    return Row(row.title, row.sequence, {**row.facts, **used}), views


def _stored(folder: Path) -> tuple[Row, list[View]]:
    """Read the plan and the record that a run kept of its first step."""
    plans = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["rows"]
    record = json.loads((folder / "inspect.json").read_text(encoding="utf-8"))
    facts = {"row": f"the first of {len(plans)} rows of the run's first step, as stored in {folder / 'plan.json'}"}
    plan = ShardPlan.from_json(json.dumps(plans[0]))
    return Row(f"{folder.resolve().name}, first step", None, facts), [View(record, plan)]


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


def plan_view(row: TokenSequence, settings: RunConfig, mesh: MeshConfig, strategy: str) -> View:
    """Plan a row and price the plan. Raises KeyError naming the strategies for one that there is not."""
    planner = settings.planner(settings.tokenizer.build().vocab_size)
    costs = row_costs(row, planner.costs)
    began = time.perf_counter()
    plan = STRATEGIES[strategy](row, (mesh.ring, mesh.ulysses), costs)
    plan_ms = 1e3 * (time.perf_counter() - began)
    return View(inspect_record(plan, balance(row, plan, costs), plan_ms=plan_ms), plan)


def _check_writable(file: Path) -> None:
    """Raise ValueError now for a file that could not be written later."""
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"'{file}' cannot be written ({file.absolute()}); name a file in a folder you may write to")
