"""The contract of every registered encoder, and the small default against a slow reference.

Compared: rows with `num_tokens`; units together with units alone; FLOPs and kept bytes with what torch counts; the
default vision transformer and sound encoder with loops over patches and heads. Run: pytest tests/encoders
"""

import atexit
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from encoders import ENCODERS, AudioWindows, ImagePatches, ImageTimm, VideoPatches, VideoTimm, Whisper

WIDTH = 24
WHISPER = {
    "model_type": "whisper", "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "num_mel_bins": 8, "max_source_positions": 40,
}  # fmt: skip


@cache
def whisper_folder() -> str:
    """Write a tiny Whisper's encoder with drawn weights; the folder goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="whisper-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "config.json").write_text(json.dumps(WHISPER))
    save_file(drawn_whisper(), Path(folder.name) / "model.safetensors")
    return folder.name


def drawn_whisper() -> dict[str, torch.Tensor]:
    """Draw the tensors of a Whisper encoder, by transformers' names."""
    c, generator = WHISPER["d_model"], torch.Generator().manual_seed(0)
    shapes = {"conv1.weight": (c, 8, 3), "conv1.bias": (c,), "conv2.weight": (c, c, 3), "conv2.bias": (c,),
              "embed_positions.weight": (40, c), "layer_norm.weight": (c,), "layer_norm.bias": (c,)}  # fmt: skip
    for layer in range(WHISPER["encoder_layers"]):
        for name, shape in {
            **{f"self_attn.{p}_proj.weight": (c, c) for p in ("q", "k", "v", "out")},
            **{f"self_attn.{p}_proj.bias": (c,) for p in ("q", "v", "out")},
            **{f"{p}_layer_norm.{end}": (c,) for p in ("self_attn", "final") for end in ("weight", "bias")},
            "fc1.weight": (4 * c, c), "fc1.bias": (4 * c,), "fc2.weight": (c, 4 * c), "fc2.bias": (c,),
        }.items():  # fmt: skip
            shapes[f"layers.{layer}.{name}"] = shape
    return {f"model.encoder.{name}": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


PATCHES = {"patch": 4, "channels": 16, "layers": 2, "heads": 2}
EXAMPLES = [
    (ImagePatches(**PATCHES), [(8, 8), (16, 24)]),
    (VideoPatches(**PATCHES), [(2, 8, 8), (2, 24, 8)]),
    (VideoPatches(frames=1, merge=1, **PATCHES), [(1, 8, 12)]),
    (AudioWindows(bins=8, window=40, frames_per_row=8, channels=16), [(8,), (24,), (40,)]),
    (ImageTimm(model="test_vit"), [(32, 32), (64, 32)]),
    (ImageTimm(model="test_resnet", merge=1), [(64, 32)]),
    (VideoTimm(model="test_vit2", merge=1), [(2, 16, 48)]),
    (Whisper(folder=whisper_folder(), window=40), [(8,), (24,), (40,)]),
]
CASES = [(config, size) for config, sizes in EXAMPLES for size in sizes]
case = pytest.mark.parametrize(("config", "size"), CASES, ids=lambda value: getattr(value, "name", str(value)))


def make(config, dtype=torch.float64):
    torch.manual_seed(0)
    return config.build(WIDTH).to(dtype)


def draw(config, size, units):
    generator = torch.Generator().manual_seed(1)
    if config.kind == "audio":
        return torch.randn(units, config.bins, *size, generator=generator)
    return torch.randint(0, 256, (units, *size, 3), dtype=torch.uint8, generator=generator)


def test_every_encoder_has_an_example():
    assert {config.name for config, _ in EXAMPLES} == set(ENCODERS)


@case
def test_rows_are_as_planned(config, size):
    rows = make(config)(draw(config, size, 3))
    assert rows.shape == (3 * config.num_tokens(size), WIDTH)
    assert config.num_tokens(size) == prod(config.grid(size))


@case
def test_units_do_not_see_each_other(config, size):
    module, x = make(config), draw(config, size, 3)
    alone = torch.cat([module(unit) for unit in x.split(1)])
    torch.testing.assert_close(module(x), alone, rtol=1e-11, atol=1e-11)


@case
def test_every_parameter_gets_a_gradient(config, size):
    module = make(config)
    module(draw(config, size, 2)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert sum(float(parameter.grad.abs().sum()) > 0 for parameter in module.parameters()) > 3


@pytest.mark.parametrize("config", [config for config, _ in EXAMPLES], ids=lambda config: config.name)
def test_a_call_of_no_units_stays_in_the_graph(config):
    module = make(config)
    rows = module(module.empty())
    assert rows.shape == (0, WIDTH)
    rows.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@case
def test_rows_have_the_weights_type(config, size, dtype):
    rows = make(config, dtype)(draw(config, size, 1))
    assert rows.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float64: 0}[dtype]
    exact = make(config)(draw(config, size, 1))
    assert (rows.double() - exact).norm() <= tolerance * exact.norm()


@case
def test_flops_are_those_torch_counts(config, size):
    module, x = make(config, torch.float32), draw(config, size, 1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(x)
    assert config.flops(size, width=WIDTH) == counter.get_total_flops()


@case
def test_kept_bytes_are_near_those_torch_keeps(config, size):
    module, x = make(config, torch.float32), draw(config, size, 8)
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, keep):
        module(x)
    measured = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
    assert config.activation_bytes(size, 4, width=WIDTH) * 8 == pytest.approx(measured, rel=0.05)
    assert config.activation_bytes(size, 2, width=WIDTH) * 2 == config.activation_bytes(size, 4, width=WIDTH)


def layer_norm(x, weights, name):
    x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x, weights, name):
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def reference_block(tokens, weights, name, heads):
    """Apply one pre-norm block to a list of [c]: a loop over queries and heads."""
    channels = len(tokens[0])
    size = channels // heads
    qkv = [linear(layer_norm(x, weights, f"{name}.attention_norm"), weights, f"{name}.attention.qkv") for x in tokens]
    result = []
    for i, x in enumerate(tokens):
        mixed = torch.zeros_like(x)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            q = qkv[i][:channels][own]
            scores = torch.stack([q @ other[channels : 2 * channels][own] for other in qkv]) / size**0.5
            for weight, other in zip(scores.softmax(0), qkv, strict=True):
                mixed[own] += weight * other[2 * channels :][own]
        x = x + linear(mixed, weights, f"{name}.attention.out")
        hidden = gelu(linear(layer_norm(x, weights, f"{name}.mlp_norm"), weights, f"{name}.expand"))
        result.append(x + linear(hidden, weights, f"{name}.contract"))
    return result


