"""Between two tokens of `generate`, ranks tell each other whether they go on: user code runs there, on each rank."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from mmcp.parallel.collectives import Group, agree, all_gather


class Turn(IntEnum):
    """What a rank is about to do."""

    READ = 0
    """Read tokens, the same as all others."""
    END = 1
    """Return from `generate`."""
    RAISE = 2
    """Raise an error."""


class Turns:
    """The exchanges of one rank during `generate`."""

    def __init__(self, group: Group):
        self.group = group
        self.is_open = True
        """Whether this rank may still tell of an error: it is neither inside a forward nor has an error been agreed."""

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[None]:
        """Agree that all ranks read `ids` next; inside, an error can no longer be told to the others."""
        self.meet(Turn.READ, ids)
        self.is_open = False
        yield
        self.is_open = True

    def meet(self, turn: Turn, ids: Tensor, *, error: Exception | None = None) -> None:
        """Exchange what each rank does next; every rank must call it as often as the others.

        ids: what it reads next   error: what it raises
        Raises on all ranks when one raises, or when they do not do the same.
        """
        if self.group.size == 1:
            return
        self.is_open = False
        digest = hashlib.sha256(ids.cpu().numpy().tobytes()).digest()[:7]
        word = torch.tensor([int(turn), int.from_bytes(digest, "big")], device=ids.device)
        words = all_gather(word, group=self.group, name="turn")
        turns = words[:, 0].tolist()
        if Turn.RAISE in turns:
            agree(error, group=self.group)
        if len(set(turns)) > 1:
            ended = [rank for rank, other in zip(self.group.ranks, turns, strict=True) if other == Turn.END]
            raise ValueError(
                f"ranks {ended} of {list(self.group.ranks)} have ended their generation, the others go on; give all "
                "ranks the same stopping criteria, or criteria that look at the ids alone"
            )
        if turn == Turn.READ and not bool((words == words[0]).all()):
            raise ValueError(
                f"ranks {list(self.group.ranks)} share a batch but chose or were given different ids; give all ranks "
                "the same batch, options and logits processors"
            )
        self.is_open = True
