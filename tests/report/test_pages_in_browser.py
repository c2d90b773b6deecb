"""Report pages in headless Chromium: nothing is logged, nothing is fetched, every picture is drawn and fits its page.

One page per kind of source, at three widths, light and dark, on 1 to 1,024 ranks; zoom and hover of the ribbon against
the row itself. Skipped where there is no Chromium (Debian: apt install chromium).
Run: python -m pytest tests/report/test_pages_in_browser.py
"""

import pytest

from mmcp.report.run import write_run_report
from mmcp.report.shards import Shown, View, write_shard_report
from mmcp.sharding.compare import plan_workloads
from tests.report.browser import Browser, find_chromium
from tests.report.runs import write_times

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")

LENGTH = 0.1  # of an hour: 540 pieces, more than the ribbon has bars
WIDTHS = (400, 1000, 1800)
SCHEMES = {"light": False, "dark": True}
UNDRAWN = (
    "[...document.querySelectorAll('.picture')].filter((e) => isShown(e) && !e.querySelector('svg.main-svg')).length"
)
TOO_WIDE = """[...document.querySelectorAll('.picture, svg.main-svg')]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).length"""
CROSSING = """[...document.querySelectorAll('.picture')].filter((e) => isShown(e)).flatMap((picture) => {
    const frame = picture.getBoundingClientRect();
    return [...picture.querySelectorAll('.xtick text, .ytick text, .gtitle, .legendtext, .xtitle, .ytitle')]
        .filter((e) => { const box = e.getBoundingClientRect();
                         return box.width > 0 && (box.left < frame.left - 2 || box.right > frame.right + 2
                                                  || box.top < frame.top - 2 || box.bottom > frame.bottom + 2); })
        .map((e) => picture.id + ': ' + e.textContent);
})"""


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return `pages(source, ranks)`: the page of a workload, of its comparison, or of a run; written once."""
    folder, written = tmp_path_factory.mktemp("pages"), {}

    def write(source: str, ranks: int):
        path = folder / f"{source}_{ranks}.html"
        if path in written:
            return path
        if source == "run":
            write_times(folder / f"run_{ranks}", ranks=ranks, steps=4)
            return written.setdefault(path, write_run_report(folder / f"run_{ranks}"))
        names = ("balanced", "striped", "zigzag") if source == "compared" else ("balanced",)
        planned = list(plan_workloads("lecture_hour", ranks, strategies=names, length=LENGTH))
        shown = Shown(sequence=planned[0].sequence, costs=planned[0].costs, cap_bytes=10**10)
        views = [View(each.record, each.plan) for each in planned]
        write_shard_report(path, views, title="<b>hour</b>", facts={"row": "<i>x</i>"}, shown=shown)
        return written.setdefault(path, path)

    return lambda source, ranks: written.get(folder / f"{source}_{ranks}.html") or write(source, ranks)


def check(browser: Browser, page, *, width: int, dark: bool) -> None:
    browser.show(page, width=width, dark=dark)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert browser.run(UNDRAWN) == 0 < browser.run("document.querySelectorAll('.js-plotly-plot').length")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == 0
    assert browser.run(CROSSING) == []


@pytest.mark.parametrize(
    ("source", "ranks", "width"),
    [("workload", 1024, 400), ("workload", 1024, 1000), ("workload", 1024, 1800), ("run", 64, 400)],
)
def test_a_page_is_whole_at_every_width(browser, pages, source, ranks, width):
    check(browser, pages(source, ranks), width=width, dark=width == 1000)


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ranks", [1, 2, 64, 1024])
@pytest.mark.parametrize("source", ["workload", "compared", "run"])
def test_every_page_is_whole(browser, pages, source, ranks, width, scheme):
    check(browser, pages(source, ranks), width=width, dark=SCHEMES[scheme])


def test_colours_follow_the_scheme(browser, pages):
    page, ink = pages("workload", 2), "getComputedStyle(document.querySelector('.xtick text')).fill"
    browser.show(page, width=1000)
    light = browser.run(ink)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = browser.run(f"new Promise((done) => setTimeout(() => done({ink}), 500))")
    assert (light, dark) == ("rgb(27, 27, 27)", "rgb(232, 232, 232)")


def test_folded_pictures_are_drawn_when_they_are_opened(browser, pages):
    browser.show(pages("compared", 4), width=1000)
    count = "document.querySelectorAll('.js-plotly-plot').length"
    closed = browser.run(count)
    opened = browser.run(
        "document.querySelectorAll('details.fold')[1].open = true;"
        f"new Promise((done) => setTimeout(() => done({count}), 500))"
    )
    assert opened == closed + 15 and browser.run(UNDRAWN) == 0 and browser.errors == []


BARS = "document.getElementById('picture-0').data"


def test_zoom_goes_from_shares_to_single_units(browser, pages):
    page = pages("workload", 2)
    browser.show(page, width=1000)
    whole = browser.run(f"{BARS}.find((t) => t.name === 'video').y")
    assert min(whole) < 0.99  # a bar holds several units, and text
    browser.run("Plotly.relayout('picture-0', {'xaxis.range[0]': 1000.4, 'xaxis.range[1]': 1499.5}).then(() => 1)")
    zoomed = browser.run(f"{BARS}.map((t) => [t.name, t.x, t.width, t.y, t.hovertext])")
    planned = next(plan_workloads("lecture_hour", 2, length=LENGTH))
    expected = {"text": 0, "video": 0, "audio": 0}
    for segment, start in zip(planned.sequence.segments, planned.sequence.offsets.tolist(), strict=False):
        expected[segment.kind] += max(0, min(start + segment.num_tokens, 1500) - max(start, 1000))
    kinds = {name: (widths, shares, told) for name, _, widths, shares, told in zoomed}
    assert {name: sum(kinds[name][0]) for name in expected} == expected
    assert all(share == 1 for name in expected for share in kinds[name][1])
    told = kinds["video"][2][1]
    ranges = zip(planned.sequence.units, planned.sequence.unit_ranges.tolist(), strict=True)
    shown = [unit for unit, (_, stop) in ranges if stop > 1000 and len(unit.size) == 3]
    assert "frames " + ", ".join(f"{item:,}" for item in shown[1].items) in told
    assert "clip time 0:00:" in told and "FLOPs to encode" in told and "held by rank 0" in told
    assert browser.run("document.getElementById('picture-0').layout.xaxis.range") == [1000, 1500]
    browser.run("Plotly.relayout('picture-0', {'xaxis.autorange': true}).then(() => 1)")
    assert browser.run(f"{BARS}.find((t) => t.name === 'video').y") == whole
    assert browser.errors == []


def test_pointing_at_the_ribbon_tells_what_is_there(browser, pages):
    browser.show(pages("workload", 2), width=1000)
    x, y = browser.run(
        "(() => { const box = document.querySelector('#picture-0 .nsewdrag').getBoundingClientRect();"
        "return [box.left + box.width / 4, box.top + 30]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = "document.querySelector('#picture-0 .hoverlayer').textContent"
    told = browser.run(f"new Promise((done) => setTimeout(() => done({shown}), 500))")
    assert "tokens " in told and "clip time" in told and "held by rank 0" in told
