"""Trade shards of the sequence for shards of the heads, and back: one collective each way, uneven in both.

Rank r holds n_r tokens of every head; afterwards rank j holds every token of its own heads. Several tensors travel
in one message, row by row, so that what arrives is one [s, width] buffer whose columns are the tensors: views, no
copies. A head that several ranks want (a key-value head under grouped queries) is sent to each from where it lies;
on the way back what they return is summed.

Two ranks of 2 and 1 tokens; query heads 0 1 2 and one key-value head K; rank 0 takes 0 and K, rank 1 takes 1 2 and K:

    rank 0 holds  a0 a1 a2 aK    sends itself  a0 aK b0 bK   and rank 1  a1 a2 aK b1 b2 bK
                  b0 b1 b2 bK
    rank 1 holds  c0 c1 c2 cK    sends rank 0  c0 cK         and itself  c1 c2 cK

    rank 0 ends with  a0 aK      rank 1 ends with  a1 a2 aK
                      b0 bK                        b1 b2 bK
                      c0 cK                        c1 c2 cK
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmcp.parallel.collectives import Flight, Group, start_exchange


@dataclass(frozen=True)
class SplitTensor:
    """One tensor of a message, [s, heads, dim], and which of its heads each rank takes."""

    heads: int
    """Heads of the whole tensor."""
    dim: int
    """Size of one head."""
    ranges: tuple[tuple[int, int], ...]
    """Per rank: first and last + 1 head it takes; they may overlap or be empty."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Per rank: numbers it takes of each token."""
        return tuple((stop - start) * self.dim for start, stop in self.ranges)

    def runs(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Cut the heads where the ranks that take them change: (first, last + 1, ranks).

        ranges (0, 2), (1, 3) -> (0, 1, (0,)), (1, 2, (0, 1)), (2, 3, (1,))
        """
        cuts = sorted({0, self.heads}.union(*self.ranges))
        takers = [tuple(rank for rank, (a, b) in enumerate(self.ranges) if a <= start < b) for start in cuts[:-1]]
        assert all(takers), f"some of {self.heads} heads are on no rank: {self.ranges}"
        return list(zip(cuts[:-1], cuts[1:], takers, strict=True))


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """How the tokens that an exchange brings together lie: rank by rank on arrival, in sequence order afterwards.

    Zigzag, ranks holding tokens 0 1 6 7 and 2 3 4 5:   lengths (4, 4), places 0 1 6 7 2 3 4 5
    """

    lengths: tuple[int, ...]
    """Per rank of the group: its tokens."""
    places: Tensor | None
    """[s] int64, on the tensors' device: place in the sequence of each token on arrival; None when nothing moves."""


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """A set of tensors that travel together between the ranks of one group."""

    tensors: tuple[SplitTensor, ...]
    order: TokenOrder
    group: Group
    name: str
    """What the recorder books it under."""

    def seq_to_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Bring all tokens of this rank's heads here; differentiable.

        tensors: each [s/cp, heads, dim]  this rank's tokens, all heads
        returns  each [s, heads/cp, dim]  all tokens in sequence order; views of one buffer
        """
        return _SeqToHeads.apply(self, *tensors)

    def heads_to_seq(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Bring all heads of this rank's tokens here; differentiable.

        tensors: each [s, heads/cp, dim]  all tokens in sequence order
        returns  each [s/cp, heads, dim]  a head that several ranks hold is summed over them, in float32 or wider
        """
        return _HeadsToSeq.apply(self, *tensors)

    def scatter_heads(self, tensors: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
        """Do what seq_to_heads does, outside autograd."""
        received, flight = self.start_scatter(tensors, backward=backward)
        flight.wait()
        return self.finish_scatter(received)

    def start_scatter(self, tensors: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, Flight]:
        """Send this rank's tokens on their way; what arrives is for `finish_scatter`."""
        send = tensors[0].new_empty(sum(self._sizes_of_heads))
        for tensor, spec, pieces in zip(tensors, self.tensors, self._pieces(send), strict=True):
            for (start, stop), piece in zip(spec.ranges, pieces, strict=True):
                piece.copy_(tensor[:, start:stop])
        sizes = self._sizes_of_heads, self._sizes_of_tokens
        return start_exchange(send, *sizes, group=self.group, name=self.name, backward=backward)

    def finish_scatter(self, received: Tensor) -> tuple[Tensor, ...]:
        """View what has arrived as one [s, heads/cp, dim] for each tensor, in sequence order."""
        rows = received.view(sum(self.order.lengths), self._width)
        if self.order.places is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.order.places, rows)
        return self._columns(rows)

    def gather_heads(self, tensors: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
        """Do what heads_to_seq does, outside autograd."""
        received, flight = self.start_gather(tensors, backward=backward)
        flight.wait()
        return tuple(
            sum_heads(spec, pieces) for spec, pieces in zip(self.tensors, self.finish_gather(received), strict=True)
        )

    def start_gather(self, tensors: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, Flight]:
        """Send this rank's heads on their way; what arrives is for `finish_gather`."""
        sizes = self._sizes_of_tokens, self._sizes_of_heads
        send = self._rows(tensors).view(-1)
        return start_exchange(send, *sizes, group=self.group, name=self.name, backward=backward)

    def finish_gather(self, received: Tensor) -> list[list[Tensor]]:
        """View what has arrived: for each tensor one [s/cp, heads of that rank, dim] from each rank."""
        return self._pieces(received)

    @cached_property
    def _widths(self) -> list[int]:
        """Per rank: numbers it takes of each token, of all tensors together."""
        return [sum(widths) for widths in zip(*(spec.widths for spec in self.tensors), strict=True)]

    @property
    def _width(self) -> int:
        return self._widths[self.group.index]

    @property
    def _num_local(self) -> int:
        return self.order.lengths[self.group.index]

    @cached_property
    def _sizes_of_heads(self) -> list[int]:
        """Per rank: numbers of this rank's tokens for that rank's heads."""
        return [self._num_local * width for width in self._widths]

    @cached_property
    def _sizes_of_tokens(self) -> list[int]:
        """Per rank: numbers of that rank's tokens for this rank's heads."""
        return [length * self._width for length in self.order.lengths]

    def _pieces(self, flat: Tensor) -> list[list[Tensor]]:
        """View the pieces of a message: one [s/cp, heads of that rank, dim] for each tensor and each rank."""
        pieces: list[list[Tensor]] = [[] for _ in self.tensors]
        for rank, piece in enumerate(flat.split(self._sizes_of_heads)):
            columns = piece.view(self._num_local, self._widths[rank])
            columns = columns.split([spec.widths[rank] for spec in self.tensors], dim=1)
            for of_tensor, column, spec in zip(pieces, columns, self.tensors, strict=True):
                of_tensor.append(_as_heads(column, spec, rank))
        return pieces

    def _columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        """View [s, width] as one [s, heads/cp, dim] for each tensor."""
        columns = rows.split([spec.widths[self.group.index] for spec in self.tensors], dim=1)
        return tuple(
            _as_heads(column, spec, self.group.index) for column, spec in zip(columns, self.tensors, strict=True)
        )

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join tensors of [s, heads/cp, dim] in sequence order into a contiguous [s, width], rank by rank."""
        places = self.order.places
        if len(tensors) == 1:
            tensor = tensors[0] if places is None else tensors[0].index_select(0, places)
            return tensor.contiguous().view(len(tensor), self._width)
        rows = tensors[0].new_empty(sum(self.order.lengths), self._width)
        for tensor, column in zip(tensors, self._columns(rows), strict=True):
            if places is None:
                column.copy_(tensor)
            else:
                torch.index_select(tensor, 0, places, out=column)
        return rows


def sum_heads(spec: SplitTensor, pieces: Sequence[Tensor]) -> Tensor:
    """Put a tensor together from the heads that each rank took, summing those of several in float32 or wider.

    pieces: one [s/cp, heads, dim] for each of the spec's ranges
    returns [s/cp, spec.heads, dim]
    """
    whole = pieces[0].new_empty(len(pieces[0]), spec.heads, spec.dim)
    wide = torch.promote_types(whole.dtype, torch.float32)
    for start, stop, takers in spec.runs():
        parts = [pieces[i][:, start - spec.ranges[i][0] : stop - spec.ranges[i][0]] for i in takers]
        total = parts[0] if len(parts) == 1 else sum((part.to(wide) for part in parts[1:]), start=parts[0].to(wide))
        whole[:, start:stop] = total
    return whole


def _as_heads(column: Tensor, spec: SplitTensor, rank: int) -> Tensor:
    start, stop = spec.ranges[rank]
    return column.unflatten(1, (stop - start, spec.dim))


class _SeqToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trade, *tensors):
        ctx.trade = trade
        return trade.scatter_heads(tensors, backward=False)

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.trade.gather_heads(grads, backward=True)


class _HeadsToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trade, *tensors):
        ctx.trade = trade
        return trade.gather_heads(tensors, backward=False)

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.trade.scatter_heads(grads, backward=True)
