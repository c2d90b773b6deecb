"""Turn media and a JSONL manifest into webdataset shards with an index.

Run:     mmcp prepare clips/train.jsonl --out shards/train
Result:  shards, their index, and rejects.jsonl: one line (row, file, reason) for each row that cannot be used
"""

import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from data_pipelines.prepare import Prepared, prepare
from mmcp.report.outcome import Outcome

SHOWN = 10  # rejected rows told on the terminal


def run(manifest: Path, out: Path, *, strict: bool = False, skip_bad: bool = False) -> Outcome:
    """Prepare a manifest; with rejected rows a success only if `skip_bad`."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"prepare {manifest}", total=None)
        found = prepare(
            manifest, out, strict=strict, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    table = Table(title=Text(str(out)))
    for name in ("rows", "accepted", "rejected", "shards", "media"):
        table.add_column(name, justify="right")
    table.add_row(*(str(getattr(found, name)) for name in ("rows", "accepted", "rejected", "shards", "media")))
    notes = _first_rejects(found) if found.rejected else []
    return Outcome(record=asdict(found), tables=[table, *map(Text, notes)], is_ok=skip_bad or found.rejected == 0)


def _first_rejects(found: Prepared) -> list[str]:
    """Say why rows were rejected, a line each, and where the rest is told."""
    with open(found.rejects, encoding="utf-8") as file:
        rejects = [json.loads(line) for line in islice(file, SHOWN)]
    lines = [f"rejected: row {reject['row']}: {reject['reason']}" for reject in rejects]
    return [*lines, f"{found.rejected} rejected rows with their reasons: {found.rejects}"]
