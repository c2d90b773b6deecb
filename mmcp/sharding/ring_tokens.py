"""Tokens of the ring's groups when documents are packed: even at every hop, in few ranges.

Zigzag over the row is even for one document only. Zigzag inside each document is even for any, at two ranges for each
document. Between the two: zigzag the longest documents, and lay the tokens of the others, whose pairs are few and near
the diagonal, in one or two runs a group. The candidate with the least work at its slowest hops wins.
"""

from collections.abc import Iterator

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.needs import Needs
from mmcp.sharding.pairs import slowest_hops
from mmcp.sharding.ranges import Ranges, slice_ranges, split, union

GRADES = 128
"""Work of the slowest hops is compared in steps of an even share over this."""


def lay_tokens(document_bounds: np.ndarray, mesh: tuple[int, int], costs: RowCosts, needs: Needs) -> tuple[Ranges, ...]:
    """Return the tokens of each rank, equal in number within one.

    document_bounds: [documents + 1] int64
    """
    ring, ulysses = mesh
    if ring == 1:
        return split(_whole(document_bounds), ulysses)
    even = sum(_flops(costs, list(costs.pairs))) // ring
    best: tuple[tuple[int, int], tuple[Ranges, ...]] | None = None
    for groups in _candidates(document_bounds, ring, longest=needs.max_ranges * ulysses // 2):
        tokens = tuple(piece for group in groups for piece in split(group, ulysses))
        ranges = max(map(len, tokens))
        hops = [slowest_hops(pairs) for pairs in costs.group_pairs(groups)]
        grade = sum(_flops(costs, hops)) * GRADES // max(1, even)
        if best is None or (ranges <= needs.max_ranges and (grade, ranges) < best[0]):
            best = (grade, ranges), tokens
        if best[0][0] <= GRADES:
            break
    assert best is not None
    return best[1]


def _flops(costs: RowCosts, pairs: list[int]) -> list[int]:
    return [layer.flops(layer.heads, count, 0) for layer, count in zip(costs.model.layers, pairs, strict=True)]


def _candidates(bounds: np.ndarray, ring: int, *, longest: int) -> Iterator[tuple[Ranges, ...]]:
    """Yield layouts of groups: zigzag of the row, runs, and zigzag of more and more of the longest documents."""
    documents = np.argsort(bounds[:-1] - bounds[1:], kind="stable")
    number = 0
    while number <= min(longest, len(documents)):
        chosen = np.sort(documents[:number]).tolist()
        for runs in (2, 1):
            yield _lay(bounds, chosen, ring, runs=runs)
        if len(documents) == 1:
            return
        number = max(number + 1, number * 3 // 2)


def _lay(bounds: np.ndarray, long: list[int], ring: int, *, runs: int) -> tuple[Ranges, ...]:
    """Zigzag each of the documents `long`, and lay the other tokens in `runs` runs a group."""
    zigzagged = [((int(bounds[number]), int(bounds[number + 1])),) for number in long]
    edges = [0, *(edge for part in zigzagged for edge in part[0]), int(bounds[-1])]
    others = tuple((low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high)
    parts: list[list[Ranges]] = [[] for _ in range(ring)]
    turn = 0
    for tokens, count in [*((document, 2) for document in zigzagged), (others, runs)]:
        total = sum(high - low for low, high in tokens)
        shares = np.full(ring, total // ring) + ((np.arange(ring) - turn) % ring < total % ring)
        turn = (turn + total) % ring
        for group, piece in _deal(tokens, shares, count):
            parts[group].append(piece)
    return tuple(union(part) for part in parts)


def _deal(tokens: Ranges, shares: np.ndarray, runs: int) -> Iterator[tuple[int, Ranges]]:
    """Cut tokens into a run a group, or into two, the second ones in reverse: 0 1 2 2 1 0."""
    front = shares // runs
    groups = [*range(len(shares)), *(reversed(range(len(shares))) if runs == 2 else ())]
    lengths = [*front.tolist(), *((shares - front)[::-1].tolist() if runs == 2 else ())]
    start = 0
    for group, length in zip(groups, lengths, strict=True):
        yield group, slice_ranges(tokens, start, start + length)
        start += length


def _whole(bounds: np.ndarray) -> Ranges:
    return ((0, int(bounds[-1])),) if bounds[-1] else ()
