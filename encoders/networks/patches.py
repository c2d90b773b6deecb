"""The small vision transformer for images and groups of frames."""

import torch
from einops import rearrange
from torch import Tensor, nn

from encoders.image import PatchEncoder
from encoders.networks.layers import Block, Projector, initialise, sine_positions, wide


class PatchTransformer(nn.Module):
    """Patches -> blocks over one unit -> rows of merge x merge patches, projected to the model's width."""

    def __init__(self, config: PatchEncoder, width: int):
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.patch_numbers, config.channels)
        self.blocks = nn.ModuleList(
            Block(config.channels, config.heads, config.mlp_ratio) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.channels)
        self.projector = Projector(config.merge**2 * config.channels, width)
        initialise(self, config.layers)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        side = self.config.multiple
        frames = () if self.config.kind == "image" else (self.config.frames,)
        return torch.zeros(0, *frames, side, side, 3, dtype=torch.uint8, device=self.embed.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Encode units of one size.

        x: image [n, h, w, 3], video [n, f, h, w, 3] uint8
        returns: [n * rows, e]  row by row of each unit's grid
        """
        height, width = x.shape[-3:-1]
        dtype = self.embed.weight.dtype
        x = (x.to(wide(dtype)) / 127.5 - 1).to(dtype)
        x = self.embed(self._patches(x if x.dim() == 5 else x[:, None]))
        x = x + self._positions(height // self.config.patch, width // self.config.patch, x)
        for block in self.blocks:
            x = block(x)
        return self.projector(rearrange(self.norm(x), "n (rows m) c -> n rows (m c)", m=self.config.merge**2))

    def _patches(self, x: Tensor) -> Tensor:
        """x: [n, f, h, w, 3] -> [n, p, f * patch * patch * 3]; the patches of one row follow each other."""
        config = self.config
        return rearrange(
            x, "n f (h a y) (w b x) c -> n (h w a b) (f y x c)", a=config.merge, b=config.merge, y=config.patch,
            x=config.patch,
        )  # fmt: skip

    def _positions(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return [p, c]: half the channels tell the patch's row in the picture, half its column."""
        grid = torch.cartesian_prod(torch.arange(rows, device=like.device), torch.arange(columns, device=like.device))
        merge, half = self.config.merge, self.config.channels // 2
        grid = rearrange(grid, "(h a w b) side -> (h w a b) side", a=merge, b=merge, w=columns // merge)
        return torch.cat([sine_positions(grid[:, side], half, like.dtype) for side in range(2)], dim=-1)
