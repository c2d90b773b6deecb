"""What does a step of transformers' Trainer cost on a long row of text with `parallelize`, beside DeepSpeed's Ulysses?

Run:     mmcp bench hf_text peers=FOLDER [tokens=4096] [rounds=3]
Smoke:   mmcp bench hf_text peers=FOLDER tokens=512 rounds=1
Expect:  the loss and gradient of transformers on one process from both, and ours no slower and no larger.
Result:  experiments/LOG.md, entry "hf".

The model, the row and the other system's driver are those of `mmcp bench peers`; both systems are run in turn, two
ranks of one thread each. DeepSpeed shards parameters (ZeRO-3), ours keeps whole ones under DDP, as Trainer has it.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import PositiveInt
from rich.table import Table

from experiments.bench_peers import LIMITS, OURS_UNDER_TRAINER, REFERENCE, Drivers, PeersBench, row_of
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.report.outcome import Outcome

THEIRS = "trainer-sp-zero3"


@config
class HfTextBench:
    """What is measured."""

    peers: str = os.environ.get("MMCP_PEERS", "")
    """Folder of the peers' drivers."""
    tokens: PositiveInt = 4096
    """Of the row."""
    rounds: PositiveInt = 3
    """Alternations; medians are over all of their steps."""
    steps: PositiveInt = 2
    """Timed steps of each run, after one that is not."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure ours beside theirs. Raises ValueError when the peers' folder or what it needs is not there."""
    settings = build(HfTextBench, Source(), overrides)
    drivers = Drivers(PeersBench(peers=settings.peers, tokens=settings.tokens, steps=settings.steps))
    drivers.check()
    lines: dict[str, list[dict[str, Any]]] = {}
    for number in range(settings.rounds):
        for name in (REFERENCE, THEIRS, OURS_UNDER_TRAINER):
            lines.setdefault(name, []).append(drivers.step(name, is_first=not number))
            print(f"round {number + 1} of {settings.rounds}: {name} done", file=sys.stderr)
    rows = [row_of(name, found) for name, found in lines.items()]
    theirs, ours = rows[1:]
    ratio = round(theirs["seconds"] / ours["seconds"], 3) if theirs["seconds"] and ours["seconds"] else None
    record = {"tokens": settings.tokens, "rows": rows, "faster_than_usual": ratio}
    is_equal = ours["gradient_error"] is not None and ours["gradient_error"] < LIMITS["float32"]
    return Outcome(record=record, tables=[_table(record)], is_ok=is_equal)


def _table(record: dict[str, Any]) -> Table:
    table = Table(title=f"one step of {record['tokens']:,} tokens; ours is {record['faster_than_usual']} times faster")
    keys = ("seconds", "growth_mb", "loss", "gradient_error")
    for heading in ("", "s", "MB grown", "loss", "gradient error"):
        table.add_column(heading)
    for row in record["rows"]:
        table.add_row(row["name"], *(str(row.get(key, row.get("error", ""))) for key in keys))
    return table
