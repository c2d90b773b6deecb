"""Models to plan for, of a public size, from a Hugging Face config.json, or ours: what memory and time follow from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mmcp.attention import AttentionConfig, GatedDeltaConfig, SoftmaxConfig
from mmcp.model.backbone import BackboneConfig


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with its embedding and head."""

    name: str
    backbone: BackboneConfig
    """Its `mlp_width` is that of one expert, where there are experts."""
    vocabulary: int
    tied: bool = False
    """Whether embedding and head are one matrix."""
    experts: int = 0
    """MLPs of each layer, of which a token takes some; 0: one, taken by all."""
    active_experts: int = 0
    """MLPs that a token takes."""
    notes: tuple[str, ...] = ()
    """What was assumed when it was read."""

    def __post_init__(self):
        if not 0 <= self.active_experts <= self.experts or bool(self.experts) != bool(self.active_experts):
            raise ValueError(
                f"{self.active_experts} of {self.experts} experts are taken by a token; use 0 of 0, or at least 1"
            )

    @property
    def mlps(self) -> int:
        """MLPs that a token passes in a layer."""
        return self.active_experts or 1

    def block_parameters(self, variant: AttentionConfig) -> int:
        """Count the parameters of one block with this attention, all experts and their router included."""
        width, hidden = self.backbone.width, self.backbone.mlp_width
        mixture = self.experts * (3 * width * hidden + width) - 3 * width * hidden if self.experts else 0
        return _dense_block_parameters(_single(self.backbone, variant)) + mixture

    @property
    def root_parameters(self) -> int:
        """Count the parameters that stay gathered: head, which a tied embedding is, and final norm."""
        return self.backbone.width * (self.vocabulary + 1)

    @property
    def parameters(self) -> int:
        """Count all parameters."""
        embedding = 0 if self.tied else self.backbone.width * self.vocabulary
        return embedding + self.root_parameters + sum(map(self.block_parameters, self.backbone.variants))

    def block_flops(self, variant: AttentionConfig) -> int:
        """Forward FLOPs of one token in the matrix products of one block; attention itself is `variant.flops`."""
        width, hidden = self.backbone.width, self.backbone.mlp_width
        mixture = 2 * width * (3 * hidden * (self.mlps - 1) + self.experts)
        return _single(self.backbone, variant).flops_per_token() + mixture


def _single(backbone: BackboneConfig, variant: AttentionConfig) -> BackboneConfig:
    return replace(backbone, layers=1, pattern=(variant,))


@cache
def _dense_block_parameters(single: BackboneConfig) -> int:
    return single.parameters() - single.width


def find_architecture(name: str) -> Architecture:
    """Return a public size by name, or what the folder of a Hugging Face model (or its config.json) describes.

    Raises ValueError for what is neither, or cannot be planned.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return read_architecture(file)
    known = {key.lower(): key for key in PUBLIC_SIZES}
    if name.lower() not in known:
        raise ValueError(
            f"--model {name}: neither a folder with config.json nor a known size; use one of {', '.join(PUBLIC_SIZES)}"
        )
    return PUBLIC_SIZES[known[name.lower()]]


def read_architecture(file: Path) -> Architecture:
    """Read a Hugging Face config.json. Raises ValueError naming what is missing or cannot be planned."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error}); name a model's config.json") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: is not a JSON object; name a model's config.json")
    return from_values(values, name=values.get("_name_or_path") or file.absolute().parent.name, place=str(file))


