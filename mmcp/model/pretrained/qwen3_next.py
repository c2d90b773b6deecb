"""Qwen3-Next with dense MLPs: gated delta layers between softmax layers with output gates and partly turned heads.

Its fused tensors hold, for each key head in turn, r = value heads / key heads:

    in_proj_qkvz   q [d], k [d], v [r * d], gate [r * d]          in_proj_ba   strength [r], decay [r]
    conv1d         filters of all q, then all k, then all v       q_proj       for each head q [d], gate [d]
"""

from typing import Any

from mmcp.attention import GatedDeltaConfig, SoftmaxConfig
from mmcp.attention.base import HeadShape
from mmcp.model.backbone import BackboneConfig
from mmcp.model.pretrained.dense import FULL, ends, head_norms, linear, mlp_and_norms
from mmcp.model.pretrained.families import FAMILIES, check_shape
from mmcp.model.pretrained.fields import Fields
from mmcp.model.pretrained.rope_fields import positions_read, read_rope, rope_fields
from mmcp.model.pretrained.rows import Decoder, Rows, strided

LINEAR = "linear_attention"
EVERY = 4  # layers to one of full attention, where the file does not say
TURNED_SHARE = 0.25  # of a head that turns, where the file does not say


@FAMILIES.register("qwen3_next")
class Qwen3Next:
    """Gated delta hybrid; its mixtures of experts are refused."""

    ignored = r"mtp\..*|.*\.rotary_emb\.inv_freq"

    def read(self, config: Fields) -> Decoder:
        """Return the decoder that a config.json describes. Raises ValueError for what is not supported."""
        config.refuse_unless("hidden_act", "silu")
        config.refuse_unless("attention_dropout", 0)
        config.refuse_unless("attention_bias", False)
        config.refuse_unless("quantization_config")
        layers = config.get("num_hidden_layers", int)
        _refuse_experts(config, layers)
        head_dim, eps = config.get("head_dim", int), config.get("rms_norm_eps", float)
        backbone = BackboneConfig(
            width=config.get("hidden_size", int),
            layers=layers,
            heads=config.get("num_attention_heads", int),
            kv_heads=config.get("num_key_value_heads", int),
            head_dim=head_dim,
            mlp_width=config.get("intermediate_size", int),
            pattern=_pattern(config, layers, eps),
            norm_eps=eps,
            zero_centred_norms=True,
            init_std=config.get("initializer_range", float, 0.02),
            **read_rope(config, head_dim=head_dim, turned_share=TURNED_SHARE),
        )
        tied = config.get("tie_word_embeddings", bool, False)
        return Decoder(backbone=backbone, vocabulary=config.get("vocab_size", int), tied_head=tied)

    def write(self, decoder: Decoder) -> dict[str, Any]:
        """Return the config.json of a decoder. Raises ValueError when theirs computes another model."""
        backbone = decoder.backbone
        recurrent = [variant for variant in backbone.variants if isinstance(variant, GatedDeltaConfig)]
        if not recurrent:
            raise ValueError("its models have gated delta layers")
        shape = backbone.shape(recurrent[0])
        config = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
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
            "linear_num_value_heads": shape.heads,
            "linear_num_key_heads": shape.kv_heads,
            "linear_key_head_dim": shape.head_dim,
            "linear_value_head_dim": shape.head_dim,
            "linear_conv_kernel_dim": recurrent[0].convolution,
            "layer_types": [LINEAR if isinstance(v, GatedDeltaConfig) else FULL for v in backbone.variants],
            "num_experts": 0,
            **rope_fields(backbone),
        }
        config["rope_parameters"]["partial_rotary_factor"] = backbone.turned / backbone.head_dim
        check_shape(self.read(Fields(config, "model family 'qwen3_next'")), decoder)
        return config

    def rows(self, decoder: Decoder) -> dict[str, Rows]:
        """Say where each parameter of the decoder lies."""
        backbone = decoder.backbone
        rows = dict(ends(decoder))
        for layer, variant in enumerate(backbone.variants):
            block, theirs = f"backbone.blocks.{layer}", f"model.layers.{layer}"
            rows |= mlp_and_norms(backbone, block, theirs)
            if isinstance(variant, GatedDeltaConfig):
                width, taps = backbone.width, variant.convolution
                rows |= _delta(f"{block}.mixer", f"{theirs}.linear_attn", backbone.shape(variant), width, taps)
            else:
                rows |= _softmax(backbone, f"{block}.mixer", f"{theirs}.self_attn")
        return rows


