"""Plan a workload with one strategy or all, and say beside each figure what no plan could beat."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mmcp.sequence import TokenSequence
from mmcp.sharding.balance import balance, inspect_record
from mmcp.sharding.bounds import lower_bounds
from mmcp.sharding.cost import RowCosts, row_costs
from mmcp.sharding.layout import UNCAPPED, Shape
from mmcp.sharding.needs import layer_needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import WORKLOADS, make_workload, reference_mesh, reference_model


@dataclass(frozen=True, eq=False)
class Planned:
    """A row, its plan, and the record of both."""

    sequence: TokenSequence
    costs: RowCosts
    plan: ShardPlan
    record: dict
    """What `mmcp inspect --json` prints, with `makespan_bound`, `bounds` and `frames_factor`."""


def plan_row(strategy: str, sequence: TokenSequence, mesh: Shape, costs: RowCosts, *, cap: int = UNCAPPED) -> Planned:
    """Plan a row, time it and price it; all strategies are given the same costs, needs and cap.

    Raises KeyError, listing the known names, for an unknown strategy.
    """
    needs = layer_needs(costs.model.layers)
    began = time.perf_counter()
    plan = STRATEGIES[strategy](sequence, mesh, costs, needs, cap)
    plan_ms = 1e3 * (time.perf_counter() - began)
    result, bounds = balance(sequence, plan, costs), lower_bounds(costs, mesh)
    least_frames = costs.least_decoding[1]
    extra = {
        "makespan_bound": bounds.makespan,
        "bounds": bounds.ratios,
        "routed_bytes": sum(result.routed_rows) * costs.model.row_bytes,
        "frames_factor": sum(result.frames) / least_frames if least_frames else 1.0,
        "frames_bound": bounds.frames / least_frames if least_frames else 1.0,
    }
    return Planned(sequence, costs, plan, inspect_record(plan, result, plan_ms=plan_ms) | extra)


def plan_workloads(
    name: str,
    ranks: int,
    *,
    strategies: tuple[str, ...] = ("balanced",),
    model: str = "softmax",
    length: float = 1.0,
    cap: int = UNCAPPED,
) -> Iterator[Planned]:
    """Plan a named workload family, or `all`, on the reference mesh: one result for each family and strategy.

    Raises ValueError for no rank, KeyError naming the known ones for an unknown family or strategy.
    """
    for family in sorted(WORKLOADS) if name == "all" else [name]:
        sequence = make_workload(family, length=length)
        costs = row_costs(sequence, reference_model(model))
        for strategy in strategies:
            planned = plan_row(strategy, sequence, reference_mesh(ranks), costs, cap=cap)
            planned.record.update(workload=family, model=model)
            yield planned


def missed_targets(record: dict) -> list[str]:
    """Say which targets of an even plan a record of `plan_row` misses; none when the bounds leave no better.

    Step time: at most 1.02, or 1.03 times its bound; every cost that units or rows make: 1.05, or 1.03 times its
    bound; frames decoded: 1.10 of one decode, or 1.03 times their bound.
    """
    missed = []
    if record["makespan_ratio"] > max(1.02, 1.03 * record["makespan_bound"]):
        missed.append("makespan")
    for cost in ("decode", "encode", "linear", "labels", "memory"):
        if record["imbalance"][cost] > max(1.05, 1.03 * record["bounds"][cost]):
            missed.append(cost)
    if record["frames_factor"] > max(1.10, 1.03 * record["frames_bound"]):
        missed.append("frames")
    return missed
