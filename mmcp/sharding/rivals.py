"""The layouts of other systems, each from its public description and priced by the same costs.

Where a system says nothing of encoders or label rows, both follow the tokens: that is what happens in it.
"""

import heapq
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mmcp.sequence import TokenSequence
from mmcp.sharding.blocks import BLOCK, block_costs, block_ranges
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.layout import STRATEGIES, UNCAPPED, Shape, complete, num_ranks
from mmcp.sharding.needs import FREE, Needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges, by_rank, even_bounds, split, union


@STRATEGIES.register("contiguous")
def contiguous(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Cut the tokens into equal runs; a unit is encoded by the owner of its first token, a label scored by its owner.

    What most systems do: even in tokens, uneven in everything else.
    """
    tokens = runs(sequence.num_tokens, num_ranks(mesh))
    return complete(sequence, mesh, costs, strategy="contiguous", tokens=tokens, cap=cap)


@STRATEGIES.register("zigzag")
def zigzag(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Give rank r the r-th run from the front and from the back of the row: even causal work for one document.

    As in Llama 3, Megatron-core and torch's head-tail balancer.
    """
    tokens = head_and_tail(sequence.num_tokens, num_ranks(mesh))
    return complete(sequence, mesh, costs, strategy="zigzag", tokens=tokens, cap=cap)


@STRATEGIES.register("document_zigzag")
def document_zigzag(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Zigzag inside every document, as TransformerEngine and torch do for packed rows, but without their padding."""
    ranks, bounds = num_ranks(mesh), sequence.document_bounds.tolist()
    parts: list[list[Ranges]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(bounds):
        for rank, part in enumerate(head_and_tail(stop - start, ranks)):
            parts[rank].append(tuple((start + low, start + high) for low, high in part))
    tokens = tuple(union(part) for part in parts)
    return complete(sequence, mesh, costs, strategy="document_zigzag", tokens=tokens, cap=cap)


@STRATEGIES.register("striped")
def striped(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Deal tokens one by one: token t to rank t modulo the ranks (Striped Attention, Brandon et al. 2023)."""
    ranks = num_ranks(mesh)
    tokens = by_rank(np.arange(sequence.num_tokens) % ranks, ranks)
    return complete(sequence, mesh, costs, strategy="striped", tokens=tokens, cap=cap)


@STRATEGIES.register("frame_count")
def frame_count(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Cut the list of units into runs of equal number, then cut the tokens anew (LongVILA's two stages)."""
    encode = runs(costs.num_units, num_ranks(mesh))
    tokens = _public_tokens(sequence, mesh)
    return complete(sequence, mesh, costs, strategy="frame_count", tokens=tokens, encode=encode, cap=cap)


@STRATEGIES.register("patch_cost")
def patch_cost(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Cut the list of units into runs of equal p (p + a h), p patches of width h (NeMo Automodel).

    That sum is the encoder's FLOPs up to a factor, so those are taken, with the constants of each encoder.
    """
    middle = np.cumsum(costs.flops) - (costs.flops + 1) // 2
    bounds = np.array(even_bounds(int(costs.flops.sum()), num_ranks(mesh)), dtype=np.int64)
    encode = by_rank(np.searchsorted(bounds[1:-1], middle, side="right"), num_ranks(mesh))
    tokens = _public_tokens(sequence, mesh)
    return complete(sequence, mesh, costs, strategy="patch_cost", tokens=tokens, encode=encode, cap=cap)


@STRATEGIES.register("lpt_blocks")
def lpt_blocks(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Give blocks of 128 tokens, the dearest first, each to the rank with the least work so far (Cornstarch).

    The work of a block is the number of blocks of 32 keys that the mask lets it read; tokens per rank are not bounded.
    """
    work = block_costs(costs.mask.slices, sequence.num_tokens, keys_per_block=32)
    tokens = block_ranges(longest_first(work, num_ranks(mesh)), num_ranks(mesh), sequence.num_tokens)
    return complete(sequence, mesh, costs, strategy="lpt_blocks", tokens=tokens, cap=cap)


@STRATEGIES.register("processing_time")
def processing_time(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Deal blocks of 128 tokens, the dearest first, to the ranks to and fro (torch's processing-time round robin).

    The work of a block is the number of blocks of 128 keys that the mask lets it read.
    """
    ranks = num_ranks(mesh)
    work = block_costs(costs.mask.slices, sequence.num_tokens, keys_per_block=BLOCK)
    dearest_first = np.argsort(-work, kind="stable")
    turn, place = np.divmod(np.arange(len(dearest_first)), ranks)
    owners = np.empty_like(dearest_first)
    owners[dearest_first] = np.where(turn % 2 == 0, place, ranks - 1 - place)
    tokens = block_ranges(owners, ranks, sequence.num_tokens)
    return complete(sequence, mesh, costs, strategy="processing_time", tokens=tokens, cap=cap)


@STRATEGIES.register("whole_video_lpt")
def whole_video_lpt(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Encode each image, picture track and sound track whole on one rank, the dearest first to the least loaded one.

    As VeOmni balances encoders; tokens are cut apart from it.
    """
    ranks = num_ranks(mesh)
    work = np.zeros(int(costs.streams.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(work, costs.streams, costs.flops)
    encode = by_rank(longest_first(work, ranks)[costs.streams], ranks)
    tokens = _public_tokens(sequence, mesh)
    return complete(sequence, mesh, costs, strategy="whole_video_lpt", tokens=tokens, encode=encode, cap=cap)


@STRATEGIES.register("replicate")
def replicate(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Decode and encode everything on every rank, each keeping the rows of its own tokens: nothing is routed.

    What systems do that add context parallelism to the language model alone.
    """
    everything = ((0, costs.num_units),) if costs.num_units else ()
    encode = (everything,) * num_ranks(mesh)
    tokens = _public_tokens(sequence, mesh)
    return complete(sequence, mesh, costs, strategy="replicate", tokens=tokens, encode=encode, cap=cap)


def runs(total: int, parts: int) -> tuple[Ranges, ...]:
    """Cut 0..total into equal runs: runs(5, 2) -> (((0, 2),), ((2, 5),))."""
    return split(((0, total),) if total else (), parts)


def head_and_tail(total: int, parts: int) -> tuple[Ranges, ...]:
    """Cut 0..total into 2 parts runs and join the r-th with the r-th last: (8, 2) -> 0 1 6 7 | 2 3 4 5."""
    chunks = runs(total, 2 * parts)
    return tuple(union([chunks[part], chunks[2 * parts - 1 - part]]) for part in range(parts))


def longest_first(work: np.ndarray, parts: int) -> np.ndarray:
    """Give items, the dearest first, each to the part with the least so far: ([3, 1, 2], 2) -> [0, 1, 1]."""
    owners = np.zeros(len(work), dtype=np.int64)
    loads = [(0, part) for part in range(parts)]
    for item in np.argsort(-work, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        owners[item] = part
        heapq.heappush(loads, (load + int(work[item]), part))
    return owners


def _public_tokens(sequence: TokenSequence, mesh: Shape) -> tuple[Ranges, ...]:
    """Tokens of systems that cut them apart from the media: equal runs under Ulysses, zigzag in a ring."""
    cut: Callable[[int, int], tuple[Ranges, ...]] = runs if mesh[0] == 1 else head_and_tail
    return cut(sequence.num_tokens, num_ranks(mesh))
