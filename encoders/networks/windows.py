"""The small convolutional transformer for windows of log-mel."""

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.nn.functional import gelu

from encoders.audio import AudioWindows
from encoders.networks.layers import Block, Projector, initialise, sine_positions


class WindowTransformer(nn.Module):
    """Convolutions as Whisper's encoder has them, blocks over one window, means over the steps of a row, projector."""

    def __init__(self, config: AudioWindows, width: int):
        super().__init__()
        self.config = config
        self.first = nn.Conv1d(config.bins, config.channels, 3, padding=1)
        self.second = nn.Conv1d(config.channels, config.channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            Block(config.channels, config.heads, config.mlp_ratio) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.channels)
        self.projector = Projector(config.channels, width)
        initialise(self, config.layers)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        return torch.zeros(0, self.config.bins, self.config.frames_per_row, device=self.first.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Encode windows of one size, each alone.

        x: [n, bins, frames]  log-mel after `finish`
        returns: [n * rows, e]  in time order
        """
        self.config.grid(tuple(x.shape[2:]))
        x = x.to(self.first.weight.dtype)
        x = rearrange(gelu(self.second(gelu(self.first(x)))), "n c steps -> n steps c")
        x = x + sine_positions(torch.arange(x.shape[1], device=x.device), x.shape[2], x.dtype)
        for block in self.blocks:
            x = block(x)
        steps = self.config.frames_per_row // 2
        return self.projector(reduce(self.norm(x), "n (rows steps) c -> n rows c", "mean", steps=steps))
