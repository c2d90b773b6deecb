"""Every exchange of data between ranks that the library itself makes, and the recorder that counts them.

A group of one rank never communicates. What FSDP2 and distributed checkpoints send is theirs and not counted.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
STATUS_BYTES = 1024  # of a rank's status in `agree`; longer messages are cut
AGREE_TIMEOUT = timedelta(seconds=60)


@dataclass
class Traffic:
    """What one kind of exchange cost this rank."""

    collectives: int = 0
    bytes: int = 0
    """Received from other ranks."""


@dataclass
class Recorder:
    """Counts the exchanges of one rank by (name, phase); phase is forward, backward or recompute.

    Recomputed exchanges are those of a forward run again inside a backward, under activation checkpointing.
    """

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    def add(self, name: str, phase: str, received: int) -> None:
        """Count one collective that brought `received` bytes from other ranks."""
        entry = self.traffic.setdefault((name, phase), Traffic())
        entry.collectives += 1
        entry.bytes += received

    def total(self, *, name: str | None = None, phase: str | None = None) -> Traffic:
        """Sum over all entries, or those of one name, one phase, or both."""
        chosen = [t for (n, p), t in self.traffic.items() if name in (None, n) and phase in (None, p)]
        return Traffic(sum(t.collectives for t in chosen), sum(t.bytes for t in chosen))


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks an exchange is between."""

    name: str = "alone"
    """What it is for: an axis of the mesh, or axes joined."""
    ranks: tuple[int, ...] = (0,)
    """Their numbers in the whole run, in the order of the axes."""
    index: int = 0
    """This rank's place among them."""
    handle: dist.ProcessGroup | None = None
    """What torch.distributed knows it by; a single rank may do without."""
    recorders: list[Recorder] = field(default_factory=list)
    """Who counts its exchanges; all groups of a mesh share one list."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class PeerError(RuntimeError):
    """A fault of another rank, of which this one only tells; that rank raises its own error, or is gone."""


@contextmanager
def record(group: Group) -> Iterator[Recorder]:
    """Count what this rank exchanges inside the `with` block, in `group` and the other groups of its mesh."""
    recorder = Recorder()
    group.recorders.append(recorder)
    try:
        yield recorder
    finally:
        group.recorders.remove(recorder)


def exchange(
    send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, group: Group, name: str, backward: bool
) -> Tensor:
    """Send consecutive pieces of `send` to the ranks of `group`, return the pieces received, joined in rank order.

    send: [sum(send_sizes), ...]  contiguous; piece j goes to rank j
    returns [sum(receive_sizes), ...]  not differentiable; `send` itself when the group is one rank
    name, backward: what the recorder books it under

    Rank 0 holds a0 a1, rank 1 holds b1 b1 (one item for each digit's rank):
        rank 0: send_sizes (1, 1), receive_sizes (1, 0) -> a0
        rank 1: send_sizes (0, 2), receive_sizes (1, 2) -> a1 b1 b1
    """
    received, flight = start_exchange(send, send_sizes, receive_sizes, group=group, name=name, backward=backward)
    flight.wait()
    return received


@dataclass(frozen=True, eq=False)
class Flight:
    """Data on its way; nothing that arrives may be read, and nothing that left be changed, before `wait`."""

    works: tuple[dist.Work, ...] = ()
    held: tuple[Tensor, ...] = ()
    """What must live until then."""

    def wait(self) -> None:
        """Return when everything has left and arrived."""
        for work in self.works:
            work.wait()


def start_exchange(
    send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, group: Group, name: str, backward: bool
) -> tuple[Tensor, Flight]:
    """Do what `exchange` does, without waiting for it."""
    assert len(send) == sum(send_sizes), f"{len(send)} items to send, but pieces of {list(send_sizes)}"
    assert len(send_sizes) == len(receive_sizes) == group.size, "one piece for each rank of the group"
    if group.size == 1:
        return send, Flight()
    received = send.new_empty((sum(receive_sizes), *send.shape[1:]))
    from_others = sum(receive_sizes) - receive_sizes[group.index]
    book(group, name, backward, from_others * send.shape[1:].numel() * send.element_size())
    work = dist.all_to_all_single(
        received, send, list(receive_sizes), list(send_sizes), group=group.handle, async_op=True
    )
    assert work is not None, "an exchange that is not waited for has something to wait for"
    return received, Flight((work,), (send, received))


def start_swap(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    *,
    group: Group,
    name: str,
    backward: bool,
) -> Flight:
    """Send tensors to some ranks of `group` and receive others in place, point to point, without waiting.

    sent, received: (index in the group, contiguous tensor); empty tensors are left out, which both sides must know.
    What one rank sends another arrives in the order of the calls. Booked as one collective when anything moves.
    """
    ops = [
        dist.P2POp(kind, tensor, group.ranks[index], group.handle)
        for kind, moves in ((dist.isend, sent), (dist.irecv, received))
        for index, tensor in moves
        if tensor.numel()
    ]
    if not ops:
        return Flight()
    book(group, name, backward, sum(tensor.nbytes for _, tensor in received))
    tensors = tuple(tensor for _, tensor in (*sent, *received))
    return Flight(tuple(dist.batch_isend_irecv(ops)), tensors)


def exchange_rows(
    rows: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, group: Group, name: str
) -> Tensor:
    """Do what `exchange` does, differentiably: gradients travel back by one exchange.

    rows: [sum(send_sizes), ...] -> [sum(receive_sizes), ...]

    Every rank of the group must agree on whether `rows` requires a gradient, else the backward waits for ever.
    """
    if group.size == 1:
        return rows
    return _ExchangeRows.apply(rows, tuple(send_sizes), tuple(receive_sizes), group, name)


def all_reduce(values: Tensor, op: str, *, group: Group, name: str) -> Tensor:
    """Return the sum or the maximum of `values` over the ranks of `group`; not differentiable.

    values: [...]  of one shape on all ranks, meant to be small; booked as (ranks - 1) times its bytes
    op: `sum` or `max`
    """
    result = values.detach().clone()
    if group.size > 1:
        book(group, name, False, (group.size - 1) * result.nbytes)
        dist.all_reduce(result, REDUCTIONS[op], group=group.handle)
    return result


def all_gather(values: Tensor, *, group: Group, name: str, timeout: timedelta | None = None) -> Tensor:
    """Return the `values` of all ranks of `group`, stacked in rank order; not differentiable.

    values: [...]  of one shape on all ranks -> [ranks, ...]
    timeout: how long to wait (the group's own if None). Raises PeerError when a rank does not answer in time.
    """
    if group.size == 1:
        return values.detach().unsqueeze(0)
    gathered = [torch.empty_like(values) for _ in group.ranks]
    book(group, name, False, (group.size - 1) * values.nbytes)
    work = dist.all_gather(gathered, values.detach().contiguous(), group=group.handle, async_op=True)
    try:
        work.wait(timeout) if timeout else work.wait()
    except RuntimeError as error:
        raise PeerError(f"'{name}': a rank of {group.ranks} has died or gave no answer in time ({error})") from error
    return torch.stack(gathered)


def all_gather_json(value: Any, *, group: Group, name: str) -> list[Any]:
    """Return the JSON-like `value` of every rank of `group`, in rank order. Two exchanges; nothing is pickled."""
    data = torch.frombuffer(bytearray(json.dumps(value, allow_nan=False), "utf-8"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor(len(data)), group=group, name=name).tolist()
    padded = torch.cat([data, data.new_zeros(max(sizes) - len(data))])
    texts = all_gather(padded, group=group, name=name).numpy()
    return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]


def agree(error: Exception | None, *, group: Group, timeout: timedelta | None = AGREE_TIMEOUT) -> None:
    """Raise on all ranks of `group` if any of them brings an error; every rank must call it.

    A rank that brings an error raises that one; the others raise PeerError, which names every failing rank with its
    error's type and text. One exchange of STATUS_BYTES per rank.

    timeout: how long to wait for the slowest rank; None: as long as the group does, where ranks work at a disk's pace
    """
    text = f"{type(error).__name__}: {error}".encode()[: STATUS_BYTES - 1] if error else b""
    status = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
    status[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    statuses = all_gather(status, group=group, name="agree", timeout=timeout)
    if error is not None:
        raise error
    failures = [
        f"rank {rank}: {bytes(row).rstrip(bytes(1)).decode(errors='replace')}"
        for rank, row in zip(group.ranks, statuses.tolist(), strict=True)
        if row[0]
    ]
    if failures:
        raise PeerError("; ".join(failures))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send_sizes, receive_sizes, group, name):
        ctx.sizes, ctx.group, ctx.name = (send_sizes, receive_sizes), group, name
        return exchange(rows.contiguous(), send_sizes, receive_sizes, group=group, name=name, backward=False)

    @staticmethod
    def backward(ctx, grad):
        send_sizes, receive_sizes = ctx.sizes
        grad = exchange(grad.contiguous(), receive_sizes, send_sizes, group=ctx.group, name=ctx.name, backward=True)
        return grad, None, None, None, None


def book(group: Group, name: str, backward: bool, received: int) -> None:
    """Count one collective of `group` that brings `received` bytes from other ranks."""
    if not group.recorders:
        return
    recomputing = not backward and torch._C._current_graph_task_id() != -1
    phase = "backward" if backward else "recompute" if recomputing else "forward"
    for recorder in group.recorders:
        recorder.add(name, phase, received)
