"""How does a named kind of row lie over the ranks? Families of rows and two reference models, from metadata alone.

Run:     mmcp inspect --workload all --ranks 64 --json
"""

from pathlib import Path

from mmcp.report.figures import save_comparison, save_shards
from mmcp.report.outcome import Outcome
from mmcp.report.shards import Shown, View, write_shard_report
from mmcp.report.terminal import balance_table, comparison_table, facts_grid
from mmcp.sharding.compare import missed_targets, plan_workloads
from mmcp.sharding.layout import UNCAPPED
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import WORKLOADS, reference_mesh

DEFAULT_RANKS = 8


def run(
    workload: str,
    *,
    ranks: int | None = None,
    strategy: str | None = None,
    compare: bool = False,
    cap_bytes: int = UNCAPPED,
    html: Path | None = None,
    png: Path | None = None,
) -> Outcome:
    """Plan a family, or `all`, with one strategy or, to compare, with all; the record is a list of `inspect` records.

    Raises ValueError for an unknown name, for no rank, and for a page or figure of more than one family.
    """
    if workload not in ("all", *WORKLOADS):
        raise ValueError(f"--workload '{workload}' is unknown; use all or one of {', '.join(sorted(WORKLOADS))}")
    if strategy not in (None, *STRATEGIES):
        raise ValueError(f"--strategy '{strategy}' is unknown; use one of {', '.join(sorted(STRATEGIES))}")
    if workload == "all" and (html or png):
        raise ValueError("--workload all has no page or figure of its own; name one family for --html or --png")
    number = DEFAULT_RANKS if ranks is None else ranks
    mesh = reference_mesh(number)
    names = tuple(sorted(STRATEGIES)) if compare else (strategy or "balanced",)
    cap = UNCAPPED if compare else cap_bytes
    planned = list(plan_workloads(workload, number, strategies=names, cap=cap))
    records = [each.record for each in planned]
    facts = {"workload": workload, "model": records[0]["model"], "mesh": f"ring={mesh[0]} x ulysses={mesh[1]}"}
    if html:
        views = [View(each.record, each.plan) for each in planned]
        shown = Shown(sequence=planned[0].sequence, costs=planned[0].costs, cap_bytes=cap_bytes)
        write_shard_report(html, views, title=workload, facts=facts, shown=shown)
    if png and compare:
        save_comparison(png, records)
    elif png:
        save_shards(png, records[0], planned[0].plan, mask=planned[0].costs.mask)
    tables = [facts_grid(facts), *(table for record in records for table in _headed(record))]
    tables += [comparison_table(records)] if compare and workload != "all" else []
    tables += [facts_grid({"written": str(file)}) for file in (html, png) if file]
    return Outcome(record=records, tables=tables)


def _headed(record: dict) -> list:
    """Lay out one record after its family, the bound of its step time and the targets it misses."""
    missed = ", ".join(missed_targets(record)) or "none"
    bound = f"{record['makespan_ratio']:.3f} of the least; no plan is below {record['makespan_bound']:.3f}"
    return [
        facts_grid({"family": record["workload"], "step time": bound, "targets missed": missed}),
        balance_table(record),
    ]
