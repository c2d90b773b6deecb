"""Llama 3, Qwen2 (2.5 too) and Qwen3 dense: fields of their config.json, and names of their tensors."""

from collections.abc import Iterator
from typing import Any

from mmcp.attention import SoftmaxConfig
from mmcp.attention.base import HeadShape
from mmcp.model.backbone import BackboneConfig
from mmcp.model.pretrained.families import FAMILIES, check_shape
from mmcp.model.pretrained.fields import Fields
from mmcp.model.pretrained.rope_fields import positions_read, read_rope, rope_fields
from mmcp.model.pretrained.rows import Decoder, Rows

WINDOWED, FULL = "sliding_attention", "full_attention"


class DenseFamily:
    """What the dense families share; each says what else of a backbone it can hold."""

    model_type: str
    architecture: str
    ignored = r".*\.rotary_emb\.inv_freq"

    def own_settings(self, config: Fields) -> dict[str, Any]:
        """Return the fields of a BackboneConfig in which the families differ."""
        raise NotImplementedError

    def own_fields(self, backbone: BackboneConfig) -> dict[str, Any]:
        """Return the fields of a config.json in which the families differ."""
        raise NotImplementedError

    def read(self, config: Fields) -> Decoder:
        """Return the decoder that a config.json describes. Raises ValueError for what is not supported."""
        config.refuse_unless("hidden_act", "silu")
        config.refuse_unless("attention_dropout", 0)
        config.refuse_unless("quantization_config")
        heads = config.get("num_attention_heads", int)
        head_dim = config.get("head_dim", int, config.get("hidden_size", int) // heads)
        layers = config.get("num_hidden_layers", int)
        backbone = BackboneConfig(
            width=config.get("hidden_size", int),
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads", int, heads),
            head_dim=head_dim,
            mlp_width=config.get("intermediate_size", int),
            pattern=pattern_of(windows_of(config, layers)),
            norm_eps=config.get("rms_norm_eps", float),
            init_std=config.get("initializer_range", float, 0.02),
            **read_rope(config, head_dim=head_dim),
            **self.own_settings(config),
        )
        tied = config.get("tie_word_embeddings", bool, False)
        return Decoder(backbone=backbone, vocabulary=config.get("vocab_size", int), tied_head=tied)

    def write(self, decoder: Decoder) -> dict[str, Any]:
        """Return the config.json of a decoder. Raises ValueError when theirs computes another model."""
        backbone = decoder.backbone
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": decoder.vocabulary,
            "hidden_size": backbone.width,
            "num_hidden_layers": backbone.layers,
            "num_attention_heads": backbone.heads,
            "num_key_value_heads": backbone.kv_heads,
            "head_dim": backbone.head_dim,
            "intermediate_size": backbone.mlp_width,
            "hidden_act": "silu",
            "rms_norm_eps": backbone.norm_eps,
            "initializer_range": backbone.init_std,
            "max_position_embeddings": positions_read(backbone),
            "tie_word_embeddings": decoder.tied_head,
            **window_fields(backbone),
            **self.own_fields(backbone),
            **rope_fields(backbone),
        }
        check_shape(self.read(Fields(config, f"model family '{self.model_type}'")), decoder)
        return config

    def rows(self, decoder: Decoder) -> dict[str, Rows]:
        """Say where each parameter of the decoder lies."""
        rows = dict(ends(decoder))
        for layer in range(decoder.backbone.layers):
            block, theirs = f"backbone.blocks.{layer}", f"model.layers.{layer}"
            rows |= mlp_and_norms(decoder.backbone, block, theirs)
            rows |= self.attention(decoder.backbone, f"{block}.mixer", f"{theirs}.self_attn")
        return rows

    def attention(self, backbone: BackboneConfig, ours: str, theirs: str) -> dict[str, Rows]:
        """Say where the parameters of a softmax layer lie."""
        shape = HeadShape(heads=backbone.heads, kv_heads=backbone.kv_heads, head_dim=backbone.head_dim)
        counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        rows: dict[str, Rows] = {}
        for name, heads in counts.items():
            rows |= linear(
                f"{ours}.project.{name}",
                f"{theirs}.{name}_proj",
                heads * shape.head_dim,
                backbone.width,
                bias=backbone.qkv_bias,
            )
        rows |= linear(
            f"{ours}.out", f"{theirs}.o_proj", backbone.width, shape.heads * shape.head_dim, bias=backbone.out_bias
        )
        return rows | head_norms(backbone, ours, theirs)


@FAMILIES.register("llama")
class Llama(DenseFamily):
    """Llama, no windows, no norms of queries and keys."""

    model_type, architecture = "llama", "LlamaForCausalLM"

    def own_settings(self, config: Fields) -> dict[str, Any]:
        config.refuse_unless("use_sliding_window", False)
        bias = config.get("attention_bias", bool, False)
        return {"qk_norm": False, "qkv_bias": bias, "out_bias": bias, "mlp_bias": config.get("mlp_bias", bool, False)}

    def own_fields(self, backbone: BackboneConfig) -> dict[str, Any]:
        return {"attention_bias": backbone.out_bias, "mlp_bias": backbone.mlp_bias}


