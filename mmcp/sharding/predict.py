"""Seconds of each rank and stage of a step, as its plans and the rates price them: what a run is measured against."""

from collections.abc import Sequence

import numpy as np

from mmcp.sharding.balance import Balance
from mmcp.sharding.cost import CostModel
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.step import StepPlan

PREDICTED = ("decode", "encode", "route", "linear", "attention", "loss")
"""Stages of a micro-batch that are priced."""


def rank_ns(plan: ShardPlan, result: Balance, model: CostModel) -> list[dict[str, int]]:
    """Price one row: nanoseconds of each rank's own work by stage of PREDICTED, without waiting for other ranks."""
    moved = [(sent + received) * model.row_bytes for sent, received in zip(*_crossing(plan, result), strict=True)]
    columns = {
        "decode": result.decode_ns,
        "encode": [model.ns(flops, "encode") for flops in result.encoder_flops],
        "route": [size * 1_000_000_000 // model.rates.link_bytes_per_second for size in moved],
        "linear": [model.ns(flops, "linear") for flops in result.linear_flops],
        "attention": result.attention_ns,
        "loss": [model.ns(rows * model.label_flops, "loss") for rows in result.label_rows],
    }
    return [{stage: column[rank] for stage, column in columns.items()} for rank in range(plan.ranks)]


def step_ns_by_rank(step: StepPlan, balances: Sequence[Balance], model: CostModel) -> list[dict[str, int]]:
    """Price a step: as `rank_ns`, for all ranks of all data-parallel groups, each group's rows added up.

    balances: of each row of the step
    Adds `total`, the step time, the same on all ranks: in each micro-batch all groups wait for the slowest.
    """
    by_row = [rank_ns(plan, result, model) for plan, result in zip(step.plans, balances, strict=True)]
    ranks = step.empty.ranks
    sums = [dict.fromkeys(PREDICTED, 0) for _ in range(len(step.groups) * ranks)]
    for group, rows in enumerate(step.groups):
        for row in rows:
            for rank, priced in enumerate(by_row[row] if row is not None else ()):
                own = sums[group * ranks + rank]
                own |= {stage: own[stage] + priced[stage] for stage in PREDICTED}
    compute = sum(
        max(balances[row].compute_ns if row is not None else 0 for row in rows)
        for rows in zip(*step.groups, strict=True)
    )
    total = model.rates.step_ns(max(own["decode"] for own in sums), compute)
    return [{**own, "total": total} for own in sums]


def _crossing(plan: ShardPlan, result: Balance) -> tuple[list[int], list[int]]:
    """Rows that leave each rank and that reach it, forward: encoder rows to their tokens, label rows to their scorers.

    Their gradients travel the other way.
    """
    rows = np.array(result.routed, dtype=np.int64).reshape(plan.ranks, plan.ranks)
    np.add.at(rows, (plan.owner[plan.label_positions], plan.scorer), 1)
    np.fill_diagonal(rows, 0)
    return rows.sum(axis=1).tolist(), rows.sum(axis=0).tolist()
