"""States of recurrent layers after the prompt, shared out evenly by heads; some ranks get none where heads are few.

Each rank tells what its own tokens do to the state of all heads, one map for each piece of a document that it holds.
One exchange brings every rank the maps of its heads, which it composes in the order of the sequence. That is the same
for all modes of a layer. What a short convolution reads of the last tokens is kept beside the state.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mmcp.attention.base import HeadShare, RecurrentAttention, RowInfo, carry
from mmcp.parallel.collectives import Group, all_gather, all_reduce, exchange
from mmcp.parallel.halo import halo_of
from mmcp.parallel.new_tokens import NewTokens
from mmcp.sharding.ranges import Ranges, even_bounds, union


class StateCache:
    """What one rank keeps of one recurrent layer."""

    def __init__(
        self, core: RecurrentAttention, inputs: dict[str, Tensor], info: RowInfo, *, heads: HeadShare, group: Group
    ):
        """Keep the states after the prompt.

        inputs: one [s/cp, heads, dim] per tensor of the core, this rank's tokens   heads: all of the layer
        """
        self.core, self.group = core, group
        bounds = even_bounds(len(heads.query_heads), group.size)
        self.shares = [_share(heads, low, high) for low, high in pairwise(bounds)]
        self.heads = self.shares[group.index]
        pieces = [_pieces(info, rank) for rank in range(group.size)]
        self.states = self._composed(self._maps(inputs, info, heads, pieces[group.index]), info, pieces)
        self.halo = self._own(_last_tokens(core, inputs, info, group))

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps."""
        return self.states.nbytes + sum(x.nbytes for x in self.halo.values())

    def decode(self, inputs: dict[str, Tensor], new: NewTokens) -> Tensor:
        """Read new tokens, the same on all ranks: one [n, heads, dim] per tensor -> [n, h, out_dim]."""
        documents, own = list(new.documents), self._own(inputs)
        most = max(len(share.query_heads) for share in self.shares)
        first = inputs[self.core.tensors[0].name]
        out = first.new_zeros(len(documents), most, self.core.out_dim)
        if documents and self.heads.query_heads:
            halo = {name: x[documents] for name, x in self.halo.items()}
            answer, self.states[documents] = self.core.decode(own, halo, self.states[documents], self.heads)
            out[:, : answer.shape[1]] = answer
            for name, x in self.halo.items():
                x[documents] = torch.cat([halo[name], own[name][:, None]], dim=1)[:, 1:]
        gathered = all_gather(out, group=self.group, name="decode states") if documents else [out] * self.group.size
        parts = [part[:, : len(share.query_heads)] for part, share in zip(gathered, self.shares, strict=True)]
        return torch.cat(parts, dim=1)

    def _maps(self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, pieces: Ranges) -> list[Tensor]:
        """Return what each piece of this rank does to the state: transition and state, [pieces, h, numbers] each."""
        device, length = self._device(inputs), max(tensor.halo for tensor in self.core.tensors)
        flat = replace(info.plan, ring=info.plan.ranks, ulysses=1)
        halo = info.once((StateCache, length), lambda: halo_of(flat, info.mask, self.group.index, length, device))
        brought = halo.bring(inputs, self.core.tensors, self.group)
        ready = self.core.prepare(inputs, info, heads, flat.group_tokens[self.group.index], brought)
        transition, state = self.core.summarise(ready, info, heads, pieces)
        return [transition.flatten(2) if transition.ndim > 2 else transition[..., None], state.flatten(2)]

    def _composed(self, maps: list[Tensor], info: RowInfo, pieces: list[Ranges]) -> Tensor:
        """Bring the maps of this rank's heads here and compose them: states after the documents, [n, h, d_k, d_v]."""
        joined = torch.cat(maps, dim=-1).transpose(0, 1).contiguous()  # [h, pieces, numbers]
        numbers, counts = joined.shape[-1], [len(ranges) for ranges in pieces]
        num_heads = len(self.heads.query_heads)
        sizes = [len(share.query_heads) * joined.shape[1] * numbers for share in self.shares]
        arriving = [num_heads * count * numbers for count in counts]
        flat = exchange(joined.flatten(), sizes, arriving, group=self.group, name="prompt states", backward=False)
        arrived = [
            part.view(num_heads, count, numbers).transpose(0, 1)
            for part, count in zip(flat.split(arriving), counts, strict=True)
        ]
        listed = sorted((piece, rank, i) for rank, ranges in enumerate(pieces) for i, piece in enumerate(ranges))
        mask, (d_k, d_v) = info.mask, self.core.state_dim
        state = joined.new_zeros(num_heads, d_k, d_v)
        after = state.new_zeros(len(mask.bounds) - 1, *state.shape)
        for (start, _), rank, i in listed:
            transition, added = arrived[rank][i].split([numbers - d_k * d_v, d_k * d_v], dim=-1)
            transition = transition.reshape(num_heads, *self.core.transition_dim)
            state = carry(transition, state) + added.reshape(num_heads, d_k, d_v)
            after[mask.documents[start]] = state
        return after

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep this rank's heads of tensors of the core, [..., heads, dim] each."""
        heads = {"query": self.heads.query_heads, "kv": self.heads.kv_heads}
        return {spec.name: tensors[spec.name][..., list(heads[spec.heads]), :] for spec in self.core.tensors}

    def _device(self, inputs: dict[str, Tensor]) -> torch.device:
        return inputs[self.core.tensors[0].name].device


def _share(heads: HeadShare, low: int, high: int) -> HeadShare:
    """Keep query heads low .. high - 1, maybe none, and the key-value heads they read."""
    kv = heads.kv_of_query[low:high]
    present = tuple(range(kv[0], kv[-1] + 1)) if kv else ()
    return HeadShare(tuple(range(low, high)), present, tuple(head - present[0] for head in kv))


def _pieces(info: RowInfo, rank: int) -> Ranges:
    """Cut the runs of tokens of a rank where documents begin."""
    borders = info.mask.bounds.tolist()
    pieces = []
    for start, stop in union([info.plan.tokens[rank]]):
        cuts = [start, *(border for border in borders if start < border < stop), stop]
        pieces += list(pairwise(cuts))
    return tuple(pieces)


def _last_tokens(core: RecurrentAttention, inputs: dict[str, Tensor], info: RowInfo, group: Group) -> dict[str, Tensor]:
    """Bring the last tokens of each document to every rank: [n, halo, heads, dim] per tensor, 0 before the document."""
    bounds, held, last = info.mask.bounds, info.plan.positions(info.rank), {}
    for spec in core.tensors:
        x = inputs[spec.name]
        rows = x.new_zeros(len(bounds) - 1, spec.halo, *x.shape[1:])
        if spec.halo:
            wanted = bounds[1:, None] - spec.halo + np.arange(spec.halo)
            mine = np.isin(wanted, held) & (wanted >= bounds[:-1, None])
            local = torch.from_numpy(held.searchsorted(wanted[mine])).to(x.device)
            rows[torch.from_numpy(mine).to(x.device)] = x[local]
            rows = all_reduce(rows, "sum", group=group, name="prompt ends")
        last[spec.name] = rows
    return last
