"""What modes move and keep: recomputed exchanges told apart, and packs that hold what each destination needs, once.

Run: python -m pytest tests/parallel/test_mode_traffic.py
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.base import split_heads
from mmcp.parallel import head_exchange
from mmcp.parallel.collectives import Flight, Group
from mmcp.parallel.head_exchange import HeadExchange, SplitTensor, TokenOrder
from mmcp.parallel.head_groups import head_groups
from tests.parallel.mode_cases import Case, check_results, run_cases

RECOMPUTED = [
    *(SoftmaxConfig(mode=mode) for mode in ("ulysses", "ring", "allgather")),
    SoftmaxConfig(chunks=2),
    LinearConfig(mode="state", chunk=4),
    KernelisedConfig(mode="scan", chunk=4),
    GatedDeltaConfig(mode="state", chunk=4),
    GatedDeltaConfig(mode="scan", chunk=4),
]


def test_recomputed_exchanges_are_those_of_the_forward_and_told_apart(rank_pool):
    owners = (0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 2, 1, 1, 0)
    cases = [Case(variant, 2, 2, 8, 2, 8, owners, (0, 3, 16), checkpointing=True) for variant in RECOMPUTED]
    for case, *results in zip(cases, *rank_pool.run(run_cases, cases, ranks=4), strict=True):
        check_results(case, results, 1e-10)
        for counted in (result.counted for result in results):
            forward = {name: traffic for (name, phase), traffic in counted.items() if phase == "forward"}
            again = {name: traffic for (name, phase), traffic in counted.items() if phase == "recompute"}
            assert forward and again == forward


class Allocations(TorchDispatchMode):
    """Adds up the bytes of every storage that comes into being."""

    def __init__(self):
        super().__init__()
        self.seen: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen.setdefault(storage.data_ptr(), storage.nbytes())
                self.kept.append(tensor)
        return result


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (8, 1, 4), (7, 1, 3), (28, 4, 6)])
def test_a_pack_allocates_what_it_sends_and_nothing_repeated(monkeypatch, heads, kv_heads, ranks):
    """Each rank is sent its query heads and, once, each key-value head that these read; no other buffer."""
    sent = []
    monkeypatch.setattr(head_exchange, "start_exchange", lambda send, *_, **__: sent.append(send) or (send, Flight()))
    shares, tokens, dim = split_heads(heads, kv_heads, ranks), 10, 4
    (group,) = head_groups(shares, 1)
    specs = tuple(
        SplitTensor(count, dim, ranges)
        for count, ranges in ((heads, group.query), (kv_heads, group.new_kv), (kv_heads, group.new_kv))
    )
    everyone = Group("cp", tuple(range(ranks)), 1)
    exchange = HeadExchange(specs, TokenOrder((tokens,) * ranks, None), everyone, "pack")
    inputs = [torch.randn(tokens, count, dim) for count in (heads, kv_heads, kv_heads)]
    before = {x.untyped_storage().data_ptr() for x in inputs}
    with Allocations() as allocations:
        exchange.start_scatter(inputs, backward=False)
    made = sum(size for pointer, size in allocations.seen.items() if pointer not in before)
    needed = sum(len(share.query_heads) + 2 * len(share.kv_heads) for share in shares) * tokens * dim * 4
    assert sent[0].nbytes == needed == made
