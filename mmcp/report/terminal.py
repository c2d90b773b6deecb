"""The shard balance of a plan as a table in the terminal."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmcp.report.numbers import short
from mmcp.sequence import KINDS

ROWS_SHOWN = 32  # beyond this many ranks, only the summary
COLUMNS = {
    "tokens": "tokens",
    "decode_s": "decode s",
    "encoder_flops": "encode",
    "linear_flops": "linear",
    "attention_flops": "attention",
    "label_rows": "labels",
    "routed_rows": "routed",
    "bytes": "bytes",
    "fragments": "ranges",
}
COST_OF = {
    "decode_s": "decode",
    "encoder_flops": "encode",
    "linear_flops": "linear",
    "attention_flops": "attention",
    "label_rows": "labels",
    "bytes": "memory",
}
"""The entry of `imbalance` that belongs to a field of `per_rank`."""


def balance_table(record: dict) -> RenderableType:
    """Lay out an `inspect` record: what each rank holds, then what it costs, with the mean and the imbalances.

    Beyond ROWS_SHOWN ranks the rows are the least, the mean and the most of each column. Fits 80 columns.
    """
    per_rank = record["per_rank"]
    held = {kind: [entry["by_modality"][kind] for entry in per_rank] for kind in KINDS}
    held = {kind: counts for kind, counts in held.items() if any(counts)}
    columns = {field: [entry[field] for entry in per_rank] for field in COLUMNS}
    counts = {heading: columns[field] for field, heading in COLUMNS.items() if field not in COST_OF}
    costs = {heading: columns[field] for field, heading in COLUMNS.items() if field in COST_OF}
    first = _rank_table({**held, **counts})
    first.title = f"{record['strategy']}: {record['tokens']:,} tokens on {record['ranks']} ranks"
    second = _rank_table(costs)
    second.add_row("imbalance", *(f"{record['imbalance'][cost]:.3f}" for cost in COST_OF.values()), style="bold")
    first.caption = f"planned in {record['plan_ms']:.1f} ms, digest {record['digest']}"
    second.caption = f"step time / least {record['makespan_ratio']:.3f}"
    return Group(first, second)


def _rank_table(columns: Mapping[str, Sequence[float]]) -> Table:
    """Lay out one row per rank and the mean."""
    table = _compact()
    for heading in ("rank", *columns):
        table.add_column(heading, justify="right")
    ranks = len(next(iter(columns.values())))
    if ranks <= ROWS_SHOWN:
        for rank, row in enumerate(zip(*columns.values(), strict=True)):
            table.add_row(str(rank), *map(short, row))
        table.add_section()
    else:
        table.add_row("least", *(short(min(values)) for values in columns.values()))
        table.add_row("most", *(short(max(values)) for values in columns.values()))
    table.add_row("mean", *(short(sum(values) / ranks) for values in columns.values()))
    return table


def facts_grid(facts: Mapping[str, str]) -> Table:
    """Lay out names and what is said of them."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(name, Text(text))
    return grid


def comparison_table(records: Sequence[dict]) -> Table:
    """Lay out `inspect` records of one row side by side: a line per strategy. Fits 80 columns."""
    table = _compact()
    table.title = f"strategies over {records[0]['ranks']} ranks: slowest rank / least mean"
    for heading in ("strategy", *ratios(records[0]), "routed"):
        name = {"attention": "attend", "step time": "step"}.get(heading, heading)
        table.add_column(name, justify="left" if heading == "strategy" else "right", no_wrap=heading == "strategy")
    for record in records:
        table.add_row(record["strategy"], *(f"{ratio:.3f}" for ratio in ratios(record).values()), short(routed(record)))
    return table


def ratios(record: Mapping) -> dict[str, float]:
    """By name: step time and each cost of its slowest rank, over the least mean that any plan could have."""
    return {"step time": record["makespan_ratio"], **record["imbalance"]}


def routed(record: Mapping) -> int:
    """Count the embedding rows that leave the rank that encodes them."""
    return sum(entry["routed_rows"] for entry in record["per_rank"])


def _compact() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
