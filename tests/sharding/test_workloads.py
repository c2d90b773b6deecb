"""Every workload family: exact plans, even costs for `balanced` where units allow it, and planning in little time.

Run: python -m pytest tests/sharding/test_workloads.py
"""

import time

import pytest

from mmcp.sharding.balance import balance
from mmcp.sharding.cost import row_costs
from mmcp.sharding.plan import check
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import REFERENCE_MODELS, WORKLOADS, make_workload, reference_mesh, reference_model

STEADY = ("lecture_hour", "questions_at_end", "dense_captions", "podcast", "silent_hour", "sports", "surveillance")
LIMITED_BY_UNITS = ("few_frames", "long_group")  # three units; groups of pictures longer than a rank's share


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


@pytest.mark.parametrize("model", sorted(REFERENCE_MODELS))
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - set(LIMITED_BY_UNITS)))
def test_balanced_evens_out_every_cost(name, ranks, model):
    sequence, costs, plan = planned(name, "balanced", ranks, model=model)
    result = balance(sequence, plan, costs)
    assert result.makespan_ratio <= 1.02
    assert max(result.imbalance.values()) <= 1.05
    assert sum(result.frames) <= 1.10 * costs.least_decoding[1]
    assert sum(result.routed_rows) <= (0.1 if name in STEADY else 0.35) * costs.rows.sum()


def test_one_group_of_pictures_for_all_is_not_decoded_by_every_rank_whole():
    sequence, costs, plan = planned("long_group", "balanced", 8)
    result = balance(sequence, plan, costs)
    assert result.imbalance["encode"] <= 1.05
    assert sum(result.frames) <= 2.2 * costs.least_decoding[1]


@pytest.mark.parametrize("name", ["lecture_hour", "adaptive_hour", "packed_shorts"])
def test_contiguous_is_less_even(name):
    sequence, costs, plan = planned(name, "contiguous", 8)
    even = STRATEGIES["balanced"](sequence, (1, 8), costs)
    assert balance(sequence, plan, costs).step_ns > balance(sequence, even, costs).step_ns


def test_planning_an_hour_for_16_ranks_is_quick():
    sequence = make_workload("lecture_hour")
    costs = row_costs(sequence, reference_model("softmax"))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        STRATEGIES["balanced"](sequence, (1, 16), costs)
        seconds.append(time.perf_counter() - start)
    assert sequence.num_tokens > 250_000
    assert min(seconds) < 0.1


def test_the_same_seed_draws_the_same_row():
    assert make_workload("packed_shorts", seed=3, length=0.1) == make_workload("packed_shorts", seed=3, length=0.1)
    assert make_workload("packed_shorts", seed=3, length=0.1) != make_workload("packed_shorts", seed=4, length=0.1)


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="choose from softmax, hybrid"):
        reference_model("mamba")
