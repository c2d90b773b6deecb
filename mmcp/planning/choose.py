"""Which mesh, modes and memory policy a step should run with: all that can be are priced, the fastest that fits wins.

A row lies on ring x ulysses ranks, rows on dp_replicate x dp_shard groups of them. Layers of one kind share a mode;
their times add up, so that nothing is lost by it. What cannot be (more ranks than heads, more groups than rows) is left
out with the reason it was refused for.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, get_args, get_type_hints

import torch

from mmcp.attention import AttentionConfig
from mmcp.masks import Mask
from mmcp.parallel.mesh import MeshConfig
from mmcp.planning.architecture import Architecture
from mmcp.planning.devices import Device
from mmcp.planning.kept import AttentionPlace, place_of
from mmcp.planning.memory import Memory, MemoryPolicy, Numbers, memory_of
from mmcp.planning.share import RankShare, RowLoad, even_share
from mmcp.planning.step_traffic import total_bytes
from mmcp.planning.timing import Seconds, seconds_of
from mmcp.planning.traffic import Phases, attention_traffic
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import split, union


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What is to be trained, on what."""

    architecture: Architecture
    load: RowLoad
    """One row of a step; all are taken to be like it."""
    mask: Mask
    """Of that row, windows aside."""
    rows: int = 1
    """Rows of a step."""
    device: Device
    devices: int
    dtype: torch.dtype = torch.bfloat16
    """Of the computation; parameters stay in float32, or in float64 with it."""
    encoder_parameters: int = 0
    largest_encoder: int = 0
    decoders: int = 8
    """Decode workers of a rank."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Layouts, traffic and pairs that several settings share."""

    @property
    def numbers(self) -> Numbers:
        return Numbers(master=8 if self.dtype == torch.float64 else 4, compute=self.dtype.itemsize)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: on several ranks, and where it casts them."""
        return self.devices > 1 or self.numbers.compute != self.numbers.master

    def pairs(self, variant: AttentionConfig) -> int:
        """Count the (query, key) pairs of a row that a layer attends to."""
        key = ("pairs", variant.window, getattr(variant, "sink", 0))
        if key not in self.memo:
            self.memo[key] = self.mask.with_window(*key[1:]).pairs() if variant.pair_flops(1) else 0
        return self.memo[key]


@dataclass(frozen=True)
class Setting:
    """One way to run a job."""

    mesh: MeshConfig
    pattern: tuple[AttentionConfig, ...]
    """Attention of the layers, with their modes."""
    policy: MemoryPolicy

    @property
    def modes(self) -> str:
        """The modes of the pattern, each named once."""
        return "+".join(dict.fromkeys(variant.mode for variant in self.pattern))


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a setting takes."""

    job: Job
    setting: Setting
    memory: Memory
    seconds: Seconds
    traffic: dict[tuple[str, str], int]
    """Bytes that the rank with the most receives in a step, by (name of the exchange, phase)."""
    gathered: int
    """Bytes that FSDP2 brings a rank in a step."""

    @property
    def micro_batches(self) -> int:
        return -(-self.job.rows // self.setting.mesh.data)

    @property
    def step_seconds(self) -> float:
        return self.seconds.step(self.micro_batches)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that a rank receives in a step, parameters and gradients included."""
        return sum(self.traffic.values()) + self.gathered

    @property
    def misses(self) -> list[str]:
        """What it does not fit into, in words."""
        device = self.job.device
        over = []
        if self.memory.total > device.memory:
            over.append(f"{self.memory.total / 1e9:.1f} GB a device of {device.memory / 1e9:.0f} GB")
        host = self.memory.host * min(device.node_size, self.job.devices)
        if host > device.host_memory:
            over.append(f"{host / 1e9:.0f} GB a host of {device.host_memory / 1e9:.0f} GB")
        return over

    @property
    def fits(self) -> bool:
        return not self.misses


def predict(job: Job, setting: Setting) -> Prediction:
    """Price one setting. Raises ValueError when it cannot be run."""
    mesh = setting.mesh
    if mesh.data > job.rows:
        raise ValueError(f"{mesh.data} data-parallel groups for {job.rows} rows a step: some would have none")
    architecture = replace(job.architecture, backbone=replace(job.architecture.backbone, pattern=setting.pattern))
    share = even_share(job.load, ring=mesh.ring, ulysses=mesh.ulysses)
    counts = Counter(architecture.backbone.variants)
    places = []
    for variant, count in counts.items():
        place = place_of(architecture, variant, share, job.numbers.compute)
        places.append((place, count, _layer_traffic(job, place, share)))
    memory = memory_of(
        architecture,
        share,
        job.numbers,
        setting.policy,
        shards=mesh.dp_shard * mesh.cp,
        is_sharded=job.is_sharded,
        encoder_parameters=job.encoder_parameters,
        largest_encoder=job.largest_encoder,
    )
    seconds = seconds_of(
        architecture,
        job.load,
        share,
        places,
        mesh=mesh,
        device=job.device,
        numbers=job.numbers,
        policy=setting.policy,
        encoder_parameters=job.encoder_parameters,
        decoders=job.decoders,
        pairs=job.pairs,
    )
    micro_batches = -(-job.rows // mesh.data)
    return Prediction(
        job=job,
        setting=setting,
        memory=memory,
        seconds=seconds,
        traffic=_step_traffic(places, micro_batches, again=setting.policy.checkpointing),
        gathered=micro_batches * _gathered_bytes(job, mesh),
    )


def _layer_traffic(job: Job, place: AttentionPlace, share: RankShare) -> Phases:
    """Say what one layer moves on the rank that receives the most: the first or the last of the zigzag."""
    key = ("traffic", place.variant, share.ring, share.ulysses)
    if key not in job.memo:
        plan = even_plan(job.load.tokens, ring=share.ring, ulysses=share.ulysses)
        heads, kv_heads = place.all_heads
        each = [
            attention_traffic(
                place.variant,
                plan,
                job.mask,
                rank=rank,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=place.head_dim,
                dtype=job.dtype,
            )
            for rank in sorted({share.ulysses - 1, share.cp - 1})
        ]
        job.memo[key] = max(each, key=total_bytes)
    return job.memo[key]


def _step_traffic(places: list[tuple[AttentionPlace, int, Phases]], times: int, *, again: bool) -> dict:
    """Bytes of all layers and micro-batches, by name and phase."""
    moved: Counter[tuple[str, str]] = Counter()
    for _, count, phases in places:
        for (name, phase), traffic in phases.items():
            moved[name, phase] += times * count * traffic.bytes
            if again and phase == "forward":
                moved[name, "recompute"] += times * count * traffic.bytes
    return {key: number for key, number in moved.items() if number}


def _gathered_bytes(job: Job, mesh: MeshConfig) -> int:
    """Bytes that FSDP2 brings a rank in a micro-batch: two gatherings of all units, one reduction."""
    shards = mesh.dp_shard * mesh.cp
    total = job.architecture.parameters + job.encoder_parameters
    return total * (2 * job.numbers.compute + job.numbers.wide) * (shards - 1) // shards


def even_plan(num_tokens: int, *, ring: int, ulysses: int) -> ShardPlan:
    """Lay a row out in zigzag along the ring, evenly inside each group, without units and labels."""
    chunks = split(((0, num_tokens),), 2 * ring)
    groups = [union([chunks[index], chunks[2 * ring - 1 - index]]) for index in range(ring)]
    tokens = tuple(piece for group in groups for piece in split(group, ulysses))
    none: tuple = ((),) * (ring * ulysses)
    return ShardPlan("even", ring, ulysses, tokens, none, none, none, none, (), ())


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """All settings that can run, the best first: those that fit, by time, then the others, by memory."""

    job: Job
    ranked: tuple[Prediction, ...]
    refused: dict[str, str]
    """By setting: why it cannot run."""

    @property
    def best(self) -> Prediction:
        return self.ranked[0]

    @cached_property
    def runners_up(self) -> tuple[Prediction, ...]:
        """The best of each other mesh."""
        seen = {self.best.setting.mesh}
        others = []
        for prediction in self.ranked:
            if prediction.setting.mesh not in seen:
                seen.add(prediction.setting.mesh)
                others.append(prediction)
        return tuple(others)


def choose(job: Job, policies: tuple[MemoryPolicy, ...]) -> Choice:
    """Price every mesh of the devices, with every mode of every kind of layer and every memory policy.

    Raises ValueError when none can run, with the reasons.
    """
    predictions, refused = [], {}
    for mesh in meshes(job.devices, job.rows):
        for pattern in patterns(job.architecture.backbone.pattern, crosses=mesh.ring > 1):
            for policy in policies:
                setting = Setting(mesh, pattern, policy)
                try:
                    predictions.append(predict(job, setting))
                except ValueError as error:
                    refused[_name(setting)] = str(error)
    if not predictions:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        raise ValueError(
            f"--gpus {job.devices} with --rows {job.rows}: nothing can run ({reasons}); use more rows a step, or fewer"
            " devices"
        )
    ranked = sorted(predictions, key=_order)
    return Choice(job=job, ranked=tuple(ranked), refused=refused)


def _order(prediction: Prediction) -> tuple[float, ...]:
    """Those that fit by time, the others by memory; ties by bytes moved, then by the smaller ring."""
    mesh = prediction.setting.mesh
    first = prediction.step_seconds if prediction.fits else prediction.memory.total
    return (float(not prediction.fits), first, prediction.traffic_bytes, mesh.ring, mesh.dp_replicate)


def meshes(devices: int, rows: int) -> Iterator[MeshConfig]:
    """List the meshes of all devices whose data-parallel groups all get a row."""
    for data in _divisors(devices):
        if data > rows:
            break
        for replicate, ring in product(_divisors(data), _divisors(devices // data)):
            yield MeshConfig(
                dp_replicate=replicate, dp_shard=data // replicate, ring=ring, ulysses=devices // data // ring
            )


def patterns(pattern: tuple[AttentionConfig, ...], *, crosses: bool) -> Iterator[tuple[AttentionConfig, ...]]:
    """List the pattern with every mode of every kind of layer; with a ring at least one kind must cross it."""
    kinds = list(dict.fromkeys(with_mode(variant, "ulysses") for variant in pattern))
    possible = [modes_of(kind) if crosses and kind.chunks == 1 else ("ulysses",) for kind in kinds]
    for modes in product(*possible):
        if crosses and set(modes) == {"ulysses"}:
            continue  # the same as all ranks on the Ulysses axis
        mode_of = dict(zip(kinds, modes, strict=True))
        yield tuple(with_mode(variant, mode_of[with_mode(variant, "ulysses")]) for variant in pattern)


def with_mode(variant: AttentionConfig, mode: str) -> AttentionConfig:
    """Return the variant in another mode."""
    settings: Any = variant
    return replace(settings, mode=mode)


def modes_of(variant: AttentionConfig) -> tuple[str, ...]:
    """Return the modes that a variant's config allows."""
    return get_args(get_type_hints(type(variant))["mode"])


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _name(setting: Setting) -> str:
    mesh = setting.mesh
    return f"dp={mesh.dp_replicate}x{mesh.dp_shard} ring={mesh.ring} ulysses={mesh.ulysses} {setting.modes}"
