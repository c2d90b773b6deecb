"""Folders of transformers read by us, and ours by transformers: logits, all gradients, bits.

In float32 as transformers computes (1e-5), in float64 with its casts to float32 taken out (1e-10). Where transformers'
own float32 gradients are farther than that from its float64 ones, in gated delta layers (2.4e-5, ours 2.5e-6), ours in
float32 are held to the latter.
Run: python -m pytest tests/model/pretrained/test_families.py
"""

import json
from contextlib import ExitStack, nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mmcp.model.pretrained import FAMILIES, ModelFolder, write_folder  # noqa: E402
from tests.attention.rows import relative_error  # noqa: E402
from tests.model.pretrained.families import CASES, casts_taken_out, hidden_states, loaded, peer  # noqa: E402

IDS = torch.randint(0, 50, (41,), generator=torch.Generator().manual_seed(0))


def test_every_family_has_a_case():
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.fixture
def precise(monkeypatch, dtype):
    with casts_taken_out(monkeypatch) if dtype == torch.float64 else nullcontext():
        yield


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_theirs(case, dtype, bound, tmp_path, precise, monkeypatch):
    theirs = peer(case, dtype)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    ours, source = loaded(tmp_path, dtype)
    with ExitStack() as stack:
        if dtype == torch.float32 and CASES[case][0] == "qwen3_next":
            stack.enter_context(casts_taken_out(monkeypatch))
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        expected = theirs(IDS[None]).logits[0]
    hidden = hidden_states(ours, IDS)
    assert relative_error(hidden @ ours.head.weight.T, expected, of=()) < bound

    torch.nn.functional.cross_entropy(expected[:-1], IDS[1:], reduction="sum").backward()
    ours.head(hidden[:-1], IDS[1:]).backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = dict(ours.named_parameters())
    assert {place.name for place in source.rows.values()} == wanted.keys()
    for name, place in source.rows.items():
        rows = torch.cat([wanted[place.name][start:stop] for start, stop in place.runs])
        gradient = parameters[name].grad
        assert relative_error(gradient, rows.reshape(gradient.shape), of=wanted.values()) < bound, name


@pytest.mark.parametrize("case", CASES)
def test_save_load_save_keeps_every_bit_and_transformers_loads_it(case, tmp_path):
    theirs = peer(case, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    for start, end, size in (("theirs", "once", 1 << 30), ("once", "twice", 5000)):
        ours, source = loaded(tmp_path / start, torch.float32)
        weights = ours.state_dict()
        write_folder(
            tmp_path / end, source.decoder, weights.__getitem__, dtype=torch.bfloat16, file_bytes=size
        )  # fmt: skip
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    read = transformers.AutoModelForCausalLM.from_pretrained
    expected = read(tmp_path / "theirs", dtype=torch.bfloat16)(IDS[None]).logits
    for name in ("once", "twice"):
        found = {}
        for file in (tmp_path / name).glob("*.safetensors"):
            found |= load_file(file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        again = read(tmp_path / name, dtype=torch.bfloat16)
        assert type(again) is type(theirs)
        torch.testing.assert_close(again(IDS[None]).logits, expected, rtol=0, atol=0)
        assert ModelFolder.open(tmp_path / name).decoder == source.decoder
    assert len(list((tmp_path / "twice").glob("*.safetensors"))) > 2


def test_dynamic_scaling_of_a_document_does_not_depend_on_its_neighbours(tmp_path):
    peer("llama, dynamic", torch.float64).save_pretrained(tmp_path)
    ours, _ = loaded(tmp_path, torch.float64)
    packed = hidden_states(ours, IDS, [30, 11])
    alone = torch.cat([hidden_states(ours, part) for part in IDS.split([30, 11])])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


def change(folder, **tensors):
    """Replace tensors of a folder's one file; None takes one out."""
    file = folder / "model.safetensors"
    state = {name: value for name, value in {**load_file(file), **tensors}.items() if value is not None}
    save_file(state, file, metadata={"format": "pt"})


def test_tensors_that_differ_are_listed(tmp_path):
    peer("qwen3", torch.float32).save_pretrained(tmp_path)
    change(
        tmp_path,
        **{"model.layers.0.mlp.up_proj.weight": None, "model.layers.1.self_attn.q_proj.weight": torch.zeros(3, 24)},
        surprise=torch.zeros(1),
    )
    with pytest.raises(ValueError) as error:
        ModelFolder.open(tmp_path).check()
    assert "model.layers.0.mlp.up_proj.weight is missing" in str(error.value)
    assert "model.layers.1.self_attn.q_proj.weight is [3, 24], expected [32, 24]" in str(error.value)
    assert "surprise is unknown" in str(error.value)


@pytest.mark.parametrize(
    ("case", "changes", "match"),
    [
        ("qwen3", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported; known: llama, qwen2, qwen3"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; use 'silu'"),
        ("qwen3", {"attention_dropout": 0.1}, r"attention_dropout=0\.1 is not supported"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen3", {"hidden_size": None}, "lacks the field 'hidden_size'"),
        ("qwen3", {"hidden_size": "big"}, "hidden_size='big' is of a type"),
        ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2, "beta": 1}}, "'beta' is not known"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types="),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3_next", {"num_experts": 8}, "layer 0 is a mixture of num_experts=8 experts"),
        ("qwen3_next", {"linear_key_head_dim": 4}, "linear_key_head_dim=4 and linear_value_head_dim=8 differ"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, changes, match, tmp_path):
    peer(case, torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match=match):
        ModelFolder.open(tmp_path)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no model folder.*nowhere"):
        ModelFolder.open(tmp_path / "nowhere")
    peer("llama", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no file model\.safetensors"):
        ModelFolder.open(tmp_path).check()


def test_settings_of_transformers_4_are_read(tmp_path):
    theirs = peer("llama, llama3", torch.float32)
    theirs.save_pretrained(tmp_path)
    wanted = ModelFolder.open(tmp_path).decoder
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(config))
    assert ModelFolder.open(tmp_path).decoder == wanted
