"""Image encoders: a small vision transformer over patches, and any vision model of timm.

Both make one row of each block of merge x merge neighbouring patches: the patches' features are joined and
projected to the model's width.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from encoders.base import ENCODERS, Encoder, transformer_elements, transformer_flops
from mmcp.config import config

if TYPE_CHECKING:
    from torch import nn


class VisionEncoder(Encoder):
    """What image and video encoders share: pictures of any size whose sides are multiples of `multiple` pixels."""

    kind: ClassVar[str] = "image"

    @property
    def frames(self) -> int:
        """Frames that one unit holds."""
        return 1

    @property
    def frame_axis(self) -> tuple[int, ...]:
        """The axis of frames that a unit's array has: (frames,) for video, () for images."""
        return (self.frames,) if self.kind == "video" else ()

    @property
    @abstractmethod
    def multiple(self) -> int:
        """Pixels along a picture's side that make one row."""

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        frames, height, width = (1, *size) if self.kind == "image" else size
        multiple = self.multiple
        if frames != self.frames:
            raise ValueError(f"a unit of {frames} frames does not fit frames={self.frames}; group {self.frames} frames")
        if min(height, width) < multiple or height % multiple or width % multiple:
            nearest = " x ".join(str(max(1, round(side / multiple)) * multiple) for side in (height, width))
            raise ValueError(
                f"a picture of {height} x {width} pixels is not made of blocks of {multiple} (patch x merge) pixels; "
                f"resize it to {nearest}"
            )
        return 1, height // multiple, width // multiple


@config
class PatchEncoder(VisionEncoder):
    """The small default: linear patch embedding, sine positions, pre-norm blocks, merging, projector."""

    patch: PositiveInt = 16
    """Side of a square patch, pixels."""
    merge: PositiveInt = 2
    """Patches along each side that make one row."""
    channels: PositiveInt = 256
    """Width of its blocks."""
    layers: PositiveInt = 4
    """Blocks."""
    heads: PositiveInt = 4
    """Attention heads of a block."""
    mlp_ratio: PositiveInt = 4
    """Width of the MLP of a block, in channels."""

    def __post_init__(self):
        if self.channels % self.heads:
            raise ValueError(f"channels={self.channels} is not a multiple of heads={self.heads}; change either")
        if self.channels % 4:
            raise ValueError(f"channels={self.channels} is not a multiple of 4, as its sine positions need; change it")

    @property
    def multiple(self) -> int:
        return self.patch * self.merge

    @property
    def patch_numbers(self) -> int:
        """Numbers in one patch: the pixels of all its frames, three colours each."""
        return self.frames * self.patch**2 * 3

    def flops(self, size: tuple[int, ...], *, width: int) -> int:
        rows = self.num_tokens(size)
        patches = rows * self.merge**2
        embedding = 2 * patches * self.patch_numbers * self.channels
        projector = 2 * (patches * self.channels * width + rows * width**2)
        blocks = transformer_flops(patches, channels=self.channels, layers=self.layers, mlp_ratio=self.mlp_ratio)
        return embedding + blocks + projector

    def activation_bytes(self, size: tuple[int, ...], element_size: int, *, width: int) -> int:
        rows = self.num_tokens(size)
        patches = rows * self.merge**2
        blocks = transformer_elements(patches, channels=self.channels, layers=self.layers, mlp_ratio=self.mlp_ratio)
        ends = patches * (self.patch_numbers + 2 * self.channels) + 2 * rows * width
        return element_size * (blocks + ends)

    def build(self, width: int) -> "nn.Module":
        from encoders.networks.patches import PatchTransformer

        return PatchTransformer(
            width,
            frames=self.frame_axis,
            patch=self.patch,
            merge=self.merge,
            channels=self.channels,
            layers=self.layers,
            heads=self.heads,
            mlp_ratio=self.mlp_ratio,
        )


@config
class TimmEncoder(VisionEncoder):
    """Any vision model of timm that gives a map of features, without its head.

    Its FLOPs and what it keeps for backward are counted by running it on torch's meta device, once a size.
    """

    model: str
    """Name in timm's list of models."""
    checkpoint: str = ""
    """File with the weights, .safetensors or a torch file of tensors only; empty draws them."""
    merge: PositiveInt = 2
    """Features along each side that make one row."""

    @property
    def multiple(self) -> int:
        from encoders.networks.timm_vision import stride

        return stride(self.model) * self.merge

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        from encoders.networks.timm_vision import places

        grid = VisionEncoder.grid(self, size)
        places(self.model, *size[-2:])
        return grid

    def flops(self, size: tuple[int, ...], *, width: int) -> int:
        return self._measure(size, width)[0]

    def activation_bytes(self, size: tuple[int, ...], element_size: int, *, width: int) -> int:
        return element_size * self._measure(size, width)[1]

    def _measure(self, size: tuple[int, ...], width: int) -> tuple[int, int]:
        from encoders.networks.timm_vision import measure

        self.grid(size)
        return measure(self.model, size, width=width, merge=self.merge, frames=self.frame_axis)

    def build(self, width: int) -> "nn.Module":
        from encoders.networks.timm_vision import TimmVision

        return TimmVision(width, model=self.model, checkpoint=self.checkpoint, merge=self.merge, frames=self.frame_axis)


@ENCODERS.register("image_patches")
@config
class ImagePatches(PatchEncoder):
    """The small default for images."""

    name: Literal["image_patches"] = "image_patches"


@ENCODERS.register("image_timm")
@config
class ImageTimm(TimmEncoder):
    """A timm model for images."""

    name: Literal["image_timm"] = "image_timm"
