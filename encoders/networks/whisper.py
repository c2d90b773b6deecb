"""Whisper's encoder, as transformers computes it, over windows of any whole number of rows."""

import json
import re
from pathlib import Path

import torch
from einops import rearrange, reduce
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from encoders.networks.layers import FeatureEncoder, Projector, initialise

PREFIX = re.compile(r"(model\.)?encoder\.")


class WhisperWindows(FeatureEncoder):
    """Convolutions, learned positions, pre-norm blocks, final norm, means over the steps of a row, projector.

    Parameters are named as in transformers, but for the projector.
    """

    def __init__(self, width: int, *, folder: str, sizes: dict[str, int], frames_per_row: int):
        super().__init__()
        channels, heads = sizes["d_model"], sizes["encoder_attention_heads"]
        self.frames_per_row = frames_per_row
        self.conv1 = nn.Conv1d(sizes["num_mel_bins"], channels, 3, padding=1)
        self.conv2 = nn.Conv1d(channels, channels, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(sizes["max_source_positions"], channels)
        blocks = (WhisperBlock(channels, heads, sizes["encoder_ffn_dim"]) for _ in range(sizes["encoder_layers"]))
        self.layers = nn.ModuleList(blocks)
        self.layer_norm = nn.LayerNorm(channels)
        load(self, folder)
        self.projector = Projector(channels, width)
        initialise(self.projector, layers=1)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        return torch.zeros(0, self.conv1.in_channels, self.frames_per_row, device=self.conv1.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """Encode windows of one size, each alone.

        x: [n, bins, frames]  log-mel after `finish`; frames make whole rows
        returns: [n, rows, c]  in time order
        """
        x = x.to(self.conv1.weight.dtype)
        x = rearrange(gelu(self.conv2(gelu(self.conv1(x)))), "n c steps -> n steps c")
        x = x + self.embed_positions.weight[: x.shape[1]]
        for block in self.layers:
            x = block(x)
        return reduce(self.layer_norm(x), "n (rows steps) c -> n rows c", "mean", steps=self.frames_per_row // 2)


class WhisperBlock(nn.Module):
    """Pre-norm attention over one window, both ways, then the MLP."""

    def __init__(self, channels: int, heads: int, hidden: int):
        super().__init__()
        self.self_attn = WhisperAttention(channels, heads)
        self.self_attn_layer_norm = nn.LayerNorm(channels)
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)
        self.final_layer_norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, steps, c] -> [n, steps, c]."""
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


class WhisperAttention(nn.Module):
    """Attention whose keys have no bias."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(channels, channels, bias=False)
        self.v_proj = nn.Linear(channels, channels)
        self.q_proj = nn.Linear(channels, channels)
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, steps, c] -> [n, steps, c]."""
        q, k, v = (
            rearrange(project(x), "n s (h d) -> n h s d", h=self.heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Attention kernels are not made for 0 units; the sum keeps the projections in the graph.
        mixed = scaled_dot_product_attention(q, k, v) if len(x) else q + k + v
        return self.out_proj(rearrange(mixed, "n h s d -> n s (h d)"))


def load(module: nn.Module, folder: str) -> None:
    """Fill the encoder from the safetensors files of a Whisper folder; the decoder's tensors are not read.

    Raises ValueError naming tensors of the encoder that are missing, unknown or of another shape.
    """
    wanted = module.state_dict()
    found: dict[str, Tensor] = {}
    for file in files_of(Path(folder)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                start = PREFIX.match(name)
                if start:
                    found[name[start.end() :]] = tensors.get_tensor(name)
    differing = sorted(wanted.keys() ^ found.keys())
    differing += [name for name, value in wanted.items() if name in found and found[name].shape != value.shape]
    if differing:
        raise ValueError(
            f"'{folder}' does not hold the encoder of its config.json: {len(differing)} tensors are missing, unknown "
            f"or of another shape, first {', '.join(differing[:5])}; copy the folder again"
        )
    module.load_state_dict(found)


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises ValueError when one is missing."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"'{folder}' has no file {name}; copy the folder again, or save it as safetensors")
    return [folder / name for name in names]
