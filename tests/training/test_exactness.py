"""The N-rank step against the one-rank step: loss, hidden states, every parameter's gradient, in float64 and float32.

Every case runs on 3 ranks and every mesh runs the packed case; `full` adds all cases on all meshes.
Run: python -m pytest tests/training/test_exactness.py
"""

from functools import cache

import pytest
import torch

from experiments.exactness import LIMITS, Computed, compare
from mmcp.parallel.mesh import MeshConfig
from tests.training.exact_cases import Layout, drawn, run_case, tiny_model

PACKED = [["tvtat", "t", "itvt"], ["at"]]  # two rows; the first packs three documents
CASES = {
    "packed": {"rows": PACKED},
    "one document": {"rows": [["tvavatt"]]},
    "softmax": {"rows": PACKED, "model": {"pattern": "softmax"}},
    "linear": {"rows": PACKED, "model": {"pattern": "linear"}},
    "delta": {"rows": PACKED, "model": {"pattern": "delta"}},
    "heads not divisible": {"rows": PACKED, "model": {"heads": 8, "kv_heads": 4}},
    "fewer kv heads than ranks": {"rows": PACKED, "model": {"heads": 5, "kv_heads": 1}},
    "contiguous, labels on the last rank": {"rows": [["vvvvvt"]], "strategy": "contiguous"},
    "contiguous, media on the first rank": {"rows": [["vtttttttttt"]], "strategy": "contiguous"},
    "encoded on every rank": {"rows": PACKED, "strategy": "replicate"},
    "blocks of any number of tokens": {"rows": PACKED, "strategy": "lpt_blocks"},
    "unequal clips": {"rows": [["t"], ["vvvvvvvvt"], ["it", "vt"], ["vvvt"], ["at"]]},
    "text alone": {"rows": [["tt", "ttt"]]},
    "one media unit": {"rows": [["ti"], ["vt"]]},
    "rows of few tokens": {"rows": [["t"], ["t", "t"], ["tt"]]},
    "a row without labels": {"rows": [["vq", "qaq"], ["tvt"]]},
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
QUICK = MeshConfig(ulysses=3)
UNEQUAL_GROUPS = ("unequal clips", MeshConfig(dp_shard=2, ulysses=2))


COMBINATIONS = [
    pytest.param(
        case,
        mesh,
        id=f"{case}-{'x'.join(map(str, mesh.shape))}",
        marks=() if mesh == QUICK or case == "packed" or (case, mesh) == UNEQUAL_GROUPS else pytest.mark.full,
    )
    for case in CASES
    for mesh in MESHES
]


@cache
def on_one_rank(case: str) -> Computed:
    settings = CASES[case]
    layout = Layout(strategy=settings.get("strategy", "balanced"))
    return run_case(tiny_model(**settings.get("model", {})), layout, case_rows(case))


def case_rows(case: str):
    return drawn(list(CASES).index(case), CASES[case]["rows"])


def assert_equal(one: Computed, many: Computed, limit: float) -> None:
    errors = compare(one, many)
    assert errors["loss_rel"] < limit and errors["hidden_rel"] < limit and errors["grad_rel_max"] < limit, errors


@pytest.mark.parametrize(("case", "mesh"), COMBINATIONS)
def test_ranks_compute_what_one_rank_computes(rank_pool, case, mesh):
    settings = CASES[case]
    layout = Layout(mesh=mesh, strategy=settings.get("strategy", "balanced"))
    model = tiny_model(**settings.get("model", {}))
    for outcome in rank_pool.run(run_case, model, layout, case_rows(case), ranks=mesh.world):
        assert_equal(on_one_rank(case), outcome, LIMITS["float64"])


def test_float32_stays_within_its_rounding(rank_pool):
    model, rows = tiny_model(), drawn(5, PACKED)
    one = run_case(model, Layout(dtype=torch.float32), rows)
    many = rank_pool.run(run_case, model, Layout(mesh=QUICK, dtype=torch.float32), rows, ranks=3)
    assert_equal(one, many[0], LIMITS["float32"])


def test_gradients_do_not_depend_on_how_documents_are_packed():
    """One row of three documents against three rows of one: the same global batch, other micro-batches."""
    packed, apart = drawn(7, [["tvtat", "t", "itvt"]]), drawn(7, [["tvtat"], ["t"], ["itvt"]])
    assert packed[0].ids.tolist() == [token for row in apart for token in row.ids.tolist()]
    one, other = (run_case(tiny_model(), Layout(), rows) for rows in (packed, apart))
    joined = Computed(other.loss, {0: torch.cat([other.hidden[i] for i in range(3)])}, other.gradients)
    assert_equal(one, joined, LIMITS["float64"])


def test_an_error_of_the_computation_is_seen():
    """A gradient, a hidden state and a loss that are off, or not finite, against themselves."""
    one = run_case(tiny_model(), Layout(), drawn(0, [["tvt"]]))
    name = max(one.gradients, key=lambda name: float(one.gradients[name].norm()))
    off = {**one.gradients, name: one.gradients[name] * (1 + 1e-9)}
    assert compare(one, Computed(one.loss, one.hidden, off))["grad_rel_max"] == pytest.approx(1e-9, rel=1e-3)
    assert compare(one, Computed(one.loss, one.hidden, off))["worst_parameter"] == name
    assert compare(one, Computed(one.loss * (1 + 1e-9), one.hidden, one.gradients))["loss_rel"] > LIMITS["float64"]
    assert compare(one, Computed(one.loss, {0: one.hidden[0] * float("nan")}, one.gradients))["hidden_rel"] == float(
        "inf"
    )
