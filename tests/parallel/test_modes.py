"""Attention in every mode on gloo ranks against each variant's reference: outputs, gradients, and bytes by closed form.

By hand: factorisations of six ranks, windows, empty ranks, zigzag and scattered tokens, other types, what is refused,
and perturbations. Run: python -m pytest tests/parallel/test_modes.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from tests.parallel.mode_cases import Case, check_case, check_results, joined, run_case, run_cases

DOCUMENTS = (0, 9, 10, 31, 48)
RECURRENT = {
    "linear": LinearConfig(feature_map="elu", chunk=4, shortest_memory=2.0, longest_memory=100.0),
    "kernelised": KernelisedConfig(chunk=4),
    "delta": GatedDeltaConfig(chunk=4),
}
SOFTMAX_MODES = ("ulysses", "ring", "allgather")
CROSSING = [
    *(SoftmaxConfig(mode=mode) for mode in ("ring", "allgather")),
    *(replace(variant, mode=mode) for variant in RECURRENT.values() for mode in ("state", "scan")),
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


def factorisations(quick: list, rest: list) -> pytest.MarkDecorator:
    """Parametrise (ring, ulysses); all that are not quick belong to the full tests."""
    return pytest.mark.parametrize(
        ("ring", "ulysses"), [*quick, *(pytest.param(*mesh, marks=pytest.mark.full) for mesh in rest)]
    )


@factorisations([(3, 1), (2, 2)], [(1, 2), (2, 1), (2, 3), (3, 2), (6, 1)])
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


@factorisations([(2, 2)], [(1, 2), (2, 1), (3, 1), (3, 2), (6, 1)])
@pytest.mark.parametrize("mode", ["ulysses", "state", "scan"])
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


def test_a_scan_brings_less_than_all_states(rank_pool):
    """Six contiguous runs, three hops and a shift. The fifth takes two maps with M, one without, and a state."""
    variant = replace(RECURRENT["delta"], mode="scan")
    case = case_of(variant, ring=6, heads=2, kv_heads=1, owners=contiguous(48, 6), bounds=(0, 48))
    counted = [result.counted["states", "forward"] for result in check_case(rank_pool, case)]
    numbers = 2 * 8 * 8 * 8  # of a state, and of a transition
    assert [traffic.bytes // numbers for traffic in counted] == [0, 2, 4, 4, 6, 1]
    assert max(traffic.collectives for traffic in counted) == 4


PERTURBED = [SoftmaxConfig(), SoftmaxConfig(chunks=2), *RECURRENT.values(), *CROSSING]


@factorisations([(3, 1)], [(2, 2)])
@pytest.mark.parametrize("variant", PERTURBED, ids=lambda variant: f"{variant.name}-{variant.mode}-{variant.chunks}")
def test_what_one_token_moves(rank_pool, variant, ring, ulysses):
    """Other documents stay the same to the bit, in both directions; the last rank sees a change of the first token."""
    ranks = ring * ulysses
    case = case_of(
        variant, ring=ring, ulysses=ulysses, heads=8, kv_heads=4, owners=contiguous(48, ranks), bounds=(0, 20, 48)
    )
    whole = replace(case, bounds=(0, 48))
    cases = [case, replace(case, moved=(0, 20)), whole, replace(whole, moved=(0, 1))]
    of_ranks = zip(*rank_pool.run(run_cases, cases, ranks=ranks), strict=True)
    before, after, one, other = (joined(c, list(results)) for c, results in zip(cases, of_ranks, strict=True))
    for name in ("out", *(tensor.name for tensor in case.core(torch.float64).tensors)):
        assert torch.equal(before[name][20:], after[name][20:]), name
    assert not torch.equal(before["out"][:20], after["out"][:20])
    assert (one["out"][36:] != other["out"][36:]).flatten(1).any(dim=-1).all()


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
