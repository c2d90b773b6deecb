"""Several data sets as one: samples numbered through, drawn in the proportion of their weights."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pydantic import PositiveFloat

from data_pipelines.examine import Media
from data_pipelines.manifest import Sample
from data_pipelines.sampler import Order
from data_pipelines.shards import ShardSet
from mmcp.config import config


@config
class DataSource:
    """One data set of a mixture."""

    path: str
    """A folder of `mmcp prepare`, a file, or a pattern such as shard-{000..009}.tar."""
    weight: PositiveFloat = 1.0
    """Share of the samples drawn from it, against the sum of all weights; it is gone through in epochs of its own."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The samples of some data sets, numbered through in the order of the sets."""

    sets: tuple[ShardSet, ...]
    weights: tuple[float, ...]

    @classmethod
    def open(cls, sources: Sequence[DataSource], *, strict: bool = False) -> "Mixture":
        """Index all shards. Raises ValueError for what `ShardSet.open` refuses, and for a shard in two sources."""
        if not sources:
            raise ValueError("the list of data sets is empty; name at least one")
        sets = tuple(ShardSet.open(source.path, strict=strict) for source in sources)
        seen: dict[str, str] = {}
        for source, shards in zip(sources, sets, strict=True):
            for shard in shards.shards:
                other = seen.setdefault(os.path.realpath(shard), source.path)
                if other != source.path:
                    raise ValueError(f"shard {shard} is in '{other}' and in '{source.path}'; list the data once")
        if len({source.path for source in sources}) < len(sources):
            raise ValueError(f"{[source.path for source in sources]} names a data set twice; list the data once")
        return cls(sets, tuple(source.weight for source in sources))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each set."""
        return tuple(map(len, self.sets))

    @property
    def problems(self) -> list[str]:
        """What could not be used, one line each."""
        return [problem for shards in self.sets for problem in shards.problems]

    def __len__(self) -> int:
        return sum(self.sizes)

    def summary(self) -> str:
        """What was found, in one line."""
        return "; ".join(
            shards.summary() + (f", weight {weight:g}" if len(self.sets) > 1 else "")
            for shards, weight in zip(self.sets, self.weights, strict=True)
        )

    def load(self, number: int) -> tuple[Sample, dict[str, Media]]:
        """Sample `number`, and what is known of its media. Raises ValueError."""
        ends = list(accumulate(self.sizes))
        source = bisect_right(ends, number)
        return self.sets[source].load(number - (ends[source - 1] if source else 0))

    def order(self, seed: int) -> Order:
        """Return the order in which they are drawn."""
        return Order(seed, self.sizes, self.weights)
