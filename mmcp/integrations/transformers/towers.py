"""Vision towers: what a batch's pixels are units of, how a rank encodes its own, what the model is handed instead.

A unit is what a tower encodes independently of everything else: an image, or two frames of a video (one step of its
grid). Each is encoded on one rank; its rows travel to the ranks that hold its tokens, with whatever else the model
takes from the tower at those tokens (DeepStack) in the same columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from mmcp.registry import Registry

TOWERS = Registry("vision tower")


@dataclass(frozen=True, kw_only=True)
class MediaUnit:
    """One unit and where its rows stand."""

    kind: str
    """image or video."""
    start: int
    """First token of the row; its rows are contiguous."""
    num_tokens: int
    key: str
    """Entry of the batch that holds its pixels."""
    rows: tuple[int, int]
    """First and last + 1 row of that entry."""
    step: int
    """Its number among the units of that entry."""
    grid: tuple[int, int, int]
    """Rows along time, height and width, their product num_tokens."""
    size: tuple[int, ...]
    """Shape of what is encoded, in pixels, without channels."""
    patches: tuple[int, int, int] = (1, 1, 1)
    """Patches along time, height and width; what a tower's grid_thw says."""
    at: Fraction = Fraction(0)
    """Seconds on the clip's clock."""
    items: tuple[int, ...] = ()
    decode: tuple[int, int] = (0, 0)
    native: tuple[int, int] = (0, 0)


class Tower(Protocol):
    """What a model's tower answers; register it for a model_type with `@TOWERS.register`."""

    pixel_keys: tuple[str, ...]
    """Entries of a batch that hold pixels: the model's own forward never sees them."""

    def units(self, batch: dict[str, Any], ids: np.ndarray) -> list[MediaUnit]:
        """List the units of a batch in token order.

        ids: [s] int64  of the packed row
        Raises ValueError when placeholders and pixels do not match.
        """

    def pixels(self, batch: dict[str, Any], units: Sequence[MediaUnit]) -> Tensor:
        """Return the pixels of units in their order; without a unit, the least that the tower can run on."""

    def encode(self, pixels: Tensor, units: Sequence[MediaUnit]) -> Tensor:
        """Encode the pixels of units in one call of the tower: [rows, columns], in their order.

        Without a unit the tower still runs, so that its parameters have gradients: [0, columns].
        """

    def outputs(self, rows: Tensor, ids: Tensor, kinds: frozenset[str]) -> dict[str, Any]:
        """Return the model's mm_encoder_outputs for this rank's tokens.

        rows: [m, columns]  of the media tokens held here, ascending   ids: [s/cp]   kinds: in the whole row
        """


@dataclass
class TowerOutput(ModelOutput):
    """What a model is handed in the place of its tower's answer: the rows of this rank's tokens."""

    pooler_output: Any = None
    """As the model's own tower gives it."""
    deepstack_features: list[tuple[Tensor, ...]] | None = None
    """Per layer that adds one: its rows."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the planner knows of one step of a video's grid before it is decoded."""

    at: Fraction
    """Seconds on the clip's clock."""
    frames: tuple[int, ...]
    """Numbers of the frames shown, in display order."""
    decode: tuple[int, int]
    """First and last + 1 frame, in decode order, that a decoder must run through."""
    native: tuple[int, int]
    """Height and width of a decoded frame in pixels."""


class DeferredPixels:
    """Pixels that are decoded only where they are encoded: put it in a batch where pixel_values_videos would be.

    load: numbers of steps, counted over all videos of the batch -> [patches, values] of these, one after the other
    steps: what is known of each
    """

    def __init__(self, load: Callable[[list[int]], Tensor], steps: Sequence[Step]):
        self.load = load
        self.steps = steps


