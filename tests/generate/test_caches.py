"""What each rank keeps while documents grow: slots against a plain recount, bytes against a closed form.

Run: python -m pytest tests/generate/test_caches.py
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.key_slots import KeySlots
from mmcp.parallel.mesh import MeshConfig
from mmcp.sharding.ranges import as_indices
from tests.generate.answer_cases import Asked, answer
from tests.training.exact_cases import Layout, drawn, tiny_model

SIZES = st.integers(1, 30), st.integers(0, 20), st.integers(1, 4), st.integers(0, 9), st.integers(0, 4)


@given(*SIZES, st.randoms(use_true_random=False))
def test_every_token_reads_exactly_the_keys_of_its_window_on_some_rank(length, room, ranks, window, sink, random):
    sink = sink if window else 0
    owners = np.array([random.randrange(ranks) for _ in range(length)])
    slots = [
        KeySlots(
            np.flatnonzero(owners == rank), length=length, room=room, rank=rank, ranks=ranks, window=window, sink=sink
        )
        for rank in range(ranks)
    ]
    most = [len(one.positions) for one in slots]
    used = [int((one.positions >= 0).sum()) for one in slots]
    for number in range(room):
        position = length + number
        slots[number % ranks].place(position)
        read = sorted(int(p) for one in slots for p in one.positions[one.readable(position)])
        wanted = [j for j in range(position + 1) if not window or position - j < window or j < sink]
        assert read == wanted
        used = [max(u, int(one.readable(position).sum())) for u, one in zip(used, slots, strict=True)]
    assert [len(one.positions) for one in slots] == most
    if window:
        assert sum(most) <= min(window + sink, length) + room
        assert max(most) <= window + sink
    else:
        assert most == used


PATTERN = (
    SoftmaxConfig(),
    SoftmaxConfig(window=7, sink=2),
    LinearConfig(chunk=8),
    KernelisedConfig(chunk=8),
    GatedDeltaConfig(chunk=8, value_heads=6, key_heads=3, head_dim=4),
)
HEADS, KV_HEADS, DIM, DOUBLE = 4, 2, 8, 8
ROOM = 9


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(ulysses=2), MeshConfig(ulysses=4)], ids=["1", "2", "4"])
def test_bytes_on_each_rank_are_those_of_its_tokens_and_heads(rank_pool, mesh):
    model = tiny_model(pattern=PATTERN, layers=len(PATTERN))
    (row,) = rows = drawn(6, [["tvtatvtat", "tvtt"]])
    asked = Asked(rows, room=ROOM)
    layout = Layout(mesh=mesh)
    plan = layout.planner(model).row(row)
    totals = []
    for rank, found in enumerate(rank_pool.run(answer, model, layout, asked, ranks=mesh.world)):
        expected = bytes_kept(plan, row.document_bounds, rank, mesh.world)
        assert found.cached[len(PATTERN) - 1] == found.cached[-1] == expected  # after the prompt, and at the end
        totals.append(expected)
    one = bytes_kept(Layout().planner(model).row(row), row.document_bounds, 0, 1)
    assert max(totals) < 1.25 * one / mesh.world


def bytes_kept(plan, bounds: np.ndarray, rank: int, ranks: int) -> int:
    """Count the numbers that one rank keeps, from the plan."""
    tokens = as_indices(plan.tokens[rank])
    keys = 0
    for start, stop in pairwise(bounds.tolist()):
        held = tokens[(tokens >= start) & (tokens < stop)] - start
        new = np.arange(stop - start + rank, stop - start + ROOM - 1, ranks)
        keys += len(held) + len(new)
        keys += most_of_window(held, new, stop - start, window=7, sink=2)
    heads, delta = ([(r + 1) * h // ranks - r * h // ranks for r in range(ranks)][rank] for h in (HEADS, 6))
    first = rank * 6 // ranks
    key_heads = len({head // 2 for head in range(first, first + delta)})
    states = heads * DIM * DIM + heads * DIM * (DIM + 1) + delta * 4 * 4 + 3 * 4 * (2 * key_heads + delta)
    return DOUBLE * (2 * KV_HEADS * DIM * keys + (len(bounds) - 1) * states)


def most_of_window(held: np.ndarray, new: np.ndarray, length: int, *, window: int, sink: int) -> int:
    """Count the keys in reach at once, just after the prompt or when a new token of this rank has come."""
    counts = [sum(length - j < window or j < sink for j in held)]
    counts += [sum(j <= p and (p - j < window or j < sink) for j in (*held, *new)) for p in new]
    return max(counts)
