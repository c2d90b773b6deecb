"""Whisper's encoder against transformers' on tiny random weights, outputs and gradients, in windows and whole.

Run: pytest tests/encoders/test_whisper.py
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import Whisper

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a tiny Whisper, decoder and all, in several files."""
    path = tmp_path_factory.mktemp("whisper")
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=60, vocab_size=60,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_whole_window_is_theirs(folder, dtype, bound):
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).model.encoder.eval()
    theirs.embed_positions.requires_grad_(True)
    ours = Whisper(folder=str(folder), window=120, frames_per_row=2).build(4).to(dtype)
    x = torch.randn(3, 8, 120, dtype=dtype)
    expected, found = theirs(x).last_hidden_state, ours.features(x)
    assert (found - expected).norm() < bound * expected.norm()
    pull = torch.randn_like(found)
    expected.backward(pull)
    found.backward(pull)
    wanted = dict(theirs.named_parameters())
    scale = torch.stack([parameter.grad.norm() for parameter in wanted.values()]).norm()
    for name, parameter in ours.named_parameters():
        if not name.startswith("projector."):
            error = (parameter.grad - wanted[name].grad).norm()
            assert error < bound * max(wanted[name].grad.norm(), 1e-3 * scale), name


def test_windows_of_a_long_sound_are_each_theirs(folder):
    """Two and a half windows: the whole ones as transformers hears them; rows are means of four steps."""
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).model.encoder.eval()
    config = Whisper(folder=str(folder), window=120)
    module, sound = config.build(4), torch.randn(8, 304)
    whole = sound[:, :240].unflatten(1, (2, 120)).transpose(0, 1)
    expected = theirs(whole).last_hidden_state.unflatten(1, (15, 4)).mean(2)
    torch.testing.assert_close(module.features(whole), expected, rtol=1e-5, atol=1e-5)
    assert module.features(sound[None, :, 240:]).shape == (1, 8, 16)
    assert [config.num_tokens((frames,)) for frames in (120, 120, 64)] == [15, 15, 8]


def test_what_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"window=3000 mel frames.*hears 120 at once"):
        Whisper(folder=str(folder))
    with pytest.raises(ValueError, match="frames_per_row=7"):
        Whisper(folder=str(folder), window=112, frames_per_row=7)
    with pytest.raises(ValueError, match="no Whisper folder"):
        Whisper(folder=str(tmp_path))
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "activation_function": "relu"}))
    with pytest.raises(ValueError, match="activation_function='relu' is not supported"):
        Whisper(folder=str(tmp_path), window=8)
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    weights.pop("model.encoder.layers.1.fc1.bias")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"first layers\.1\.fc1\.bias"):
        Whisper(folder=str(tmp_path), window=8).build(4)
