"""Every registered attention variant under Ulysses against itself on one rank: outputs and gradients in float64.

Run: python -m pytest tests/parallel/test_variants_under_ulysses.py
"""

import pytest
import torch

from mmcp.attention import SoftmaxConfig
from mmcp.attention.base import ATTENTION, RowInfo, split_heads
from mmcp.masks import Mask
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ulysses import Ulysses
from tests.parallel.cases import plan_of_owners, relative_error

HEADS, KV_HEADS, HEAD_DIM, DOCUMENTS = 8, 2, 8, (70, 1, 40)
VARIANTS = {"windowed softmax": SoftmaxConfig(window=9, sink=2)} | {name: entry() for name, entry in ATTENTION.items()}


def errors_of(name: str) -> dict[str, float]:
    mesh, variant = build_mesh(MeshConfig(ulysses=3)), VARIANTS[name]
    owners = [i // 5 % 3 for i in range(sum(DOCUMENTS))]
    plan, mask = plan_of_owners(owners, 3), Mask.causal(list(DOCUMENTS))
    core = variant.build(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM).double()
    count = {"query": HEADS, "kv": KV_HEADS}
    torch.manual_seed(0)
    whole = {
        t.name: torch.randn(len(owners), count[t.heads], t.dim, dtype=torch.float64, requires_grad=True)
        for t in core.tensors
    }
    weight = torch.randn(len(owners), HEADS, core.out_dim, dtype=torch.float64)
    alone = RowInfo(mask, plan_of_owners([0] * len(owners), 1), 0)
    expected = core(whole, alone, split_heads(HEADS, KV_HEADS, 1)[0])
    (expected * weight).sum().backward()

    mine = torch.from_numpy(plan.positions(mesh.cp.index))
    local = {tensor: value.detach()[mine].requires_grad_() for tensor, value in whole.items()}
    layer = Ulysses(core, mesh, num_heads=HEADS, num_kv_heads=KV_HEADS)
    out = layer(local, RowInfo(mask, plan, mesh.cp.index))
    (out * weight[mine]).sum().backward()
    errors = {tensor: relative_error(local[tensor].grad, value.grad[mine]) for tensor, value in whole.items()}
    return errors | {"out": relative_error(out, expected[mine])}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_one_rank(rank_pool, name):
    for errors in rank_pool.run(errors_of, name, ranks=3):
        assert max(errors.values()) < 1e-10, errors
