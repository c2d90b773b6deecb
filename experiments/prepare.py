"""Turn media and a JSONL manifest into webdataset shards with an index.

Run:     mmcp prepare clips/train.jsonl --out shards/train [--workers 16] [--part 3/8]
Result:  shards, their index, and rejects.jsonl: one line (row, file, reason) for each row that cannot be used
"""

import json
import os
import re
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from data_pipelines.prepare import Prepared, damaged_files, prepare
from mmcp.report.outcome import Outcome

LINE_S = 10.0
SHOWN = 10  # rejected rows told on the terminal


def run(
    manifest: Path,
    out: Path,
    *,
    strict: bool = False,
    skip_bad: bool = False,
    workers: int | None = None,
    part: str = "1/1",
    outside_mb: int | None = None,
) -> Outcome:
    """Prepare a manifest; with rejected rows a success only if `skip_bad`."""
    count = os.cpu_count() or 1 if workers is None else workers
    if count < 0 or (outside_mb is not None and outside_mb < 0):
        raise ValueError(f"--workers {count} --outside-mb {outside_mb}: give numbers of at least 0")
    with ShownProgress(f"prepare {manifest}") as shown:
        found = prepare(
            manifest,
            out,
            strict=strict,
            workers=count,
            part=_part(part),
            outside_bytes=None if outside_mb is None else outside_mb << 20,
            progress=shown,
        )
    table = Table(title=Text(str(out)))
    for name in ("rows", "accepted", "rejected", "shards", "media"):
        table.add_column(name, justify="right")
    table.add_row(*(str(getattr(found, name)) for name in ("rows", "accepted", "rejected", "shards", "media")))
    told = [*(_first_rejects(found) if found.rejected else []), *_counted(found)]
    return Outcome(record=asdict(found), tables=[table, *map(Text, told)], is_ok=skip_bad or found.rejected == 0)


def _first_rejects(found: Prepared) -> list[str]:
    """Say why rows were rejected, a line each with the file, and where the rest is told."""
    with open(found.rejects, encoding="utf-8") as file:
        rejects = [json.loads(line) for line in islice(file, SHOWN)]
    lines = [
        f"rejected: row {reject['row']}: {reject['file'] and printable(reject['file']) + ': '}{reject['reason']}"
        for reject in rejects
    ]
    return [*lines, f"{found.rejected} rejected rows with their reasons: {found.rejects}"]


def _counted(found: Prepared) -> list[str]:
    """Say what was taken although something is wrong with it."""
    damaged = islice(damaged_files(Path(found.rejects).parent), SHOWN if found.notes else 0)
    lines = [f"damaged: {printable(file)}: {'; '.join(notes)}" for file, notes in damaged]
    if found.notes:
        lines.append(f"{found.notes} media files are damaged and were taken as far as they go")
    if found.replaced:
        lines.append(f"{found.replaced} characters that are half of a pair became U+FFFD")
    return lines


def printable(name: str) -> str:
    """A file's name, whatever bytes and line ends are in it, on one line of a terminal."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")


def _part(text: str) -> tuple[int, int]:
    """Read i/n. Raises ValueError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise ValueError(f"--part {text}: write i/n, such as 3/16 for the third of sixteen machines")
    return int(match[1]), int(match[2])


class ShownProgress:
    """Shows rows done and time left: a bar on a terminal, elsewhere a line every LINE_S seconds."""

    def __init__(self, title: str):
        self.title, self.is_terminal = title, sys.stderr.isatty()
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not self.is_terminal)
        self.task = self.bar.add_task(title, total=None)
        self.began = self.told = time.monotonic()
        self.first: int | None = None

    def __enter__(self) -> "ShownProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, rows: int) -> None:
        self.bar.update(self.task, completed=done, total=rows)
        now = time.monotonic()
        self.first = done - 1 if self.first is None else self.first
        if not self.is_terminal and (now - self.told >= LINE_S or (done == rows and now - self.began >= LINE_S)):
            self.told = now
            left = (now - self.began) / (done - self.first) * (rows - done)
            print(f"{self.title}: {done} of {rows} rows, {duration(left)} left", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Write a time as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
