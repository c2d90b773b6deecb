"""The small vision transformer for images and groups of frames."""

from math import prod

import torch
from einops import rearrange
from torch import Tensor, nn

from encoders.networks.layers import Block, FeatureEncoder, Projector, initialise, sine_positions, wide


class PatchTransformer(FeatureEncoder):
    """Patches -> blocks over one unit -> rows of merge x merge patches, projected to the model's width.

    frames: the axis of frames of a unit, (f,) for a video, () for an image, which has none
    """

    def __init__(
        self,
        width: int,
        *,
        frames: tuple[int, ...],
        patch: int,
        merge: int,
        channels: int,
        layers: int,
        heads: int,
        mlp_ratio: int,
    ):
        super().__init__()
        self.frames, self.patch, self.merge = frames, patch, merge
        self.embed = nn.Linear(prod(frames) * patch**2 * 3, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, mlp_ratio) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.projector = Projector(merge**2 * channels, width)
        initialise(self, layers)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        side = self.patch * self.merge
        return torch.zeros(0, *self.frames, side, side, 3, dtype=torch.uint8, device=self.embed.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """Encode units of one size.

        x: image [n, h, w, 3], video [n, f, h, w, 3] uint8
        returns: [n, rows, merge * merge * c]  row by row of each unit's grid
        """
        height, width = x.shape[-3:-1]
        dtype = self.embed.weight.dtype
        x = (x.to(wide(dtype)) / 127.5 - 1).to(dtype)
        x = self.embed(self._patches(x if x.dim() == 5 else x[:, None]))
        x = x + self._positions(height // self.patch, width // self.patch, x)
        for block in self.blocks:
            x = block(x)
        return rearrange(self.norm(x), "n (rows m) c -> n rows (m c)", m=self.merge**2)

    def _patches(self, x: Tensor) -> Tensor:
        """x: [n, f, h, w, 3] -> [n, p, f * patch * patch * 3]; the patches of one row follow each other."""
        merge, patch = self.merge, self.patch
        return rearrange(x, "n f (h a y) (w b x) c -> n (h w a b) (f y x c)", a=merge, b=merge, y=patch, x=patch)

    def _positions(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return [p, c]: half the channels tell the patch's row in the picture, half its column."""
        grid = torch.cartesian_prod(torch.arange(rows, device=like.device), torch.arange(columns, device=like.device))
        merge, half = self.merge, like.shape[-1] // 2
        grid = rearrange(grid, "(h a w b) side -> (h w a b) side", a=merge, b=merge, w=columns // merge)
        return torch.cat([sine_positions(grid[:, side], half, like.dtype) for side in range(2)], dim=-1)
