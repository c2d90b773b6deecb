"""Bring the rows of all ranks of a group together, whatever their numbers, without a copy of them per receiver."""

from collections.abc import Sequence

from torch import Tensor

from mmcp.parallel.collectives import Group, start_swap


def gather_rows(rows: Tensor, lengths: Sequence[int], *, group: Group, name: str, backward: bool) -> Tensor:
    """Return the rows of every rank, joined in rank order; not differentiable.

    rows: [lengths[this rank], ...]   lengths: rows of each rank, which all ranks know
    returns [sum(lengths), ...]
    """
    assert len(rows) == lengths[group.index], f"{len(rows)} rows, expected {lengths[group.index]}"
    if group.size == 1:
        return rows
    rows = rows.contiguous()
    gathered = rows.new_empty((sum(lengths), *rows.shape[1:]))
    pieces = gathered.split(list(lengths))
    others = [rank for rank in range(group.size) if rank != group.index]
    flight = start_swap(
        [(rank, rows) for rank in others],
        [(rank, pieces[rank]) for rank in others],
        group=group,
        name=name,
        backward=backward,
    )
    pieces[group.index].copy_(rows)
    flight.wait()
    return gathered
