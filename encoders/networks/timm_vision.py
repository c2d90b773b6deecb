"""timm's vision models as encoders: their map of features, merged and projected to the model's width.

BatchNorm is frozen in its stored statistics, since a unit's rows must not depend on the units encoded beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import timm
import torch
from einops import rearrange
from safetensors.torch import load_file
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from encoders.networks.layers import FeatureEncoder, Projector, initialise, wide


class TimmVision(FeatureEncoder):
    """Each frame through timm's model; the features of merge x merge places and all frames make one row.

    checkpoint: file with the weights of timm's model; empty draws them
    frames:     the axis of frames of a unit, (f,) for a video, () for an image, which has none
    """

    projector: Projector

    def __init__(self, width: int, *, model: str, checkpoint: str, merge: int, frames: tuple[int, ...]):
        super().__init__()
        self.model, self.merge, self.frames = model, merge, frames
        self.backbone: Any = without_unused(create(model), model)
        if checkpoint:
            load(self.backbone, checkpoint, left_out=unused(model))
        features = prod(frames) * merge**2 * self.backbone.num_features
        self.projector = Projector(features, width, norm=True)
        initialise(self.projector, layers=1)

    def empty(self) -> Tensor:
        """Return a call's input of no units."""
        sides = smallest(self.model, stride(self.model) * self.merge)
        return torch.zeros(0, *self.frames, *sides, 3, dtype=torch.uint8, device=self.projector.first.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """Encode units of one size.

        x: image [n, h, w, 3], video [n, f, h, w, 3] uint8
        returns: [n, rows, frames * merge * merge * c]  row by row of each unit's grid
        """
        rows, columns = places(self.model, *x.shape[-3:-1])
        units, frames, merge = len(x), prod(self.frames), self.merge
        # Not every timm model takes 0 pictures: encode a black one and keep none of it.
        x = x if units else x.new_zeros(1, *x.shape[1:])
        pixels = rearrange(x if x.dim() == 5 else x[:, None], "n f h w c -> (n f) c h w")
        features = self._map(self._normalise(pixels), rows, columns)[: units * frames]
        return rearrange(features, "(n f) (h a) (w b) c -> n (h w) (f a b c)", n=units, f=frames, a=merge, b=merge)

    def _normalise(self, pixels: Tensor) -> Tensor:
        """pixels: [n, 3, h, w] uint8 -> the same in the weights' type, by the mean and deviation timm gives."""
        mean, std = (
            torch.tensor(self.backbone.pretrained_cfg[name], dtype=torch.float64, device=pixels.device)[:, None, None]
            for name in ("mean", "std")
        )
        dtype = self.projector.first.weight.dtype
        precise = wide(dtype)
        return ((pixels.to(precise) / 255 - mean.to(precise)) / std.to(precise)).to(dtype)

    def _map(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """pixels: [n, 3, h, w] -> [n, rows, columns, features], without class and register tokens."""
        features = feature_map(self.backbone, pixels)
        return features if features.dim() == 4 else rearrange(features, "n (h w) c -> n h w c", h=rows, w=columns)


def create(model: str) -> Any:
    """Make a timm model with new weights and no head, for any picture size where timm can.

    Raises ValueError for a name timm does not know.
    """
    if not timm.is_model(model):
        near = ", ".join(timm.list_models(f"*{model.split('_')[0]}*")[:5])
        raise ValueError(f"timm has no model '{model}'; near it are: {near or 'none'} (timm.list_models() lists all)")
    try:
        backbone = timm.create_model(model, pretrained=False, num_classes=0, dynamic_img_size=True)
    except TypeError:  # not a model whose position embeddings timm resizes
        backbone = timm.create_model(model, pretrained=False, num_classes=0)
    return freeze_batch_norm_2d(backbone)


def feature_map(backbone: Any, pixels: Tensor) -> Tensor:
    """pixels: [n, 3, h, w] -> [n, tokens, c] without class and register tokens, or [n, rows, columns, c]."""
    features = backbone.forward_features(pixels)
    if features.dim() == 3:
        return features[:, getattr(backbone, "num_prefix_tokens", 0) :]
    channels_last = getattr(backbone, "output_fmt", "NCHW") == "NHWC"  # timm's Swin family says so
    return features if channels_last else rearrange(features, "n c h w -> n h w c")


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make tensors without memory, and leave torch's generator as it was: asking must not change what is drawn next."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        yield


@cache
def unused(model: str) -> tuple[str, ...]:
    """Name the parts of a model that its map of features does not depend on: those for pooling and classes.

    Raises ValueError when a part is used only partly, since what is not used would never get a gradient.
    """
    with shapes_only():
        backbone = create(model)
        feature_map(backbone, torch.zeros(1, *backbone.pretrained_cfg["input_size"])).sum().backward()
    idle = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    used = {name.split(".")[0] for name, parameter in backbone.named_parameters() if parameter.grad is not None}
    shared = [name for name in idle if "." not in name or name.split(".")[0] in used]
    if shared:
        raise ValueError(f"timm model '{model}' has parameters that its features do not use ({', '.join(shared)})")
    return tuple(sorted({name.split(".")[0] for name in idle}))


def without_unused(backbone: Any, model: str) -> Any:
    """Take out the parts of `unused`."""
    for part in unused(model):
        setattr(backbone, part, nn.Identity())
    return backbone


def load(backbone: Any, path: str, *, left_out: tuple[str, ...]) -> None:
    """Load weights from a local file without unpickling, but for the parts named `left_out` and the old head.

    Raises ValueError naming tensors that are missing, not known or of another shape.
    """
    if not Path(path).is_file():
        raise ValueError(f"encoder checkpoint '{path}' is not a file ({Path(path).resolve()}); give a local file")
    state = (
        load_file(path) if path.endswith(".safetensors") else torch.load(path, map_location="cpu", weights_only=True)
    )
    head = backbone.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in (*left_out, *((head,) if isinstance(head, str) else head)))
    wanted = backbone.state_dict()
    state = {name: value for name, value in state.items() if name in wanted or not name.startswith(heads)}
    differing = sorted(set(wanted) ^ set(state))
    differing += [name for name in wanted if name in state and wanted[name].shape != state[name].shape]
    if differing:
        raise ValueError(
            f"encoder checkpoint '{path}' does not fit the model: {len(differing)} tensors are missing, unknown or of "
            f"another shape, first {', '.join(differing[:5])}; give a file of this very model"
        )
    backbone.load_state_dict(state)


@cache
def stride(model: str) -> int:
    """Pixels along a side of the picture that make one feature."""
    with shapes_only():
        return create(model).feature_info[-1]["reduction"]


@cache
def places(model: str, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of features a model gives for a picture; raises ValueError for a size it does not take."""
    with shapes_only():
        backbone = create(model)
        try:
            features = feature_map(backbone, torch.zeros(1, 3, height, width))
        except (AssertionError, RuntimeError, ValueError) as error:
            only = backbone.pretrained_cfg["input_size"][1:]
            raise ValueError(
                f"timm model '{model}' does not take pictures of {height} x {width} pixels ({error}); "
                f"use {only[0]} x {only[1]}, or a model with dynamic_img_size"
            ) from None
    rows, columns = height // stride(model), width // stride(model)
    found = features.shape[1:-1]
    if tuple(found) not in ((rows, columns), (rows * columns,)):
        raise ValueError(
            f"timm model '{model}' gives {tuple(found)} features for a picture of {height} x {width} pixels where "
            f"{rows} x {columns} are expected; use a model with one feature for each {stride(model)} pixels"
        )
    return rows, columns


@cache
def smallest(model: str, multiple: int) -> tuple[int, int]:
    """Height and width of a small picture the model takes: one row where it can, else its only size."""
    try:
        places(model, multiple, multiple)
        return multiple, multiple
    except ValueError:
        with shapes_only():
            return tuple(create(model).pretrained_cfg["input_size"][1:])


@cache
def measure(model: str, size: tuple[int, ...], *, width: int, merge: int, frames: tuple[int, ...]) -> tuple[int, int]:
    """FLOPs forward of one unit, and how many numbers its forward keeps for its backward, each storage once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    cpu_attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with shapes_only():
        module = TimmVision(width, model=model, checkpoint="", merge=merge, frames=frames)
    with FakeTensorMode():  # a processor's kernels are chosen, nothing is computed
        module._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
        with FlopCounterMode(display=False, custom_mapping=cpu_attention) as flops, saved_tensors_hooks(keep, keep):
            module(torch.zeros(1, *size, 3, dtype=torch.uint8))
    for weight in [*module.parameters(), *module.buffers()]:
        kept.pop(weight.untyped_storage()._cdata, None)
    return flops.get_total_flops(), sum(storage.nbytes() for storage in kept.values()) // 4


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)
