"""Answers through caches split over ranks, against one rank, and against a whole forward for each token.

The ids are the same and the logits they are chosen from agree: float64 to 1e-10. In float32 answers may part where the
two best logits are within 1e-5.
Run: python -m pytest tests/generate/test_answers.py
"""

import pytest
import torch

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.generate import Sampling
from mmcp.parallel.mesh import MeshConfig
from tests.generate.answer_cases import Asked, answer, answer_slowly, worst
from tests.training.exact_cases import Layout, drawn, tiny_model

ROWS = [["tvtat", "qt", "itvt"], ["at"]]
WINDOW = SoftmaxConfig(window=5, sink=2)
LINEAR, KERNEL = LinearConfig(chunk=8), KernelisedConfig(chunk=8)
DELTA = GatedDeltaConfig(chunk=8, value_heads=6, key_heads=3, head_dim=4)
HYBRID = (DELTA, SoftmaxConfig(), LINEAR, WINDOW)
RING, GATHER = SoftmaxConfig(mode="ring"), SoftmaxConfig(mode="allgather", window=5, sink=2)
STATE, SCAN = LinearConfig(mode="state", chunk=8), KernelisedConfig(mode="scan", chunk=8)
DELTA_STATE = GatedDeltaConfig(mode="state", chunk=8)
SAMPLED = Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=5)
PATTERNS = {
    "softmax": (SoftmaxConfig(),),
    "window": (WINDOW,),
    "linear": (LINEAR,),
    "kernelised": (KERNEL,),
    "delta": (DELTA,),
    "hybrid": HYBRID,
}
MROPE = {"positions": "mrope", "mrope_sections": (2, 1, 1)}
QUICK = {
    "softmax and window on 4": ((SoftmaxConfig(), WINDOW), MeshConfig(ulysses=4), Sampling()),
    "recurrent on 3": ((LINEAR, KERNEL, DELTA), MeshConfig(ulysses=3), Sampling()),
    "all modes on 2 x 2": ((DELTA_STATE, GATHER, SCAN, RING, STATE), MeshConfig(ring=2, ulysses=2), SAMPLED),
    "two groups of data": (HYBRID, MeshConfig(dp_shard=2, ring=2), Sampling()),
}
MESHES = {
    "2": MeshConfig(ulysses=2),
    "3": MeshConfig(ulysses=3),
    "4": MeshConfig(ulysses=4),
    "ring of 3": MeshConfig(ring=3),
    "2 x 2": MeshConfig(ring=2, ulysses=2),
}


def model_of(pattern: tuple, **changes):
    """A tiny model with weights so large that attention decides what it says."""
    return tiny_model(pattern=pattern, layers=max(2, len(pattern)), init_std=0.4, **changes)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_cached_decoding_says_what_whole_forwards_say(pattern):
    model = model_of(PATTERNS[pattern], **(MROPE if pattern in ("softmax", "hybrid") else {}))
    asked = Asked(drawn(3, ROWS), sampling=SAMPLED if pattern == "window" else Sampling())
    slow, cached = answer_slowly(model, Layout(), asked), answer(model, Layout(), asked)
    assert cached.said == slow.said
    assert worst(cached.logits, slow.logits) < 1e-10
    assert set(cached.logits) == set(slow.logits)


@pytest.mark.parametrize("case", QUICK)
def test_ranks_say_what_one_rank_says(rank_pool, case):
    pattern, mesh, sampling = QUICK[case]
    check_ranks(rank_pool, model_of(pattern), mesh, Asked(drawn(4, ROWS), sampling=sampling))


@pytest.mark.full
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_variant_on_every_mesh(rank_pool, pattern, mesh, sampling):
    asked = Asked(drawn(5, [["tvtat", "ivt"], ["qt", "t", "vavat"]]), room=20, sampling=sampling)
    check_ranks(rank_pool, model_of(PATTERNS[pattern]), MESHES[mesh], asked)


def check_ranks(rank_pool, model, mesh: MeshConfig, asked: Asked) -> None:
    one = answer(model, Layout(), asked)
    for found in rank_pool.run(answer, model, Layout(mesh=mesh), asked, ranks=mesh.world):
        assert found.said == one.said
        assert worst(found.logits, one.logits) < 1e-10


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_float32_parts_only_where_two_ids_are_as_likely(rank_pool, seed):
    model, mesh = model_of(HYBRID), MeshConfig(ring=2, ulysses=2)
    asked = Asked(drawn(seed, ROWS), room=30)
    one = answer(model, Layout(dtype=torch.float32), asked)
    for found in rank_pool.run(answer, model, Layout(mesh=mesh, dtype=torch.float32), asked, ranks=mesh.world):
        for row, (answers, expected) in enumerate(zip(found.said, one.said, strict=True)):
            for document, (said, other) in enumerate(zip(answers, expected, strict=True)):
                if said != other:
                    parts = next(i for i in range(len(other) + 1) if said[: i + 1] != other[: i + 1])
                    best = one.logits[row, document, parts].topk(2).values
                    assert best[0] - best[1] < 1e-5, f"parted at token {parts} though {best.tolist()} differ"
