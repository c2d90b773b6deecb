"""Tiny random models of transformers, one for each thing that a folder may say, and the casts taken out of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mmcp.masks import Mask
from mmcp.model.pretrained import ModelFolder
from mmcp.model.vlm import VideoLM
from mmcp.parallel.pretrained import fill, materialise
from tests.attention.rows import row_info

SIZES = dict(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=256,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000.0}
DELTA = dict(linear_num_value_heads=6, linear_num_key_heads=3, linear_key_head_dim=8, linear_value_head_dim=8)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama, dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3, biases, yarn": (
        "qwen3",
        {"attention_bias": True, "rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
    ),
    "qwen3_next": ("qwen3_next", {"num_hidden_layers": 4, "num_experts": 0, **DELTA}),
    "qwen3_next, dense by name, tied": (
        "qwen3_next",
        {"mlp_only_layers": [0, 1], "layer_types": ["full_attention", "linear_attention"], "tie_word_embeddings": True,
         **DELTA},
    ),
}  # fmt: skip
MODULES = ("llama", "qwen2", "qwen3", "qwen3_next")


class WideTorch:
    """torch, with float64 where the code asks for float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def casts_taken_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers compute in float64 where it says float32, or where it says nothing, frequencies included."""
    modules = [getattr(transformers.models, name) for name in MODULES]
    for module in [*(getattr(m, f"modeling_{n}") for m, n in zip(modules, MODULES, strict=True)),
                   transformers.modeling_rope_utils]:  # fmt: skip
        monkeypatch.setattr(module, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def peer(case: str, dtype: torch.dtype, *, seed: int = 0) -> transformers.PreTrainedModel:
    """Make a tiny model of transformers, all of its weights drawn, norms and biases included."""
    family, changes = CASES[case]
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **changes}, attn_implementation="sdpa")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def loaded(folder: Path, dtype: torch.dtype) -> tuple[VideoLM, ModelFolder]:
    """Make our model of a folder, without encoders."""
    source = ModelFolder.open(folder)
    source.check()
    decoder = source.decoder
    with torch.device("meta"):
        model = VideoLM(
            decoder.backbone.build(), {}, vocabulary=decoder.vocabulary, tied_head=decoder.tied_head
        ).to(dtype)  # fmt: skip
    materialise(model, torch.device("cpu"))
    fill(model, source)
    return model, source


def hidden_states(model: VideoLM, ids: torch.Tensor, documents: list[int] | None = None) -> torch.Tensor:
    """[s] -> [s, e]; documents: lengths of packed ones, positions counted in each."""
    documents = documents or [len(ids)]
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    return model.backbone(model.embedding(ids), positions, row_info(Mask.causal(documents)))
