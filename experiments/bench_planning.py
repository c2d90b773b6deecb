"""How long does planning a row take, on one core?

Run:     mmcp bench planning [--json]                   (idle machine, about a minute)
Smoke:   mmcp bench planning length=0.02 hours=1 many_ranks=16 repeats=1
Expect:  under 100 ms for each hour of a quarter of a million tokens on 16 ranks, under 2 s for 16 million tokens on
         1,024 ranks.
Result:  experiments/LOG.md, entry "sharding"
"""

import time
from collections.abc import Sequence

from pydantic import PositiveFloat, PositiveInt
from rich.table import Table

from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.report.outcome import Outcome
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import row_costs
from mmcp.sharding.needs import layer_needs
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import make_workload, reference_mesh, reference_model

HOURS = ("lecture_hour", "adaptive_hour", "dense_captions", "scene_keys", "hour_with_shorts", "silent_hour")


@config
class PlanningConfig:
    """What is planned."""

    length: PositiveFloat = 1.0
    """Scales the hours."""
    ranks: PositiveInt = 16
    hours: PositiveInt = 64
    """Hours of the long row."""
    many_ranks: PositiveInt = 1024
    """Ranks of the long row."""
    repeats: PositiveInt = 5
    """Times each is planned; the quickest counts."""
    model: str = "softmax"
    """Reference model."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Time `balanced` on several families of an hour, and on one long row."""
    settings = build(PlanningConfig, Source(), overrides)
    rows = [(name, make_workload(name, length=settings.length), settings.ranks) for name in HOURS]
    long = make_workload("lecture_hour", length=settings.length * settings.hours)
    entries = [measure(*row, settings) for row in [*rows, ("lecture_hours", long, settings.many_ranks)]]
    table = Table("workload", "tokens", "units", "ranks", "costs ms", "plan ms")
    for entry in entries:
        counts = (f"{entry[name]:,}" for name in ("tokens", "units", "ranks"))
        table.add_row(entry["workload"], *counts, f"{entry['costs_ms']:.0f}", f"{entry['plan_ms']:.0f}")
    return Outcome(record=entries, tables=[table])


def measure(name: str, sequence: TokenSequence, ranks: int, settings: PlanningConfig) -> dict:
    """Time pricing and planning of one row by the processor time of this process."""
    model, costs_s, plan_s = reference_model(settings.model), [], []
    needs = layer_needs(model.layers)
    for _ in range(settings.repeats):
        fresh = TokenSequence(sequence.segments)
        began = time.process_time()
        costs = row_costs(fresh, model)
        priced = time.process_time()
        STRATEGIES["balanced"](fresh, reference_mesh(ranks), costs, needs)
        costs_s.append(priced - began)
        plan_s.append(time.process_time() - priced)
    return {
        "workload": name,
        "tokens": sequence.num_tokens,
        "units": len(sequence.units),
        "ranks": ranks,
        "costs_ms": 1e3 * min(costs_s),
        "plan_ms": 1e3 * min(plan_s),
    }
