"""What ring and gathered keys run on a GPU, on gloo ranks: its code, kernels replaced by stand-ins, in float64.

Against the reference, outputs and gradients, and the same bytes as on the CPU.
Run: python -m pytest tests/parallel/test_gpu_modes.py
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmcp.attention import SoftmaxConfig, flash_gpu, gpu, softmax
from mmcp.parallel import mesh
from mmcp.parallel.collectives import Group
from tests.attention import fake_flash_attn
from tests.attention.eager_flex import eager_flex
from tests.parallel.mode_cases import Case, Result, check_results, run_cases

DOCUMENTS, UNITS = (0, 9, 10, 31, 48), ((3, 8), (12, 20))
ZIGZAG = (0,) * 12 + (1,) * 24 + (0,) * 12
LATE = (2,) * 20 + (0,) * 28  # rank 1 has no token
SCATTERED = tuple(np.random.default_rng(0).integers(0, 4, 48).tolist())


def by_flex_attention(patch: pytest.MonkeyPatch) -> None:
    eager_flex(patch)


def by_flash_attn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flash_gpu, "find_spec", lambda name: name)
    patch.setattr(flash_gpu, "HALF", (torch.float64,))
    patch.setattr(gpu, "MOST_CALLS", 1000)
    fake_flash_attn.install(patch, flash_gpu.HALF)


def run_on_gpu_code(kernels: Callable[[pytest.MonkeyPatch], None], cases: list[Case]) -> list[Result | str]:
    """Run cases on this rank as if its tensors were on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)

        def partial(self, q, k, v, pairs, heads):
            return gpu.gpu_partial(q, k, v, pairs, heads.kv_of_query)

        def partial_backward(self, grad, q, k, v, out, lse, pairs, heads):
            return gpu.gpu_partial_backward(grad, q, k, v, out, lse, pairs, heads.kv_of_query)

        patch.setattr(softmax.Softmax, "partial", partial)
        patch.setattr(softmax.Softmax, "partial_backward", partial_backward)
        return run_cases(cases)


def case_of(owners, *, ring: int, ulysses: int = 1, heads=(6, 3), blocks=UNITS, **variant) -> Case:
    return Case(SoftmaxConfig(**variant), ring, ulysses, *heads, 8, owners, DOCUMENTS, blocks)


@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("kernels", [by_flash_attn, by_flex_attention], ids=lambda kernels: kernels.__name__)
def test_gpu_code_on_ranks_equals_one_rank(rank_pool, kernels, mode):
    check(
        rank_pool, kernels, [case_of(ZIGZAG, ring=2, mode=mode), case_of(ZIGZAG, ring=2, mode=mode, window=7, sink=2)]
    )


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("kernels", [by_flash_attn, by_flex_attention], ids=lambda kernels: kernels.__name__)
def test_gpu_code_on_more_ranks_equals_one_rank(rank_pool, kernels, mode):
    check(rank_pool, kernels, [case_of(LATE, ring=3, mode=mode)])
    check(rank_pool, kernels, [case_of(SCATTERED, ring=2, ulysses=2, heads=(5, 5), mode=mode)])


def check(pool, kernels, cases: list[Case]) -> None:
    results = pool.run(run_on_gpu_code, kernels, cases, ranks=cases[0].ranks)
    for case, *each in zip(cases, *results, strict=True):
        check_results(case, each, 1e-10)


def test_ranks_of_a_ring_are_joined_before_they_talk(monkeypatch):
    """On a GPU all of them exchange something first; on the CPU, where gloo joins pairs, nothing."""
    joined = []
    monkeypatch.setattr(mesh.dist, "all_reduce", lambda tensor, group: joined.append((tensor.device.type, group)))
    ring = Group("ring", (0, 1), 0)
    mesh.connect(ring, torch.device("cpu"))
    mesh.connect(Group(), torch.device("meta"))
    assert not joined
    mesh.connect(ring, torch.device("meta"))
    assert joined == [("meta", ring.handle)]