class QwenTower:
    """Qwen2.5-VL and Qwen3-VL: images and videos as patches, merged m x m; frames never see each other.

    Windows of attention lie inside a frame. Qwen3-VL adds one feature per token for each of its first layers
    (DeepStack); they travel as further columns.
    """

    pixel_keys = ("pixel_values", "pixel_values_videos")

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model.base_model
        self.config = model.config
        self.merge = model.config.vision_config.spatial_merge_size
        self.token_ids = {"image": model.config.image_token_id, "video": model.config.video_token_id}

    def units(self, batch: dict[str, Any], ids: np.ndarray) -> list[MediaUnit]:
        """List images, and the steps of videos."""
        found = [unit for kind in ("image", "video") for unit in self._units_of(kind, batch, ids)]
        return sorted(found, key=lambda unit: unit.start)

    def pixels(self, batch: dict[str, Any], units: Sequence[MediaUnit]) -> Tensor:
        """Join the patches of units: [patches, values]."""
        if not units:
            vision = self.config.vision_config
            patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            return torch.zeros(self.merge**2, patch)
        return torch.cat([_pixels_of(batch[key], list(same)) for key, same in groupby(units, lambda unit: unit.key)])

    def encode(self, pixels: Tensor, units: Sequence[MediaUnit]) -> Tensor:
        """Run the tower once: [rows, e * (1 + DeepStack layers)]."""
        grids = [unit.patches for unit in units] or [(1, self.merge, self.merge)]
        device = self.model.visual.patch_embed.proj.weight.device
        out = self.model.get_image_features(pixels.to(device), torch.tensor(grids, device=device), return_dict=True)
        parts = [torch.cat(tuple(out.pooler_output)), *_deepstack(out)]
        return torch.cat(parts, dim=1)[: sum(unit.num_tokens for unit in units)]

    def outputs(self, rows: Tensor, ids: Tensor, kinds: frozenset[str]) -> dict[str, Any]:
        """Give each kind its rows."""
        width = self.config.text_config.hidden_size
        media = (ids == self.token_ids["image"]) | (ids == self.token_ids["video"])
        outputs = {}
        for kind in sorted(kinds):
            chosen = rows[ids[media] == self.token_ids[kind]]
            first, *further = chosen.split(width, dim=1)
            outputs[kind] = TowerOutput(pooler_output=(first,), deepstack_features=[(x,) for x in further])
        return outputs

    def _units_of(self, kind: str, batch: dict[str, Any], ids: np.ndarray) -> list[MediaUnit]:
        key, grid_key = (
            ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
        )
        grids = batch[grid_key].tolist() if batch.get(key) is not None and batch.get(grid_key) is not None else []
        tokens = np.flatnonzero(ids == self.token_ids[kind])
        units: list[MediaUnit] = []
        token = row = 0
        for t, h, w in grids:
            for _ in range(t):
                count = h * w // self.merge**2
                unit = self._unit(kind, key, tokens[token : token + count], row, (h, w), len(units))
                units.append(_with_step(unit, batch[key]))
                token, row = token + count, row + h * w
        if token != len(tokens):
            raise ValueError(
                f"{len(tokens)} {kind} tokens, but {grid_key} {grids} makes {token} rows; both must tell of the same "
                f"{kind}s, and none may be cut off by a maximal length"
            )
        return units

    def _unit(self, kind: str, key: str, tokens: np.ndarray, row: int, size: tuple[int, int], step: int) -> MediaUnit:
        h, w = size
        if len(tokens) * self.merge**2 != h * w or (len(tokens) and tokens[-1] - tokens[0] >= len(tokens)):
            raise ValueError(
                f"the {len(tokens)} tokens of one {kind} frame of {h} x {w} patches are too few or interrupted by "
                "others; placeholders of a frame must stand together"
            )
        patch = self.config.vision_config.patch_size
        return MediaUnit(
            kind=kind,
            start=int(tokens[0]),
            num_tokens=len(tokens),
            key=key,
            rows=(row, row + h * w),
            step=step,
            grid=(1, h // self.merge, w // self.merge),
            size=(self.config.vision_config.temporal_patch_size, h * patch, w * patch),
            patches=(1, h, w),
        )


class GemmaTower:
    """Gemma 3: images of one size, as many tokens each."""

    pixel_keys = ("pixel_values",)

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model.base_model
        self.config = model.config

    def units(self, batch: dict[str, Any], ids: np.ndarray) -> list[MediaUnit]:
        """List the images."""
        count, size = self.config.mm_tokens_per_image, self.config.vision_config.image_size
        pixels = batch.get("pixel_values")
        images = 0 if pixels is None else len(pixels)
        tokens = np.flatnonzero(ids == self.config.image_token_id)
        if len(tokens) != images * count:
            raise ValueError(f"{len(tokens)} image tokens for {images} images of {count} rows each")
        side = int(count**0.5)
        starts = tokens[::count]
        if (tokens[count - 1 :: count] - starts >= count).any():
            raise ValueError("the tokens of an image are interrupted by others; its placeholders must stand together")
        return [
            MediaUnit(
                kind="image",
                start=int(start),
                num_tokens=count,
                key="pixel_values",
                rows=(number, number + 1),
                step=number,
                grid=(1, side, side),
                size=(size, size),
            )
            for number, start in enumerate(starts)
        ]

    def pixels(self, batch: dict[str, Any], units: Sequence[MediaUnit]) -> Tensor:
        """Join the pictures of units: [images, channels, height, width]."""
        vision = self.config.vision_config
        if not units:
            return torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size, dtype=self.model.dtype)
        return _pixels_of(batch["pixel_values"], units)

    def encode(self, pixels: Tensor, units: Sequence[MediaUnit]) -> Tensor:
        """Run the tower and the projector once: [rows, e]."""
        device = next(self.model.vision_tower.parameters()).device
        rows = self.model.get_image_features(pixels.to(device), return_dict=True).pooler_output.flatten(0, 1)
        return rows[: sum(unit.num_tokens for unit in units)]

    def outputs(self, rows: Tensor, ids: Tensor, kinds: frozenset[str]) -> dict[str, Any]:
        """Give the images their rows."""
        return {kind: TowerOutput(pooler_output=rows[None]) for kind in kinds}


for _model_type in ("qwen2_5_vl", "qwen3_vl"):
    TOWERS.register(_model_type)(QwenTower)
TOWERS.register("gemma3")(GemmaTower)


def _pixels_of(pixels: Tensor | DeferredPixels, units: Sequence[MediaUnit]) -> Tensor:
    """[rows, ...]: the pixels of units of one entry, in their order."""
    if isinstance(pixels, DeferredPixels):
        return pixels.load([unit.step for unit in units])
    return torch.cat([pixels[unit.rows[0] : unit.rows[1]] for unit in units])


def _with_step(unit: MediaUnit, pixels: Tensor | DeferredPixels) -> MediaUnit:
    """Add what is known of a unit that has yet to be decoded."""
    if not isinstance(pixels, DeferredPixels):
        return unit
    step = pixels.steps[unit.step]
    return replace(unit, at=step.at, items=step.frames, decode=step.decode, native=step.native)


def _deepstack(out: Any) -> list[Tensor]:
    """[rows, e] for each layer that takes a feature of the tower."""
    return [torch.cat(tuple(feature)) for feature in getattr(out, "deepstack_features", None) or ()]
