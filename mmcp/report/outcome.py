"""What a job hands back to the command line: a record for programs, tables for people, and whether it succeeded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one job."""

    record: dict[str, Any] | list[dict[str, Any]]
    """Strict JSON values: what `--json` prints."""
    tables: Sequence[RenderableType] = ()
    """What is printed without `--json`."""
    is_ok: bool = True
    """Whether the exit code is 0."""

    def show(self, *, as_json: bool) -> None:
        """Print to the standard output, a line of text as one line; progress and messages go to the standard error."""
        if as_json:
            print(json.dumps(self.record, indent=2, allow_nan=False))
        else:
            console = Console()
            for table in self.tables:
                console.print(table, soft_wrap=isinstance(table, str | Text))
