"""What crosses the ring axis by hand, on integers one can check by eye: hops, gathered rows, halos, states.

Run: python -m pytest tests/parallel/test_point_to_point.py
"""

import torch

from mmcp.attention.base import HeadTensor
from mmcp.masks import Mask
from mmcp.parallel.collectives import record, start_swap
from mmcp.parallel.gather import gather_rows
from mmcp.parallel.halo import before_runs, halo_of
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ring import hops_of
from mmcp.parallel.state_passing import RunOrder
from tests.parallel.cases import plan_of_owners

ZIGZAG = [0, 0, 1, 1, 1, 1, 0, 0]


def swap_with_the_next() -> tuple[list, list, int]:
    """Rank r sends its number r times to the next rank; rank 0 sends nothing."""
    group = build_mesh(MeshConfig(ring=3)).ring
    before, after = (group.index - 1) % 3, (group.index + 1) % 3
    received = torch.zeros(before)
    with record(group) as recorder:
        start_swap(
            [(after, torch.full((group.index,), float(group.index)))], [(before, received)], group=group, name="swap",
            backward=False,
        ).wait()  # fmt: skip
        silent = start_swap([(after, torch.zeros(0))], [(before, torch.zeros(0))], group=group, name="x", backward=True)
    silent.wait()
    return received.tolist(), list(recorder.traffic), recorder.total().bytes


def test_a_swap_moves_what_both_sides_know_of_and_counts_once(rank_pool):
    assert rank_pool.run(swap_with_the_next, ranks=3) == [
        ([2, 2], [("swap", "forward")], 8),
        ([], [("swap", "forward")], 0),
        ([1], [("swap", "forward")], 4),
    ]


def gather_uneven() -> tuple[list, int]:
    group = build_mesh(MeshConfig(ring=3)).ring
    rows = torch.full((group.index, 2), float(group.index))
    with record(group) as recorder:
        gathered = gather_rows(rows, [0, 1, 2], group=group, name="rows", backward=False)
    return gathered[:, 0].tolist(), recorder.total().bytes


def test_rows_of_all_ranks_are_gathered_in_rank_order(rank_pool):
    assert rank_pool.run(gather_uneven, ranks=3) == [([1, 2, 2], 24), ([1, 2, 2], 16), ([1, 2, 2], 8)]


def test_a_hop_brings_the_keys_that_its_queries_read():
    """Rank 0 holds tokens 0 1 6 7 and rank 1 the others: 6 and 7 read all of rank 1's, which reads 0 and 1."""
    plan, mask = plan_of_owners(ZIGZAG, 2, ring=2), Mask.causal([8])
    first, second = hops_of(plan, mask, 0)[1], hops_of(plan, mask, 1)[1]
    assert (first.num_received, first.sent) == (4, ((0, 2),))
    assert (second.num_received, second.sent) == (2, ((0, 4),))
    near = mask.with_window(2)
    assert (hops_of(plan, near, 0)[1].num_received, hops_of(plan, near, 1)[1].num_received) == (1, 1)
    assert hops_of(plan, Mask.causal([2, 4, 2]), 0)[1].num_received == 0


def test_runs_are_composed_in_the_order_of_the_sequence():
    order = RunOrder.of(plan_of_owners(ZIGZAG, 2, ring=2), 1)
    assert (order.counts, order.order, [order.holds(run) for run in range(3)]) == (
        (2, 1),
        (0, 2, 1),
        [False, False, True],
    )


def bring_halo(documents: list[int]) -> list:
    mesh, mask = build_mesh(MeshConfig(ring=2)), Mask.causal(documents)
    plan = plan_of_owners(ZIGZAG, 2, ring=2)
    halo = halo_of(plan, mask, mesh.ring.index, 2, mesh.device)
    tensors = (HeadTensor("x", "query", 1, halo=2), HeadTensor("gate", "query", 1))
    tokens = torch.from_numpy(plan.positions(mesh.cp.index)).double()[:, None, None].requires_grad_()
    brought = halo.bring({"x": tokens, "gate": tokens}, tensors, mesh.ring)
    assert brought["gate"].shape[1] == 0
    (brought["x"] * (1 + mesh.ring.index)).sum().backward()
    return [brought["x"].flatten(1).tolist(), tokens.grad.flatten().tolist()]


def test_each_run_gets_the_tokens_before_it_and_returns_their_gradients(rank_pool):
    assert rank_pool.run(bring_halo, [8], ranks=2) == [
        [[[0, 0], [4, 5]], [2, 2, 0, 0]],
        [[[0, 1]], [0, 0, 1, 1]],
    ]
    assert rank_pool.run(bring_halo, [1, 4, 3], ranks=2) == [
        [[[0, 0], [0, 5]], [0, 2, 0, 0]],
        [[[0, 1]], [0, 0, 0, 1]],
    ]


def test_halos_stop_at_the_document():
    positions, places = before_runs(Mask.causal([3, 5]), ((2, 4), (5, 8)), 3)
    assert (positions.tolist(), places.tolist()) == ([0, 1, 3, 4], [1, 2, 4, 5])
