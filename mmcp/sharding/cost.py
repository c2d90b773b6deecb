"""What a row costs: decoding, encoding, per-token work, attention, label rows and memory, from metadata alone.

All costs are integers (FLOPs, nanoseconds, bytes), so a plan made from them is the same in every process. Decoding is
not additive: units shown by one group of pictures share the frames before them, so decoding is priced on spans.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from pydantic import NonNegativeInt

from mmcp.config import config
from mmcp.masks import Mask
from mmcp.sequence import KINDS, TokenSequence
from mmcp.sharding.pairs import group_pairs
from mmcp.sharding.ranges import Ranges, flat


@config
class Rates:
    """What one rank does in a second; measured once on rank 0, stored with the run and kept on resume."""

    flops_per_second: int = 20_000_000_000
    """Floating-point operations a second in the matrix products of the backbone."""
    encode_percent: int = 100
    """Of that rate, what encoders reach."""
    attention_percent: int = 100
    """Of that rate, what attention by pairs of tokens reaches."""
    recurrent_percent: int = 100
    """Of that rate, what attention that hands on a state reaches."""
    loss_percent: int = 100
    """Of that rate, what the head reaches."""
    link_bytes_per_second: int = 1_000_000_000
    """Bytes a second that one rank receives from others."""
    update_ns_per_million: int = 5_000_000
    """Nanoseconds to update a million parameters that a rank keeps."""
    decode_ns_per_megapixel: int = 2_000_000
    """Nanoseconds to decode a megapixel of native video."""
    convert_ns_per_megapixel: int = 1_500_000
    """Nanoseconds to turn a megapixel of a native frame or image into the encoder's input."""
    image_ns_per_megapixel: int = 10_000_000
    """Nanoseconds to decompress a megapixel of an image file."""
    packet_ns: int = 40_000
    """Nanoseconds to decode and resample one packet of sound."""
    seek_ns: int = 2_000_000
    """Nanoseconds to find a safe start."""
    decoders: NonNegativeInt = 1
    """Decoders of a rank that work beside its compute stages; 0: they share its core, and their time adds to theirs."""

    def step_ns(self, decode: int, compute: int) -> int:
        """Step time of so many nanoseconds of decoding and of computing on the slowest rank."""
        return max(decode // self.decoders, compute) if self.decoders else decode + compute

    def percent(self, stage: str) -> int:
        """Return what a stage of STEP_PERCENT reaches of `flops_per_second`, in percent."""
        return {
            "encode": self.encode_percent,
            "linear": 100,
            "attention": self.attention_percent,
            "recurrent": self.recurrent_percent,
            "loss": self.loss_percent,
        }[stage]


DEFAULT_RATES = {
    "cpu": Rates(),
    "cuda": Rates(
        flops_per_second=200_000_000_000_000,
        link_bytes_per_second=50_000_000_000,
        update_ns_per_million=10_000,
        decoders=4,
    ),
}
"""Rates by device type for runs that measured none: one core; a data-centre GPU at about a third of its peak."""

STEP_PERCENT = {"encode": 300, "linear": 300, "attention": 300, "recurrent": 300, "loss": 300}
"""FLOPs of a training step in percent of a stage's forward FLOPs: backward takes twice those of forward."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Forward cost of the attention of `count` equal layers, and how it is spread over ranks."""

    count: int
    """Layers of this kind."""
    heads: int
    """Query heads of one layer."""
    pair_flops: int
    """FLOPs per allowed (query, key) pair and query head: 4 d for softmax attention."""
    token_flops: int
    """FLOPs per token and query head that do not depend on the mask: recurrent layers."""
    window: int = 0
    """Keys a query may look back on, itself included; 0: all."""
    sink: int = 0
    """First keys of a document that stay visible beyond the window."""
    mode: str = "ulysses"
    """A name of mmcp.parallel.modes. `ulysses`: each rank computes some heads of the whole row; the others: some heads
    of the tokens of its ulysses group."""

    @property
    def stage(self) -> str:
        """The entry of STEP_PERCENT that prices these layers."""
        return "attention" if self.pair_flops else "recurrent"

    def flops(self, heads: int, num_pairs: int, num_tokens: int) -> int:
        """Forward FLOPs of these layers for some heads, pairs and tokens."""
        return self.count * heads * (self.pair_flops * num_pairs + self.token_flops * num_tokens)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Integer costs of encoders and backbone; the configs of these supply the numbers and functions."""

    encoder_flops: Mapping[str, Callable[[tuple[int, ...]], int]]
    """By kind: forward FLOPs of one unit of a size."""
    encoder_bytes: Mapping[str, Callable[[tuple[int, ...]], int]]
    """By kind: resident bytes of one unit of a size: input and what the encoder keeps for backward."""
    linear_flops: int
    """Forward FLOPs per token in projections and MLPs, all layers together."""
    layers: tuple[LayerCost, ...]
    """Attention of the backbone, grouped by kind of layer."""
    label_flops: int
    """Forward FLOPs per label row in the head."""
    token_bytes: int
    """Resident bytes per token: what the backbone keeps for backward."""
    label_bytes: int
    """Resident bytes per label row."""
    row_bytes: int
    """Bytes of one embedding row on its way from encoder to owner."""
    call_tokens: int
    """Most rows of one encoder call."""
    rates: Rates
    passes: int = 3
    """Forward passes' worth of FLOPs in a step, as FLOPs a second are counted; what is computed twice counts once."""
    step_percent: Mapping[str, int] = field(default_factory=STEP_PERCENT.copy)
    """By stage: FLOPs that a step really computes, in percent of the forward's."""

    def ns(self, flops: int, stage: str) -> int:
        """Nanoseconds of a training step for `flops` forward FLOPs of a stage; exact integers of any size."""
        percent = self.step_percent[stage]
        return percent * flops * 1_000_000_000 // (self.rates.flops_per_second * self.rates.percent(stage))


@dataclass(frozen=True, eq=False)
class RowCosts:
    """The costs of one row as columns; u is its number of units."""

    model: CostModel
    num_tokens: int
    num_labels: int
    kinds: np.ndarray
    """[u] int64: index of each unit's kind in KINDS."""
    rows: np.ndarray
    """[u] int64: embedding rows of each unit."""
    streams: np.ndarray
    """[u] int64: number of the (source, stream) it is decoded from, by first appearance."""
    spans: np.ndarray
    """[u, 2] int64: first and last + 1 frame or packet to decode, in decode order; equal when there are none."""
    frame_ns: np.ndarray
    """[u] int64: nanoseconds per decoded frame or packet."""
    output_ns: np.ndarray
    """[u] int64: nanoseconds that do not depend on what else is decoded."""
    flops: np.ndarray
    """[u] int64: forward FLOPs of encoding."""
    bytes: np.ndarray
    """[u] int64: resident bytes."""
    mask: Mask
    """Which query may read which key."""

    @property
    def num_units(self) -> int:
        return len(self.flops)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """Per entry of `model.layers`: allowed (query, key) pairs of the row."""
        return tuple(self.mask_of(layer).pairs() if layer.pair_flops else 0 for layer in self.model.layers)

    def group_pairs(self, groups: tuple[Ranges, ...]) -> tuple[np.ndarray, ...]:
        """Per entry of `model.layers`: pairs [ring, ring] between queries of group i and keys of group j."""
        nothing = np.zeros((len(groups), len(groups)), dtype=np.int64)
        return tuple(
            group_pairs(self.mask_of(layer).slices, groups) if layer.pair_flops else nothing
            for layer in self.model.layers
        )

    def mask_of(self, layer: LayerCost) -> Mask:
        return self.mask.with_window(layer.window, layer.sink) if layer.window else self.mask

    def decoding(self, units: np.ndarray, ranks: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Price decoding unit units[i] on ranks[i]: nanoseconds and frames of each rank, both [num_ranks] int64.

        A rank runs through each frame once, however many of its units need it, and seeks where its spans have a gap.
        """
        moving = self.spans[units, 1] > self.spans[units, 0]
        ns = np.zeros(num_ranks, dtype=np.int64)
        frames = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(ns, ranks, self.output_ns[units])
        fresh, seeks, units, ranks = new_frames(self, units[moving], ranks[moving])
        np.add.at(ns, ranks, fresh * self.frame_ns[units] + seeks * self.model.rates.seek_ns)
        video = self.kinds[units] == KINDS.index("video")
        np.add.at(frames, ranks[video], fresh[video])
        return ns, frames

    @cached_property
    def least_decoding(self) -> tuple[int, int]:
        """Nanoseconds and frames of decoding every needed frame of the row once."""
        ns, frames = self.decoding(np.arange(self.num_units), np.zeros(self.num_units, dtype=np.int64), 1)
        return int(ns[0]), int(frames[0])

    @property
    def total_flops(self) -> int:
        """Forward FLOPs of encoding, linear work, attention and label rows, each done once."""
        return (
            int(self.flops.sum())
            + self.num_tokens * self.model.linear_flops
            + self.num_labels * self.model.label_flops
            + self.total_attention_flops
        )

    @property
    def total_attention_flops(self) -> int:
        """Forward FLOPs of attention, all layers and heads."""
        layers = zip(self.model.layers, self.pairs, strict=True)
        return sum(layer.flops(layer.heads, count, self.num_tokens) for layer, count in layers)

    @cached_property
    def compute_ns(self) -> int:
        """Nanoseconds of the compute stages, everything done once on one rank."""
        model = self.model
        attention = sum(
            model.ns(layer.flops(layer.heads, count, self.num_tokens), layer.stage)
            for layer, count in zip(model.layers, self.pairs, strict=True)
        )
        return (
            model.ns(int(self.flops.sum()), "encode")
            + model.ns(self.num_tokens * model.linear_flops, "linear")
            + model.ns(self.num_labels * model.label_flops, "loss")
            + attention
        )

    def least_step_ns(self, ranks: int) -> int:
        """Step time with every stage at its least mean: decoding of the next batch beside the compute stages."""
        return self.model.rates.step_ns(self.least_decoding[0] // ranks, self.compute_ns // ranks)

    def resident(self, units: Sequence[Ranges], tokens: Sequence[int], labels: Sequence[int]) -> np.ndarray:
        """Add up the resident bytes of each rank [ranks] int64: units it decodes, tokens it holds, labels it scores."""
        number, rank = flat(units)
        resident = np.array(tokens, dtype=np.int64) * self.model.token_bytes
        resident += np.array(labels, dtype=np.int64) * self.model.label_bytes
        np.add.at(resident, rank, self.bytes[number])
        return resident

    @property
    def total_bytes(self) -> int:
        """Resident bytes of the row with everything held once."""
        model = self.model
        return int(self.bytes.sum()) + self.num_tokens * model.token_bytes + self.num_labels * model.label_bytes


def row_costs(sequence: TokenSequence, model: CostModel) -> RowCosts:
    """Price one row. Raises ValueError when the model has no encoder for a kind of unit in the row."""
    units = sequence.units
    kinds = [KINDS.index(segment.kind) for segment in sequence.segments for _ in segment.units]
    streams: dict[tuple[str, int], int] = {}
    numbers = [
        streams.setdefault((segment.source, segment.stream), len(streams))
        for segment in sequence.segments
        for _ in segment.units
    ]
    pixels = _column([unit.native[0] * unit.native[1] for unit in units])
    kind = _column(kinds)
    return RowCosts(
        model=model,
        num_tokens=sequence.num_tokens,
        num_labels=len(sequence.label_positions),
        kinds=kind,
        rows=_column([unit.num_tokens for unit in units]),
        streams=_column(numbers),
        spans=np.array([unit.decode for unit in units], dtype=np.int64).reshape(-1, 2),
        frame_ns=_frame_ns(kind, pixels, model.rates),
        output_ns=_output_ns(kind, pixels, _column([len(unit.items) for unit in units]), model.rates),
        flops=_by_size(sequence, model.encoder_flops),
        bytes=_by_size(sequence, model.encoder_bytes),
        mask=Mask.of(sequence),
    )


def new_frames(costs: RowCosts, units: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Say how many frames each unit adds to what its rank decodes anyway: fresh, seeks, units, ranks, reordered.

    Frames 0..4 and 2..6 on one rank: fresh = 4, 2 and seeks = 1, 0; on two ranks: 4, 4 and 1, 1.
    """
    order = np.lexsort((units, costs.spans[units, 0], costs.streams[units], ranks))
    units, ranks = units[order], ranks[order]
    starts, stops = costs.spans[units].T
    streams = costs.streams[units]
    reader = np.cumsum((np.diff(ranks, prepend=-1) != 0) | (np.diff(streams, prepend=-1) != 0))
    shift = reader * (int(stops.max(initial=0)) + 1)  # each reader's frames follow those of the reader before
    reached = np.concatenate([[0], np.maximum.accumulate(stops + shift)[:-1]]) if len(units) else shift
    fresh = np.maximum(stops + shift - np.maximum(reached, starts + shift), 0)
    return fresh, (starts + shift > reached).astype(np.int64), units, ranks


def _by_size(sequence: TokenSequence, function: Mapping[str, Callable[[tuple[int, ...]], int]]) -> np.ndarray:
    """Ask `function` of each kind once per size: [u] int64."""
    known = []
    for unit in np.unique(sequence.unit_sizes, return_index=True)[1].tolist():
        kind = sequence.unit_segment(unit).kind
        if kind not in function:
            raise ValueError(
                f"the row has {kind} units, but the model has encoders for "
                f"{', '.join(sorted(function)) or 'nothing'} only; add an encoder for {kind}"
            )
        known.append(int(function[kind](sequence.units[unit].size)))
    return _column(known)[sequence.unit_sizes]


def _frame_ns(kinds: np.ndarray, pixels: np.ndarray, rates: Rates) -> np.ndarray:
    video = np.maximum(1, pixels * rates.decode_ns_per_megapixel // 1_000_000)
    return np.where(kinds == KINDS.index("audio"), rates.packet_ns, video)


def _output_ns(kinds: np.ndarray, pixels: np.ndarray, items: np.ndarray, rates: Rates) -> np.ndarray:
    video = items * pixels * rates.convert_ns_per_megapixel // 1_000_000
    image = pixels * (rates.image_ns_per_megapixel + rates.convert_ns_per_megapixel) // 1_000_000
    return np.select([kinds == KINDS.index("video"), kinds == KINDS.index("image")], [video, image], 0)


def _column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
