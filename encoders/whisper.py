"""Whisper's audio encoder from a model folder: log-mel windows through its convolutions and blocks.

Whisper hears 30 s at once. A sound of hours is cut into windows of `window` mel frames (100 a second), each encoded
alone, with Whisper's own positions from the window's start: a window of 3000 frames computes what transformers
computes for those 30 s, a shorter one what Whisper's layers give for it alone. Two mel frames make a step (20 ms), and
frames_per_row / 2 steps are averaged into a row.
(Radford et al. 2022, arXiv 2212.04356)
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from encoders.audio import row_grid
from encoders.base import ENCODERS, Encoder, transformer_elements, transformer_flops
from mmcp.config import config

if TYPE_CHECKING:
    from torch import nn

FIELDS = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins")
FRAMES_PER_STEP = 2


@ENCODERS.register("whisper")
@config
class Whisper(Encoder):
    """Windows of log-mel -> Whisper's encoder -> means over time -> projector."""

    kind: ClassVar[str] = "audio"
    name: Literal["whisper"] = "whisper"
    folder: str
    """Model folder of a Whisper model: config.json and safetensors."""
    window: PositiveInt = 3000
    """Mel frames (10 ms) of a whole window, at most what the model was trained on."""
    frames_per_row: PositiveInt = 8
    """Mel frames that make one row; 8 make 12.5 rows a second."""

    def __post_init__(self):
        if self.frames_per_row % FRAMES_PER_STEP or self.window % self.frames_per_row:
            raise ValueError(
                f"window={self.window} and frames_per_row={self.frames_per_row} mel frames do not give whole rows; "
                "use an even frames_per_row that divides the window"
            )
        longest = FRAMES_PER_STEP * self.sizes["max_source_positions"]
        if self.window > longest:
            raise ValueError(
                f"window={self.window} mel frames, '{self.folder}' hears {longest} at once; use that or less"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Fields of the folder's config.json."""
        return read_sizes(self.folder)

    @property
    def bins(self) -> int:
        """Mel bands."""
        return self.sizes["num_mel_bins"]

    @property
    def mlp_ratio(self) -> int:
        """Width of the MLP of a block, in channels."""
        return self.sizes["encoder_ffn_dim"] // self.sizes["d_model"]

    def grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        return row_grid(size, window=self.window, frames_per_row=self.frames_per_row)

    def flops(self, size: tuple[int, ...], *, width: int) -> int:
        sizes, rows, steps = self.sizes, self.num_tokens(size), size[0] // FRAMES_PER_STEP
        channels, layers = sizes["d_model"], sizes["encoder_layers"]
        convolutions = 2 * 3 * channels * (size[0] * self.bins + steps * channels)
        blocks = transformer_flops(steps, channels=channels, layers=layers, mlp_ratio=self.mlp_ratio)
        return convolutions + blocks + 2 * rows * (channels * width + width**2)

    def activation_bytes(self, size: tuple[int, ...], element_size: int, *, width: int) -> int:
        sizes, rows, steps = self.sizes, self.num_tokens(size), size[0] // FRAMES_PER_STEP
        channels, layers = sizes["d_model"], sizes["encoder_layers"]
        blocks = transformer_elements(steps, channels=channels, layers=layers, mlp_ratio=self.mlp_ratio)
        convolutions = size[0] * (self.bins + 2 * channels) + steps * channels
        return element_size * (convolutions + blocks + steps * channels + rows * (channels + 2 * width))

    def build(self, width: int) -> "nn.Module":
        from encoders.networks.whisper import WhisperWindows

        return WhisperWindows(width, folder=self.folder, sizes=self.sizes, frames_per_row=self.frames_per_row)


def read_sizes(folder: str) -> dict[str, int]:
    """Return the fields of a Whisper folder's config.json that its encoder is made of.

    Raises ValueError for a folder without one, of another model, or with settings that are not computed here.
    """
    file = Path(folder) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{folder}' is no Whisper folder ({file.resolve()}: {error}); give a model folder") from None
    for field, wanted in (("model_type", "whisper"), ("activation_function", "gelu"), ("scale_embedding", False)):
        if values.get(field, wanted) != wanted or (field == "model_type" and field not in values):
            raise ValueError(f"{file}: {field}={values.get(field)!r} is not supported; use {wanted!r}")
    missing = [field for field in (*FIELDS, "max_source_positions") if not isinstance(values.get(field), int)]
    if missing:
        raise ValueError(f"{file} lacks the number '{missing[0]}'; copy the folder again")
    return {field: values[field] for field in (*FIELDS, "max_source_positions")}
