"""The layout of a row over ranks as one page: who holds what, who sends what, the mask, and how even the work is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmcp.masks import Mask
from mmcp.report.comparison import comparison_section, owners_section
from mmcp.report.mask_tiles import mask_sections
from mmcp.report.page import Fold, Section, facts_table, page
from mmcp.report.ribbon import ribbon_section, row_of_plan
from mmcp.report.routes import labels_section, routes_section
from mmcp.report.row_pieces import Words, row_data
from mmcp.report.work import modality_section, work_section
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.plan import ShardPlan

ROW = "row"  # name of the page's data about the row


@dataclass(frozen=True)
class View:
    """A plan and its `inspect` record."""

    record: dict
    plan: ShardPlan


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The row that plans are shown of, as far as it is known."""

    sequence: TokenSequence | None = None
    """None when only its plan is left: neither times nor mask are known then."""
    costs: RowCosts | None = None
    words: Words | None = None
    cap_bytes: int = 0
    """Most resident bytes of a rank; 0: any number."""

    def data(self, plan: ShardPlan) -> dict:
        """Return what the ribbon tells of the row."""
        return row_of_plan(plan) if self.sequence is None else row_data(self.sequence, self.costs, self.words)


def write_shard_report(
    path: Path,
    views: Sequence[View],
    *,
    title: str,
    facts: Mapping[str, str],
    shown: Shown,
    more: Sequence[Section] = (),
) -> None:
    """Write one HTML file that shows a row's plans, side by side when there are several.

    facts: what is known of the row, in words
    more: further sections, after the plans
    """
    parts: list[Section | Fold] = [_facts_section(facts)]
    if len(views) == 1:
        parts += shard_sections(views[0], shown)
    else:
        parts.append(comparison_section([view.record for view in views]))
        parts += [owners_section([view.plan for view in views])] if views[0].plan.num_tokens else []
        parts += [Fold(title=f"Strategy {view.plan.strategy}", sections=shard_sections(view, shown)) for view in views]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, [*parts, *more], data={ROW: shown.data(views[0].plan)}), encoding="utf-8")


def shard_sections(view: View, shown: Shown) -> list[Section]:
    """Return the sections that show one plan; the page's data need ROW."""
    record, plan = view.record, view.plan
    masked = mask_sections(plan, Mask.of(shown.sequence)) if shown.sequence is not None else []
    return [
        ribbon_section(plan, ROW),
        modality_section(record),
        work_section(record, cap_bytes=shown.cap_bytes),
        routes_section(plan),
        labels_section(plan),
        *masked,
    ]


def _facts_section(facts: Mapping[str, str]) -> Section:
    return Section(
        title="What was planned",
        text="Planned from metadata alone: containers were demuxed, no picture and no sound was decoded.",
        table=facts_table(facts),
        table_title="The row",
        is_table_open=True,
    )
