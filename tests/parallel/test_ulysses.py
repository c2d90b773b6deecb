"""Ulysses around a small dense attention on gloo ranks against the same attention on one rank, outputs and gradients.

Also, by eye, what each rank sees of rank-filled integers; and the recorder's counts against the closed form.
Run: python -m pytest tests/parallel/test_ulysses.py           (some drawn cases)
     python -m pytest tests/parallel/test_ulysses.py -m full   (five hundred)
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.attention.base import RowInfo, split_heads
from mmcp.masks import Mask
from mmcp.parallel.collectives import record
from mmcp.parallel.head_exchange import HeadExchange, SplitTensor
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ulysses import Ulysses, token_order
from tests.parallel.cases import DenseAttention, plan_of_owners, relative_error

INPUTS = ("q", "k", "v", "gate")


@dataclass(frozen=True)
class Case:
    ranks: int
    heads: int
    kv_heads: int
    owners: tuple[int, ...]
    """Rank of each token."""
    bounds: tuple[int, ...]
    """First token of each document, then the number of tokens."""
    dim: int = 3
    out_dim: int = 2
    dtype: torch.dtype = torch.float64


def compare_with_one_rank(case: Case) -> tuple[dict[str, float], list[tuple], list[tuple]]:
    """Return this rank's errors of the output and every gradient, what it counted and what the closed form says."""
    mesh = build_mesh(MeshConfig(ulysses=case.ranks))
    plan = plan_of_owners(list(case.owners), case.ranks)
    info = RowInfo(Mask.causal(np.diff(case.bounds).tolist()), plan, mesh.cp.index)
    core = DenseAttention(case.dim, case.out_dim)
    generator = torch.Generator().manual_seed(len(case.owners))

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(len(case.owners), heads, dim, generator=generator, dtype=torch.float64).to(case.dtype)

    count = {"query": case.heads, "kv": case.kv_heads}
    whole = {t.name: draw(count[t.heads], t.dim).requires_grad_() for t in core.tensors}
    weight = draw(case.heads, case.out_dim)
    expected = core(whole, info, split_heads(case.heads, case.kv_heads, 1)[0])
    (expected * weight).sum().backward()

    mine = torch.from_numpy(plan.positions(info.rank))
    local = {name: value.detach()[mine].requires_grad_() for name, value in whole.items()}
    layer = Ulysses(core, mesh, num_heads=case.heads, num_kv_heads=case.kv_heads)
    with record(mesh.world) as recorder:
        out = layer(local, info)
        (out * weight[mine]).sum().backward()
    errors = {name: relative_error(local[name].grad, value.grad[mine]) for name, value in whole.items()}
    errors["out"] = relative_error(out, expected[mine])
    counted = sorted((*key, entry.collectives, entry.bytes) for key, entry in recorder.traffic.items())
    return errors, counted, closed_form(case, info.rank)


def closed_form(case: Case, rank: int) -> list[tuple]:
    """(name, phase, collectives, bytes from other ranks) of one layer, forward and backward, on `rank`."""
    if case.ranks == 1:
        return []
    mine = case.owners.count(rank)
    others = len(case.owners) - mine
    shares = split_heads(case.heads, case.kv_heads, case.ranks)
    per_token = [
        len(share.query_heads) * (case.dim + 1) + len(share.kv_heads) * (case.dim + case.out_dim) for share in shares
    ]
    size = case.dtype.itemsize
    sent_inputs = mine * (sum(per_token) - per_token[rank]) * size
    kept_output = len(shares[rank].query_heads) * case.out_dim
    return [
        ("ulysses inputs", "backward", 1, sent_inputs),
        ("ulysses inputs", "forward", 1, others * per_token[rank] * size),
        ("ulysses output", "backward", 1, others * kept_output * size),
        ("ulysses output", "forward", 1, mine * (case.heads * case.out_dim - kept_output) * size),
    ]


def check_case(pool, case: Case, tolerance: float) -> None:
    for rank, (errors, counted, expected) in enumerate(pool.run(compare_with_one_rank, case, ranks=case.ranks)):
        assert max(errors.values()) <= tolerance, (rank, errors)
        assert counted == expected, rank


@st.composite
def cases(draw, max_ranks: int) -> Case:
    ranks = draw(st.integers(1, max_ranks))
    heads = draw(st.integers(ranks, 12))
    kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    ownership = draw(st.sampled_from(["contiguous", "zigzag", "scattered"]))
    if ownership == "scattered":
        owners = draw(st.lists(st.integers(0, ranks - 1), max_size=24))
    else:
        turns = list(range(ranks)) if ownership == "contiguous" else [*range(ranks), *reversed(range(ranks))]
        lengths = draw(st.lists(st.integers(0, 5), min_size=len(turns), max_size=len(turns)))
        owners = [rank for rank, length in zip(turns, lengths, strict=True) for _ in range(length)]
    inner = draw(st.sets(st.integers(1, max(1, len(owners) - 1)), max_size=4)) if len(owners) > 1 else set()
    bounds = sorted({0, len(owners), *inner})
    return Case(ranks, heads, kv_heads, tuple(owners), tuple(bounds), draw(st.integers(1, 5)), draw(st.integers(1, 5)))


@settings(max_examples=40)
@given(case=cases(4))
def test_drawn_cases_equal_one_rank(rank_pool, case):
    check_case(rank_pool, case, 1e-10)


@pytest.mark.full
@settings(max_examples=500)
@given(case=cases(6))
def test_many_drawn_cases_equal_one_rank(rank_pool, case):
    check_case(rank_pool, case, 1e-10)


