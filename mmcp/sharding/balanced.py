"""Our strategy: decoding, encoding, tokens, attention, label rows and memory even at once, rows routed where needed."""

from mmcp.sequence import TokenSequence
from mmcp.sharding.assign import assign_units
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.layout import STRATEGIES, UNCAPPED, Shape, complete, even_scorers, num_ranks
from mmcp.sharding.needs import FREE, Needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import by_rank, part_of
from mmcp.sharding.ring_tokens import lay_tokens


@STRATEGIES.register("balanced")
def balanced(
    sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
) -> ShardPlan:
    """Even out every cost at once; a unit is encoded near its tokens where that keeps the work even."""
    ranks = num_ranks(mesh)
    tokens = lay_tokens(sequence.document_bounds, mesh, costs, needs)
    encoders = assign_units(costs, tokens, sequence.unit_ranges[:, 0], unit_cap=_unit_cap(costs, ranks, cap))
    scorers = even_scorers(part_of(tokens, sequence.label_positions), ranks)
    encode = by_rank(encoders, ranks)
    return complete(sequence, mesh, costs, strategy="balanced", tokens=tokens, encode=encode, scorers=scorers, cap=cap)


def _unit_cap(costs: RowCosts, ranks: int, cap: int) -> int:
    """Most bytes that the units of a rank may take beside its even share of tokens and label rows."""
    if cap == UNCAPPED:
        return 0
    shares = costs.resident(((),), [-(-costs.num_tokens // ranks)], [-(-costs.num_labels // ranks)])
    return max(1, cap - int(shares[0]))
