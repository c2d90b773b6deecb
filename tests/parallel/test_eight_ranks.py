"""A handful of layers on eight gloo ranks against each variant's reference: outputs, gradients, bytes.

Run: python -m pytest tests/parallel/test_eight_ranks.py -m full
"""

import numpy as np
import pytest

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from tests.distributed import RankPool
from tests.parallel.mode_cases import Case, check_results, run_cases

OWNERS = tuple(np.random.default_rng(0).integers(0, 8, 60).tolist())
BOUNDS = (0, 1, 25, 60)
LAYERS = {
    "ulysses, fewer key-value heads than ranks": Case(SoftmaxConfig(), 1, 8, 12, 2, 8, OWNERS, BOUNDS, ((25, 40),)),
    "ulysses in groups": Case(SoftmaxConfig(chunks=2), 1, 8, 17, 1, 8, OWNERS, BOUNDS),
    "ring": Case(SoftmaxConfig(mode="ring", window=9, sink=1), 8, 1, 1, 1, 16, OWNERS, BOUNDS, ((2, 9),)),
    "ring across pairs": Case(SoftmaxConfig(mode="ring"), 4, 2, 6, 3, 8, OWNERS, BOUNDS),
    "gathered keys": Case(SoftmaxConfig(mode="allgather"), 2, 4, 4, 2, 8, OWNERS, BOUNDS),
    "states": Case(LinearConfig(mode="state", chunk=4), 8, 1, 2, 1, 8, OWNERS, BOUNDS),
    "scanned states": Case(GatedDeltaConfig(mode="scan", chunk=4), 4, 2, 4, 2, 8, OWNERS, BOUNDS),
    "kernelised over heads": Case(KernelisedConfig(chunk=4), 2, 4, 8, 4, 8, OWNERS, BOUNDS),
}


@pytest.mark.full
def test_eight_ranks_compute_what_one_does():
    cases = list(LAYERS.values())
    with RankPool(8) as pool:
        of_ranks = pool.run(run_cases, cases, timeout=200)
    for case, *results in zip(cases, *of_ranks, strict=True):
        check_results(case, results, 1e-10)
