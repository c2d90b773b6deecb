"""Turn media and a JSONL manifest into webdataset shards with an index.

Run:     mmcp prepare clips/train.jsonl --out shards/train
Result:  shards, their index, and rejects.jsonl: one line (row, file, reason) for each row that cannot be used
"""

import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from data_pipelines.prepare import prepare
from mmcp.report.outcome import Outcome


def run(manifest: Path, out: Path, *, strict: bool = False, skip_bad: bool = False) -> Outcome:
    """Prepare a manifest; with rejected rows a success only if `skip_bad`."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"prepare {manifest}", total=None)
        found = prepare(
            manifest, out, strict=strict, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    table = Table(title=str(out))
    for name in ("rows", "accepted", "rejected", "shards", "media"):
        table.add_column(name, justify="right")
    table.add_row(*(str(getattr(found, name)) for name in ("rows", "accepted", "rejected", "shards", "media")))
    notes = [f"see {found.rejects} for the rows that were rejected"] if found.rejected else []
    return Outcome(record=asdict(found), tables=[table, *notes], is_ok=skip_bad or found.rejected == 0)
