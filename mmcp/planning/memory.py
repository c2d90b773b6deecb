"""Bytes of one rank at the moment of a step when it holds the most, by part.

    static        parameters, gradients, optimizer: this rank's shard, and the units that FSDP2 has gathered
    kept          what forward keeps for backward (mmcp.planning.kept), with checkpointing the inputs of blocks and one
                  block in full; the label rows and the gradients that the head has made already; encoders
    working       temporaries: the head's logits, or the dearest part of a block's backward, whichever is more
    media         decoded units of this step and of those prefetched

The most is held where backward begins. Offloaded parts are counted for the host.
"""

from dataclasses import dataclass, fields
from math import ceil

from mmcp.model.gated_product import BLOCK_NUMBERS
from mmcp.planning.architecture import Architecture
from mmcp.planning.kept import AttentionPlace, kept_by_block, place_of
from mmcp.planning.share import RankShare

HEAD_CHUNK = 1024  # label rows whose logits the head makes at a time
TILE = 16384  # tokens that tiled norms work on at a time


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """What is kept, for how long, and where."""

    checkpointing: bool
    """Keep only the input of each block."""
    offload_optimizer: bool = False
    """Shards of parameters, gradients and moments live on the host, as with FSDP2's CPUOffloadPolicy."""
    offload_activations: bool = False
    """Inputs of checkpointed blocks wait on the host, and norms are computed TILE tokens at a time."""
    prefetch: int = 2
    """Steps decoded ahead."""

    def __post_init__(self):
        if self.offload_activations and not self.checkpointing:
            raise ValueError("offload=activations without checkpointing; only the inputs of checkpointed blocks leave")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank; `host` is not on the device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of blocks without attention, and of the rows that enter them."""
    attention: int
    """Inputs and outputs of attention, buffers of exchanges, states."""
    loss: int
    encoder: int
    media: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host

    def as_record(self) -> dict[str, int]:
        """Return the parts on the device and their total."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}
        return {**parts, "total": self.total}


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes of a number, by what it is."""

    master: int
    """Parameters, gradients and moments as they are stored."""
    compute: int
    """Of the computation, and of gathered parameters."""

    @property
    def wide(self) -> int:
        """Partial results."""
        return max(self.compute, 4)


@dataclass(frozen=True, kw_only=True)
class KeptBytes:
    """What one rank keeps between forward and backward: what `saved_tensors_hooks` sees, parameters left out."""

    activations: int
    attention: int
    loss: int
    encoder: int

    @property
    def total(self) -> int:
        return self.activations + self.attention + self.loss + self.encoder


def kept_bytes(architecture: Architecture, share: RankShare, numbers: Numbers, *, checkpointing: bool) -> KeptBytes:
    """Say what forward leaves for backward on one rank; with checkpointing, blocks leave their inputs only."""
    settings, e = architecture.backbone, numbers.compute
    row = share.tokens * settings.width * e
    activations, attention = _entry_bytes(architecture, share, numbers), 0
    if checkpointing:
        activations += (settings.layers - 1) * row  # the first block reads what enters
    else:
        for place, count in _places(architecture, share, e):
            kept = kept_by_block(architecture, place)
            activations += count * kept.tokenwise
            attention += count * kept.attention
    return KeptBytes(
        activations=activations,
        attention=attention,
        loss=(share.labels + architecture.vocabulary) * settings.width * e,
        encoder=share.encoder_bytes,
    )


def _entry_bytes(architecture: Architecture, share: RankShare, numbers: Numbers) -> int:
    """Ids, the rows of text and media and their places, rotary tables, input and scale of the final norm."""
    settings = architecture.backbone
    tables = share.tokens * settings.head_dim * numbers.wide if any(v.rotary for v in settings.variants) else 0
    places = 8 * (share.tokens + share.text_tokens)
    return tables + places + share.tokens * (2 * settings.width * numbers.compute + numbers.wide)


def memory_of(
    architecture: Architecture,
    share: RankShare,
    numbers: Numbers,
    policy: MemoryPolicy,
    *,
    shards: int,
    is_sharded: bool,
    encoder_parameters: int = 0,
    largest_encoder: int = 0,
) -> Memory:
    """Predict the most that a rank holds during a step.

    shards: ranks that share one copy of the parameters      is_sharded: whether FSDP2 holds them
    encoder_parameters, largest_encoder: parameters of all encoders, and of the largest
    """
    kept = kept_bytes(architecture, share, numbers, checkpointing=policy.checkpointing)
    settings, e = architecture.backbone, numbers.compute
    places = _places(architecture, share, e)
    activations, attention, loss, host = kept.activations, kept.attention, kept.loss, 0
    if policy.checkpointing:
        again = max((kept_by_block(architecture, place) for place, _ in places), key=lambda block: block.total)
        activations += again.tokenwise - share.tokens * settings.width * e  # its input is counted already
        attention += again.attention
    if policy.offload_activations:
        row = share.tokens * settings.width * e
        inputs, waiting = settings.layers * row, min(2, settings.layers) * row
        host += inputs
        activations += waiting - inputs
    working = _working(architecture, share, places[-1][0], numbers, tile=TILE if policy.offload_activations else 0)
    dearest = max(working, key=lambda part: working[part])
    activations += working[dearest] if dearest in ("mlp", "norm") else 0
    attention += working[dearest] if dearest == "attention" else 0
    loss += working[dearest] if dearest == "head" else 0
    static = _static(architecture, numbers, policy, shards, is_sharded, encoder_parameters, largest_encoder)
    return Memory(
        **{name: value for name, value in static.items() if name != "host"},
        activations=activations,
        attention=attention,
        loss=loss,
        encoder=kept.encoder,
        media=share.media_bytes * (1 + policy.prefetch),
        host=host + static["host"],
    )


def _places(architecture: Architecture, share: RankShare, element: int) -> list[tuple[AttentionPlace, int]]:
    """Place each kind of layer, with the number of its layers; the last layer's kind is last."""
    counts: dict = {}
    for variant in reversed(architecture.backbone.variants):
        counts[variant] = counts.get(variant, 0) + 1
    listed = [(place_of(architecture, variant, share, element), count) for variant, count in counts.items()]
    return listed[::-1]


