"""One optimizer step: an ordered list of packed rows, each with its plan, dealt to the data-parallel groups."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmcp.sequence import TokenSequence
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
    groups: tuple[tuple[int, ...], ...]
    """Per data-parallel group: numbers of its rows in order."""
    empty: ShardPlan
    """Plan of a row without tokens."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches that every group runs."""
        return max(1, *(len(group) for group in self.groups))

    def row(self, group: int, micro_batch: int) -> tuple[int, TokenSequence, ShardPlan]:
        """Return number (-1: none left), sequence and plan of a group's micro-batch."""
        if micro_batch >= len(self.groups[group]):
            return -1, EMPTY_ROW, self.empty
        number = self.groups[group][micro_batch]
        return number, self.rows[number], self.plans[number]

    def num_calls(self, kind: str, micro_batch: int) -> int:
        """Encoder calls of `kind` that every rank of every group makes in this micro-batch."""
        return max(self.row(group, micro_batch)[2].num_calls(kind) for group in range(len(self.groups)))

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the plans' digests and the deal."""
        text = json.dumps([[plan.digest for plan in self.plans], self.groups])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_step(
    rows: Sequence[TokenSequence],
    *,
    num_groups: int,
    plan_row: Callable[[TokenSequence], ShardPlan],
    deal: Callable[[Sequence[TokenSequence], int], tuple[tuple[int, ...], ...]],
) -> StepPlan:
    """Plan each row and deal the rows to the groups.

    plan_row: plans one row over the context-parallel ranks of a group
    deal:     (rows, groups) -> per group, the numbers of its rows
    """
    groups = deal(rows, num_groups)
    dealt = sorted(number for group in groups for number in group)
    assert dealt == list(range(len(rows))), f"{len(rows)} rows were dealt as {groups}"
    return StepPlan(tuple(rows), tuple(plan_row(row) for row in rows), groups, plan_row(EMPTY_ROW))
