"""Video encoders: the image encoders over groups of frames.

The default embeds patches that reach through the frames of a group. A timm model sees each frame alone, and the
frames' features are joined with those of the merged block before the projector.
"""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from encoders.base import ENCODERS
from encoders.image import PatchEncoder, TimmEncoder
from mmcp.config import config


@ENCODERS.register("video_patches")
@config
class VideoPatches(PatchEncoder):
    """The small default for video."""

    kind: ClassVar[str] = "video"
    name: Literal["video_patches"] = "video_patches"
    frames: PositiveInt = 2
    """Frames of one group."""


@ENCODERS.register("video_timm")
@config
class VideoTimm(TimmEncoder):
    """A timm model for video."""

    kind: ClassVar[str] = "video"
    name: Literal["video_timm"] = "video_timm"
    frames: PositiveInt = 2
    """Frames of one group."""