def _static(
    architecture: Architecture,
    numbers: Numbers,
    policy: MemoryPolicy,
    shards: int,
    is_sharded: bool,
    encoder_parameters: int,
    largest_encoder: int,
) -> dict[str, int]:
    """Bytes of parameters, gradients and moments.

    FSDP2 keeps the root unit (head, final norm) gathered, and of the others the one at work and the next; a unit's
    gradients are in the type of the computation until they are summed in the wide one.
    """
    total = architecture.parameters + encoder_parameters
    shard = ceil(total / shards) * numbers.master
    if not is_sharded:
        return {"parameters": shard, "gradients": shard, "optimizer": 2 * shard, "host": 0}
    blocks = [architecture.block_parameters(variant) for variant in set(architecture.backbone.variants)]
    unit = max(*blocks, largest_encoder)
    gathered = (architecture.root_parameters + 2 * unit) * numbers.compute
    reducing = unit * (numbers.compute + numbers.wide)
    if policy.offload_optimizer:
        return {"parameters": gathered, "gradients": reducing, "optimizer": 0, "host": 4 * shard}
    return {"parameters": shard + gathered, "gradients": shard + reducing, "optimizer": 2 * shard, "host": 0}


def _working(
    architecture: Architecture, share: RankShare, place: AttentionPlace, numbers: Numbers, *, tile: int
) -> dict[str, int]:
    """Bytes of temporaries by part; when those of a block are there, the input of the final norm is gone.

    head        one chunk of logits in both types and its softmax, the sum of the weight's gradients
    mlp         gradients of output and input, sums of the weights' gradients, five products of a few tokens
    norm        its input normed, and gradients, in the wide type
    attention   gradients of output, q, k, v, and the messages they travel in
    """
    settings, e, w, n = architecture.backbone, numbers.compute, numbers.wide, share.tokens
    rows = min(HEAD_CHUNK, share.labels)
    at_once = min(n, tile) if tile else n
    gone = n * settings.width * e
    return {
        "head": rows * architecture.vocabulary * (e + 2 * w) + architecture.vocabulary * settings.width * w,
        "mlp": settings.width * (2 * n * e + 3 * settings.mlp_width * w) + 5 * BLOCK_NUMBERS * e - gone,
        "norm": n * settings.width * e + at_once * settings.width * 5 * w - gone,
        "attention": _attention_working(place, w) - gone,
    }


def _attention_working(place: AttentionPlace, wide: int) -> int:
    """Bytes of temporaries in the backward of attention, by mode."""
    (heads, kv_heads), d, e, n = place.all_heads, place.head_dim, place.element, place.share.tokens
    here = (place.query + 2 * place.kv) * d
    working = place.tokens * (here + place.query * d) * e + n * heads * d * e
    if place.trades:
        working += place.tokens * here * e + n * (heads + 2 * kv_heads) * d * e
    if place.crosses and place.variant.mode == "ring":
        working += place.tokens * 2 * place.kv * d * (2 * e + 3 * wide)
    if place.crosses and place.variant.mode == "allgather":
        working += place.share.row_tokens * 2 * place.kv * d * (2 * e + 2 * wide)
    return working
