"""The planner against figures that others have published, each with its source, and against transformers' own models.

Run: python -m pytest tests/planning/test_public_figures.py
"""

from dataclasses import replace

import pytest
import torch

from mmcp.attention import GatedDeltaConfig, SoftmaxConfig
from mmcp.masks import Mask
from mmcp.planning.architecture import PUBLIC_SIZES, from_values
from mmcp.planning.choose import Choice, Job, choose, even_plan
from mmcp.planning.devices import find_device
from mmcp.planning.explain import assumptions
from mmcp.planning.memory import MemoryPolicy, Numbers, kept_bytes
from mmcp.planning.share import RowLoad, even_share
from mmcp.planning.step_traffic import total_bytes
from mmcp.planning.traffic import attention_traffic

MILLION, MIB = 1 << 20, 1 << 20
PLAIN = (MemoryPolicy(checkpointing=False), MemoryPolicy(checkpointing=True))
LEAN = (MemoryPolicy(checkpointing=True, offload_optimizer=True, offload_activations=True),)
UNOFFERED = {
    "parameters, gradients and moments on the host",
    "inputs of checkpointed blocks on the host; norms computed 16,384 tokens at a time",
}


def chosen(model: str, tokens: int, devices: int, *, gpu: str = "H100", policies=PLAIN) -> Choice:
    load = RowLoad(tokens=tokens, labels=tokens)
    return choose(
        Job(
            architecture=PUBLIC_SIZES[model],
            load=load,
            mask=Mask.causal([tokens]),
            device=find_device(gpu),
            devices=devices,
        ),
        policies,
    )


def forward_bytes(variant, heads: int, kv_heads: int, ranks: int, *, tokens: int = MILLION) -> int:
    """Bytes that the rank with the most receives in one layer forward, in bfloat16, heads of 128."""
    crosses = variant.mode != "ulysses"
    plan = even_plan(tokens, ring=ranks if crosses else 1, ulysses=1 if crosses else ranks)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "dtype": torch.bfloat16}
    each = [attention_traffic(variant, plan, Mask.causal([tokens]), rank=rank, **sizes) for rank in range(ranks)]
    return max(total_bytes(phases, phase="forward") for phases in each)


