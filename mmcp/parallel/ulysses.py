"""Ulysses: any attention variant over a sequence that is cut over ranks, by trading tokens for heads around it.

Every rank attends with all tokens of its group and a share of the heads, so the variant never knows that it is
parallel, and its work is balanced whatever the planner did with the tokens. Jacobs et al., arXiv 2309.14509.
The modes of `mmcp.parallel.modes` say which ranks are a group, and what crosses from one group to another.
"""

import numpy as np
import torch
from torch import Tensor, nn

from mmcp.attention.base import Attention, HeadShare, RowInfo, split_heads
from mmcp.parallel.head_exchange import HeadExchange, SplitTensor, TokenOrder
from mmcp.parallel.head_groups import GroupedExchange
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.modes import MODES
from mmcp.sharding.plan import ShardPlan


class Ulysses(nn.Module):
    """Give `core` more tokens of some heads where the caller has some tokens of all heads.

    Two collectives in forward (all inputs in one, the output in the other) and two in backward, beside what the mode
    moves between groups. Lengths and order come from the plan; nothing about them is exchanged.
    """

    def __init__(
        self,
        core: Attention,
        mesh: Mesh,
        *,
        num_heads: int,
        num_kv_heads: int,
        mode: str = "ulysses",
        chunks: int = 1,
    ):
        """Raises ValueError when the mode cannot carry the core, or some rank would get too few heads.

        chunks: groups of heads, the exchange of one under the attention of another
        """
        super().__init__()
        self.core, self.mesh = core, mesh
        self.heads = {"query": num_heads, "kv": num_kv_heads}
        self.mode = MODES[mode]
        self.mode.check(core)
        self.group = mesh.cp if self.mode.is_flat else mesh.ulysses
        self.share = split_heads(num_heads, num_kv_heads, self.group.size)[self.group.index]
        self.groups = self.mode.groups(num_heads, num_kv_heads, chunks, ring=mesh.ring.size, ulysses=mesh.ulysses.size)

    def forward(self, inputs: dict[str, Tensor], info: RowInfo) -> Tensor:
        """Attend over the whole row.

        inputs: one [s/cp, heads, dim] for each of the core's tensors, this rank's tokens in sequence order
        returns [s/cp, h, out_dim]
        Raises ValueError for inputs of different types, or of a type or under a mask that the core cannot compute.
        """
        tensors = [inputs[tensor.name] for tensor in self.core.tensors]
        self._check(tensors, info)
        if self.group.size == 1:
            return self._attend(inputs, info, self.share)
        exchanges = self._exchanges(tensors[0].device, info)
        if len(self.groups) > 1:
            return exchanges.run(tensors, lambda named, share: self._attend(named, info, share))
        there = exchanges.inputs[0].seq_to_heads(tensors)
        out = self._attend({t.name: x for t, x in zip(self.core.tensors, there, strict=True)}, info, self.share)
        (local,) = exchanges.outputs[0].heads_to_seq((out,))
        return local

    def _attend(self, inputs: dict[str, Tensor], info: RowInfo, share: HeadShare) -> Tensor:
        """inputs: one [tokens of the group, heads present, dim] each -> [tokens of the group, query heads, out_dim]."""
        if self.mesh.ring.size == 1:
            return self.core(inputs, info, share)
        return self.mode.attend(self.core, inputs, info, share, self.mesh.ring)

    def _exchanges(self, device: torch.device, info: RowInfo) -> GroupedExchange:
        """Return the exchanges of this row; layers of one shape share them."""
        tensors = self.core.tensors
        key = (Ulysses, tensors, self.core.out_dim, *self.heads.values(), len(self.groups), self.group.name, device)

        def make() -> GroupedExchange:
            order = token_order(info.plan, self._ranks(info.plan), device)
            inputs, outputs = [], []
            for group in self.groups:
                moved = {"query": group.query, "kv": group.new_kv}
                specs = tuple(SplitTensor(self.heads[t.heads], t.dim, moved[t.heads]) for t in tensors)
                out = SplitTensor(self.heads["query"], self.core.out_dim, group.query)
                inputs.append(HeadExchange(specs, order, self.group, "ulysses inputs"))
                outputs.append(HeadExchange((out,), order, self.group, "ulysses output"))
            shares = tuple(group.shares[self.group.index] for group in self.groups)
            return GroupedExchange(tensors, tuple(inputs), tuple(outputs), shares)

        return info.once(key, make)

    def _ranks(self, plan: ShardPlan) -> range:
        """The ranks of the plan that this rank trades with."""
        first = 0 if self.mode.is_flat else self.mesh.ring.index * plan.ulysses
        return range(first, first + self.group.size)

    def _check(self, tensors: list[Tensor], info: RowInfo) -> None:
        plan, mesh = info.plan, self.mesh
        self.core.check(info.mask)
        assert (plan.ring, plan.ulysses) == (mesh.ring.size, mesh.ulysses.size), "the plan is for another mesh"
        assert info.rank == mesh.cp.index, f"rank {info.rank} of the plan is not this rank, {mesh.cp.index}"
        for tensor, value in zip(self.core.tensors, tensors, strict=True):
            expected = (plan.lengths[info.rank], self.heads[tensor.heads], tensor.dim)
            assert value.shape == expected, f"{tensor.name} is {tuple(value.shape)}, expected {expected}"
        self.core.check_type(tensors[0].dtype, tensors[0].device)
        if len({value.dtype for value in tensors}) > 1:
            types = ", ".join(f"{t.name} {v.dtype}" for t, v in zip(self.core.tensors, tensors, strict=True))
            raise ValueError(f"tensors of different types cannot travel in one message: {types}; cast them to one type")


def token_order(plan: ShardPlan, ranks: range, device: torch.device) -> TokenOrder:
    """Derive how the tokens of some ranks of a plan lie on arrival and in the sequence."""
    positions = np.concatenate([plan.positions(rank) for rank in ranks])
    in_order = bool(np.all(positions[1:] > positions[:-1]))
    places = None if in_order else torch.from_numpy(np.argsort(np.argsort(positions))).to(device)
    return TokenOrder(tuple(plan.lengths[rank] for rank in ranks), places)
