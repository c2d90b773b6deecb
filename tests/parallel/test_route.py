"""Rows routed between ranks against indexing of the whole row on one rank: values, places, gradients and counts.

Run: python -m pytest tests/parallel/test_route.py
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.parallel.collectives import record
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.route import Router, row_map
from mmcp.sequence import Segment, TokenSequence, Unit
from mmcp.sharding.plan import ShardPlan, check, schedule_calls
from mmcp.sharding.ranges import as_ranges


@dataclass(frozen=True)
class Case:
    """Parts of the row: a number of text tokens, or the rows of each unit of a video."""

    ranks: int
    parts: tuple[int | tuple[int, ...], ...]
    owners: tuple[int, ...]
    """Rank of each token."""
    encoders: tuple[int, ...]
    """Rank that encodes each unit."""
    scorers: tuple[int, ...]
    """Rank that scores each label."""


def sequence_of(parts: tuple) -> TokenSequence:
    segments = []
    for part in parts:
        if isinstance(part, int):
            segments.append(Segment(kind="text", ids=tuple(range(part)), loss=True))
        else:
            units = tuple(
                Unit(num_tokens=n, start=Fraction(0), end=Fraction(1), grid=(1, 1, n), size=(2, 1, n), items=())
                for n in part
            )
            segments.append(Segment(kind="video", units=units))
    return TokenSequence(tuple(segments))


def plan_of(case: Case) -> ShardPlan:
    sequence = sequence_of(case.parts)

    def held(owners: tuple[int, ...]) -> tuple:
        return tuple(as_ranges(np.flatnonzero(np.array(owners) == rank)) for rank in range(case.ranks))

    encode = held(case.encoders)
    plan = ShardPlan(
        strategy="test",
        ring=1,
        ulysses=case.ranks,
        tokens=held(case.owners),
        decode=encode,
        encode=encode,
        scored=held(case.scorers),
        calls=tuple(schedule_calls(sequence, ranges, 4) for ranges in encode),
        unit_ranges=tuple(map(tuple, sequence.unit_ranges.tolist())),
        label_ranges=as_ranges(sequence.label_positions),
    )
    check(plan, sequence)
    return plan


def route_both(case: Case) -> None:
    """Row p of the whole is [p, -p]; its weight in the loss is p + 1 after media, 2 p + 1 after labels."""
    mesh = build_mesh(MeshConfig(ulysses=case.ranks))
    plan = plan_of(case)
    rank = mesh.cp.index
    router = Router(plan, mesh.cp, device=mesh.device)
    made, mine = plan.unit_positions(rank), plan.positions(rank)
    is_media = np.isin(mine, np.concatenate([np.arange(a, b) for a, b in plan.unit_ranges] or [[]]))

    with record(mesh.world) as recorder:
        rows = whole(made).requires_grad_(len(made) > 0)  # a rank that made none must still take part
        placed = router.to_owners(rows, trainable=True)
        assert torch.equal(placed, whole(mine[is_media]))
        hidden = whole(mine).requires_grad_(len(mine) > 0)
        scored = router.to_scorers(hidden, trainable=True)
        positions = plan.label_positions[plan.scorer == rank]
        assert torch.equal(scored, whole(positions))
        weights = torch.from_numpy(mine[is_media] + 1.0), torch.from_numpy(2.0 * positions + 1)
        ((placed * weights[0][:, None]).sum() + (scored * weights[1][:, None]).sum()).backward()

    if len(made):
        assert rows.grad[:, 1].tolist() == (made + 1.0).tolist()
    if len(mine):
        is_label = np.isin(mine, plan.label_positions)
        assert hidden.grad[:, 0].tolist() == np.where(is_label, 2.0 * mine + 1, 0.0).tolist()
    received = int((np.isin(mine[is_media], made, invert=True)).sum()), int(np.isin(positions, mine, invert=True).sum())
    for name, count in zip(("route media", "route labels"), received, strict=True):
        forward, backward = recorder.total(name=name, phase="forward"), recorder.total(name=name, phase="backward")
        assert forward.collectives == backward.collectives == (1 if case.ranks > 1 else 0)
        assert forward.bytes == count * 2 * 8


def whole(positions: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([positions, -positions], axis=1).astype(np.float64))


@st.composite
def cases(draw, max_ranks: int) -> Case:
    ranks = draw(st.integers(1, max_ranks))
    part = st.integers(0, 6) | st.lists(st.integers(1, 4), max_size=5).map(tuple)
    parts = tuple(draw(st.lists(part, max_size=5)))
    sequence = sequence_of(parts)
    used = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks))  # the others hold nothing

    def deal(count: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.sampled_from(used), min_size=count, max_size=count)))

    counts = sequence.num_tokens, len(sequence.units), len(sequence.label_positions)
    return Case(ranks, parts, *(deal(count) for count in counts))


@settings(max_examples=25)
@given(case=cases(4))
def test_drawn_routes_equal_indexing_the_whole_row(rank_pool, case):
    rank_pool.run(route_both, case, ranks=case.ranks)


@pytest.mark.full
@settings(max_examples=300)
@given(case=cases(6))
def test_many_drawn_routes_equal_indexing_the_whole_row(rank_pool, case):
    rank_pool.run(route_both, case, ranks=case.ranks)


def test_the_worked_example_of_the_row_map():
    keys, targets = [np.array([5, 2, 9]), np.array([3])], [np.array([1, 0, 1]), np.array([0])]
    maps = [row_map(keys, targets, rank=rank, device=torch.device("cpu")) for rank in range(2)]
    assert [(m.send.tolist(), m.send_sizes, m.receive_sizes, m.order.tolist()) for m in maps] == [
        ([1, 0, 2], (1, 2), (1, 1), [0, 1]),
        ([0], (1, 0), (2, 0), [0, 1]),
    ]


def test_rows_that_carry_gradients_must_be_said_to():
    plan = plan_of(Case(1, ((2,),), (0, 0), (0,), ()))
    router = Router(plan, build_mesh(MeshConfig()).cp, device=torch.device("cpu"))
    assert not router.to_owners(torch.zeros(2, 1), trainable=False).requires_grad
    with pytest.raises(AssertionError, match="said not to be trainable"):
        router.to_owners(torch.zeros(2, 1, requires_grad=True), trainable=False)
