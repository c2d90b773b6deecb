"""Drawn layers on gloo ranks against each variant's slow reference in float64: outputs, gradients, exact byte counts.

Drawn: ranks 1 to 6 in any ring x ulysses, heads 1 to 40 over any divisor, head sizes 8 to 64, documents from length 1,
ranks without tokens, contiguous, zigzag and scattered ownership, windows, sinks, prefixes and both-ways blocks, every
variant in every mode. What cannot be combined must raise the documented error on all ranks before any exchange.
Run: python -m pytest tests/parallel/test_modes_drawn.py           (60 cases)
     python -m pytest tests/parallel/test_modes_drawn.py -m full -s   (800 cases; tells the largest error)
"""

import itertools
import re
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.base import ATTENTION
from mmcp.parallel.modes import MODES
from tests.parallel.mode_cases import Case, check_results, run_cases

MODES_OF = {
    name: next(field.type for field in fields(entry) if field.name == "mode").__args__
    for name, entry in ATTENTION.items()
}
CASES_A_RUN = 5
RUNS = 160


@st.composite
def variants(draw):
    name = draw(st.sampled_from(sorted(ATTENTION)))
    mode = draw(st.sampled_from(MODES_OF[name]))
    chunks = draw(st.sampled_from([1, 1, 1, 2, 3])) if mode == "ulysses" else 1
    if name == "softmax":
        window = draw(st.sampled_from([0, 0, 1, 3, 8, 40]))
        return SoftmaxConfig(window=window, sink=draw(st.integers(0, 3)) if window else 0, mode=mode, chunks=chunks)
    chunk = draw(st.sampled_from([1, 3, 8]))
    if name == "gated_delta":
        return GatedDeltaConfig(convolution=draw(st.integers(1, 5)), chunk=chunk, mode=mode, chunks=chunks)
    if name == "kernelised":
        return KernelisedConfig(
            feature_map=draw(st.sampled_from(["elu", "softmax"])), chunk=chunk, mode=mode, chunks=chunks
        )
    feature_map = draw(st.sampled_from(["silu", "elu"]))
    memory = draw(st.sampled_from([2.0, 50.0]))
    return LinearConfig(
        feature_map=feature_map,
        shortest_memory=memory,
        longest_memory=memory * 10,
        chunk=chunk,
        mode=mode,
        chunks=chunks,
    )


@st.composite
def owners(draw, ranks: int) -> tuple[int, ...]:
    ownership = draw(st.sampled_from(["contiguous", "zigzag", "scattered"]))
    if ownership == "scattered":
        return tuple(draw(st.lists(st.integers(0, ranks - 1), max_size=40)))
    turns = list(range(ranks)) if ownership == "contiguous" else [*range(ranks), *reversed(range(ranks))]
    lengths = draw(st.lists(st.integers(0, 12), min_size=len(turns), max_size=len(turns)))
    return tuple(rank for rank, length in zip(turns, lengths, strict=True) for _ in range(length))


@st.composite
def masks(draw, tokens: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Documents, and in some of them a prefix and blocks that attend both ways."""
    inner = draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=5)) if tokens > 1 else set()
    bounds = sorted({0, tokens, *inner})
    blocks = []
    if draw(st.booleans()):
        for start, stop in itertools.pairwise(bounds):
            cuts = sorted(draw(st.sets(st.integers(start, stop), max_size=4)))
            blocks += list(zip(cuts[::2], cuts[1::2], strict=False))
    return tuple(bounds), tuple(blocks)


@st.composite
def cases(draw, ranks: int) -> Case:
    ring = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    heads = draw(st.one_of(st.integers(max(1, ranks), 12), st.integers(1, 40)))
    tokens = draw(owners(ranks))
    bounds, blocks = draw(masks(len(tokens)))
    return Case(
        variant=draw(variants()),
        ring=ring,
        ulysses=ranks // ring,
        heads=heads,
        kv_heads=draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0])),
        head_dim=draw(st.sampled_from([8, 8, 16, 24, 64])) if heads < 13 else 8,
        owners=tokens,
        bounds=bounds,
        blocks=blocks,
        seed=draw(st.integers(0, 99)),
    )


def refusal(case: Case) -> str:
    """What the documents say of a case that cannot be; empty for one that can."""
    ranks = case.ranks if MODES[case.variant.mode].is_flat else case.ulysses
    if case.heads < ranks:
        return f"ulysses={ranks} ranks for {case.heads} query heads"
    if case.heads // ranks < case.variant.chunks:
        return f"chunks={case.variant.chunks} groups of heads, but some rank has {case.heads // ranks}; use at most"
    if case.variant.name != "softmax" and case.blocks:
        return "attend both ways"
    return ""


@dataclass
class Tally:
    """What drawn cases came to."""

    computed: int = 0
    refused: int = 0
    largest_error: float = 0.0

    def check(self, pool, drawn: list[Case]) -> None:
        """Run cases of one number of ranks together and check each."""
        of_ranks = pool.run(run_cases, drawn, ranks=drawn[0].ranks, timeout=300)
        for case, *results in zip(drawn, *of_ranks, strict=True):
            message = refusal(case)
            if message:
                assert all(re.match("0 exchanges: .*" + re.escape(message), str(result)) for result in results), results
                self.refused += 1
            else:
                assert not any(isinstance(result, str) for result in results), (case, results)
                self.largest_error = max(self.largest_error, check_results(case, results, 1e-10))
                self.computed += 1


TOGETHER = st.integers(1, 6).flatmap(lambda ranks: st.lists(cases(ranks), min_size=CASES_A_RUN, max_size=CASES_A_RUN))
DRAWN = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],  # a failing case is told as drawn: to shrink it takes minutes of ranks
}


@pytest.mark.parametrize(
    "runs",
    [
        12,
        pytest.param(RUNS, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_drawn_layers_equal_one_rank(rank_pool, runs):
    tally = Tally()

    @settings(max_examples=runs, **DRAWN)
    @given(drawn=TOGETHER)
    def check(drawn):
        tally.check(rank_pool, drawn)

    check()
    print(tally)
    assert tally.computed >= 2 * (runs * CASES_A_RUN) // 3 and tally.refused


def test_every_mode_is_named_by_a_variant_that_it_carries():
    for name, modes in MODES_OF.items():
        core = ATTENTION[name]().build(heads=2, kv_heads=2, head_dim=8)
        assert set(modes) == {mode.name for mode in MODES.values() if isinstance(core, mode.carries)}


def test_the_check_sees_a_wrong_gradient(rank_pool):
    case = Case(SoftmaxConfig(mode="ring"), 2, 1, 2, 1, 8, (0, 0, 1, 1), (0, 4))
    results = [result for (result,) in rank_pool.run(run_cases, [case], ranks=2)]
    check_results(case, results, 1e-10)
    results[1].values["k"] = results[1].values["k"] * (1 + 1e-8)
    with pytest.raises(AssertionError, match="'k'"):
        check_results(case, results, 1e-10)
    with pytest.raises(AssertionError):
        check_results(replace(case, variant=SoftmaxConfig(mode="ring", window=2)), results, 1e-10)
