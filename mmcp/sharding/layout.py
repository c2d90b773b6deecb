"""What every sharding strategy is given and gives: a row, a mesh, costs, needs and a cap in; a plan out."""

from typing import Protocol

import numpy as np

from mmcp.registry import Registry
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.needs import FREE, Needs
from mmcp.sharding.plan import ShardPlan, schedule_calls
from mmcp.sharding.ranges import Ranges, as_ranges, by_rank, part_of, size

UNCAPPED = 0
Shape = tuple[int, int]


class Strategy(Protocol):
    """What STRATEGIES holds."""

    def __call__(
        self, sequence: TokenSequence, mesh: Shape, costs: RowCosts, needs: Needs = FREE, cap: int = UNCAPPED
    ) -> ShardPlan:
        """Split `sequence` over a mesh of (ring, ulysses) ranks, ulysses innermost.

        needs: what the layers ask of a layout; `balanced` meets it, a published layout stays as it was published
        cap: most resident bytes of one rank; UNCAPPED: any number
        Raises ValueError when the mesh has no rank, or a rank of the plan is over the cap.
        """


STRATEGIES = Registry("sharding strategy")


def num_ranks(mesh: Shape) -> int:
    """Count the ranks of a mesh. Raises ValueError when an axis is below 1."""
    ring, ulysses = mesh
    if ring < 1 or ulysses < 1:
        raise ValueError(f"mesh ring={ring} ulysses={ulysses} has no rank; both must be at least 1")
    return ring * ulysses


def complete(
    sequence: TokenSequence,
    mesh: Shape,
    costs: RowCosts,
    *,
    strategy: str,
    tokens: tuple[Ranges, ...],
    encode: tuple[Ranges, ...] | None = None,
    scorers: np.ndarray | None = None,
    cap: int,
) -> ShardPlan:
    """Make the plan of a layout; each unit is decoded where it is encoded.

    tokens: per rank, the global positions it holds
    encode: per rank, the units it encodes; where not given, the rank that holds a unit's first token encodes it
    scorers: [labels] int64  the rank that scores each label row; where not given, the rank that holds it
    Raises ValueError when a rank is over the cap.
    """
    ranks = num_ranks(mesh)
    if encode is None:
        encode = by_rank(part_of(tokens, sequence.unit_ranges[:, 0]), ranks)
    if scorers is None:
        scorers = part_of(tokens, sequence.label_positions)
    plan = ShardPlan(
        strategy=strategy,
        ring=mesh[0],
        ulysses=mesh[1],
        tokens=tokens,
        decode=encode,
        encode=encode,
        scored=by_rank(scorers, ranks),
        calls=tuple(schedule_calls(sequence, units, costs.model.call_tokens) for units in encode),
        unit_ranges=tuple(map(tuple, sequence.unit_ranges.tolist())),
        label_ranges=as_ranges(sequence.label_positions),
    )
    if cap != UNCAPPED:
        _check_cap(plan, costs, cap)
    return plan


def _check_cap(plan: ShardPlan, costs: RowCosts, cap: int) -> None:
    scored = [size(part) for part in plan.scored]
    resident = costs.resident(plan.decode, plan.lengths, scored)
    rank = int(resident.argmax())
    if resident[rank] > cap:
        raise ValueError(
            f"{plan.strategy} puts {int(resident[rank]):,} bytes on rank {rank} of {plan.ranks}, the cap is {cap:,}; "
            f"an even share is {costs.total_bytes // plan.ranks:,}: use more ranks, shorter rows or another strategy"
        )


def even_scorers(owners: np.ndarray, num_ranks: int) -> np.ndarray:
    """Give every rank an even share of the label rows, its own first: even_scorers([1, 1, 1, 1], 2) -> [1, 1, 0, 0].

    owners: [labels] int64  the rank that holds each label row
    Only rows beyond their owner's share move, so no other even split moves fewer.
    """
    held = np.bincount(owners, minlength=num_ranks)
    shares = np.full(num_ranks, len(owners) // num_ranks)
    shares[np.argsort(-held, kind="stable")[: len(owners) % num_ranks]] += 1
    order = np.argsort(owners, kind="stable")
    nth = np.empty_like(owners)
    nth[order] = np.arange(len(owners)) - np.repeat(np.cumsum(held) - held, held)
    scorers = owners.copy()
    scorers[nth >= shares[owners]] = np.repeat(np.arange(num_ranks), np.maximum(shares - held, 0))
    return scorers