def from_values(values: Mapping[str, Any], *, name: str, place: str) -> Architecture:
    """Turn the values of a config.json into an architecture; of a vision-language model, its language model."""
    notes = []
    if isinstance(values.get("text_config"), dict):
        notes.append(f"{name}: only its language model is planned; its own encoders are not")
        values = {**values["text_config"], "tie_word_embeddings": _tied(values)}

    def number(key: str, default: int | None = None) -> int:
        value = values.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{place}: {key}={value!r}, but a decoder needs a whole number from 1; add it to the file")
        return value

    heads, width = number("num_attention_heads"), number("hidden_size")
    head_dim, layers = number("head_dim", width // heads), number("num_hidden_layers")
    experts = values.get("num_experts") or values.get("num_local_experts") or values.get("n_routed_experts") or 0
    model_type = str(values.get("model_type", "unknown"))
    if model_type not in KNOWN_TYPES:
        notes.append(f"model_type '{model_type}' is planned as a decoder like Llama with the sizes of its config.json")
    backbone = BackboneConfig(
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_width=number("moe_intermediate_size" if values.get("moe_intermediate_size") else "intermediate_size"),
        pattern=_pattern(values, layers),
        qk_norm=model_type.startswith("qwen3"),
        qkv_bias=bool(values.get("attention_bias")) or model_type.startswith("qwen2"),
    )
    return Architecture(
        name=name,
        backbone=backbone,
        vocabulary=number("vocab_size"),
        tied=_tied(values),
        experts=experts,
        active_experts=number("num_experts_per_tok") if experts else 0,
        notes=tuple(notes),
    )


KNOWN_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text")


def _tied(values: Mapping[str, Any]) -> bool:
    return bool(values.get("tie_word_embeddings", False))


def _pattern(values: Mapping[str, Any], layers: int) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer, as the shortest pattern that repeats to it."""
    kinds = values.get("layer_types") or ["full_attention"] * layers
    window = values.get("sliding_window") or 0
    variants: dict[str, AttentionConfig] = {
        "full_attention": SoftmaxConfig(),
        "sliding_attention": SoftmaxConfig(window=window),
        "linear_attention": GatedDeltaConfig(
            value_heads=values.get("linear_num_value_heads") or 0,
            key_heads=values.get("linear_num_key_heads") or 0,
            head_dim=values.get("linear_key_head_dim") or 0,
            convolution=values.get("linear_conv_kernel_dim") or 4,
        ),
    }
    unknown = sorted(set(kinds) - variants.keys())
    if unknown:
        raise ValueError(f"layer_types has '{unknown[0]}', which is unknown; known are {', '.join(sorted(variants))}")
    length = next(n for n in range(1, layers + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return tuple(variants[kind] for kind in kinds[:length])


def _public(
    name: str,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocabulary: int,
    head_dim: int = 128,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    tied: bool = False,
    experts: tuple[int, int] = (0, 0),
) -> Architecture:
    backbone = BackboneConfig(
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )
    return Architecture(
        name=name,
        backbone=backbone,
        vocabulary=vocabulary,
        tied=tied,
        experts=experts[0],
        active_experts=experts[1],
    )


QWEN25 = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": (8192, 80, 64, 8, 29568, 152064),
}
QWEN3 = {
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, 151936),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, 151936),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, 151936),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, 151936),
    "Qwen3-14B": (5120, 40, 40, 8, 17408, 151936),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, 151936),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 768, 151936),
    "Qwen3-235B-A22B": (4096, 94, 64, 4, 1536, 151936),
}
LLAMA3 = {
    "Llama-3-1B": (2048, 16, 32, 8, 8192, 128256),
    "Llama-3-3B": (3072, 28, 24, 8, 8192, 128256),
    "Llama-3-8B": (4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": (8192, 80, 64, 8, 28672, 128256),
    "Llama-3-405B": (16384, 126, 128, 8, 53248, 128256),
}
TIED = (
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Llama-3-1B",
    "Llama-3-3B",
)
SMALL_HEADS = ("Qwen2.5-0.5B", "Llama-3-1B")


def _public_sizes() -> dict[str, Architecture]:
    """Make the table of public sizes, as in the config.json of each on the Hugging Face hub."""
    sizes = {}
    for table, qk_norm, qkv_bias in ((QWEN25, False, True), (QWEN3, True, False), (LLAMA3, False, False)):
        for name, (width, layers, heads, kv_heads, mlp_width, vocabulary) in table.items():
            sizes[name] = _public(
                name,
                width=width,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                mlp_width=mlp_width,
                vocabulary=vocabulary,
                head_dim=64 if name in SMALL_HEADS else 128,
                qk_norm=qk_norm,
                qkv_bias=qkv_bias,
                tied=name in TIED,
                experts=(128, 8) if "-A" in name else (0, 0),
            )
    return sizes


PUBLIC_SIZES = _public_sizes()
"""Width, layers, query and key-value heads, width of the MLP (of an expert), vocabulary."""
