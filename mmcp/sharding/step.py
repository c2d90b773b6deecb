"""One optimizer step: an ordered list of packed rows, each with its plan, dealt to the data-parallel groups."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmcp.sequence import TokenSequence
from mmcp.sharding.deal import deal
from mmcp.sharding.plan import ShardPlan

EMPTY_ROW = TokenSequence(())


@dataclass(frozen=True)
class StepPlan:
    """What every rank of every group does in one optimizer step; the same bytes on all of them.

    Group g runs its rows one after the other, each as one micro-batch over its context-parallel ranks. All groups run
    the same number of micro-batches, and in micro-batch m all ranks make the same encoder calls, since sharded
    parameters are gathered in each: a group without a row left runs an empty one.
    """

    rows: tuple[TokenSequence, ...]
    """The global batch in order."""
    plans: tuple[ShardPlan, ...]
    """Per row: its plan."""
    groups: tuple[tuple[int | None, ...], ...]
    """Per data-parallel group: the row of each micro-batch; None where the group has none."""
    empty: ShardPlan
    """Plan of a row without tokens."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches that every group runs."""
        return len(self.groups[0])

    def row(self, group: int, micro_batch: int) -> tuple[int | None, TokenSequence, ShardPlan]:
        """Return number (None: an empty row), sequence and plan of a group's micro-batch."""
        number = self.groups[group][micro_batch]
        return (None, EMPTY_ROW, self.empty) if number is None else (number, self.rows[number], self.plans[number])

    def num_calls(self, kind: str, micro_batch: int) -> int:
        """Encoder calls of `kind` that every rank of every group makes in this micro-batch."""
        return max(self.row(group, micro_batch)[2].num_calls(kind) for group in range(len(self.groups)))

    def to_json(self) -> str:
        """Return the deal and the plan of every row as JSON."""
        plans = ",".join(plan.to_json() for plan in self.plans)
        return f'{{"digest":"{self.digest}","groups":{json.dumps(self.groups)},"rows":[{plans}]}}'

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the plans' digests and the deal."""
        text = json.dumps([[plan.digest for plan in self.plans], self.groups])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_step(
    rows: Sequence[TokenSequence],
    *,
    groups: int,
    plan_row: Callable[[TokenSequence], ShardPlan],
    cost: Callable[[TokenSequence], int],
) -> StepPlan:
    """Plan each row and deal the rows to the data-parallel groups by cost.

    plan_row: plans one row over the context-parallel ranks of a group
    cost:     row -> its integer cost
    """
    dealt = deal([cost(row) for row in rows], groups)
    plans = tuple(plan_row(row) for row in rows)
    return StepPlan(tuple(rows), plans, tuple(map(tuple, dealt)), plan_row(EMPTY_ROW))
