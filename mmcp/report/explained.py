"""Why each frame, image and window of sound was kept, when, in which size, on which rank: a table, and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from mmcp.report.page import Section, table
from mmcp.sequence import SAMPLE_RATE, TokenSequence, Unit
from mmcp.sharding.plan import ShardPlan

Entry = dict[str, Any]
HEADINGS = ("unit", "kind", "shown", "clip time s", "size", "tokens", "encoded", "held", "why")


def explain_units(sequence: TokenSequence, plan: ShardPlan, reasons: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return one entry of JSON values for each unit of a row.

    reasons: in token order, what is known of why a unit is there; `why` is the sentence, `times_s` those of its frames
    """
    entries: list[Entry] = []
    for number, (unit, reason) in enumerate(zip(sequence.units, reasons, strict=True)):
        segment = sequence.unit_segment(number)
        first, last = sequence.unit_ranges[number].tolist()
        entries.append(
            {
                "unit": number,
                "kind": segment.kind,
                "source": segment.source,
                **_shown(segment.kind, unit),
                "start_s": float(unit.start),
                "end_s": float(unit.end),
                "size": list(unit.size),
                "tokens": unit.num_tokens,
                "first_token": first,
                "encoded_by": int(plan.encoder[first]),
                "held_by": sorted(set(plan.owner[first:last].tolist())),
                **reason,
            }
        )
    return entries


def _shown(kind: str, unit: Unit) -> dict[str, Any]:
    """Say which frames or samples a unit shows, and from where a decoder runs."""
    if kind == "video":
        return {"frames": list(dict.fromkeys(unit.items)), "decoded": list(unit.decode)}
    if kind == "audio":
        return {"samples": list(unit.items), "decoded": list(unit.decode)}
    return {}


def explain_lines(entries: Sequence[Entry]) -> Text:
    """Lay the entries out for a terminal: two lines each, what it is and why."""
    lines = Text("why each unit was kept\n", style="bold")
    for entry in entries:
        number, kind, what, times, size, tokens, encoder, holders, why = _cells(entry)
        when = f" at {times} s" if times else ""
        told = f"{what}{when}, {size}, {tokens} tokens, encoded by rank {encoder}, held by {holders}"
        lines.append(f"{number:>5}  {kind}: {told}\n", style="none").append(f"       {why}\n", style="dim")
    return lines


def explain_section(entries: Sequence[Entry]) -> Section:
    """Return the same as a part of a page."""
    rows = map(_cells, entries)
    return Section(
        title="Why each frame was kept",
        text="A budget of tokens takes upgrades in one fixed order while they fit: halving a stretch that one unit "
        "stands for, or enlarging its picture. The table says how often each unit's stretch was halved and its picture "
        "enlarged, and which upgrade would have been its next.",
        table=table(HEADINGS, rows, words=(len(HEADINGS) - 1,)),
        table_title=f"{len(entries):,} units",
        is_table_open=len(entries) <= 40,
    )


def _cells(entry: Entry) -> tuple[str, ...]:
    times = entry.get("times_s") or ([] if entry["kind"] == "image" else [entry["start_s"], entry["end_s"]])
    joint = ", " if entry.get("times_s") else " to "
    sides = entry["size"][-2:]
    return (
        str(entry["unit"]),
        entry["kind"],
        _what(entry),
        joint.join(f"{time:.2f}" for time in times),
        "x".join(map(str, sides)),
        f"{entry['tokens']:,}",
        str(entry["encoded_by"]),
        _ranks(entry["held_by"]),
        entry["why"],
    )


def _what(entry: Entry) -> str:
    if entry["kind"] == "video":
        return "frames " + ", ".join(map(str, entry["frames"]))
    if entry["kind"] == "audio":
        return " to ".join(f"{item / SAMPLE_RATE:.2f} s" for item in entry["samples"])
    return entry["source"]


def _ranks(ranks: Sequence[int]) -> str:
    is_run = len(ranks) > 2 and all(after == before + 1 for before, after in pairwise(ranks))
    return f"{ranks[0]} to {ranks[-1]}" if is_run else ", ".join(map(str, ranks))
