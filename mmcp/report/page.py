"""One HTML page that works offline: plotly's script inlined, light and dark, every picture with its numbers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

HERE = Path(__file__).parent
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
"""A legend above a picture, where a narrow page has room for it."""
RIBBON_HEIGHT = 360
SMALL_MARGIN = {"l": 55, "r": 10, "t": 35, "b": 40}
SQUARE = "square"
"""The `meta` of the layout of a figure that is not to be wider than high."""


@dataclass(frozen=True, kw_only=True)
class Ribbon:
    """What `ribbon.js` draws of one plan."""

    row: str
    """Name of the page's data that describe the row."""
    plan: Mapping[str, Any]
    """JSON values: who holds and who encodes each token."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: heading, a sentence or two, pictures, and a table of the same numbers."""

    title: str
    text: str
    pictures: Sequence[go.Figure | Ribbon] = ()
    is_small: bool = False
    """Whether several pictures stand beside each other where there is room."""
    table: str = ""
    """HTML made by `table`."""
    table_title: str = "The same in numbers"
    is_table_open: bool = False
    """Whether the table shows without a click."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Sections that are shown on a click; their pictures are drawn then."""

    title: str
    sections: Sequence[Section]
    is_open: bool = False


@dataclass(frozen=True)
class _Writer:
    """Numbers the pictures of a page and collects their data."""

    numbers: "count[int]" = field(default_factory=count)

    def part(self, part: Section | Fold) -> str:
        if isinstance(part, Section):
            return self.section(part)
        state = " open" if part.is_open else ""
        inside = "\n".join(map(self.section, part.sections))
        return f'<details class="fold"{state}><summary>{escape(part.title)}</summary>\n{inside}\n</details>'

    def section(self, section: Section) -> str:
        parts = [f"<section><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"]
        if section.pictures:
            small = " small" if section.is_small else ""
            pictures = "\n".join(map(self.picture, section.pictures))
            parts.append(f'<div class="pictures{small}">\n{pictures}\n</div>')
        if section.table:
            state = " open" if section.is_table_open else ""
            parts.append(f"<details{state}><summary>{escape(section.table_title)}</summary>{section.table}</details>")
        return "\n".join([*parts, "</section>"])

    def picture(self, picture: go.Figure | Ribbon) -> str:
        number = next(self.numbers)
        name, values = f"figure-{number}", picture.plan if isinstance(picture, Ribbon) else _plain(picture)
        attribute = f' data-ribbon="{picture.row}"' if isinstance(picture, Ribbon) else ""
        square = " square" if not isinstance(picture, Ribbon) and picture.layout.meta == SQUARE else ""
        height = RIBBON_HEIGHT if isinstance(picture, Ribbon) else values["layout"]["height"]
        return (
            f'<div class="picture{square}" id="picture-{number}" data-figure="{name}"{attribute}'
            f' style="height: {height}px"></div>{_data(name, values)}'
        )


def figure(traces: Sequence[Any] = (), *, title: str = "", height: int = 340, **layout: Any) -> go.Figure:
    """Return a figure of a page: the title above it, margins that leave a narrow page room."""
    margin = {"l": 55, "r": 25, "t": 45 if title else 30, "b": 45}
    heading = {"title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 14}}} if title else {}
    return go.Figure(list(traces)).update_layout({"height": height, "margin": margin, **heading, **layout})


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = ()) -> str:
    """Return an HTML table; all text is escaped. `words`: numbers of the columns that hold sentences."""
    kinds = [' class="words"' if number in words else "" for number in range(len(headings))]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="numbers"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts_table(facts: Mapping[str, str]) -> str:
    """Return an HTML table of names and what is said of them; all text is escaped."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts.items())
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def page(title: str, parts: Iterable[Section | Fold], *, data: Mapping[str, Any] | None = None) -> str:
    """Return a whole HTML document; all text is escaped.

    data: JSON values by name, which several pictures share
    """
    writer = _Writer()
    shared = "".join(_data(name, values) for name, values in (data or {}).items())
    body = "\n".join(map(writer.part, parts))
    scripts = "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("ribbon.js", "page.js"))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>\n"
        "<noscript><p>The pictures need JavaScript; the tables do not.</p></noscript>\n"
        f"{body}\n{shared}\n<script>{scripts}</script></body></html>\n"
    )


def _plain(figure: go.Figure) -> dict[str, Any]:
    """Return data and layout of a figure in the page's style, without plotly's own template."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return json.loads(figure.to_json())


def _data(name: str, values: Any) -> str:
    """Return JSON values as an element of the page; no text in them can end it."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'
