"""How rotary frequencies are stretched so that a model reads further than it was trained: a registry of rules.

theta^(-2i/d) is the frequency i of d/2; n positions were trained, `factor` says how many times more shall be read.

    default   as they are
    linear    all divided by factor (Chen et al. 2023, arXiv 2306.15595)
    dynamic   theta grows with the document's length L > n: theta * (factor L / n - factor + 1)^(d / (d-2))
    llama3    long waves divided by factor, short ones kept, those between blended (Llama 3.1, arXiv 2407.21783)
    yarn      the same with a linear ramp over i, and cos and sin enlarged (Peng et al. 2023, arXiv 2309.00071)

`dynamic` follows each document's own length, whatever it is packed with and whatever was read before.
"""

import math
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from mmcp.config import config
from mmcp.registry import Registry

ROPE_SCALINGS = Registry("rope scaling")
Factor = Annotated[float, Field(ge=1)]
Positions = Annotated[int, Field(ge=1)]


class RopeScaling(Protocol):
    """A rule that turns the base of the frequencies into frequencies."""

    @property
    def name(self) -> str: ...

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the length of a token's document."""

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return radians per position, float64.

        dim: numbers of a head that turn, two for each frequency
        lengths: [n] int64  tokens of each token's document; looked at only where `by_length`
        returns [dim/2], or [n, dim/2] where `by_length`
        """


class _Fixed:
    """A rule that looks at no length and leaves the size of cos and sin."""

    @property
    def by_length(self) -> bool:
        return False

    @property
    def amplitude(self) -> float:
        return 1.0


@ROPE_SCALINGS.register("default")
@config
class Unscaled(_Fixed):
    """Frequencies as they were trained."""

    name: Literal["default"] = "default"

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return [dim/2]: theta^(-2i/dim)."""
        return theta ** -exponents(dim, lengths.device)


@ROPE_SCALINGS.register("linear")
@config
class Linear(_Fixed):
    """All frequencies divided by one number."""

    name: Literal["linear"] = "linear"
    factor: Factor

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return [dim/2]."""
        return theta ** -exponents(dim, lengths.device) / self.factor


@ROPE_SCALINGS.register("dynamic")
@config
class Dynamic(_Fixed):
    """A base that grows with the length of the document, once that is beyond what was trained."""

    name: Literal["dynamic"] = "dynamic"
    factor: Factor
    trained: Positions
    """Positions that were trained."""

    @property
    def by_length(self) -> bool:
        return True

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return [n, dim/2]."""
        stretch = self.factor * lengths.double().clamp(min=self.trained) / self.trained - (self.factor - 1)
        base = theta * stretch ** (dim / (dim - 2))
        return base[:, None] ** -exponents(dim, lengths.device)


@ROPE_SCALINGS.register("llama3")
@config
class Llama3(_Fixed):
    """Waves longer than trained / low divided by factor, those shorter than trained / high kept."""

    name: Literal["llama3"] = "llama3"
    factor: Factor
    low: Annotated[float, Field(gt=0)]
    """Turns over the trained positions at and below which a frequency is divided."""
    high: Annotated[float, Field(gt=0)]
    """Turns over the trained positions at and above which it is kept."""
    trained: Positions
    """Positions that were trained."""

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(
                f"low={self.low} turns are not fewer than high={self.high}; lower the one or raise the other"
            )

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return [dim/2]."""
        plain = theta ** -exponents(dim, lengths.device)
        turns = self.trained * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@ROPE_SCALINGS.register("yarn")
@config
class Yarn:
    """Frequencies blended between kept and divided along a ramp over their number."""

    name: Literal["yarn"] = "yarn"
    factor: Factor
    trained: Positions
    """Positions that were trained."""
    fast: Annotated[float, Field(gt=0)] = 32.0
    """Turns over the trained positions from which a frequency is kept."""
    slow: Annotated[float, Field(gt=0)] = 1.0
    """Turns over the trained positions up to which it is divided."""
    whole: bool = True
    """Let the ramp begin and end at whole numbers of frequencies."""
    amplitude: Annotated[float, Field(gt=0)]
    """What cos and sin are multiplied by; 0.1 log(factor) + 1 in the paper."""

    @property
    def by_length(self) -> bool:
        return False

    def frequencies(self, dim: int, theta: float, lengths: Tensor) -> Tensor:
        """Return [dim/2]."""
        plain = theta ** -exponents(dim, lengths.device)
        low, high = (self._number(turns, dim, theta) for turns in (self.fast, self.slow))
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        numbers = torch.arange(dim // 2, dtype=torch.float64, device=lengths.device)
        divided = ((numbers - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return plain * (1 - divided + divided / self.factor)

    def _number(self, turns: float, dim: int, theta: float) -> float:
        """Return the number i of the frequency that makes this many turns over the trained positions."""
        return dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


def exponents(dim: int, device: torch.device) -> Tensor:
    """Return [dim/2] float64: 2i/dim."""
    return torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
