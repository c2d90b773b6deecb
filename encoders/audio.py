"""Audio encoder: independent windows of Whisper's log-mel through two convolutions and a small transformer.

A sound is cut into windows of `window` mel frames (100 a second); the last one is as long as what is left, padded
with silence to whole rows. A window of m frames gives m / frames_per_row rows, so rows keep step with time, a sound
shorter than one mel frame (10 ms) gives none, and windows have at most window / frames_per_row different sizes.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from encoders.base import ENCODERS, Encoder, transformer_elements, transformer_flops
from mmcp.config import config

if TYPE_CHECKING:
    from torch import nn


@ENCODERS.register("audio_windows")
@config
class AudioWindows(Encoder):
    """Windows of log-mel -> two convolutions (the second halves the rate) -> blocks -> means over time -> projector."""

    kind: ClassVar[str] = "audio"
    name: Literal["audio_windows"] = "audio_windows"
    bins: PositiveInt = 80
    """Mel bands."""
    window: PositiveInt = 100
    """Mel frames (10 ms) of a whole window."""
    frames_per_row: PositiveInt = 20
    """Mel frames that make one row."""
    channels: PositiveInt = 256
    """Width of its blocks."""
    layers: PositiveInt = 2
    """Blocks."""
    heads: PositiveInt = 4
    """Attention heads of a block."""
    mlp_ratio: PositiveInt = 4
    """Width of the MLP of a block, in channels."""

    def __post_init__(self):
        if self.frames_per_row % 2 or self.window % self.frames_per_row:
            raise ValueError(
                f"window={self.window} and frames_per_row={self.frames_per_row} mel frames do not give whole rows; "
                f"use an even frames_per_row that divides the window"
            )
        if self.channels % self.heads or self.channels % 2:
            raise ValueError(
                f"channels={self.channels} is not a multiple of 2 and of heads={self.heads}; change either"
            )

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        return row_grid(size, window=self.window, frames_per_row=self.frames_per_row)

    def flops(self, size: tuple[int, ...], *, width: int) -> int:
        rows, steps = self.num_tokens(size), size[0] // 2
        convolutions = 2 * 3 * self.channels * (size[0] * self.bins + steps * self.channels)
        projector = 2 * rows * (self.channels * width + width**2)
        blocks = transformer_flops(steps, channels=self.channels, layers=self.layers, mlp_ratio=self.mlp_ratio)
        return convolutions + blocks + projector

    def activation_bytes(self, size: tuple[int, ...], element_size: int, *, width: int) -> int:
        rows, steps = self.num_tokens(size), size[0] // 2
        blocks = transformer_elements(steps, channels=self.channels, layers=self.layers, mlp_ratio=self.mlp_ratio)
        convolutions = size[0] * (self.bins + 2 * self.channels) + steps * self.channels
        ends = steps * self.channels + rows * (self.channels + 2 * width)
        return element_size * (convolutions + blocks + ends)

    def build(self, width: int) -> "nn.Module":
        from encoders.networks.windows import WindowTransformer

        return WindowTransformer(
            width,
            bins=self.bins,
            frames_per_row=self.frames_per_row,
            channels=self.channels,
            layers=self.layers,
            heads=self.heads,
            mlp_ratio=self.mlp_ratio,
        )


def row_grid(size: tuple[int, ...], *, window: int, frames_per_row: int) -> tuple[int, int, int]:
    """Return the grid of a window of mel frames; raises ValueError for one that is too long or not of whole rows."""
    (frames,) = size
    if not 0 < frames <= window or frames % frames_per_row:
        raise ValueError(
            f"a window of {frames} mel frames is not one of {frames_per_row}, {2 * frames_per_row}, ..., {window}; "
            f"pad it to whole rows or cut it at {window}"
        )
    return frames // frames_per_row, 1, 1
