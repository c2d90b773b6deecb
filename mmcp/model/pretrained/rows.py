"""What a checkpoint folder holds, in our terms: a decoder's shape, and where the rows of each of its parameters lie."""

from dataclasses import dataclass

from mmcp.model.backbone import BackboneConfig
from mmcp.sharding.ranges import Ranges


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A text model: embedding, backbone, head."""

    backbone: BackboneConfig
    vocabulary: int
    """Rows of the embedding and of the head."""
    tied_head: bool
    """Whether the head's weights are the embedding's."""


@dataclass(frozen=True)
class Rows:
    """The rows of a checkpoint's tensor that make one of our parameters, in order.

    A parameter of more dimensions than the tensor, or fewer, holds the same numbers in the same order: a filter
    [heads, d, W] is heads * d rows of [heads * d, 1, W].
    """

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape."""
    runs: Ranges
    """Half-open ranges of its first dimension; they need not ascend."""

    @staticmethod
    def whole(name: str, *shape: int) -> "Rows":
        """Take every row."""
        return Rows(name, shape, ((0, shape[0]),))

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def cut(self, start: int, stop: int) -> Ranges:
        """Return the ranges of the tensor's rows that are rows start .. stop of the parameter.

        runs (4, 8), (12, 16), cut(2, 6):  (6, 8), (12, 14)
        """
        found, before = [], 0
        for first, last in self.runs:
            lo, hi = max(start - before, 0), min(stop - before, last - first)
            if lo < hi:
                found.append((first + lo, first + hi))
            before += last - first
        return tuple(found)


def strided(first: int, length: int, *, every: int, count: int) -> Ranges:
    """Return `count` ranges of `length` rows, the first at `first`, one every `every` rows."""
    return tuple((first + i * every, first + i * every + length) for i in range(count))
