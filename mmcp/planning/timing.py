"""Seconds of a step, from FLOPs, bytes and the rates of a device.

A row passes through stages, each as slow as its slowest rank: encoding, the matrix products of blocks, attention with
its exchanges, and the head. Beside them run the gathering of parameters and the reduction of gradients by FSDP2, copies
to the host, and the decoding of the next step; a micro-batch takes the longest of these, and the update follows.

Backward costs twice the FLOPs of forward, checkpointing one forward more. A collective takes the time of its slower
link: inside a node, or between nodes for the share of its bytes that comes from there. What travels round a ring hides
behind the attention to what came before it, but each hop's answer is merged into the one before, at the memory's rate.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from mmcp.attention import AttentionConfig
from mmcp.parallel.mesh import MeshConfig
from mmcp.parallel.modes import MODES
from mmcp.planning.architecture import Architecture
from mmcp.planning.devices import Device
from mmcp.planning.kept import AttentionPlace
from mmcp.planning.memory import MemoryPolicy, Numbers
from mmcp.planning.share import RankShare, RowLoad
from mmcp.planning.traffic import Phases

OVERLAPPED = ("ring keys", "ring gradients")
"""Exchanges that travel under attention."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one micro-batch, by stage; the update once a step."""

    encode: float
    linear: float
    attention: float
    """Attention of all layers, whatever of its exchanges does not hide behind it included."""
    exchange: float
    """Trading of heads, gathered keys, states, routed rows."""
    head: float
    parameters: float
    """Gathering parameters, reducing gradients; beside the stages above."""
    host: float
    """Copies to and from the host; beside them too."""
    decode: float
    """Decoding of the next step; beside them too."""
    update: float

    @property
    def compute(self) -> float:
        """Of the stages that follow each other."""
        return self.encode + self.linear + self.attention + self.exchange + self.head

    def step(self, micro_batches: int) -> float:
        """Of a whole step."""
        return micro_batches * max(self.compute, self.parameters, self.host, self.decode) + self.update

    def as_record(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class Links:
    """How fast bytes come to one device, by the ranks that take part."""

    device: Device
    mesh: MeshConfig

    def seconds(self, received: int, collectives: int, *, ranks: int, stride: int) -> float:
        """Time an all-to-all of `ranks` ranks that are `stride` apart: the slower of the links that it uses."""
        if ranks == 1 or not collectives:
            return 0.0
        near = max(1, min(ranks, self.device.node_size // stride))
        far = received * (ranks - near) / (ranks - 1)
        links = (received - far) / self.device.reached_node_rate, far / self.device.reached_network_rate
        return max(links) + collectives * self.device.latency

    def gather_seconds(self, size: float, ranks: int) -> float:
        """Time the gathering or reduction of `size` bytes over all ranks; a node shares what comes from others."""
        device = self.device
        inside = size * (ranks - 1) / ranks / device.reached_node_rate
        nodes = -(-ranks // device.node_size)
        between = size * (nodes - 1) / nodes / min(ranks, device.node_size) / device.reached_network_rate
        return max(inside, between)


def seconds_of(
    architecture: Architecture,
    load: RowLoad,
    share: RankShare,
    places: list[tuple[AttentionPlace, int, Phases]],
    *,
    mesh: MeshConfig,
    device: Device,
    numbers: Numbers,
    policy: MemoryPolicy,
    encoder_parameters: int = 0,
    decoders: int = 1,
    pairs: Callable[[AttentionConfig], int],
) -> Seconds:
    """Predict the seconds of one micro-batch of one row.

    places: each kind of layer, the number of its layers, and what one of them moves
    pairs: variant -> (query, key) pairs that the row's mask and the variant's window allow
    """
    links, flops = Links(device, mesh), device.reached_flops
    passes = 4 if policy.checkpointing else 3
    attention = exchange = 0.0
    for place, count, phases in places:
        compute = passes * _attention_flops(place, pairs(place.variant)) / flops
        moved, hidden = _exchange_seconds(place, phases, links, again=policy.checkpointing)
        merging = _merge_bytes(place, again=policy.checkpointing) / (device.memory_rate * device.rate_share)
        attention += count * (max(compute, hidden) + merging)
        exchange += count * moved
    linear = sum(count * architecture.block_flops(place.variant) for place, count, _ in places)
    rows = 3 * (share.tokens - share.text_tokens + share.labels) * architecture.backbone.width * numbers.compute
    exchange += links.seconds(rows, 4, ranks=share.cp, stride=1)
    head = 3 * share.labels * 2 * architecture.backbone.width * architecture.vocabulary / flops
    total = architecture.parameters + encoder_parameters
    return Seconds(
        encode=3 * share.encoder_flops / flops,
        linear=passes * share.tokens * linear / flops,
        attention=attention,
        exchange=exchange,
        head=head,
        parameters=_parameter_seconds(total, mesh, links, numbers),
        host=_host_seconds(architecture, share, total, mesh, device, numbers, policy),
        decode=load.decode_ns / 1e9 / decoders / share.cp,
        update=_update_seconds(total, mesh, device, numbers, policy),
    )


def _attention_flops(place: AttentionPlace, pairs: int) -> int:
    """Forward FLOPs of one layer on this rank; along the ring, pairs and tokens are dealt out evenly."""
    variant, d, share = place.variant, place.head_dim, place.share
    groups = share.ring if place.crosses else 1
    own = -(-pairs // groups)
    return place.query * (variant.pair_flops(d) * own + variant.token_flops(d) * place.tokens)


def _merge_bytes(place: AttentionPlace, *, again: bool) -> int:
    """Bytes read and written to merge the answers of a ring's hops, and the gradients that they bring back.

    Per number: the sum is read and written in the wide type, what is added is read; keys and values gathered instead
    are written and read once each way.
    """
    if not place.crosses or place.variant.mode not in ("ring", "allgather"):
        return 0
    e, w, d = place.element, place.wide, place.head_dim
    queries, keys = place.tokens * place.query * d, place.tokens * 2 * place.kv * d
    hops, forwards = place.share.ring - 1, 2 if again else 1
    if place.variant.mode == "ring":
        return hops * (forwards * queries * (2 * w + e) + queries * (2 * w + e) + keys * 3 * w)
    return (hops + 1) * keys * ((forwards + 1) * 2 * e + 4 * w)


def _exchange_seconds(place: AttentionPlace, phases: Phases, links: Links, *, again: bool) -> tuple[float, float]:
    """Seconds of a layer's exchanges that are waited for, and of those that hide behind attention."""
    waited = hidden = 0.0
    share = place.share
    for (name, phase), traffic in phases.items():
        times = 2 if again and phase == "forward" else 1
        trading = name.startswith("ulysses")
        ranks = (share.cp if MODES[place.variant.mode].is_flat else share.ulysses) if trading else share.ring
        stride = 1 if trading else share.ulysses
        seconds = times * links.seconds(traffic.bytes, traffic.collectives, ranks=ranks, stride=stride)
        if name in OVERLAPPED:
            hidden += seconds
        else:
            waited += seconds
    return waited, hidden


def _parameter_seconds(total: int, mesh: MeshConfig, links: Links, numbers: Numbers) -> float:
    """Gather all units forward and backward, sum gradients over the shards, and then over the copies."""
    shards = mesh.dp_shard * mesh.cp
    gathered = 2 * links.gather_seconds(total * numbers.compute, shards)
    reduced = links.gather_seconds(total * numbers.wide, shards)
    copies = 2 * total / shards * numbers.wide * (mesh.dp_replicate - 1) / mesh.dp_replicate
    return gathered + reduced + copies / links.device.reached_network_rate


def _host_seconds(
    architecture: Architecture,
    share: RankShare,
    total: int,
    mesh: MeshConfig,
    device: Device,
    numbers: Numbers,
    policy: MemoryPolicy,
) -> float:
    """Shards come from the host twice and gradients go there; inputs of blocks go and come back."""
    moved = 0.0
    if policy.offload_optimizer:
        moved += total / (mesh.dp_shard * mesh.cp) * (2 * numbers.compute + numbers.wide)
    if policy.offload_activations:
        moved += 2 * architecture.backbone.layers * share.tokens * architecture.backbone.width * numbers.compute
    return moved / device.reached_host_rate


def _update_seconds(total: int, mesh: MeshConfig, device: Device, numbers: Numbers, policy: MemoryPolicy) -> float:
    """Read parameter, gradient and moments, write all but the gradient; on the host at the rate of its link."""
    moved = 7 * total / (mesh.dp_shard * mesh.cp) * numbers.master
    return moved / (device.reached_host_rate if policy.offload_optimizer else device.memory_rate)
