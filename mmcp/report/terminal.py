"""The shard balance of a plan as a table in the terminal."""

from rich.table import Table

from mmcp.report.numbers import short

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


def balance_table(record: dict) -> Table:
    """Lay out an `inspect` record: a row per rank, the mean, and the imbalance of each cost.

    Beyond ROWS_SHOWN ranks the rows are the least, the mean and the most of each column.
    """
    title = f"{record['strategy']}: {record['tokens']:,} tokens on {record['ranks']} ranks"
    caption = f"step time / least {record['makespan_ratio']:.3f}   planned in {record['plan_ms']:.1f} ms"
    table = Table(title=title, caption=f"{caption}   digest {record['digest']}")
    for heading in ("rank", "text/image/video/audio", *COLUMNS.values()):
        table.add_column(heading, justify="right")
    per_rank = record["per_rank"]
    if record["ranks"] <= ROWS_SHOWN:
        for entry in per_rank:
            kinds = "/".join(short(count) for count in entry["by_modality"].values())
            table.add_row(str(entry["rank"]), kinds, *(short(entry[field]) for field in COLUMNS))
        table.add_section()
    else:
        table.add_row("least", "", *(short(min(entry[field] for entry in per_rank)) for field in COLUMNS))
        table.add_row("most", "", *(short(max(entry[field] for entry in per_rank)) for field in COLUMNS))
    table.add_row("mean", "", *(short(_mean(per_rank, field)) for field in COLUMNS))
    table.add_row("imbalance", "", *(_imbalance(record, field) for field in COLUMNS), style="bold")
    return table


def _mean(per_rank: list[dict], field: str) -> float:
    return sum(entry[field] for entry in per_rank) / len(per_rank)


def _imbalance(record: dict, field: str) -> str:
    return f"{record['imbalance'][COST_OF[field]]:.3f}" if field in COST_OF else ""
