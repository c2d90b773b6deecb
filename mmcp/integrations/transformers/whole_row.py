"""A batch as transformers knows it, read as one packed row as the planner knows it: padding gone, labels shifted."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from mmcp.integrations.transformers.outline import outline
from mmcp.integrations.transformers.towers import MediaUnit, Tower
from mmcp.integrations.transformers.whole_mask import WholeMask
from mmcp.masks import Mask
from mmcp.sequence import NO_LABEL, Segment, TokenSequence, Unit

LOSS_KEYS = ("labels", "shift_labels", "num_items_in_batch")


@dataclass(frozen=True)
class BatchRow(TokenSequence):
    """A row whose labels are given, as transformers' losses take them: any token may be asked for any id."""

    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[s] int64: what each token is to predict, NO_LABEL for nothing."""

    @cached_property
    def labels(self) -> np.ndarray:
        """[s] int64: the given labels."""
        return self.targets

    @cached_property
    def label_positions(self) -> np.ndarray:
        """[labels] int64: positions that carry a given label, ascending."""
        return np.flatnonzero(self.targets != NO_LABEL)


@dataclass(frozen=True, eq=False)
class WholeRow:
    """All that every rank knows of a batch."""

    sequence: BatchRow
    ids: np.ndarray
    """[s] int64: token ids, a placeholder's where media stand."""
    positions: np.ndarray
    """[axes, s]: rotary positions."""
    places: np.ndarray
    """[s] int64: where each token stood in the flattened batch [b * s]."""
    masks: tuple[Mask, ...]
    """Per layer; layers of the same mask share the object."""
    units: tuple[MediaUnit, ...]


def read_batch(model: PreTrainedModel, batch: dict[str, Any], tower: Tower | None, linear: list[bool]) -> WholeRow:
    """Read a batch.

    linear: per layer, whether it reads in order
    Raises ValueError for masks, labels and media that cannot be split, before anything is communicated.
    """
    ids = batch["input_ids"]
    if tower:
        tower.units(batch, ids.reshape(-1).cpu().numpy())  # the model's own code would trip over what this refuses
    hidden_from_model = (*LOSS_KEYS, *(tower.pixel_keys if tower else ()))
    seen = outline(model, {key: value for key, value in batch.items() if key not in hidden_from_model})
    masks = seen.whole_masks(linear, tuple(ids.shape))
    kept = _kept(masks)
    places = np.flatnonzero(kept.reshape(-1))
    targets = _targets(batch, kept)
    assert seen.positions is not None
    axes = seen.positions[None] if seen.positions.ndim == 2 else seen.positions
    positions = axes.expand(len(axes), *ids.shape).reshape(len(axes), -1).cpu().numpy()[:, places]
    row_ids = ids.reshape(-1).cpu().numpy()[places]
    units = tower.units(batch, row_ids) if tower else []
    rows = np.repeat(np.arange(len(kept)), kept.sum(axis=1))
    return WholeRow(
        sequence=BatchRow(tuple(_segments(row_ids, rows, units)), targets[places]),
        ids=row_ids,
        positions=positions,
        places=places,
        masks=_packed_masks(masks),
        units=tuple(units),
    )


def _kept(masks: list[WholeMask | None]) -> np.ndarray:
    """[b, s] bool: tokens that are not padding, for all layers."""
    known = [mask for mask in masks if mask is not None]
    if not known:
        raise ValueError("the model has no layer of softmax attention; its batch cannot be read")
    kept = known[0].kept
    if any(not np.array_equal(mask.kept, kept) for mask in known):
        raise ValueError("layers differ in which tokens are padding; give all of them one attention_mask")
    runs = np.diff(np.pad(kept.astype(np.int8), ((0, 0), (1, 0))), axis=1).clip(min=0).sum(axis=1)
    if len(known) < len(masks) and runs.max(initial=0) > 1:
        raise ValueError(
            "attention_mask has zeros between the tokens of a row, and a layer reads in order; pad before or after "
            "the tokens only"
        )
    return kept


def _packed_masks(masks: list[WholeMask | None]) -> tuple[Mask, ...]:
    packed = {id(mask): mask.packed() for mask in masks if mask is not None}
    first = next(iter(packed.values()))
    in_order = Mask(first.bounds, np.zeros((0, 2), np.int64))
    return tuple(in_order if mask is None else packed[id(mask)] for mask in masks)


def _targets(batch: dict[str, Any], kept: np.ndarray) -> np.ndarray:
    """[b * s] int64: the label each token predicts, shifted on whole rows.

    Raises ValueError when a padding token is asked for one: in transformers it would read nothing and still count.
    """
    if not {"labels", "shift_labels"} & set(batch):
        return np.full(kept.size, NO_LABEL)
    if "shift_labels" in batch:
        shifted = batch["shift_labels"].cpu().numpy()
    else:
        labels: Tensor = batch["labels"]
        shifted = np.pad(labels.cpu().numpy()[:, 1:], ((0, 0), (0, 1)), constant_values=NO_LABEL)
    asked = (shifted != NO_LABEL) & ~kept
    if asked.any():
        row, token = np.argwhere(asked)[0].tolist()
        raise ValueError(
            f"label {shifted[row, token]} of row {row} is predicted by token {token}, which attention_mask says is "
            f"padding; set labels to {NO_LABEL} there and on the first token after left padding, or pad on the right"
        )
    return shifted.reshape(-1).astype(np.int64)


def _segments(ids: np.ndarray, rows: np.ndarray, units: list[MediaUnit]) -> list[Segment]:
    """Cut the row into runs of text and units of media, each in one row of the batch."""
    segments: list[Segment] = []

    def text(start: int, stop: int) -> None:
        cuts = [start, *(start + 1 + np.flatnonzero(np.diff(rows[start:stop]))).tolist(), stop]
        for low, high in pairwise(cuts):
            if low < high:
                segments.append(Segment(kind="text", ids=tuple(ids[low:high].tolist()), document=int(rows[low])))

    at = 0
    for number, unit in enumerate(units):
        text(at, unit.start)
        at = unit.start + unit.num_tokens
        segments.append(
            Segment(kind=unit.kind, source=str(number), units=(_planned(unit),), document=int(rows[unit.start]))
        )
    text(at, len(ids))
    return segments


def _planned(unit: MediaUnit) -> Unit:
    return Unit(
        num_tokens=unit.num_tokens,
        start=unit.at,
        end=unit.at,
        grid=unit.grid,
        size=unit.size,
        items=unit.items,
        decode=unit.decode,
        native=unit.native,
    )
