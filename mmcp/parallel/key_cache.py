"""Keys and values of a growing row, each on the rank that holds its token: memory falls with the ranks.

After the prompt every rank keeps the keys and values of its own tokens, all heads, whatever mode the layer attended in;
new token n of each document goes to rank n mod ranks. A new token asks all ranks at once: each attends to the keys it
keeps, and the answers are merged by log-sum-exp, as in flash decoding (Dao et al. 2023) over ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmcp.attention.base import RowInfo, SoftmaxAttention
from mmcp.attention.key_slots import KeySlots, document_slots
from mmcp.parallel.collectives import Group, all_gather
from mmcp.parallel.new_tokens import NewTokens


@dataclass(frozen=True, eq=False)
class RowSlots:
    """Slots of all documents of a row on one rank, shared by the layers of one window."""

    documents: tuple[KeySlots, ...]
    starts: tuple[int, ...]
    """First slot of each document in the layer's tensor, then the number of slots."""

    @staticmethod
    def of(core: SoftmaxAttention, info: RowInfo, *, room: int, group: Group) -> "RowSlots":
        """Plan where this rank keeps keys, for documents that grow by `room` tokens at most."""
        mask = core.visible(info.mask)

        def make() -> RowSlots:
            tokens = info.plan.tokens[info.rank]
            documents = document_slots(mask, tokens, room=room, rank=group.index, ranks=group.size)
            starts = [0]
            for slots in documents:
                starts.append(starts[-1] + len(slots.positions))
            return RowSlots(tuple(documents), tuple(starts))

        return info.once((RowSlots, mask.window, mask.sink, room), make)

    def place(self, new: NewTokens) -> list[int]:
        """Choose a slot of the layer's tensor for each new token."""
        return [
            self.starts[document] + self.documents[document].place(position)
            for document, position in zip(new.documents, new.places, strict=True)
        ]

    def readable(self, new: NewTokens, device: torch.device) -> list[tuple[int, int, Tensor | None]]:
        """Tell for each new token: first and last + 1 slot that it may read, and which of these it reads."""
        spans: list[tuple[int, int, Tensor | None]] = []
        for document, position in zip(new.documents, new.places, strict=True):
            readable = self.documents[document].readable(position)
            found, start = readable.nonzero()[0], self.starts[document]
            if not len(found):
                spans.append((start, start, None))
                continue
            first, last = int(found[0]), int(found[-1]) + 1
            gaps = None if len(found) == last - first else torch.from_numpy(readable[first:last]).to(device)
            spans.append((start + first, start + last, gaps))
        return spans


class KeyCache:
    """What one rank keeps of one softmax layer."""

    def __init__(self, core: SoftmaxAttention, inputs: dict[str, Tensor], info: RowInfo, *, room: int, group: Group):
        """Keep the keys and values of the prompt: inputs k, v [s/cp, k, d], this rank's tokens."""
        self.core, self.group = core, group
        self.slots = RowSlots.of(core, info, room=room, group=group)
        k, v = inputs["k"], inputs["v"]
        self.keys, self.values = (x.new_empty(x.shape[1], self.slots.starts[-1], x.shape[2]) for x in (k, v))
        bounds, local = info.mask.bounds, info.plan.positions(info.rank)
        for document, slots in enumerate(self.slots.documents):
            rows = torch.from_numpy(local.searchsorted(slots.kept + bounds[document])).to(k.device)
            start = self.slots.starts[document]
            for kept, x in ((self.keys, k), (self.values, v)):
                kept[:, start : start + len(rows)] = x[rows].transpose(0, 1)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps."""
        return self.keys.nbytes + self.values.nbytes

    def decode(self, inputs: dict[str, Tensor], new: NewTokens) -> Tensor:
        """Attend from new tokens, the same on all ranks: q [n, h, d], k, v [n, k, d] -> [n, h, d]."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        key = self.slots.documents  # equal for all layers of one window
        if new.number % self.group.size == self.group.index and len(q):
            slots = new.once(("slots", key), lambda: torch.tensor(self.slots.place(new), device=q.device))
            self.keys[:, slots], self.values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)
        spans = new.once(("readable", key), lambda: self.slots.readable(new, q.device))
        parts = [
            self.core.decode(q[i], self.keys[:, start:stop], self.values[:, start:stop], gaps)
            for i, (start, stop, gaps) in enumerate(spans)
        ]
        if not parts:
            return q
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return _merged(outs, lses, self.group).to(q.dtype)


def _merged(out: Tensor, lse: Tensor, group: Group) -> Tensor:
    """Merge the answers of all ranks: out [n, h, d], lse [n, h] -> [n, h, d]; the same bits on every rank."""
    gathered = all_gather(torch.cat([out, lse[..., None]], dim=-1), group=group, name="decode keys")
    outs, lses = gathered[..., :-1], gathered[..., -1:]
    return (outs * torch.softmax(lses, dim=0)).sum(0)
