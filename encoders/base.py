"""What an encoder is: a config that answers every question of a plan, and a module that makes the rows."""

from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING, ClassVar

from mmcp.registry import Registry

if TYPE_CHECKING:
    from torch import nn

ENCODERS = Registry("encoder")


class Encoder(ABC):
    """Config of an encoder of one kind of media, under `@ENCODERS.register(name)`.

    A unit is encoded alone, so a unit's rows do not depend on which other units share its call. `size` is a unit's
    `mmcp.sequence.Unit.size`: image (height, width) and video (frames, height, width) in pixels, audio (mel frames,).

    The module that `build` returns has two methods:

        forward(x) -> [n * num_tokens(size), e]   n units of one size, rows unit by unit; n = 0 gives 0 rows that
                                                  stay in the graph, so parameters get zeros for gradients
        empty() -> x                              an input of n = 0

        x: image [n, h, w, 3] uint8   video [n, f, h, w, 3] uint8   audio [n, mel bins, mel frames] float32
    """

    kind: ClassVar[str]
    """image, video or audio: what it encodes."""
    name: str
    """The name it is registered under."""

    @abstractmethod
    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        """Rows along time, height and width for one unit; raises ValueError for a size it cannot encode."""

    def num_tokens(self, size: tuple[int, ...]) -> int:
        """Rows made of one unit."""
        return prod(self.grid(size))

    @abstractmethod
    def flops(self, size: tuple[int, ...], *, width: int) -> int:
        """FLOPs of one unit forward (2 per multiplication and addition of its matrix products), for rows of `width`."""

    @abstractmethod
    def activation_bytes(self, size: tuple[int, ...], element_size: int, *, width: int) -> int:
        """Bytes that one unit's forward keeps for its backward, at `element_size` bytes a number."""

    @abstractmethod
    def build(self, width: int) -> "nn.Module":
        """Make the module with new weights, drawn from torch's generator, giving rows of `width`."""


def transformer_flops(tokens: int, *, channels: int, layers: int, mlp_ratio: int) -> int:
    """FLOPs forward of pre-norm blocks over one unit of `tokens`, all of which see each other.

    Per block and token 8 c^2 for the projections, 4 r c^2 for the MLP, and 4 t c for the two attention products.
    """
    return layers * tokens * ((8 + 4 * mlp_ratio) * channels**2 + 4 * tokens * channels)


def transformer_elements(tokens: int, *, channels: int, layers: int, mlp_ratio: int) -> int:
    """Numbers that pre-norm blocks keep for backward for one unit.

    Per block and token: 2 inputs of norms, the inputs of the projections and of the MLP (2), q, k and v (3), the
    attention's output (2, by head and by token), and both sides of the activation (2 r).
    """
    return layers * tokens * channels * (9 + 2 * mlp_ratio)
