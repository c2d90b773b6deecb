"""Tokens of the ring's groups when documents are packed: even at every hop, in few ranges.

Zigzag over the row is even for one document only. Zigzag inside each document is even for any, at two ranges for each
document. Between the two: zigzag the longest documents, and lay the tokens of the others, whose pairs are few and near
the diagonal, in one or two runs a group, or in several dealt by their work. The candidate with the least work at its
slowest hops wins.
"""

from collections.abc import Iterator

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.needs import Needs
from mmcp.sharding.pairs import slowest_hops
from mmcp.sharding.ranges import Ranges, even_bounds, size, slice_ranges, split, union

DEALT = (2, 3, 4, 6)
"""Runs a group that are dealt by the work inside them."""
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
    for groups in _candidates(document_bounds, costs, ring, longest=needs.max_ranges * ulysses // 2):
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


def _candidates(bounds: np.ndarray, costs: RowCosts, ring: int, *, longest: int) -> Iterator[tuple[Ranges, ...]]:
    """Yield layouts of groups: zigzag of the row, runs, and zigzag of more and more of the longest documents."""
    documents = np.argsort(bounds[:-1] - bounds[1:], kind="stable")
    number = 0
    while number <= min(longest, len(documents)):
        chosen = np.sort(documents[:number]).tolist()
        for runs in (2, 1):
            yield _lay(bounds, chosen, ring, runs=runs)
        if len(documents) == 1:
            return
        for runs in DEALT:
            yield _lay(bounds, chosen, ring, runs=runs, costs=costs)
        number = max(number + 1, number * 3 // 2)


def _lay(
    bounds: np.ndarray, long: list[int], ring: int, *, runs: int, costs: RowCosts | None = None
) -> tuple[Ranges, ...]:
    """Zigzag each of the documents `long`, and lay the other tokens in `runs` runs a group.

    costs: deal these runs by their work; where not given, they lie as they come
    """
    zigzagged = [((int(bounds[number]), int(bounds[number + 1])),) for number in long]
    edges = [0, *(edge for part in zigzagged for edge in part[0]), int(bounds[-1])]
    others = tuple((low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high)
    parts: list[list[Ranges]] = [[] for _ in range(ring)]
    turn = 0
    for tokens in [*zigzagged, others]:
        total = size(tokens)
        shares = np.full(ring, total // ring) + ((np.arange(ring) - turn) % ring < total % ring)
        turn = (turn + total) % ring
        if tokens is not others:
            owners = _to_and_fro(np.arange(2 * ring), ring)
        elif costs is None:
            owners = _to_and_fro(np.arange(runs * ring), ring)
        else:
            owners = _to_and_fro(np.argsort(-_inside(split(tokens, runs * ring), costs), kind="stable"), ring)
        for group, piece in _deal(tokens, shares, owners):
            parts[group].append(piece)
    return tuple(union(part) for part in parts)


def _to_and_fro(order: np.ndarray, ring: int) -> np.ndarray:
    """Deal runs in an order to the groups and back: [0, 1, 2, 3], 2 -> 0 1 1 0, the group of each run."""
    turn, place = np.divmod(np.arange(len(order)), ring)
    owners = np.empty_like(order)
    owners[order] = np.where(turn % 2 == 0, place, ring - 1 - place)
    return owners


def _inside(runs: tuple[Ranges, ...], costs: RowCosts) -> np.ndarray:
    """FLOPs of the pairs inside each run: [runs] int64, in units that fit."""
    pairs = zip(*(np.diag(each).tolist() for each in costs.group_pairs(runs)), strict=True)
    flops = [sum(_flops(costs, list(each))) for each in pairs]
    return np.array([each >> max(0, max(flops).bit_length() - 62) for each in flops], dtype=np.int64)


def _deal(tokens: Ranges, shares: np.ndarray, owners: np.ndarray) -> Iterator[tuple[int, Ranges]]:
    """Cut tokens into runs, one after the other, of which each group gets its share in even parts.

    shares: [ring] int64  tokens of each group;  owners: [runs] int64  the group of each run
    """
    lengths = np.zeros(len(owners), dtype=np.int64)
    for group, share in enumerate(shares.tolist()):
        own = owners == group
        lengths[own] = np.diff(even_bounds(share, int(own.sum())))
    start = 0
    for group, length in zip(owners.tolist(), lengths.tolist(), strict=True):
        yield group, slice_ranges(tokens, start, start + length)
        start += length


def _whole(bounds: np.ndarray) -> Ranges:
    return ((0, int(bounds[-1])),) if bounds[-1] else ()
