"""Attention in every mode on gloo ranks against each variant's reference: outputs, gradients, and bytes by closed form.

By hand: factorisations of six ranks, windows, empty ranks, zigzag and scattered tokens, other types, what is refused,
and perturbations. Run: python -m pytest tests/parallel/test_modes.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from tests.parallel.mode_cases import Case, check_case, check_results, joined, run_case, run_cases

DOCUMENTS = (0, 9, 10, 31, 48)
RECURRENT = {
    "linear": LinearConfig(feature_map="elu", chunk=4, shortest_memory=2.0, longest_memory=100.0),
    "delta": GatedDeltaConfig(chunk=4),
}
SOFTMAX_MODES = ("ulysses", "ring", "allgather")
CROSSING = [
    *(SoftmaxConfig(mode=mode) for mode in ("ring", "allgather")),
    *(replace(variant, mode="state") for variant in RECURRENT.values()),
]


def zigzag(tokens: int, ranks: int) -> tuple[int, ...]:
    """Give rank r chunks r and 2 ranks - 1 - r."""
    chunk = np.arange(tokens) * 2 * ranks // max(tokens, 1)
    return tuple(np.minimum(chunk, 2 * ranks - 1 - chunk).tolist())


def contiguous(tokens: int, ranks: int) -> tuple[int, ...]:
    return tuple((np.arange(tokens) * ranks // max(tokens, 1)).tolist())


def scattered(tokens: int, ranks: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, ranks, tokens).tolist())


def case_of(variant, *, ring=2, ulysses=1, owners=None, heads=6, kv_heads=3, bounds=DOCUMENTS, **changes) -> Case:
    owners = zigzag(bounds[-1], ring * ulysses) if owners is None else owners
    return Case(variant, ring, ulysses, heads, kv_heads, 8, owners, bounds, **changes)


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (3, 1), (2, 2), (2, 3), (3, 2), (6, 1)])
@pytest.mark.parametrize("mode", SOFTMAX_MODES)
def test_softmax_on_every_factorisation(rank_pool, mode, ring, ulysses):
    variants = [SoftmaxConfig(mode=mode), SoftmaxConfig(mode=mode, window=7, sink=2)]
    owners = zigzag(48, ring * ulysses), contiguous(48, ring * ulysses), scattered(48, ring * ulysses)
    cases = [
        case_of(variants[i % 2], ring=ring, ulysses=ulysses, owners=owners[i % 3], blocks=((3, 8), (12, 20)))
        for i in range(6)
    ]
    for case, *results in zip(cases, *rank_pool.run(run_cases, cases, ranks=ring * ulysses), strict=True):
        check_results(case, results, 1e-10)


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (3, 1), (2, 2), (3, 2), (6, 1)])
@pytest.mark.parametrize("mode", ["ulysses", "state"])
@pytest.mark.parametrize("recurrent", RECURRENT)
def test_recurrent_on_every_factorisation(rank_pool, recurrent, mode, ring, ulysses):
    variant = replace(RECURRENT[recurrent], mode=mode)
    owners = zigzag(48, ring * ulysses), contiguous(48, ring * ulysses), scattered(48, ring * ulysses)
    cases = [case_of(variant, ring=ring, ulysses=ulysses, owners=owners[i]) for i in range(3)]
    cases.append(replace(cases[0], bounds=(0, 48)))
    for case, *results in zip(cases, *rank_pool.run(run_cases, cases, ranks=ring * ulysses), strict=True):
        check_results(case, results, 1e-10)


@pytest.mark.parametrize("variant", CROSSING, ids=lambda variant: f"{variant.name}-{variant.mode}")
def test_ranks_without_tokens(rank_pool, variant):
    cases = [
        case_of(variant, ring=3, owners=(1,) * 48),
        case_of(variant, ring=3, owners=(2,) * 20 + (0,) * 28),
        case_of(variant, ring=3, owners=(0,), bounds=(0, 1)),
        case_of(variant, ring=3, owners=(), bounds=(0, 0)),
    ]
    for case, *results in zip(cases, *rank_pool.run(run_cases, cases, ranks=3), strict=True):
        check_results(case, results, 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("variant", CROSSING, ids=lambda variant: f"{variant.name}-{variant.mode}")
def test_other_types(rank_pool, variant, dtype, tolerance):
    check_case(rank_pool, case_of(variant, ring=2, ulysses=2, dtype=dtype), tolerance)


@pytest.mark.parametrize("variant", [SoftmaxConfig(), *RECURRENT.values()], ids=lambda variant: variant.name)
@pytest.mark.parametrize(("heads", "kv_heads", "chunks"), [(8, 8, 2), (8, 2, 4), (9, 3, 3), (7, 1, 2), (12, 4, 3)])
def test_groups_of_heads_change_nothing(rank_pool, variant, heads, kv_heads, chunks):
    case = case_of(variant, ring=1, ulysses=2, heads=heads, kv_heads=kv_heads)
    grouped = replace(case, variant=replace(variant, chunks=chunks))
    results = check_case(rank_pool, grouped)
    for name, value in joined(case, check_case(rank_pool, case)).items():
        torch.testing.assert_close(joined(grouped, results)[name], value, rtol=1e-12, atol=1e-12)
    counted = results[0].counted
    assert {entry.collectives for entry in counted.values()} == {chunks}


def test_a_window_moves_only_the_keys_that_it_needs(rank_pool):
    """64 contiguous tokens on 4 ring ranks, a window of 5: each rank reads the 4 tokens before its own."""
    case = case_of(SoftmaxConfig(mode="ring", window=5), ring=4, owners=contiguous(64, 4), bounds=(0, 64))
    results = check_case(rank_pool, case)
    row = 2 * case.kv_heads * case.head_dim * 8
    assert [result.counted["ring keys", "forward"].bytes for result in results] == [0, 4 * row, 4 * row, 4 * row]
    assert [result.counted["ring keys", "forward"].collectives for result in results] == [1] * 4


def test_documents_apart_move_nothing(rank_pool):
    case = case_of(SoftmaxConfig(mode="ring"), ring=3, owners=contiguous(48, 3), bounds=(0, 16, 32, 48))
    assert all(not result.counted for result in check_case(rank_pool, case))


@pytest.mark.parametrize(("recurrent", "transition"), [("linear", 1), ("delta", 8 * 8)])
def test_states_cost_the_same_at_any_length(rank_pool, recurrent, transition):
    variant, counted = replace(RECURRENT[recurrent], mode="state"), []
    for tokens in (30, 96):
        case = case_of(variant, ring=3, owners=zigzag(tokens, 3), bounds=(0, tokens))
        counted.append([result.counted for result in check_case(rank_pool, case)])
    assert counted[0] == counted[1]
    assert counted[0][0]["states", "forward"].bytes == 3 * 6 * (8 * 8 + transition) * 8  # 3 runs elsewhere, 6 heads


PERTURBED = [SoftmaxConfig(), *RECURRENT.values(), *CROSSING]


@pytest.mark.parametrize("variant", PERTURBED, ids=lambda variant: f"{variant.name}-{variant.mode}")
def test_what_one_token_moves(rank_pool, variant):
    """Another document's output stays the same to the bit; the last rank sees a change of the first token."""
    case = case_of(variant, ring=3, heads=3, owners=contiguous(48, 3), bounds=(0, 20, 48))
    before, after = (joined(c, rank_pool.run(run_case, c, ranks=3)) for c in (case, replace(case, moved=(0, 20))))
    assert torch.equal(before["out"][20:], after["out"][20:])
    assert not torch.equal(before["out"][:20], after["out"][:20])
    whole = replace(case, bounds=(0, 48))
    before, after = (joined(c, rank_pool.run(run_case, c, ranks=3)) for c in (whole, replace(whole, moved=(0, 1))))
    assert (before["out"][32:] != after["out"][32:]).any(dim=-1).all()


REFUSED = {
    "ulysses=4 ranks for 3 query heads": case_of(SoftmaxConfig(), ring=2, ulysses=2, heads=3),
    "ulysses=2 ranks for 1 query heads": case_of(SoftmaxConfig(mode="ring"), ring=2, ulysses=2, heads=1, kv_heads=1),
    "tokens 3 to 7 attend both ways": case_of(LinearConfig(mode="state"), blocks=((3, 8),)),
    "chunks=3 groups of heads, but some rank has 2": case_of(SoftmaxConfig(chunks=3), ring=1, ulysses=3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks_before_any_exchange(rank_pool, message):
    for refusal in rank_pool.run(run_case, REFUSED[message], ranks=REFUSED[message].ranks):
        assert refusal.startswith("0 exchanges: ") and message in refusal
