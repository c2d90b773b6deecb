"""Ulysses: any attention variant over a sequence that is cut over ranks, by trading tokens for heads around it.

Every rank attends with all tokens and a share of the heads, so the variant never knows that it is parallel, and its
work is balanced whatever the planner did with the tokens. Jacobs et al., https://arxiv.org/abs/2309.14509
"""

import numpy as np
import torch
from torch import Tensor, nn

from mmcp.attention.base import Attention, RowInfo, split_heads
from mmcp.parallel.head_exchange import HeadExchange, SplitTensor, TokenOrder
from mmcp.parallel.mesh import Mesh
from mmcp.sharding.plan import ShardPlan


class Ulysses(nn.Module):
    """Give `core` whole sequences of some heads where the caller has some tokens of all heads.

    Two collectives in forward (all inputs in one, the output in the other) and two in backward. Lengths and order come
    from the plan; nothing about them is exchanged. Raises ValueError when some rank would get no head.
    """

    def __init__(self, core: Attention, mesh: Mesh, *, num_heads: int, num_kv_heads: int):
        super().__init__()
        if mesh.ring.size > 1:
            raise ValueError(f"ring={mesh.ring.size} ranks, but attention runs over the Ulysses axis only; use ring=1")
        self.core = core
        self.mesh = mesh
        self.shares = split_heads(num_heads, num_kv_heads, mesh.ulysses.size)
        query = tuple((share.query_heads[0], share.query_heads[-1] + 1) for share in self.shares)
        kv = tuple((share.kv_heads[0], share.kv_heads[-1] + 1) for share in self.shares)
        self.inputs = tuple(
            SplitTensor(num_heads, tensor.dim, query)
            if tensor.heads == "query"
            else SplitTensor(num_kv_heads, tensor.dim, kv)
            for tensor in core.tensors
        )
        self.output = (SplitTensor(num_heads, core.out_dim, query),)

    def forward(self, inputs: dict[str, Tensor], info: RowInfo) -> Tensor:
        """Attend over the whole row.

        inputs: one [s/cp, heads, dim] for each of the core's tensors, this rank's tokens in sequence order
        returns [s/cp, h, out_dim]
        Raises ValueError when the inputs are of different types.
        """
        tensors = [inputs[tensor.name] for tensor in self.core.tensors]
        self._check(tensors, info)
        share = self.shares[self.mesh.ulysses.index]
        if self.mesh.ulysses.size == 1:
            return self.core(inputs, info, share)
        whole = self._exchange(self.inputs, "ulysses inputs", tensors[0].device, info).seq_to_heads(tensors)
        named = {tensor.name: value for tensor, value in zip(self.core.tensors, whole, strict=True)}
        out = self.core(named, info, share)  # [s, h/cp, out_dim]
        (local,) = self._exchange(self.output, "ulysses output", out.device, info).heads_to_seq((out,))
        return local

    def _exchange(
        self, tensors: tuple[SplitTensor, ...], name: str, device: torch.device, info: RowInfo
    ) -> HeadExchange:
        """Return the exchange of `tensors` for this row; layers of one shape share it."""
        key = (Ulysses, tensors, name, device)
        if key not in info.memo:
            order_key = (Ulysses, device)
            if order_key not in info.memo:
                info.memo[order_key] = token_order(info.plan, self.mesh.ring.index, device)
            info.memo[key] = HeadExchange(tensors, info.memo[order_key], self.mesh.ulysses, name)
        return info.memo[key]

    def _check(self, tensors: list[Tensor], info: RowInfo) -> None:
        plan, mesh = info.plan, self.mesh
        assert (plan.ring, plan.ulysses) == (mesh.ring.size, mesh.ulysses.size), "the plan is for another mesh"
        assert info.rank == mesh.cp.index, f"rank {info.rank} of the plan is not this rank, {mesh.cp.index}"
        for tensor, spec, value in zip(self.core.tensors, self.inputs, tensors, strict=True):
            expected = (plan.lengths[info.rank], spec.heads, spec.dim)
            assert value.shape == expected, f"{tensor.name} is {tuple(value.shape)}, expected {expected}"
        if len({value.dtype for value in tensors}) > 1:
            types = ", ".join(f"{t.name} {v.dtype}" for t, v in zip(self.core.tensors, tensors, strict=True))
            raise ValueError(f"tensors of different types cannot travel in one message: {types}; cast them to one type")


def token_order(plan: ShardPlan, ring_index: int, device: torch.device) -> TokenOrder:
    """Derive how the tokens of one Ulysses group lie on arrival and in the sequence."""
    ranks = range(ring_index * plan.ulysses, (ring_index + 1) * plan.ulysses)
    positions = np.concatenate([plan.positions(rank) for rank in ranks])
    in_order = bool(np.all(positions[1:] > positions[:-1]))
    places = None if in_order else torch.from_numpy(np.argsort(np.argsort(positions))).to(device)
    return TokenOrder(tuple(plan.lengths[rank] for rank in ranks), places)
