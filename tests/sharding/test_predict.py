"""Predicted seconds of a step by rank and stage against a count token by token over drawn rows and deals.

Run: python -m pytest tests/sharding/test_predict.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcp.sharding.balance import balance
from mmcp.sharding.cost import Rates, row_costs
from mmcp.sharding.predict import PREDICTED, step_ns_by_rank
from mmcp.sharding.ranges import as_indices
from mmcp.sharding.step import plan_step
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, rows

RATES = Rates(
    flops_per_second=1_000_000,
    encode_percent=50,
    attention_percent=200,
    recurrent_percent=25,
    loss_percent=10,
    link_bytes_per_second=1_000,
)


@given(
    st.lists(rows(), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from((1, 2)),
    st.sampled_from((0, 1, 2)),
    st.sampled_from(("balanced", "contiguous", "replicate")),
)
def test_ranks_are_priced_as_if_counted_one_by_one(batch, ranks, groups, decoders, strategy):
    model = replace(MODEL, rates=replace(RATES, decoders=decoders))
    costs = {id(row): row_costs(row, model) for row in batch}

    def plan_row(row):
        return STRATEGIES[strategy](row, (1, ranks), costs.get(id(row)) or row_costs(row, model))

    step = plan_step(batch, groups=groups, plan_row=plan_row, cost=lambda row: costs[id(row)].compute_ns)
    balances = [balance(row, plan, costs[id(row)]) for row, plan in zip(batch, step.plans, strict=True)]
    found = step_ns_by_rank(step, balances, model)
    assert len(found) == groups * ranks and len({own["total"] for own in found}) == 1
    for number, own in enumerate(found):
        group, rank = divmod(number, ranks)
        expected = dict.fromkeys(PREDICTED, 0)
        for row in step.groups[group]:
            if row is not None:
                for stage, each in counted(batch[row], step.plans[row], rank, model, costs[id(batch[row])]).items():
                    expected[stage] += each
        for stage, each in expected.items():
            assert own[stage] == pytest.approx(each, abs=50), stage


def counted(row, plan, rank, model, costs):
    """Nanoseconds of a rank's share of one row, by loops."""
    second = 1e9 / 1_000_000
    units = as_indices(plan.encode[rank])
    routed = sum(
        (plan.encoder[position] == rank) + (plan.owner[position] == rank)
        for position in range(plan.num_tokens)
        if plan.encoder[position] not in (-1, plan.owner[position])
    )
    routed += sum(
        (holder == rank) + (scorer == rank)
        for holder, scorer in zip(plan.owner[plan.label_positions], plan.scorer, strict=True)
        if holder != scorer
    )
    decoded = as_indices(plan.decode[rank])
    here = np.full(len(decoded), 0)
    return {
        "decode": int(costs.decoding(decoded, here, 1)[0][0]),
        "encode": 3 * int(costs.flops[units].sum()) * second * 2,
        "route": routed * model.row_bytes * 1e6,
        "linear": 3 * plan.lengths[rank] * model.linear_flops * second,
        "attention": attention(plan, rank, model, costs) * second,
        "loss": 3 * len(as_indices(plan.scored[rank])) * model.label_flops * second * 10,
    }


def attention(plan, rank, model, costs):
    """Nanoseconds of attention in units of a FLOP at the rate: heads are dealt out, all tokens are seen."""
    allowed = int(costs.mask.dense().sum()) if plan.num_tokens else 0
    total = 0.0
    for layer in model.layers:
        heads = layer.heads * (rank + 1) // plan.ranks - layer.heads * rank // plan.ranks
        work = layer.count * heads * (layer.pair_flops * allowed + layer.token_flops * plan.num_tokens)
        total += 3 * work * (0.5 if layer.pair_flops else 4)
    return total


def test_the_step_waits_in_each_micro_batch_for_the_slowest_group_and_decodes_beside_or_before():
    rates = [Rates(decoders=decoders) for decoders in (0, 1, 2)]
    assert [rate.step_ns(90, 50) for rate in rates] == [140, 90, 50]
