"""Our strategy: decoding, encoding, tokens, attention, label rows and memory even at once, rows routed where needed."""

import numpy as np

from mmcp.sequence import TokenSequence
from mmcp.sharding.assign import FEW_ROUTED, assign_units, routed_percent
from mmcp.sharding.attention_work import attention_work
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.layout import STRATEGIES, UNCAPPED, Shape, complete, even_scorers, num_ranks
from mmcp.sharding.members import even_bytes, head_and_body, lighten
from mmcp.sharding.needs import FREE, Needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges, by_rank, part_of, union
from mmcp.sharding.ring_tokens import lay_tokens

LONG_HEAD = 8
"""Tokens before the first unit that are this part of the row, or more, may be shared out by themselves."""


@STRATEGIES.register("balanced")
def balanced(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Even out every cost at once; a unit is encoded near its tokens where that keeps the work even."""
    ranks = num_ranks(mesh)
    tokens, encoders, is_plain = _laid(sequence, mesh, costs, needs, unit_cap=_unit_cap(costs, ranks, cap))
    units = np.zeros(ranks, dtype=np.int64)
    np.add.at(units, encoders, costs.bytes)
    share = costs.num_tokens // ranks * costs.model.token_bytes
    if is_plain and int(units.max()) + share > even_bytes(costs, ranks):
        tokens = lighten(costs, tokens, units, mesh[1])
    scorers = even_scorers(part_of(tokens, sequence.label_positions), ranks)
    encode = by_rank(encoders, ranks)
    return complete(sequence, mesh, costs, strategy="balanced", tokens=tokens, encode=encode, scorers=scorers, cap=cap)


def _laid(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs, *, unit_cap: int
) -> tuple[tuple[Ranges, ...], np.ndarray, bool]:
    """Lay tokens and assign units: tokens of each rank, [u] int64 rank of each unit, whether ranks hold one run of
    their group's tokens each."""
    starts = sequence.unit_ranges[:, 0]
    tokens = lay_tokens(sequence.document_bounds, mesh, costs, needs)
    groups = tuple(union(tokens[first : first + mesh[1]]) for first in range(0, len(tokens), mesh[1]))
    uneven_ns = _uneven_attention_ns(costs, groups, mesh[1])
    encoders = assign_units(costs, tokens, starts, unit_cap=unit_cap, uneven_ns=uneven_ns)
    routed = routed_percent(costs, encoders, part_of(tokens, starts))
    if routed <= FEW_ROUTED or int(starts[0]) * LONG_HEAD < costs.num_tokens:
        return tokens, encoders, True
    mixed = head_and_body(groups, mesh[1], int(starts[0]))
    if max(map(len, mixed)) > needs.max_ranges:
        return tokens, encoders, True
    other = assign_units(costs, mixed, starts, unit_cap=unit_cap, uneven_ns=uneven_ns)
    is_better = routed_percent(costs, other, part_of(mixed, starts)) < routed
    return (mixed, other, False) if is_better else (tokens, encoders, True)


def _uneven_attention_ns(costs: RowCosts, groups: tuple[Ranges, ...], ulysses: int) -> int:
    """Nanoseconds that attention takes over its even share; none on a ring of one, whatever the tokens' layout."""
    if len(groups) == 1:
        return 0
    _, own_ns, all_ns = attention_work(costs, groups, ulysses)
    return max(0, all_ns - sum(own_ns) // len(own_ns))


def _unit_cap(costs: RowCosts, ranks: int, cap: int) -> int:
    """Most bytes that the units of a rank may take beside its even share of tokens and label rows."""
    if cap == UNCAPPED:
        return 0
    shares = costs.resident(((),), [-(-costs.num_tokens // ranks)], [-(-costs.num_labels // ranks)])
    return max(1, cap - int(shares[0]))
