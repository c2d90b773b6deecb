"""The N-rank step against the one-rank step: loss, hidden states, every parameter's gradient, in float64 and float32.

python -m pytest tests/training/test_exactness.py
"""

import pytest
import torch

from experiments.verify import LIMITS, compare
from mmcp.parallel.mesh import MeshConfig
from tests.training.exact_cases import draw_rows, run_case, tiny_model

PACKED = [["tvtat", "t", "itvt"], ["at"]]  # two rows; the first packs three documents
CASES = {
    "packed": {"rows": PACKED},
    "one document": {"rows": [["tvavatt"]]},
    "softmax": {"rows": PACKED, "model": {"pattern": "softmax"}},
    "linear": {"rows": PACKED, "model": {"pattern": "linear"}},
    "delta": {"rows": PACKED, "model": {"pattern": "delta"}},
    "heads not divisible": {"rows": PACKED, "model": {"heads": 6, "kv_heads": 3}},
    "fewer kv heads than ranks": {"rows": PACKED, "model": {"heads": 5, "kv_heads": 1}},
    "contiguous, labels on the last rank": {"rows": [["vvvvvt"]], "strategy": "contiguous"},
    "contiguous, media on the first rank": {"rows": [["vtttttttttt"]], "strategy": "contiguous"},
    "text alone": {"rows": [["tt", "ttt"]]},
    "one media unit": {"rows": [["ti"], ["vt"]]},
    "rows of few tokens": {"rows": [["t"], ["t", "t"], ["tt"]]},
    "mrope": {"rows": PACKED, "model": {"positions": "mrope", "mrope_sections": (2, 1, 1)}},
    "checkpointing": {"rows": PACKED, "model": {"checkpointing": True}},
}
MESHES = [
    MeshConfig(ulysses=2),
    MeshConfig(ulysses=3),
    MeshConfig(ulysses=4),
    MeshConfig(dp_shard=2),
    MeshConfig(dp_shard=2, ulysses=2),
    MeshConfig(dp_replicate=2, ulysses=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape)))
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_rank_computes(rank_pool, case, mesh):
    settings = {"model": {}, "strategy": "balanced", **CASES[case]}
    model, rows = tiny_model(**settings["model"]), draw_rows(list(CASES).index(case), settings["rows"])
    one = run_case(model, MeshConfig(), rows, strategy=settings["strategy"])
    many = rank_pool.run(run_case, model, mesh, rows, settings["strategy"], ranks=mesh.world)
    for outcome in many:
        errors = compare(one, outcome)
        limit = LIMITS[torch.float64]
        assert errors["loss_rel"] < limit and errors["hidden_rel"] < limit and errors["grad_rel_max"] < limit, errors


def test_float32_stays_within_its_rounding(rank_pool):
    rows = draw_rows(5, PACKED)
    one = run_case(tiny_model(), MeshConfig(), rows, dtype=torch.float32)
    many = rank_pool.run(run_case, tiny_model(), MeshConfig(ulysses=3), rows, "balanced", torch.float32, ranks=3)
    errors = compare(one, many[0])
    assert max(errors["loss_rel"], errors["hidden_rel"], errors["grad_rel_max"]) < LIMITS[torch.float32], errors


def test_gradients_do_not_depend_on_how_documents_are_packed():
    """One row of three documents against three rows of one: the same global batch, other micro-batches."""
    rows = draw_rows(7, [["tvtat", "t", "itvt"]])
    apart = draw_rows(7, [["tvtat"], ["t"], ["itvt"]])
    assert rows[0].ids.tolist() == [token for row in apart for token in row.ids.tolist()]
    media = run_case(tiny_model(), MeshConfig(), rows), run_case(tiny_model(), MeshConfig(), apart)
    errors = compare_gradients(*media)
    assert errors < LIMITS[torch.float64]


def compare_gradients(one, other):
    whole = sum(float(grad.square().sum()) for grad in one.gradients.values()) ** 0.5
    return max(
        float((other.gradients[name] - grad).norm()) / max(float(grad.norm()), 1e-3 * whole)
        for name, grad in one.gradients.items()
    )
