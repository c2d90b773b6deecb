"""Blocks of 128 tokens and what they cost under a mask: the grain of the balancers that sort blocks."""

import numpy as np

from mmcp.sharding.ranges import Ranges, overlapping, union

BLOCK = 128


def block_costs(slices: np.ndarray, num_tokens: int, *, keys_per_block: int) -> np.ndarray:
    """Count, for each block of queries, the blocks of keys of which it reads any: [blocks] int64.

    slices: [slices, 6] int64  see Mask.slices
    Causal, 512 tokens: 1 2 3 4 with 128 keys to a block, 4 8 12 16 with 32.
    """
    starts = np.arange(0, num_tokens, BLOCK)
    stops = np.minimum(starts + BLOCK, num_tokens)
    q0, q1, k0, k1, low, high = slices.T
    piece, block = overlapping(starts, stops, q0, q1)
    first_key = np.maximum(k0[piece], np.maximum(q0[piece], starts[block]) + low[piece])
    last_key = np.minimum(k1[piece] - 1, np.minimum(q1[piece], stops[block]) - 1 + high[piece])
    is_read = first_key <= last_key
    block, first = block[is_read], first_key[is_read] // keys_per_block
    after = last_key[is_read] // keys_per_block + 1
    order = np.lexsort((first, block))
    block, first, after = block[order], first[order], after[order]
    shift = block * (num_tokens // keys_per_block + 2)  # keys read by one block follow those of the block before
    reached = np.concatenate([[0], np.maximum.accumulate(after + shift)[:-1]]) if len(block) else shift
    fresh = np.maximum(after + shift - np.maximum(reached, first + shift), 0)
    costs = np.zeros(len(starts), dtype=np.int64)
    np.add.at(costs, block, fresh)
    return costs


def block_ranges(owners: np.ndarray, num_ranks: int, num_tokens: int) -> tuple[Ranges, ...]:
    """Return the tokens of each rank's blocks: [1, 0, 1], 2, 300 -> ((128, 256),), ((0, 128), (256, 300))."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for block, owner in enumerate(owners.tolist()):
        parts[owner].append((block * BLOCK, min((block + 1) * BLOCK, num_tokens)))
    return tuple(union([tuple(part)]) for part in parts)
