"""The backbone against transformers' Llama, Qwen2 and Qwen3 decoders on tiny random weights: hidden states, gradients.

In float32 as they are (1e-6), in float64 with their casts to float32 taken out (1e-10).
Run: python -m pytest tests/model/test_transformers.py
"""

import pytest
import torch

from mmcp.attention import SoftmaxConfig
from mmcp.masks import Mask
from mmcp.model.backbone import Backbone
from tests.attention.rows import relative_error, row_info
from tests.model.tiny import SIZES, build

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaModel, {"qk_norm": False}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2Model, {"qk_norm": False, "qkv_bias": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model, {"qk_norm": True}),
    "qwen3_window": (transformers.Qwen3Config, transformers.Qwen3Model, {"pattern": (SoftmaxConfig(window=7),)}),
}
NAMES = {
    "mixer_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mixer.project.": "self_attn.{}_proj",
    "mixer.norm.": "self_attn.{}_norm",
    "mixer.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def theirs_of(name: str) -> str:
    """Translate the name of a parameter of ours."""
    for ours, theirs in NAMES.items():
        start = name.find("." + ours)
        if start >= 0:
            tail = name[start + 1 + len(ours) :]
            if "{}" in theirs:
                letter, _, tail = tail.partition(".")
                tail = "." + tail
                theirs = theirs.format(letter)
            return name[:start].replace("blocks", "layers") + "." + theirs + tail
    return name


def peer(family: str, ours: Backbone, dtype: torch.dtype) -> torch.nn.Module:
    config_class, model_class, settings = FAMILIES[family]
    window = settings.get("pattern", (SoftmaxConfig(),))[0].window
    options = {} if not window else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    config = config_class(
        vocab_size=5, hidden_size=SIZES["width"], num_hidden_layers=SIZES["layers"],
        intermediate_size=SIZES["mlp_width"],
        num_attention_heads=SIZES["heads"], num_key_value_heads=SIZES["kv_heads"], head_dim=SIZES["head_dim"],
        rms_norm_eps=1e-6, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = model_class(config).to(dtype)
    weights = {theirs_of(name): value for name, value in ours.state_dict().items()}
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"] and not missing.unexpected_keys
    return model


def without_casts(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the norm and the rotary tables, which compute in float32, by their formulas in float64."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def tables(self, x, position_ids):
        size = SIZES["head_dim"]
        angles = position_ids[..., None] * 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", norm)
        if type(module).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(module), "forward", tables)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_theirs(family, dtype, bound, monkeypatch):
    ours = build(dtype=dtype, **FAMILIES[family][2])
    theirs = peer(family, ours, dtype)
    if dtype == torch.float64:
        without_casts(theirs, monkeypatch)
    hidden = torch.randn(31, SIZES["width"], dtype=dtype)
    out = ours(hidden, torch.arange(31)[None], row_info(Mask.causal([31])))
    expected = theirs(inputs_embeds=hidden[None]).last_hidden_state[0]
    assert relative_error(out, expected, of=()) < bound

    pull = torch.randn_like(out)
    out.backward(pull)
    expected.backward(pull)
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, wanted[theirs_of(name)], of=wanted.values()) < bound, name
