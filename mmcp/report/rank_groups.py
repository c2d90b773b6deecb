"""Ranks as bars and tiles: each for itself, or neighbours grouped so that a thousand still fit a screen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

MOST_BARS = 64
GROUPED = " A bar is the mean of several ranks, its whisker runs from the least to the most."
HATCH = {"size": 6, "solidity": 0.25, "fillmode": "overlay"}


@dataclass(frozen=True)
class RankGroups:
    """Ranks cut into at most MOST_BARS groups of neighbours."""

    edges: tuple[int, ...]
    """First rank of each group, then the number of ranks."""

    @staticmethod
    def of(ranks: int, most: int = MOST_BARS) -> "RankGroups":
        each = -(-ranks // most)
        return RankGroups((*range(0, ranks, each), ranks))

    @property
    def is_grouped(self) -> bool:
        return self.edges[1] - self.edges[0] > 1

    @property
    def labels(self) -> list[str]:
        return [str(low) if high - low == 1 else f"{low} to {high - 1}" for low, high in pairwise(self.edges)]

    @property
    def middles(self) -> list[float]:
        """Where each group stands on an axis of ranks."""
        return [(low + high - 1) / 2 for low, high in pairwise(self.edges)]

    @property
    def axis(self) -> dict:
        """The axis of ranks of a figure."""
        ranks = self.edges[-1]
        return {"tick0": 0, "dtick": max(1, -(-ranks // 8)), "range": [-0.6, ranks - 0.4], "title": {"text": "rank"}}

    def cut(self, values: Sequence[float]) -> list[np.ndarray]:
        """Cut one value per rank into those of each group."""
        return np.split(np.asarray(values, dtype=np.float64), self.edges[1:-1])

    def sums(self, matrix: np.ndarray) -> np.ndarray:
        """Add up a matrix [ranks, ranks] by group: [groups, groups]."""
        starts = list(self.edges[:-1])
        return np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)

    def bars(self, values: Sequence[float], *, name: str, color: str, pattern: str = "", **options: Any) -> go.Bar:
        """Draw one value per rank as bars; of several ranks the mean, with whiskers from the least to the most."""
        parts = self.cut(values)
        means = [float(part.mean()) for part in parts]
        least, most = [float(part.min()) for part in parts], [float(part.max()) for part in parts]
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": [high - mean for high, mean in zip(most, means, strict=True)],
            "arrayminus": [mean - low for low, mean in zip(least, means, strict=True)],
            "thickness": 1,
            "width": 2,
        }
        told = "<br>mean %{y:,.4s}, least %{customdata[0]:,.4s}, most %{customdata[1]:,.4s}"
        return go.Bar(
            x=self.middles,
            y=means,
            name=name,
            marker={"color": color, "line": {"width": 0}, "pattern": {"shape": pattern, **HATCH}},
            error_y=whiskers if self.is_grouped else None,
            customdata=list(zip(least, most, strict=True)),
            hovertext=self.labels,
            hovertemplate=f"{name}<br>rank %{{hovertext}}{told if self.is_grouped else '<br>%{y:,.4s}'}<extra></extra>",
            **options,
        )

    def cells(self, values: Sequence[float], write: Callable[[float], str]) -> list[str]:
        """Write the value of each group for a table: of several ranks least, mean and most."""
        if not self.is_grouped:
            return [write(value) for value in values]
        return [f"{write(part.min())} / {write(part.mean())} / {write(part.max())}" for part in self.cut(values)]
