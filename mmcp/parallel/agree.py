"""Agree on what only one rank can see, so that all ranks take the same turn."""

import torch
import torch.distributed as dist

MESSAGE_BYTES = 2048  # of a fault's message that the other ranks are told


class PeerError(ValueError):
    """A fault that another rank has seen; that rank raises its own error."""


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether `flag` is set on any rank of the group; every rank must ask.

    One all-reduce of one integer. Without torch.distributed the answer is `flag`.
    """
    if not dist.is_initialized():
        return flag
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks when any has an error: its own on the rank that has one, PeerError on the others.

    Costs one all-reduce of one integer while all is well. Use a group with a short timeout, so that a rank that died
    ends the wait. Every rank must call it.
    """
    if not any_rank(error is not None, group):
        return
    if dist.is_initialized():
        messages = _gather(str(error) or type(error).__name__ if error else "", group)
    if error is not None:
        raise error
    rank, message = next((rank, message) for rank, message in enumerate(messages) if message)
    raise PeerError(f"rank {rank}: {message}")


def _gather(message: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return each rank's message, cut to MESSAGE_BYTES; as bytes, since object collectives unpickle."""
    text = message.encode()[:MESSAGE_BYTES]
    mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in every]