@FAMILIES.register("qwen2")
class Qwen2(DenseFamily):
    """Qwen2 and Qwen2.5: biases of queries, keys and values."""

    model_type, architecture = "qwen2", "Qwen2ForCausalLM"

    def own_settings(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": False, "qkv_bias": True}

    def own_fields(self, backbone: BackboneConfig) -> dict[str, Any]:
        return {}


@FAMILIES.register("qwen3")
class Qwen3(DenseFamily):
    """Qwen3: norms of queries and keys."""

    model_type, architecture = "qwen3", "Qwen3ForCausalLM"

    def own_settings(self, config: Fields) -> dict[str, Any]:
        bias = config.get("attention_bias", bool, False)
        return {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}

    def own_fields(self, backbone: BackboneConfig) -> dict[str, Any]:
        return {"attention_bias": backbone.out_bias}


def windows_of(config: Fields, layers: int) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 for none."""
    window = config.get("sliding_window", int, 0) if config.get("use_sliding_window", bool, False) else 0
    first = config.get("max_window_layers", int, 0)
    default = [WINDOWED if window and layer >= first else FULL for layer in range(layers)]
    kinds = config.get("layer_types", list, default)
    if len(kinds) != layers or not set(kinds) <= {WINDOWED, FULL}:
        raise ValueError(
            f"{config.where}: layer_types={kinds} are not {layers} of '{WINDOWED}' and '{FULL}'; copy the folder again"
        )
    if WINDOWED in kinds and not window:
        raise ValueError(f"{config.where}: layer_types have '{WINDOWED}', but there is no sliding_window in use")
    return tuple(window if kind == WINDOWED else 0 for kind in kinds)


def pattern_of(windows: tuple[int, ...]) -> tuple[SoftmaxConfig, ...]:
    """Return the shortest pattern that repeats to these windows."""
    for length in range(1, len(windows) + 1):
        if all(window == windows[layer % length] for layer, window in enumerate(windows)):
            return tuple(SoftmaxConfig(window=window) for window in windows[:length])
    raise AssertionError("a model has at least one layer")


def window_fields(backbone: BackboneConfig) -> dict[str, Any]:
    """Return the fields of a config.json that say which layers have a window."""
    windows = {getattr(variant, "window", 0) for variant in backbone.variants} - {0}
    if not windows:
        return {}
    if len(windows) > 1:
        raise ValueError(f"windows of {sorted(windows)} tokens in one model; transformers knows one, give all the same")
    kinds = [WINDOWED if variant.window else FULL for variant in backbone.variants]
    return {"use_sliding_window": True, "sliding_window": windows.pop(), "layer_types": kinds}


def ends(decoder: Decoder) -> Iterator[tuple[str, Rows]]:
    """Say where embedding, final norm and head lie."""
    width = decoder.backbone.width
    yield "embedding.weight", Rows.whole("model.embed_tokens.weight", decoder.vocabulary, width)
    yield "backbone.norm.weight", Rows.whole("model.norm.weight", width)
    if not decoder.tied_head:
        yield "head.weight", Rows.whole("lm_head.weight", decoder.vocabulary, width)


def mlp_and_norms(backbone: BackboneConfig, ours: str, theirs: str) -> dict[str, Rows]:
    """Say where a block's MLP and its two norms lie."""
    width, hidden, bias = backbone.width, backbone.mlp_width, backbone.mlp_bias
    rows = {
        f"{ours}.mixer_norm.weight": Rows.whole(f"{theirs}.input_layernorm.weight", width),
        f"{ours}.mlp_norm.weight": Rows.whole(f"{theirs}.post_attention_layernorm.weight", width),
    }
    for name, (outputs, inputs) in {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}.items():
        rows |= linear(f"{ours}.mlp.{name}", f"{theirs}.mlp.{name}_proj", outputs, inputs, bias=bias)
    return rows


def head_norms(backbone: BackboneConfig, ours: str, theirs: str) -> dict[str, Rows]:
    """Say where the norms of queries and keys lie, if there are any."""
    names = "qk" if backbone.qk_norm else ""
    return {
        f"{ours}.norm.{name}.weight": Rows.whole(f"{theirs}.{name}_norm.weight", backbone.head_dim) for name in names
    }


def linear(ours: str, theirs: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, Rows]:
    """Say where a linear map lies."""
    rows = {f"{ours}.weight": Rows.whole(f"{theirs}.weight", outputs, inputs)}
    return rows | ({f"{ours}.bias": Rows.whole(f"{theirs}.bias", outputs)} if bias else {})
