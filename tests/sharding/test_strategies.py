"""Every registered strategy gives an exact plan of every row; `balanced` is as even as small cases allow.

Run: python -m pytest tests/sharding/test_strategies.py
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.cost import row_costs
from mmcp.sharding.layout import even_scorers
from mmcp.sharding.members import MOST_TOKENS
from mmcp.sharding.plan import ShardPlan, check
from mmcp.sharding.ranges import size
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, media_units, rows

MESHES = [(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (4, 2)]


def plan_of(name, sequence, mesh):
    return STRATEGIES[name](sequence, mesh, row_costs(sequence, MODEL))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@settings(max_examples=60)
@given(sequence=rows(), mesh=st.sampled_from(MESHES))
def test_every_plan_is_exact(name, sequence, mesh):
    plan = plan_of(name, sequence, mesh)
    check(plan, sequence)
    assert (plan.strategy, plan.ring, plan.ulysses) == (name, *mesh)
    assert ShardPlan.from_json(plan.to_json()) == plan


EDGES = {
    "no segment": TokenSequence(()),
    "one token": TokenSequence((Segment(kind="text", ids=(1,), loss=True),)),
    "fewer units than ranks": TokenSequence((Segment(kind="video", source="a", units=media_units("video", 2)),)),
    "labels at the end only": TokenSequence(
        (
            Segment(kind="video", source="a", units=media_units("video", 40)),
            Segment(kind="text", ids=tuple(range(9)), loss=True),
        )
    ),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("edge", EDGES)
def test_edges(name, edge):
    check(plan_of(name, EDGES[edge], (2, 4)), EDGES[edge])


@settings(max_examples=60)
@given(sequence=rows(), mesh=st.sampled_from(MESHES))
def test_balanced_evens_out_tokens_and_labels(sequence, mesh):
    plan = plan_of("balanced", sequence, mesh)
    share = -(-sequence.num_tokens // plan.ranks)
    assert max(plan.lengths) <= share + share * MOST_TOKENS[0] // MOST_TOKENS[1]
    scored = [size(ranges) for ranges in plan.scored]
    assert max(scored) - min(scored) <= 1


def test_labels_stay_where_they_can():
    assert even_scorers(np.array([0, 0, 1, 1]), 2).tolist() == [0, 0, 1, 1]
    assert even_scorers(np.array([0, 0, 0, 1, 2]), 3).tolist() == [0, 0, 1, 1, 2]
    assert even_scorers(np.array([3] * 6), 4).tolist() == [3, 3, 0, 0, 1, 2]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=30), st.integers(5, 7))
def test_no_even_split_of_the_labels_moves_fewer(owners, ranks):
    owners = np.array(owners, dtype=np.int64)
    scorers = even_scorers(owners, ranks)
    scored, held = np.bincount(scorers, minlength=ranks), np.bincount(owners, minlength=ranks)
    assert scored.max() - scored.min() <= 1
    shares = sorted([len(owners) // ranks + (i < len(owners) % ranks) for i in range(ranks)], reverse=True)
    most_kept = sum(min(h, share) for h, share in zip(sorted(held, reverse=True), shares, strict=True))
    assert (scorers == owners).sum() == most_kept


PRINT_DIGESTS = """
from tests.sharding.test_strategies import EDGES, MESHES, STRATEGIES, plan_of
print([plan_of(name, row, mesh).digest for name in STRATEGIES for row in EDGES.values() for mesh in MESHES])
"""


def test_every_process_makes_the_same_bytes():
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1 and len(printed.pop()) > 100
