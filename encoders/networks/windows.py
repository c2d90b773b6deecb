"""The small convolutional transformer for windows of log-mel."""

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.nn.functional import gelu

from encoders.networks.layers import Block, FeatureEncoder, Projector, initialise, sine_positions


class WindowTransformer(FeatureEncoder):
    """Convolutions as Whisper's encoder has them, blocks over one window, means over the steps of a row, projector."""

    def __init__(
        self, width: int, *, bins: int, frames_per_row: int, channels: int, layers: int, heads: int, mlp_ratio: int
    ):
        super().__init__()
        self.bins, self.frames_per_row = bins, frames_per_row
        self.first = nn.Conv1d(bins, channels, 3, padding=1)
        self.second = nn.Conv1d(channels, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(channels, heads, mlp_ratio) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.projector = Projector(channels, width)
        initialise(self, layers)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        return torch.zeros(0, self.bins, self.frames_per_row, device=self.first.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """Encode windows of one size, each alone.

        x: [n, bins, frames]  log-mel after `finish`; frames make whole rows
        returns: [n, rows, c]  in time order
        """
        x = x.to(self.first.weight.dtype)
        x = rearrange(gelu(self.second(gelu(self.first(x)))), "n c steps -> n steps c")
        x = x + sine_positions(torch.arange(x.shape[1], device=x.device), x.shape[2], x.dtype)
        for block in self.blocks:
            x = block(x)
        steps = self.frames_per_row // 2
        return reduce(self.norm(x), "n (rows steps) c -> n rows c", "mean", steps=steps)
