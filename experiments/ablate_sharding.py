"""What is `balanced` worth? Every strategy plans every workload family; nothing runs, all is priced from metadata.

Question: how far is each strategy from even, and what does `balanced` gain over it, by family and number of ranks?
Run:      python -m experiments.ablate_sharding --ranks 8 64 --out runs/ablate_sharding
Expect:   under Ulysses the gain comes from decoding, encoding and label rows, in a ring also from packed documents;
          families of few units or few key frames are limited by their bounds, not by the strategy.
Result:   experiments/LOG.md
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmcp.sharding.compare import missed_targets, plan_workloads
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import REFERENCE_MODELS, WORKLOADS

COLUMNS = ("workload", "ranks", "strategy", "makespan", "bound", "worst cost", "routed MB", "decode", "gain", "missed")


def compare(ranks: Sequence[int], *, workloads: Sequence[str], model: str, length: float) -> Iterator[dict]:
    """Yield an entry for each family, number of ranks and strategy; `gain`: its step time over that of `balanced`."""
    for workload in workloads:
        for number in ranks:
            planned = plan_workloads(workload, number, strategies=tuple(STRATEGIES), model=model, length=length)
            records = {each.record["strategy"]: each.record for each in planned}
            for strategy, record in records.items():
                yield summary(record) | {
                    "gain": record["makespan_ratio"] / records["balanced"]["makespan_ratio"],
                    "missed": missed_targets(record) if strategy == "balanced" else [],
                }


def summary(record: dict) -> dict:
    """Keep of a record what the table shows."""
    worst = max(record["imbalance"], key=record["imbalance"].__getitem__)
    return {
        "workload": record["workload"],
        "model": record["model"],
        "ranks": record["ranks"],
        "strategy": record["strategy"],
        "makespan_ratio": record["makespan_ratio"],
        "makespan_bound": record["makespan_bound"],
        "worst_cost": worst,
        "worst_ratio": record["imbalance"][worst],
        "routed_bytes": record["routed_bytes"],
        "frames_factor": record["frames_factor"],
        "plan_ms": record["plan_ms"],
    }


def show(entries: Sequence[dict]) -> Table:
    """Lay the entries out, a section for each family and number of ranks, the quickest first."""
    table = Table(*COLUMNS)
    cases = dict.fromkeys((entry["workload"], entry["ranks"]) for entry in entries)
    for case in cases:
        group = [entry for entry in entries if (entry["workload"], entry["ranks"]) == case]
        for entry in sorted(group, key=lambda entry: entry["makespan_ratio"]):
            table.add_row(
                entry["workload"],
                str(entry["ranks"]),
                entry["strategy"],
                f"{entry['makespan_ratio']:.3f}",
                f"{entry['makespan_bound']:.3f}",
                f"{entry['worst_cost']} {entry['worst_ratio']:.2f}",
                f"{entry['routed_bytes'] / 1e6:.0f}",
                f"{entry['frames_factor']:.2f}",
                f"{entry['gain']:.2f}",
                " ".join(entry["missed"]),
            )
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Plan, print the table and write it to results.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], metavar="N", help="numbers of ranks")
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS), metavar="NAME", help="families")
    parser.add_argument("--model", default="softmax", choices=REFERENCE_MODELS, help="reference model")
    parser.add_argument("--length", type=float, default=1.0, help="scales the families; 0.02 plans in seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/ablate_sharding"), help="folder of results.jsonl")
    chosen = parser.parse_args(arguments)
    entries = list(compare(chosen.ranks, workloads=chosen.workloads, model=chosen.model, length=chosen.length))
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
    (chosen.out / "results.jsonl").write_text(lines, encoding="utf-8")
    Console(width=140).print(show(entries))
    return entries


if __name__ == "__main__":
    main()
