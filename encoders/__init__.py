"""Encoders: what turns images, frames, sound and text into rows of the model's width.

Configs and tokenizers are free of torch, so that plans and decode workers need not import it; `build` does.
"""

from encoders.audio import AudioWindows
from encoders.base import ENCODERS, Encoder
from encoders.image import ImagePatches, ImageTimm
from encoders.text import Tokenizer, TokenizerConfig
from encoders.video import VideoPatches, VideoTimm
from encoders.whisper import Whisper

__all__ = [
    "ENCODERS",
    "AudioWindows",
    "Encoder",
    "ImagePatches",
    "ImageTimm",
    "Tokenizer",
    "TokenizerConfig",
    "VideoPatches",
    "VideoTimm",
    "Whisper",
]
