"""What attention costs under a layout of tokens: FLOPs of each rank, and time with ring stages hop by hop."""

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.pairs import slowest_hops
from mmcp.sharding.ranges import Ranges, even_bounds, size


def attention_work(costs: RowCosts, groups: tuple[Ranges, ...], ulysses: int) -> tuple[list[int], list[int], int]:
    """Return FLOPs and nanoseconds of each rank, and the nanoseconds that all take, each layer at its slowest.

    groups: per ring index, the tokens that its `ulysses` ranks hold together
    """
    ranks, num_tokens = len(groups) * ulysses, costs.num_tokens
    flops, own_ns, nanoseconds = [0] * ranks, [0] * ranks, 0
    held = [size(group) for group in groups]
    for layer, pairs in zip(costs.model.layers, costs.group_pairs(groups), strict=True):
        is_flat = layer.mode == "ulysses"
        heads = np.diff(even_bounds(layer.heads, ranks if is_flat else ulysses)).tolist()
        by_group = list(zip(pairs.sum(axis=1).tolist(), held, strict=True))
        works = [(int(pairs.sum()), num_tokens)] if is_flat else by_group
        each = [layer.flops(share, *work) for work in works for share in heads]
        hops = slowest_hops(pairs) if layer.mode == "ring" else 0
        slowest = layer.flops(max(heads), hops, max(held)) if layer.mode == "ring" else max(each)
        flops = [before + more for before, more in zip(flops, each, strict=True)]
        own_ns = [before + costs.model.ns(more, layer.stage) for before, more in zip(own_ns, each, strict=True)]
        nanoseconds += costs.model.ns(slowest, layer.stage)
    return flops, own_ns, nanoseconds
