"""Before each step the ranks agree: same plan, who wants to stop, which samples some rank could not read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mmcp.parallel.collectives import Group, RankError, all_gather_json, all_reduce
from mmcp.sharding.step import StepPlan


@dataclass(frozen=True)
class Status:
    """What all ranks know after the exchange."""

    stop: bool
    """Some rank was asked to stop."""
    void: dict[int, frozenset[int]]
    """By row number: documents that some rank could not produce."""
    messages: tuple[str, ...]
    """Why, one line for each fault, the same on every rank."""


def exchange_status(
    plan: StepPlan, faults: Mapping[tuple[int, int], str], *, stop: bool, group: Group, device: torch.device
) -> Status:
    """Exchange one status word per document, the plan's digest and the wish to stop: one all-reduce.

    faults: by (row, document): what this rank could not read, and why; told to the others only when there are any
    Raises RankError on every rank when the ranks hold different plans.
    """
    documents = [(i, document) for i, row in enumerate(plan.rows) for document in range(len(row.document_bounds) - 1)]
    digest = int(plan.digest[:15], 16)
    flags = [int(key in faults) for key in documents]
    words = torch.tensor([digest, -digest, int(stop), *flags], dtype=torch.int64, device=device)
    largest, smallest, wants_stop, *lost = all_reduce(words, "max", group=group, name="status").tolist()
    if largest != -smallest:
        raise RankError(
            f"ranks hold different plans for one step (this rank's digest is {plan.digest}); "
            "give every rank the same config, data and software"
        )
    void: dict[int, set[int]] = {}
    for (row, document), flag in zip(documents, lost, strict=True):
        if flag:
            void.setdefault(row, set()).add(document)
    messages = all_gather_json(sorted(faults.values()), group=group, name="faults") if void else []
    return Status(
        bool(wants_stop),
        {row: frozenset(lost_documents) for row, lost_documents in void.items()},
        tuple(dict.fromkeys(message for rank in messages for message in rank)),
    )
