"""The step of a small model whose layers attend in modes of their own, on ring x ulysses ranks, against one rank.

Loss, hidden states and every parameter's gradient in float64, through routing, FSDP2 and activation checkpointing.
Run: python -m pytest tests/parallel/test_modes_in_model.py
"""

import pytest

from experiments.exactness import LIMITS, compare
from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from mmcp.parallel.mesh import MeshConfig
from tests.training.exact_cases import Layout, drawn, run_case, tiny_model

ROWS = [["tvtat", "t", "itvt"], ["at"]]
RING, GATHER = SoftmaxConfig(mode="ring"), SoftmaxConfig(mode="allgather", window=9)
LINEAR, DELTA = LinearConfig(mode="state", chunk=8), GatedDeltaConfig(mode="state", chunk=8)
CASES = {
    "ring of 3": ((RING,), MeshConfig(ring=3), {}),
    "linear and ring, 2 x 2": ((LINEAR, RING), MeshConfig(ring=2, ulysses=2), {}),
    "delta by state, softmax over all heads": ((DELTA, SoftmaxConfig()), MeshConfig(ring=3), {}),
    "two groups of data, recomputed": ((DELTA, GATHER), MeshConfig(dp_shard=2, ring=2), {"checkpointing": True}),
    "heads in groups, recomputed": ((SoftmaxConfig(chunks=2),), MeshConfig(ulysses=2), {"checkpointing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_in_modes_of_their_own_compute_what_one_rank_computes(rank_pool, case):
    pattern, mesh, changes = CASES[case]
    model, rows = tiny_model(pattern=pattern, **changes), drawn(3, ROWS)
    one = run_case(model, Layout(), rows)
    for outcome in rank_pool.run(run_case, model, Layout(mesh=mesh), rows, ranks=mesh.world):
        errors, limit = compare(one, outcome), LIMITS["float64"]
        assert max(errors["loss_rel"], errors["hidden_rel"], errors["grad_rel_max"]) < limit, errors