FEW_KV_HEADS = [(8, 2, 4), (5, 1, 2), (8, 8, 3), (6, 3, 2), (6, 2, 4), (4, 1, 4)]
OWNERS = (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), FEW_KV_HEADS)
def test_key_value_heads_that_do_not_divide_by_the_ranks(rank_pool, heads, kv_heads, ranks):
    check_case(rank_pool, Case(ranks, heads, kv_heads, OWNERS, (0, 4, 11)), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_other_types(rank_pool, dtype, tolerance):
    check_case(rank_pool, Case(3, 6, 2, OWNERS, (0, 4, 11), dtype=dtype), tolerance)


def show_what_arrives() -> tuple[list, list]:
    """Each number says token, head: 10 t + h. Two query heads and one key-value head (head 9) on two ranks."""
    mesh = build_mesh(MeshConfig(ulysses=2))
    plan = plan_of_owners([0, 1, 1, 0], 2)
    order = token_order(plan, range(2), torch.device("cpu"))
    query, kv = SplitTensor(2, 1, ((0, 1), (1, 2))), SplitTensor(1, 1, ((0, 1), (0, 1)))
    trade = HeadExchange((query, kv), order, mesh.ulysses, "test")
    token = torch.from_numpy(plan.positions(mesh.cp.index))
    local = (10.0 * token[:, None] + torch.arange(2))[..., None], (10.0 * token + 9)[:, None, None]
    there = trade.seq_to_heads(local)
    back = trade.heads_to_seq(there)
    return [x.flatten().tolist() for x in there], [x.flatten().tolist() for x in back]


def test_each_rank_sees_its_heads_of_all_tokens_in_order(rank_pool):
    (first, first_back), (second, second_back) = rank_pool.run(show_what_arrives, ranks=2)
    assert first == [[0, 10, 20, 30], [9, 19, 29, 39]]
    assert second == [[1, 11, 21, 31], [9, 19, 29, 39]]
    assert first_back == [[0, 1, 30, 31], [18, 78]]  # the key-value head was on both ranks: summed
    assert second_back == [[10, 11, 20, 21], [38, 58]]


def show_tokens_of_ring_group() -> list:
    mesh = build_mesh(MeshConfig(ring=2, ulysses=2))
    plan = plan_of_owners([0, 2, 1, 3, 1, 0, 3], 4, ring=2)
    head = SplitTensor(2, 1, ((0, 1), (1, 2)))
    ranks = range(2 * mesh.ring.index, 2 * mesh.ring.index + 2)
    trade = HeadExchange((head,), token_order(plan, ranks, mesh.device), mesh.ulysses, "test")
    local = torch.from_numpy(plan.positions(mesh.cp.index))[:, None, None].expand(-1, 2, 1).double()
    return trade.seq_to_heads((local,))[0].flatten().tolist()


def test_each_ring_group_sees_its_own_tokens_in_order(rank_pool):
    assert rank_pool.run(show_tokens_of_ring_group, ranks=4) == [[0, 2, 4, 5]] * 2 + [[1, 3, 6]] * 2


def test_one_rank_hands_the_core_the_very_tensors():
    seen = {}

    class Spy(DenseAttention):
        def forward(self, inputs, info, heads):
            seen.update(inputs)
            return inputs["v"]

    layer = Ulysses(Spy(2, 2), build_mesh(MeshConfig()), num_heads=1, num_kv_heads=1)
    local = {name: torch.zeros(3, 1, 1 if name == "gate" else 2) for name in INPUTS}
    layer(local, RowInfo(Mask.causal([3]), plan_of_owners([0, 0, 0], 1), 0))
    assert all(seen[name] is local[name] for name in INPUTS)


def refusal_of_mesh(config: MeshConfig, heads: int) -> str:
    with pytest.raises(ValueError) as refused:
        Ulysses(DenseAttention(2, 2), build_mesh(config), num_heads=heads, num_kv_heads=heads)
    return str(refused.value)


def refusal_of_mode(mode: str) -> str:
    with pytest.raises(ValueError) as refused:
        Ulysses(DenseAttention(2, 2), build_mesh(MeshConfig(ring=2)), num_heads=2, num_kv_heads=2, mode=mode)
    return str(refused.value)


def refuse_mixed_types() -> str:
    mesh = build_mesh(MeshConfig(ulysses=2))
    layer = Ulysses(DenseAttention(2, 2), mesh, num_heads=2, num_kv_heads=2)
    local = {name: torch.zeros(1, 2, 1 if name == "gate" else 2) for name in INPUTS}
    local["gate"] = local["gate"].double()
    with pytest.raises(ValueError) as refused:
        layer(local, RowInfo(Mask.causal([2]), plan_of_owners([0, 1], 2), mesh.cp.index))
    return str(refused.value)


def test_what_cannot_work_is_refused_on_all_ranks_before_any_exchange(rank_pool):
    for message in rank_pool.run(refuse_mixed_types, ranks=2):
        assert "gate torch.float64" in message and "cast them to one type" in message
    for message in rank_pool.run(refusal_of_mesh, MeshConfig(ulysses=4), 2, ranks=4):
        assert "ulysses=4 ranks for 2 query heads (2 key-value heads)" in message and "at most 2" in message
    for message in rank_pool.run(refusal_of_mode, "ring", ranks=2):
        assert message.startswith("mode 'ring' needs answers that merge by log-sum-exp, which DenseAttention is not")
        assert message.endswith("use one of 'ulysses'")
    with pytest.raises(ValueError, match=r"ulysses=8 ranks for 4 query heads \(4 key-value heads\).*at most 4"):
        split_heads(4, 4, 8)
