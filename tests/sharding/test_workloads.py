"""Every workload family: exact plans, even costs for `balanced` where units allow it.

Run: python -m pytest tests/sharding/test_workloads.py
"""

import pytest

from mmcp.sharding.balance import balance
from mmcp.sharding.cost import row_costs
from mmcp.sharding.plan import check
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import WORKLOADS, make_workload, reference_mesh, reference_model


def planned(name, strategy, ranks, *, length=1.0, model="softmax"):
    sequence = make_workload(name, length=length)
    costs = row_costs(sequence, reference_model(model))
    plan = STRATEGIES[strategy](sequence, reference_mesh(ranks), costs)
    return sequence, costs, plan


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_plans_are_exact(name, strategy):
    sequence, _, plan = planned(name, strategy, 3, length=0.02)
    check(plan, sequence)


@pytest.mark.parametrize("name", ["lecture_hour", "adaptive_hour", "packed_shorts"])
@pytest.mark.parametrize("rival", ["contiguous", "frame_count", "replicate"])
def test_rivals_are_less_even(name, rival):
    sequence, costs, plan = planned(name, rival, 8)
    even = balance(sequence, STRATEGIES["balanced"](sequence, (1, 8), costs), costs)
    result = balance(sequence, plan, costs)
    assert result.step_ns > 0.99 * even.step_ns
    assert max(result.imbalance.values()) > max(even.imbalance.values())


def test_the_same_seed_draws_the_same_row():
    assert make_workload("packed_shorts", seed=3, length=0.1) == make_workload("packed_shorts", seed=3, length=0.1)
    assert make_workload("packed_shorts", seed=3, length=0.1) != make_workload("packed_shorts", seed=4, length=0.1)


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="choose from softmax, hybrid"):
        reference_model("mamba")
