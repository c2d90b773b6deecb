"""Where one rank keeps the keys of one document while it grows: a fixed number of slots, used again behind a window.

Tokens count from 0 in their document. Rank `rank` of `ranks` holds some of the prompt's tokens and every `ranks`-th new
one. A prompt of 6 tokens on one rank, window 3, sink 1, five new tokens; keys in the slots after each, `.` unread:

    prompt 0 4 5    6: 0 4 5 6    7: 0 7 5 6    8: 0 7 8 6    9: 0 7 8 9    10: 0 10 8 9
"""

import numpy as np

from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges, as_indices


class KeySlots:
    """The slots of one document on one rank."""

    def __init__(self, held: np.ndarray, *, length: int, room: int, rank: int, ranks: int, window: int, sink: int):
        """held: [m] int64  tokens of the prompt that this rank holds   length: tokens of the prompt   room: new ones

        window, sink: as in `Mask.with_window`
        """
        self.window, self.sink = window, sink
        new = np.arange(length + rank, length + room, ranks)
        self.kept = held[self._is_readable(held, length)]
        self.positions = np.full(self._most(new), -1, dtype=np.int64)
        self.positions[: len(self.kept)] = self.kept

    def place(self, position: int) -> int:
        """Choose a slot for a new token: one that it cannot read itself."""
        slot = int(np.flatnonzero(~self.readable(position))[0])
        self.positions[slot] = position
        return slot

    def readable(self, position: int) -> np.ndarray:
        """[slots] bool: what the new token at `position`, the last one, reads."""
        return (self.positions >= 0) & self._is_readable(self.positions, position)

    def _is_readable(self, keys: np.ndarray, query: int) -> np.ndarray:
        if not self.window:
            return np.ones(len(keys), dtype=bool)
        return (query - keys < self.window) | (keys < self.sink)

    def _most(self, new: np.ndarray) -> int:
        """Count the slots for what is read at once when the tokens `new` have come, one after the other."""
        if not self.window:
            return len(self.kept) + len(new)
        tokens = np.concatenate([self.kept, new])

        def up_to(position: np.ndarray) -> np.ndarray:
            return np.searchsorted(tokens, position, side="right")

        far = new - self.window
        read = up_to(new) - up_to(far) + up_to(np.minimum(self.sink - 1, far))
        return max(len(self.kept), int(read.max(initial=0)))


def document_slots(mask: Mask, tokens: Ranges, *, room: int, rank: int, ranks: int) -> list[KeySlots]:
    """Make the slots of every document of a row on one rank.

    mask: of the prompts, narrowed to what a layer lets a query read   tokens: of the row that the rank holds
    """
    positions = as_indices(tokens)
    slots = []
    for start, stop in zip(mask.bounds[:-1].tolist(), mask.bounds[1:].tolist(), strict=True):
        held = positions[(positions >= start) & (positions < stop)] - start
        slots.append(
            KeySlots(held, length=stop - start, room=room, rank=rank, ranks=ranks, window=mask.window, sink=mask.sink)
        )
    return slots
