"""What one micro-batch moves between ranks, forward and backward, beside what FSDP2 moves: as the recorder books it.

Attention of every layer (mmcp.planning.traffic), rows on their way from encoders to owners and from owners to scorers,
and the loudest sound of each clip. With checkpointing, what a block moves forward it moves again in backward.
"""

from collections import Counter

import numpy as np
import torch

from mmcp.masks import Mask
from mmcp.parallel.collectives import Traffic
from mmcp.planning.architecture import Architecture
from mmcp.planning.traffic import Phases, attention_traffic
from mmcp.sequence import TokenSequence
from mmcp.sharding.plan import ShardPlan

SOUND_BYTES = 4  # of the maximum of one sound track


def layers_traffic(
    architecture: Architecture,
    plan: ShardPlan,
    mask: Mask,
    *,
    rank: int,
    dtype: torch.dtype,
    checkpointing: bool,
) -> Phases:
    """Say what the attention of all layers costs `rank`."""
    settings = architecture.backbone
    phases: Phases = {}
    for variant, count in Counter(settings.variants).items():
        shape = settings.shape(variant)
        moved = attention_traffic(
            variant,
            plan,
            mask,
            rank=rank,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
        for (name, phase), traffic in moved.items():
            _add(phases, name, phase, count * traffic.collectives, count * traffic.bytes)
            if checkpointing and phase == "forward":
                _add(phases, name, "recompute", count * traffic.collectives, count * traffic.bytes)
    return phases


def row_traffic(
    architecture: Architecture,
    sequence: TokenSequence,
    plan: ShardPlan,
    *,
    rank: int,
    dtype: torch.dtype,
    checkpointing: bool,
) -> Phases:
    """Say what forward and backward of one row cost `rank`."""
    mask = Mask.of(sequence)
    phases = layers_traffic(architecture, plan, mask, rank=rank, dtype=dtype, checkpointing=checkpointing)
    if plan.ranks == 1:
        return phases
    row = architecture.backbone.width * dtype.itemsize
    for name, (come, leave) in routed_rows(plan, rank).items():
        _add(phases, name, "forward", 1, come * row)
        _add(phases, name, "backward", 1, leave * row)
    tracks = {
        (segment.document, segment.source, segment.stream)
        for segment in sequence.segments
        if segment.kind == "audio" and segment.units
    }
    if tracks:
        _add(phases, "loudest sound", "forward", 1, (plan.ranks - 1) * len(tracks) * SOUND_BYTES)
    return phases


def routed_rows(plan: ShardPlan, rank: int) -> dict[str, tuple[int, int]]:
    """Rows that come to `rank` from others and that leave it, by the name of the exchange."""
    encoders = np.concatenate([np.full(len(plan.unit_positions(r)), r) for r in range(plan.ranks)])
    owners = plan.owner[np.concatenate([plan.unit_positions(r) for r in range(plan.ranks)])]
    holders = plan.owner[plan.label_positions]
    return {
        "route media": _moved(encoders, owners, rank),
        "route labels": _moved(holders, plan.scorer, rank),
    }


def _moved(source: np.ndarray, target: np.ndarray, rank: int) -> tuple[int, int]:
    moves = source != target
    return int((moves & (target == rank)).sum()), int((moves & (source == rank)).sum())


def total_bytes(phases: Phases, *, phase: str | None = None, name: str | None = None) -> int:
    """Sum bytes over all exchanges, or those of one phase, one name, or both."""
    return sum(t.bytes for (n, p), t in phases.items() if name in (None, n) and phase in (None, p))


def _add(phases: Phases, name: str, phase: str, collectives: int, received: int) -> None:
    entry = phases.setdefault((name, phase), Traffic())
    entry.collectives += collectives
    entry.bytes += received
