"""Side-by-side measurements: one table of names and the jobs that measure."""

import difflib
import importlib
from collections.abc import Sequence

from mmcp.report.outcome import Outcome

BENCHES = {
    "attention": "experiments.bench_attention:run",
    "calibrate": "experiments.bench_calibrate:run",
    "data": "experiments.bench_data:run",
    "generate": "experiments.bench_generate:run",
    "hf": "experiments.bench_hf:run",
    "hf_text": "experiments.bench_hf_text:run",
    "loader": "experiments.bench_loader:run",
    "peers": "experiments.bench_peers:run",
    "planning": "experiments.bench_planning:run",
    "sharding": "experiments.bench_sharding:run",
}
"""Name -> `module:function`; it gets the settings written as key=value and returns an Outcome."""


def run(name: str, overrides: Sequence[str] = ()) -> Outcome:
    """Run one measurement. Raises ValueError for a name that is not known."""
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(BENCHES)}"
        raise ValueError(f"unknown measurement '{name}'; {hint}")
    module, function = BENCHES[name].split(":")
    return getattr(importlib.import_module(module), function)(overrides)
