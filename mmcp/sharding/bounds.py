"""What no plan can beat: lower bounds from things that cannot be divided.

A unit is encoded whole, the last unit of a group of pictures needs all frames before it, a label row is scored whole, a
head is computed whole. Each bound is the least that the busiest rank must do of one cost. Costs must be even at the
same time, so some bounds take for granted that another is: they say so.
"""

from dataclasses import dataclass

import numpy as np

from mmcp.sequence import KINDS
from mmcp.sharding.cost import LayerCost, RowCosts
from mmcp.sharding.joint import (
    allowed_flops,
    busiest,
    decoding_beside_encoding,
    groups_of_pictures,
    whole_groups,
)  # fmt: skip
from mmcp.sharding.ranges import even_bounds

EVEN_ENOUGH = (105, 100)
"""What a rank may hold over its even share where the bound of memory rests on it, as a fraction."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least that the busiest rank does, by cost, and the least of the whole row; exact integers."""

    decode_ns: int
    """When no rank encodes more than `allowed_flops`."""
    encoder_flops: int
    linear_flops: int
    attention_flops: int
    label_rows: int
    bytes: int
    """When no rank holds more than EVEN_ENOUGH of its share of the tokens, nor scores more of the label rows."""
    frames: int
    """Video frames that all ranks together decode when no rank encodes more than `allowed_flops`."""
    step_ns: int
    ratios: dict[str, float]
    """Per cost of mmcp.sharding.balance.COSTS: bound / (least total / ranks); 1.0 when there is no such work."""
    makespan: float
    """Bound of the step time over the least step time."""


def lower_bounds(costs: RowCosts, mesh: tuple[int, int]) -> Bounds:
    """Bound every plan of a row over a mesh of (ring, ulysses) ranks."""
    model, ranks = costs.model, mesh[0] * mesh[1]
    least = {
        "decode": (decoding_beside_encoding(costs, ranks), costs.least_decoding[0]),
        "encode": (busiest(costs.flops, int(costs.flops.sum()), ranks), int(costs.flops.sum())),
        "linear": (-(-costs.num_tokens // ranks) * model.linear_flops, costs.num_tokens * model.linear_flops),
        "attention": (_attention_flops(costs, mesh), costs.total_attention_flops),
        "labels": (-(-costs.num_labels // ranks), costs.num_labels),
        "memory": (_bytes(costs, ranks), costs.total_bytes),
    }
    decode, encode, linear, attention, labels, memory = (bound for bound, _ in least.values())
    stages = model.ns(encode, "encode") + model.ns(linear, "linear") + model.ns(labels * model.label_flops, "loss")
    alone = busiest(whole_groups(costs), costs.least_decoding[0], ranks)
    step_ns = model.rates.step_ns(alone, stages + _attention_ns(costs, mesh))
    return Bounds(
        decode_ns=decode,
        encoder_flops=encode,
        linear_flops=linear,
        attention_flops=attention,
        label_rows=labels,
        bytes=memory,
        frames=_frames(costs, ranks),
        step_ns=step_ns,
        ratios={name: bound * ranks / total if total else 1.0 for name, (bound, total) in least.items()},
        makespan=step_ns / costs.least_step_ns(ranks) if costs.least_step_ns(ranks) else 1.0,
    )


def _bytes(costs: RowCosts, ranks: int) -> int:
    """Bound the busiest rank: an even share, or the units that must lie together beside the fewest tokens, or, where
    units are fewer than ranks, an even share of what ranks without units cannot take."""
    most_tokens = -(-costs.num_tokens // ranks) * EVEN_ENOUGH[0] // EVEN_ENOUGH[1]
    fewest_tokens = max(0, costs.num_tokens - (ranks - 1) * most_tokens)
    units = busiest(costs.bytes, int(costs.bytes.sum()), ranks)
    most_labels = -(-costs.num_labels // ranks) * EVEN_ENOUGH[0] // EVEN_ENOUGH[1] + 1
    without = max(0, ranks - costs.num_units)
    elsewhere = without * (most_tokens * costs.model.token_bytes + most_labels * costs.model.label_bytes)
    left = -(-max(0, costs.total_bytes - elsewhere) // (ranks - without)) if ranks > without else 0
    return max(-(-costs.total_bytes // ranks), units + fewest_tokens * costs.model.token_bytes, left)


def _frames(costs: RowCosts, ranks: int) -> int:
    """Bound the video frames of all ranks when none encodes more than is allowed.

    Let the ranks that share a group be sorted by their last unit in it, the latest first. All units after the last one
    of rank j are on the j - 1 ranks before it, so they encode at most j - 1 such shares: that unit comes no earlier.
    """
    share = allowed_flops(costs, ranks) + 1
    order, group = groups_of_pictures(costs)
    order = order[np.lexsort((costs.spans[order, 1], group))]
    is_video = costs.kinds[order] == KINDS.index("video")
    frames, flops = costs.spans[order, 1] - costs.spans[order, 0], costs.flops[order]
    up_to = np.cumsum(flops)
    ends = np.concatenate([np.flatnonzero(np.diff(group)), [len(group) - 1]]) if len(group) else group
    after = up_to[ends][group] - up_to
    last_of = -(-(after + flops) // share) + (after // -share)
    return max(costs.least_decoding[1], int((frames * last_of)[is_video].sum()))


def _attention_flops(costs: RowCosts, mesh: tuple[int, int]) -> int:
    """Bound the busiest rank: its heads of an even share of the pairs and tokens of the groups, or an even share."""
    ring, ulysses = mesh
    flat, grouped = [0] * (ring * ulysses), [0] * ulysses
    for layer, pairs in zip(costs.model.layers, costs.pairs, strict=True):
        by_member = flat if layer.mode == "ulysses" else grouped
        for member, share in enumerate(np.diff(even_bounds(layer.heads, len(by_member))).tolist()):
            by_member[member] += layer.flops(share, pairs, costs.num_tokens)
    return max(max(flat), -(-max(grouped) // ring), -(-costs.total_attention_flops // (ring * ulysses)))


def _attention_ns(costs: RowCosts, mesh: tuple[int, int]) -> int:
    """Bound the time of all attention layers, each of which waits for its slowest rank."""
    layers = zip(costs.model.layers, costs.pairs, strict=True)
    return sum(
        costs.model.ns(_slowest_flops(layer, pairs, costs.num_tokens, mesh), layer.stage) for layer, pairs in layers
    )


def _slowest_flops(layer: LayerCost, pairs: int, num_tokens: int, mesh: tuple[int, int]) -> int:
    ring, ulysses = mesh
    groups, members = (1, ring * ulysses) if layer.mode == "ulysses" else mesh
    return layer.flops(-(-layer.heads // members), -(-pairs // groups), -(-num_tokens // groups))
