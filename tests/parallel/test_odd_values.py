"""What a rank gives to a layer that it should not: in softmax attention NaN and infinity stay in their document, mixed
types are refused. (A chunk of a recurrent layer multiplies what it must not see by 0, and NaN times 0 is NaN.)

Run: python -m pytest tests/parallel/test_odd_values.py
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmcp.attention import GatedDeltaConfig, SoftmaxConfig
from mmcp.attention.base import RowInfo
from mmcp.parallel.collectives import record
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ulysses import Ulysses
from tests.parallel.mode_cases import Case

BORDER = 20  # first token of the second document
CASE = Case(SoftmaxConfig(), 1, 3, 6, 3, 8, (0, 1, 2) * 16, (0, BORDER, 48))
ON_A_RING = (
    SoftmaxConfig(mode="ring"),
    SoftmaxConfig(mode="ring", window=40, sink=60),
    SoftmaxConfig(mode="allgather"),
)
CASES = [CASE, *(replace(CASE, variant=variant, ring=3, ulysses=1) for variant in ON_A_RING)]
MIXED = [*CASES[:2], replace(CASE, variant=GatedDeltaConfig(mode="state", chunk=4), ring=3, ulysses=1)]


def layer_of(case: Case) -> tuple[Ulysses, RowInfo, dict[str, Tensor], Tensor]:
    """Build the layer on this rank, and return its tokens' inputs and positions."""
    mesh = build_mesh(MeshConfig(ring=case.ring, ulysses=case.ulysses))
    layer = Ulysses(
        case.core(case.dtype), mesh, num_heads=case.heads, num_kv_heads=case.kv_heads, mode=case.variant.mode
    )
    mine = torch.from_numpy(case.plan.positions(mesh.cp.index))
    return layer, RowInfo(case.mask, case.plan, mesh.cp.index), case.inputs()[0], mine


def run_with(case: Case, value: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Put `value` into a token of the first document; this rank's positions, output and gradients."""
    layer, info, whole, mine = layer_of(case)
    for x in whole.values():
        x[3] = value
    local = {name: x[mine].requires_grad_() for name, x in whole.items()}
    out = layer(local, info)
    out.sum().backward()
    return mine, {"out": out.detach()} | {name: x.grad for name, x in local.items()}


def run_mixed(case: Case) -> str:
    """Give the last tensor in another type; what the layer says, and what it exchanged before."""
    layer, info, whole, mine = layer_of(case)
    *_, last = whole
    with record(layer.mesh.world) as recorder, pytest.raises(ValueError, match="different types") as raised:
        layer({name: x[mine].float() if name == last else x[mine] for name, x in whole.items()}, info)
    return f"{len(recorder.traffic)} exchanges: {raised.value}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.variant.name}-{case.variant.mode}")
def test_nan_and_infinity_stay_in_their_document(rank_pool, case):
    for value in (float("nan"), float("inf")):
        results = rank_pool.run(run_with, case, value, ranks=case.ranks)
        for mine, values in results:
            for name, x in values.items():
                assert x[mine >= BORDER].isfinite().all(), (value, name)
        assert not all(values["out"][mine < BORDER].isfinite().all() for mine, values in results), "it was not hidden"


@pytest.mark.parametrize("case", MIXED, ids=lambda case: f"{case.variant.name}-{case.variant.mode}")
def test_mixed_types_are_refused_on_all_ranks(rank_pool, case):
    said = rank_pool.run(run_mixed, case, ranks=case.ranks)
    assert len(said) == case.ranks and all(text.startswith("0 exchanges: tensors of different types") for text in said)