def sines(position, channels):
    angles = [position / 10000 ** (2 * i / channels) for i in range(channels // 2)]
    return [0.1 * wave(torch.tensor(angles, dtype=torch.float64)) for wave in (torch.sin, torch.cos)]


def project(features, weights):
    return linear(gelu(linear(features, weights, "projector.first")), weights, "projector.second")


def test_patches_equal_a_loop_over_patches():
    config = VideoPatches(**PATCHES)
    module, x = make(config), draw(config, (2, 16, 8), 1)
    weights, patch, merge = module.state_dict(), config.patch, config.merge
    pixels = x[0].double() / 127.5 - 1
    tokens, where = [], []
    for row in range(16 // patch):
        for column in range(8 // patch):
            square = pixels[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            position = torch.cat([*sines(row, 8), *sines(column, 8)])
            tokens.append(linear(square.flatten(), weights, "embed") + position)
            where.append((row // merge, column // merge))
    for layer in range(config.layers):
        tokens = reference_block(tokens, weights, f"blocks.{layer}", config.heads)
    normed = [layer_norm(token, weights, "norm") for token in tokens]
    rows = []
    for place in sorted(set(where)):
        block = [token for token, other in zip(normed, where, strict=True) if other == place]
        rows.append(project(torch.cat(block), weights))
    torch.testing.assert_close(module(x), torch.stack(rows), rtol=1e-10, atol=1e-10)


def test_windows_equal_a_loop_over_steps():
    config = AudioWindows(bins=6, window=16, frames_per_row=4, channels=8, layers=1, heads=2)
    module, x = make(config), draw(config, (12,), 1)
    weights = module.state_dict()

    def convolve(steps, name, stride):
        padded = [torch.zeros_like(steps[0]), *steps, torch.zeros_like(steps[0])]
        kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return [
            gelu(sum(kernel[:, :, k] @ padded[i + k] for k in range(3)) + bias) for i in range(0, len(steps), stride)
        ]

    steps = convolve(convolve(list(x[0].double().T), "first", 1), "second", 2)
    tokens = [step + torch.cat(sines(i, 8)) for i, step in enumerate(steps)]
    tokens = reference_block(tokens, weights, "blocks.0", config.heads)
    normed = [layer_norm(token, weights, "norm") for token in tokens]
    rows = [project((normed[i] + normed[i + 1]) / 2, weights) for i in range(0, len(normed), 2)]
    torch.testing.assert_close(module(x), torch.stack(rows), rtol=1e-10, atol=1e-10)


def test_planning_needs_no_torch():
    code = "import sys, encoders, encoders.mel; sys.exit(bool({'torch', 'timm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_that_do_not_fit_are_refused_with_the_next_that_does():
    image, video, audio = ImagePatches(**PATCHES), VideoPatches(**PATCHES), AudioWindows()
    with pytest.raises(ValueError, match=r"30 x 17 .* blocks of 8 .* resize it to 32 x 16"):
        image.grid((30, 17))
    with pytest.raises(ValueError, match="resize it to 8 x 8"):
        image.grid((0, 8))
    with pytest.raises(ValueError, match="unit of 3 frames does not fit frames=2"):
        video.grid((3, 16, 16))
    with pytest.raises(ValueError, match="window of 101 mel frames"):
        audio.grid((101,))
    with pytest.raises(ValueError, match="window of 0 mel frames"):
        audio.grid((0,))
    with pytest.raises(ValueError, match="frames_per_row=7"):
        AudioWindows(frames_per_row=7)
    with pytest.raises(ValueError, match="heads=3"):
        replace(image, heads=3)
