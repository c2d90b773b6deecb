"""Predicted bytes against real runs on gloo ranks: tensors kept for backward within 5 percent, exchanges to the byte.

Kept tensors are counted by `saved_tensors_hooks`, each storage once, parameters left out; exchanges by the recorder of
mmcp.parallel.collectives. Variants, modes, meshes, types, gates, norms, checkpointing, rows with and without media.
Run: python -m pytest tests/planning/test_memory.py
"""

import pytest
import torch

from mmcp.attention import ATTENTION, GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.planning.kept import KEPT
from tests.planning.runs import Run, watch

RUNS = {
    "softmax, text alone": Run(media=0),
    "softmax, media": Run(),
    "softmax, checkpointing": Run(changes={"qk_norm": False, "checkpointing": True}),
    "ulysses": Run(ulysses=2),
    "ulysses, gate, contiguous": Run(ulysses=2, strategy="contiguous", pattern=(SoftmaxConfig(output_gate=True),)),
    "ulysses, groups of heads": Run(ulysses=2, pattern=(SoftmaxConfig(chunks=2),)),
    "ulysses, bfloat16": Run(ulysses=2, dtype=torch.bfloat16),
    "ring": Run(ring=2, pattern=(SoftmaxConfig(mode="ring"),)),
    "ring x ulysses, window": Run(ring=2, ulysses=2, pattern=(SoftmaxConfig(mode="ring", window=100, sink=3),)),
    "allgather x ulysses": Run(ring=2, ulysses=2, pattern=(SoftmaxConfig(mode="allgather"),)),
    "linear, one rank": Run(pattern=(LinearConfig(),)),
    "linear, ulysses": Run(ulysses=2, pattern=(LinearConfig(feature_map="silu"),)),
    "linear, state": Run(ring=2, pattern=(LinearConfig(feature_map="silu", mode="state"),)),
    "kernelised, one rank": Run(pattern=(KernelisedConfig(),)),
    "kernelised, ulysses": Run(ulysses=2, pattern=(KernelisedConfig(),)),
    "kernelised, state x ulysses": Run(ring=2, ulysses=2, pattern=(KernelisedConfig(mode="state"),)),
    "delta, one rank": Run(pattern=(GatedDeltaConfig(),)),
    "delta, ulysses": Run(ulysses=3, pattern=(GatedDeltaConfig(),)),
    "delta, state": Run(ring=2, pattern=(GatedDeltaConfig(mode="state"),)),
    "linear, scan": Run(ring=3, pattern=(LinearConfig(mode="scan"),)),
    "delta, scan": Run(ring=2, pattern=(GatedDeltaConfig(mode="scan"),)),
    "hybrid, float64, checkpointing": Run(
        ring=4,
        dtype=torch.float64,
        pattern=(LinearConfig(mode="state"), SoftmaxConfig(mode="ring")),
        changes={"checkpointing": True},
    ),
}
QUICK = ("softmax, media", "ulysses, groups of heads", "ring", "linear, state", "kernelised, ulysses", "delta, state")


def check(rank_pool, run: Run) -> None:
    for rank, watched in enumerate(rank_pool.run(watch, run, ranks=run.ranks)):
        predicted = watched.predicted
        assert abs(predicted.total / watched.kept - 1) < 0.05, (rank, watched.kept, predicted)
        assert watched.counted == watched.expected, rank


@pytest.mark.parametrize("name", QUICK)
def test_a_run_keeps_and_moves_what_is_predicted(rank_pool, name):
    check(rank_pool, RUNS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(RUNS) - set(QUICK)))
def test_other_runs_keep_and_move_what_is_predicted(rank_pool, name):
    check(rank_pool, RUNS[name])


def test_every_variant_has_a_formula():
    assert KEPT.keys() == ATTENTION.keys()