def _refuse_experts(config: Fields, layers: int) -> None:
    """Raise ValueError when a layer's MLP is a mixture of experts."""
    step, dense = config.get("decoder_sparse_step", int, 1), config.get("mlp_only_layers", list, [])
    count = config.get("num_experts", int, 512)
    mixed = [layer for layer in range(layers) if count and layer not in dense and (layer + 1) % step == 0]
    if mixed:
        raise ValueError(
            f"{config.where}: layer {mixed[0]} is a mixture of num_experts={count} experts, which this library does "
            "not have; use a model whose layers are dense (num_experts=0, or all in mlp_only_layers)"
        )


def _pattern(config: Fields, layers: int, eps: float) -> tuple[GatedDeltaConfig | SoftmaxConfig, ...]:
    """Return the attention of each layer."""
    key_dim, value_dim = (config.get(f"linear_{name}_head_dim", int) for name in ("key", "value"))
    if key_dim != value_dim:
        raise ValueError(
            f"{config.where}: linear_key_head_dim={key_dim} and linear_value_head_dim={value_dim} differ, which this "
            "library does not have; use a model with equal ones"
        )
    recurrent = GatedDeltaConfig(
        value_heads=config.get("linear_num_value_heads", int),
        key_heads=config.get("linear_num_key_heads", int),
        head_dim=value_dim,
        convolution=config.get("linear_conv_kernel_dim", int),
        norm_eps=eps,
    )
    variants: dict[str, GatedDeltaConfig | SoftmaxConfig] = {
        LINEAR: recurrent,
        FULL: SoftmaxConfig(output_gate=True),
    }
    every = config.get("full_attention_interval", int, EVERY)
    kinds = config.get("layer_types", list, [LINEAR if (i + 1) % every else FULL for i in range(layers)])
    if len(kinds) != layers or not set(kinds) <= variants.keys():
        raise ValueError(f"{config.where}: layer_types={kinds} are not {layers} of '{LINEAR}' and '{FULL}'")
    return tuple(variants[kind] for kind in kinds)


def _softmax(backbone: BackboneConfig, ours: str, theirs: str) -> dict[str, Rows]:
    width, heads, dim = backbone.width, backbone.heads, backbone.head_dim
    fused = (f"{theirs}.q_proj.weight", (2 * heads * dim, width))
    rows = {
        f"{ours}.project.q.weight": Rows(*fused, strided(0, dim, every=2 * dim, count=heads)),
        f"{ours}.gate.weight": Rows(*fused, strided(dim, dim, every=2 * dim, count=heads)),
    }
    for name in "kv":
        projected = backbone.kv_heads * dim
        rows |= linear(f"{ours}.project.{name}", f"{theirs}.{name}_proj", projected, width, bias=False)
    rows |= linear(f"{ours}.out", f"{theirs}.o_proj", width, heads * dim, bias=False)
    return rows | head_norms(backbone, ours, theirs)


def _delta(ours: str, theirs: str, shape: HeadShape, width: int, taps: int) -> dict[str, Rows]:
    heads, keys, dim = shape.heads, shape.kv_heads, shape.head_dim
    each = heads // keys
    fused, gates = 2 * dim + 2 * each * dim, 2 * each
    starts = {"project.q": (0, dim), "project.k": (dim, dim), "project.v": (2 * dim, each * dim)}
    starts["gate"] = (2 * dim + each * dim, each * dim)
    rows = {
        f"{ours}.{name}.weight": Rows(
            f"{theirs}.in_proj_qkvz.weight", (keys * fused, width), strided(start, length, every=fused, count=keys)
        )
        for name, (start, length) in starts.items()
    }
    rows |= {
        f"{ours}.project.{name}.weight": Rows(
            f"{theirs}.in_proj_ba.weight", (keys * gates, width), strided(start, each, every=gates, count=keys)
        )
        for name, start in (("strength", 0), ("decay", each))
    }
    channels, core = (2 * keys + heads) * dim, f"{ours}.attention.core"
    bounds = {"q": (0, keys * dim), "k": (keys * dim, 2 * keys * dim), "v": (2 * keys * dim, channels)}
    rows |= {
        f"{core}.filters.{name}": Rows(f"{theirs}.conv1d.weight", (channels, 1, taps), (run,))
        for name, run in bounds.items()
    }
    rows |= {
        f"{core}.log_rate": Rows.whole(f"{theirs}.A_log", heads),
        f"{core}.decay_bias": Rows.whole(f"{theirs}.dt_bias", heads),
        f"{core}.norm": Rows.whole(f"{theirs}.norm.weight", dim),
    }
    return rows | linear(f"{ours}.out", f"{theirs}.out_proj", width, heads * dim, bias=False)