def test_activations_of_qwen3_235b_need_more_than_100_gb_with_checkpointing():
    """94 inputs of blocks of 131,072 x 4,096 numbers alone; sizes: config.json of Qwen/Qwen3-235B-A22B."""
    share = even_share(RowLoad(tokens=131_072, labels=0), ring=1, ulysses=1)
    numbers = Numbers(master=4, compute=2)
    kept = kept_bytes(PUBLIC_SIZES["Qwen3-235B-A22B"], share, numbers, checkpointing=True)
    assert kept.activations > 94 * 131_072 * 4_096 * 2 > 100e9


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_ring_moves_less_than_ulysses_below_group_plus_one_ranks(kv_heads, group):
    """(h + k) / (P k) = (g + 1) / P while P <= k; sizes: DeepSpeed Ulysses (2309.14509), ring (2310.01889)."""
    heads = group * kv_heads
    for ranks in (n for n in range(2, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0):
        ring = forward_bytes(SoftmaxConfig(mode="ring"), heads, kv_heads, ranks)
        ulysses = forward_bytes(SoftmaxConfig(), heads, kv_heads, ranks)
        assert (ring < ulysses) == (ranks < group + 1), (ranks, ring, ulysses)


def test_bytes_of_28_query_and_4_key_value_heads_on_8_ranks():
    """Beyond the key-value heads the count decides: every rank reads a whole key-value head."""
    assert forward_bytes(SoftmaxConfig(mode="ring"), 28, 4, 8) == 1_792 * MIB
    tokens, ranks, d, e = MILLION, 8, 128, 2
    received = (tokens - tokens // ranks) * (4 + 2) * d * e + tokens // ranks * (28 - 4) * d * e
    assert forward_bytes(SoftmaxConfig(), 28, 4, 8) == received  # of a rank with 4 query heads
    mean = (tokens // ranks) * (ranks - 1) * (3.5 + 2 + 3.5) * d * e
    assert mean == 2_016 * MIB


@pytest.mark.parametrize("tokens", [1 << 17, MILLION])
def test_28_query_and_4_key_value_heads_on_8_gpus_are_cut_into_ulysses_4_and_ring_2(tokens):
    mesh = chosen("Qwen2.5-7B", tokens, 8, policies=LEAN).best.setting.mesh
    assert (mesh.ring, mesh.ulysses) == (2, 4)


def test_passing_states_beats_trading_heads_beyond_about_a_thousand_tokens_a_rank():
    """Qwen3-Next's layers, 16 key and 32 value heads of 128, on 8 ranks; AI-Hypercomputer/maxtext#5040."""
    variant = GatedDeltaConfig(value_heads=32, key_heads=16, head_dim=128)

    def received(mode: str, per_rank: int) -> int:
        crosses, tokens = mode == "state", 8 * per_rank
        bounds = [(per_rank * rank, per_rank * (rank + 1)) for rank in range(8)]
        plan = even_plan(tokens, ring=8 if crosses else 1, ulysses=1 if crosses else 8)
        plan = replace(plan, tokens=tuple((pair,) for pair in bounds))
        sizes = {"heads": 32, "kv_heads": 16, "head_dim": 128, "dtype": torch.bfloat16}
        mask = Mask.causal([tokens])
        return total_bytes(attention_traffic(replace(variant, mode=mode), plan, mask, rank=3, **sizes), phase="forward")

    crossing = next(n for n in range(64, 4096, 8) if received("state", n) < received("ulysses", n))
    assert 1_000 < crossing < 1_400
    assert received("state", 4096) < received("ulysses", 4096) / 2


@pytest.mark.parametrize(("tokens", "devices"), [(500_000, 1), (3_700_000, 8)])
def test_llama_8b_fits_as_in_alst(tokens, devices):
    """Bekman et al. 2025 (arXiv 2506.13996): 500K tokens on one H100, 3.7M on eight, with both offloads."""
    best = chosen("Llama-3-8B", tokens, devices, policies=LEAN).best
    assert best.fits
    assert {entry.text for entry in assumptions(best.job, best.setting) if not entry.is_offered} >= UNOFFERED
    assert not chosen("Llama-3-8B", tokens, devices).best.fits


def test_two_million_tokens_fit_256_gpus_as_in_longvila():
    """Chen et al. 2024 (arXiv 2408.10188): 2M tokens of an 8B model on 256 GPUs of 80 GB."""
    best = chosen("Llama-3-8B", 2_000_000, 256, gpu="A100", policies=LEAN).best
    assert best.fits
    assert {entry.text for entry in assumptions(best.job, best.setting) if not entry.is_offered} >= UNOFFERED
    assert chosen("Llama-3-8B", 2_000_000, 256, gpu="A100").best.fits  # the paper does without checkpointing too


TRANSFORMERS = {
    "Qwen2.5-7B": ("qwen2", {}),
    "Qwen3-8B": ("qwen3", {}),
    "Llama-3-8B": ("llama", {}),
    "Llama-3-1B": ("llama", {"tie_word_embeddings": True}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parameters_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    size, (model_type, more) = PUBLIC_SIZES[name], TRANSFORMERS[name]
    backbone = size.backbone
    values = {
        "hidden_size": backbone.width,
        "num_hidden_layers": 2,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_heads,
        "head_dim": backbone.head_dim,
        "intermediate_size": backbone.mlp_width,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": size.tied,
        **more,
    }
    read = from_values({"model_type": model_type, **values}, name=name, place="test")
    assert read.backbone == replace(backbone, layers=2)
    assert (read.tied, read.experts, read.active_experts) == (size.tied, size.experts, size.active_experts)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **values))
    assert read.parameters == sum(parameter.numel() for parameter in model.parameters())
