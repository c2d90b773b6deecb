"""One HTML page that works offline: plotly's script inlined, light and dark, every picture with its numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #d0d0d0; --soft: #5a5a5a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --line: #3c4046; --soft: #a8adb3; } }
body { margin: 0 auto; max-width: 1200px; padding: 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p { color: var(--soft); max-width: 70ch; }
.numbers { overflow-x: auto; max-height: 30rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.facts td:first-child { white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--paper); }
summary { cursor: pointer; color: var(--soft); }
"""

THEME = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function colourPictures() {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue("--ink").trim(), line = css.getPropertyValue("--line").trim();
  for (const picture of document.querySelectorAll(".js-plotly-plot")) {
    const change = {"font.color": ink};
    for (const key of Object.keys(picture.layout).filter((key) => /^[xy]axis/.test(key))) {
      change[key + ".gridcolor"] = line;
      change[key + ".zerolinecolor"] = line;
    }
    Plotly.relayout(picture, change);
  }
}
dark.addEventListener("change", colourPictures);
colourPictures();
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: heading, a sentence or two, a picture, and a table of the same numbers."""

    title: str
    text: str
    picture: go.Figure | None = None
    table: str = ""
    """HTML made by `table`."""
    table_title: str = "The same in numbers"
    is_table_open: bool = False
    """Whether the table shows without a click."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; all text is escaped."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="numbers"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts_table(facts: Mapping[str, str]) -> str:
    """Return an HTML table of names and what is said of them; all text is escaped."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts.items())
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def page(title: str, sections: Iterable[Section]) -> str:
    """Return a whole HTML document; all text is escaped."""
    body = "\n".join(_section(section, number) for number, section in enumerate(sections))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n<script>{THEME}</script></body></html>\n"
    )


def _section(section: Section, number: int) -> str:
    parts = [f'<section id="section-{number}"><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>']
    if section.picture is not None:
        section.picture.update_layout(
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            modebar={"bgcolor": "rgba(0,0,0,0)", "orientation": "v"},
            margin={"l": 60, "r": 45, "t": 40, "b": 45},
        )
        parts.append(
            section.picture.to_html(
                full_html=False,
                include_plotlyjs=False,
                div_id=f"picture-{number}",
                config={"displaylogo": False, "responsive": True},
            )
        )
    if section.table:
        state = " open" if section.is_table_open else ""
        parts.append(f"<details{state}><summary>{escape(section.table_title)}</summary>{section.table}</details>")
    return "\n".join([*parts, "</section>"])
