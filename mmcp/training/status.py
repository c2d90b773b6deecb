"""Before each step the ranks agree: same plan, who wants to stop, which samples some rank could not read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mmcp.parallel.collectives import Group, all_gather_json, all_reduce
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
    """Exchange the plan's digest, the wish to stop and whether anything was lost: one all-reduce of four integers.

    Only when something was lost is there a second one, with one word per document, and an exchange of the reasons.

    faults: by (row, document): what this rank could not read, and why
    Raises ValueError on every rank when the ranks hold different plans.
    """
    digest = int(plan.digest[:15], 16)
    words = torch.tensor([digest, -digest, int(stop), int(bool(faults))], dtype=torch.int64, device=device)
    largest, smallest, wants_stop, has_faults = all_reduce(words, "max", group=group, name="status").tolist()
    if largest != -smallest:
        raise ValueError(
            f"ranks hold different plans for one step (this rank's digest is {plan.digest}); "
            "give every rank the same config, data and software"
        )
    if not has_faults:
        return Status(bool(wants_stop), {}, ())
    documents = [(i, document) for i, row in enumerate(plan.rows) for document in range(len(row.document_bounds) - 1)]
    flags = torch.tensor([int(key in faults) for key in documents], dtype=torch.int64, device=device)
    lost = all_reduce(flags, "max", group=group, name="status").tolist()
    void: dict[int, set[int]] = {}
    for (row, document), flag in zip(documents, lost, strict=True):
        if flag:
            void.setdefault(row, set()).add(document)
    messages = all_gather_json(sorted(faults.values()), group=group, name="faults")
    return Status(
        bool(wants_stop),
        {row: frozenset(lost_documents) for row, lost_documents in void.items()},
        tuple(dict.fromkeys(message for rank in messages for message in rank)),
    )
