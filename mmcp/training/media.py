"""From decoded units to the planned encoder calls of one rank."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmcp.sequence import TokenSequence
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices
from mmcp.training.kept import KeptUnits, PartlyKept, Store

NOTHING_KEPT = KeptUnits()


class UnitEncoder(Protocol):
    """What is asked of an encoder's module here."""

    def empty(self) -> Tensor:
        """Return a call's input of no units."""


class MediaInputs:
    """Makes encoder inputs of decoded units; every rank of every group makes the same number of calls.

    encoders:   by segment kind; their `empty()` gives an input of 0 units
    finish:     (raw log-mel [n, bins, frames], maximum of each window's clip [n]) -> features; Whisper's last step
    silence:    raw log-mel value of silence, the least there is
    reduce_max: element-wise maximum of a float32 tensor over the ranks that share a row
    store:      keeps features of frozen encoders; None: they are not kept
    """

    def __init__(
        self,
        encoders: Mapping[str, UnitEncoder],
        *,
        finish: Callable[[Tensor, Tensor], Tensor],
        silence: float,
        reduce_max: Callable[[Tensor], Tensor],
        device: torch.device,
        store: Store | None = None,
    ):
        self.encoders = encoders
        self.finish = finish
        self.silence = silence
        self.reduce_max = reduce_max
        self.device = device
        self.store = store

    def calls(
        self,
        sequence: TokenSequence,
        plan: ShardPlan,
        *,
        rank: int,
        arrays: Mapping[int, np.ndarray],
        num_calls: Mapping[str, int],
        void: frozenset[int] = frozenset(),
        kept: KeptUnits = NOTHING_KEPT,
    ) -> list[tuple]:
        """Return this rank's encoder calls for one row, padded with empty ones to `num_calls` of each kind.

        arrays: by unit number; image [h, w, 3] and video [f, h, w, 3] uint8, audio [bins, frames] raw log10 mel power
        void:   documents whose labels do not count; what is missing of their media is blank
        kept:   units whose features are there already, and keys of others
        """
        arrays = {**self._blanks(sequence, plan, rank, {**arrays, **kept.features}, void), **arrays}
        maxima = self._clip_maxima(sequence, arrays, kept) if num_calls.get("audio") else {}
        calls: list[tuple] = []
        for kind in sorted(num_calls):
            own = [as_indices(ranges).tolist() for call_kind, ranges in plan.calls[rank] if call_kind == kind]
            for i in range(num_calls[kind]):
                units = own[i] if i < len(own) else []
                missing = [unit for unit in units if unit not in kept.features]
                x = self._stack(kind, missing, sequence, arrays, maxima) if missing else self._empty(kind)
                calls.append((kind, x, *self._partly_kept(kind, units, arrays, kept)))
        return calls

    def _partly_kept(
        self, kind: str, units: list[int], arrays: Mapping[int, np.ndarray], kept: KeptUnits
    ) -> tuple[PartlyKept, ...]:
        """What completes and keeps the features of a call, if there is anything of the kind."""
        if self.store is None or not any(unit in kept.features or unit in kept.keys for unit in units):
            return ()
        missing = [unit for unit in units if unit not in kept.features]
        return (
            PartlyKept(
                kept=[kept.features.get(unit) for unit in units],
                keys=[kept.keys.get(unit, "") for unit in missing],
                loudest=[float(arrays[unit].max()) if kind == "audio" else 0.0 for unit in missing],
                store=self.store,
            ),
        )

    def blank(self, unit_kind: str, size: tuple[int, ...]) -> np.ndarray:
        """Return a black picture or silence of a unit's size."""
        if unit_kind == "audio":
            return np.full((self._empty("audio").shape[1], *size), self.silence, dtype=np.float32)
        return np.zeros((*size, 3), dtype=np.uint8)

    def _blanks(
        self,
        sequence: TokenSequence,
        plan: ShardPlan,
        rank: int,
        arrays: Mapping[int, np.ndarray],
        void: frozenset[int],
    ) -> dict[int, np.ndarray]:
        """Stand in for what this rank should encode and could not read; nothing that is trained on sees it."""
        missing = [unit for unit in as_indices(plan.encode[rank]).tolist() if unit not in arrays]
        lost = {sequence.unit_segment(unit).document for unit in missing}
        assert lost <= void, f"units of documents {sorted(lost - void)} were neither decoded nor reported as unreadable"
        return {unit: self.blank(sequence.unit_segment(unit).kind, sequence.units[unit].size) for unit in missing}

    def _empty(self, kind: str) -> Tensor:
        return self.encoders[kind].empty().to(self.device)

    def _stack(
        self,
        kind: str,
        units: list[int],
        sequence: TokenSequence,
        arrays: Mapping[int, np.ndarray],
        maxima: dict[tuple, float],
    ) -> Tensor:
        x = torch.from_numpy(np.stack([arrays[unit] for unit in units])).to(self.device)
        if kind != "audio":
            return x
        loudest = torch.tensor([maxima[_clip(sequence, unit)] for unit in units], device=self.device)
        return self.finish(x, loudest)

    def _clip_maxima(
        self, sequence: TokenSequence, arrays: Mapping[int, np.ndarray], kept: KeptUnits
    ) -> dict[tuple, float]:
        """Find the largest raw log-mel value of each sound track of the row, over all ranks."""
        audio = [unit for unit in range(len(sequence.units)) if sequence.unit_segment(unit).kind == "audio"]
        clips = list(dict.fromkeys(_clip(sequence, unit) for unit in audio))
        number = {clip: i for i, clip in enumerate(clips)}
        local = torch.full((len(clips),), self.silence, dtype=torch.float32)
        for unit in audio:
            if unit in arrays or unit in kept.features:
                i = number[_clip(sequence, unit)]
                loudest = kept.loudest[unit] if unit in kept.features else float(arrays[unit].max())
                local[i] = max(local[i].item(), loudest)
        return dict(zip(clips, self.reduce_max(local.to(self.device)).tolist(), strict=True))


def _clip(sequence: TokenSequence, unit: int) -> tuple:
    segment = sequence.unit_segment(unit)
    return segment.document, segment.source, segment.stream


def call_counts(kinds: Iterable[str], count: Callable[[str], int]) -> dict[str, int]:
    """Return how many calls of each kind a micro-batch makes, kinds without one left out."""
    return {kind: number for kind in sorted(kinds) if (number := count(kind))}
