"""Both pages in a real browser: what ``report --html`` and ``trace --timeline`` draw, and how they are walked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.browser import Browser
from support.pages import HOSTILE, make_report, make_timeline

from cachectl.layers.formats.details import Details
from cachectl.verbs.report import draw
from cachectl.watching.timeline import Span, Trace, page

ENTER, HOME, END, ESCAPE, RIGHT = "\ue007", "\ue011", "\ue010", "\ue00c", "\ue014"
BELOW = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


def rows(browser: Browser, table: str) -> list[Any]:
    return list(browser.chrome.find_elements("css selector", f"#{table} tbody tr"))


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (800, "light"), (1000, "dark"), (1280, "light")])
@pytest.mark.parametrize("canvas", ["map", "chart"])
def test_pages_are_drawn_with_whole_cells_and_without_a_word_or_a_request(
    browser: Browser, file: Path, canvas: str, width: int, scheme: str
) -> None:
    drawn = draw(*make_report()) if canvas == "map" else page(make_timeline())
    browser.open(drawn, file, width=width, scheme=scheme)
    assert browser.colours(canvas) > 8
    assert (browser.messages, browser.requests) == ([], [])
    assert not browser.is_wider_than_the_screen()
    assert browser.background() == {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 21, 26)"}[scheme]
    tables = "[...document.querySelectorAll('.table')]"
    assert browser.evaluate(f"{tables}.filter((one) => one.scrollWidth > one.clientWidth).length") == 0
    assert browser.evaluate("document.querySelectorAll('td').length") > 50
    if canvas == "map":
        assert browser.find("facts").text.startswith("findings")
        # No word of a command is broken, and its spaces stay.
        fixes = browser.chrome.find_elements("css selector", ".fix code")
        assert [fix.get_property("textContent") for fix in fixes] == [finding.fix for finding in make_report()[2]]
        assert browser.evaluate("[...document.querySelectorAll('.fix span')].every((one) => one.offsetHeight < 30)")


def test_empty_pages_are_pages_too(browser: Browser, file: Path, home: Home) -> None:
    home.cachectl(f"report --html {file}")
    browser.open(file.read_bytes(), file)
    browser.press("map", RIGHT, ENTER, ESCAPE)
    assert (browser.messages, browser.requests) == ([], [])
    assert "No problem was found." in browser.find("findings").text
    browser.open(page(Trace(("true",), wall_seconds=0.01)), file)
    browser.press("chart", "+n0")
    assert (browser.messages, browser.requests) == ([], [])


def test_hostile_names_are_only_shown(browser: Browser, file: Path) -> None:
    report, listing, findings = make_report(40)
    names = [HOSTILE[place % len(HOSTILE)] for place in range(len(listing.entries))]
    entries = tuple(
        entry._replace(key=name, details=Details((name,), name))
        for entry, name in zip(listing.entries, names, strict=True)
    )
    hostile = tuple(one._replace(message=HOSTILE[0], fix=HOSTILE[2]) for one in findings)
    made = make_timeline(ranks=1, kernels=len(HOSTILE))
    rename = dict(zip(dict.fromkeys(span.kernel for span in made.spans if span.kernel), HOSTILE, strict=True))
    spans = tuple(span._replace(kernel=rename.get(span.kernel or ""), name=HOSTILE[0]) for span in made.spans)
    processes = ({**made.processes[0], "command": HOSTILE[0], "host": HOSTILE[2]},)
    traced = page(replace(made, command=HOSTILE, processes=processes, spans=spans))
    for drawn, canvas, keys, title, shows in (
        (draw(report, listing._replace(entries=entries), hostile), "map", (RIGHT, ENTER) * 2, "report", "entries"),
        (traced, "chart", "n", "trace: timeline", "tip"),
    ):
        browser.open(drawn, file)
        browser.press("search", "script", ENTER)
        browser.press(canvas, *keys)
        browser.read_logs(file.as_uri())
        assert browser.chrome.title == f"cachectl {title}"
        assert "</script>" in browser.find(shows).text
        assert (browser.messages, browser.requests) == ([], [])


# ---------------------------------------------------------------------- the report


def test_the_map_has_areas_of_the_bytes_and_is_walked_by_keys_and_by_mouse(browser: Browser, file: Path) -> None:
    browser.open(draw(*make_report()), file)
    areas = browser.evaluate("areas.filter((a) => !a.depth).map((a) => [a.x, a.y, a.width, a.height, a.node.bytes])")
    size, total = browser.evaluate("[canvas.clientWidth * canvas.clientHeight, tree.bytes]")
    for place, (x, y, width, height, amount) in enumerate(areas):
        assert width * height / size == pytest.approx(amount / total, rel=1e-3)
        for left, top, across, down, _ in areas[:place]:
            gaps = (x - left - across, left - x - width, y - top - down, top - y - height)
            assert max(gaps) > -1e-6
    browser.press("map", RIGHT, RIGHT)
    chosen = browser.evaluate("chosen.name")
    assert chosen in browser.find("tip").text
    browser.press("map", ENTER)
    assert browser.find("path").text.split() == ["all", "layers", BELOW, chosen]
    browser.press("map", ESCAPE)
    assert browser.evaluate("shown === tree")
    browser.find("map").click()
    browser.settle()
    assert browser.evaluate("shown.outer === tree")
    # The table says the same to those who do not see the map.
    shown = browser.evaluate("shown.children.slice(0, 8).map((node) => node.name)")
    assert [row.find_element("tag name", "button").text for row in rows(browser, "level")] == shown
    assert browser.messages == []


def test_entries_are_searched_sorted_and_filtered(browser: Browser, file: Path) -> None:
    report, listing, findings = make_report()
    browser.open(draw(report, listing, findings), file)
    wanted = [entry for entry in listing.entries if entry.details.kernels == ("energy_002",)]
    browser.press("search", "energy_002")
    assert browser.find("matches").text.startswith(f"{len(wanted)} entries")
    titles = browser.chrome.find_elements("css selector", "#entries th button")
    next(one for one in titles if one.text.startswith("size")).click()
    assert browser.evaluate("listed.rows.map((row) => row.bytes)") == sorted(entry.bytes for entry in wanted)
    browser.press("search", *"\b" * len("energy_002"))
    browser.find("only-stale").click()
    stale = sum(entry.stale is True for entry in listing.entries)
    assert browser.find("matches").text.startswith(f"{stale:,} entries")


# ---------------------------------------------------------------------- the timeline


def test_the_keyboard_zooms_moves_and_searches(browser: Browser, file: Path) -> None:
    browser.open(page(make_timeline()), file)
    whole = browser.evaluate("view.seconds")
    for key, script, expected in (
        ("++", "view.seconds", whole / 1.5**2),
        (HOME, "view.start", 0),
        (RIGHT, "view.start > 0", True),
        (END, "view.start + view.seconds", whole),
        ("-", "view.seconds", whole / 1.5),
        ("0", "[view.start, view.seconds]", [0, whole]),
        ("/", "document.activeElement.id", "search"),
    ):
        browser.press("chart", key)
        assert browser.evaluate(script) == (pytest.approx(expected) if isinstance(expected, float) else expected)
    browser.press("search", "energy_002", ENTER)
    assert "spans of 1 kernel" in browser.find("matches").text
    assert "energy_002" in browser.find("tip").text
    browser.press("chart", "n", ENTER)
    assert browser.evaluate("view.seconds") < whole / 10
    browser.press("chart", ESCAPE)
    assert not browser.find("tip").is_displayed()
    found = rows(browser, "spans")
    assert found
    assert all("energy_002" in row.text for row in found)
    found[0].find_element("tag name", "button").click()
    browser.settle()
    assert (browser.evaluate("chosen.of"), browser.find("tip").is_displayed()) == ("energy_002", True)
    assert browser.messages == []


def test_the_mouse_zooms_moves_and_shows_details(browser: Browser, file: Path) -> None:
    browser.open(page(make_timeline()), file)
    whole, box = browser.evaluate("view.seconds"), browser.find("chart").rect
    x, y = box["x"] + 60, box["y"] + 60

    def mouse(kind: str, x: float, **more: object) -> None:
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        browser.settle()

    mouse("mouseMoved", x)
    assert browser.find("tip").text.startswith("import ")
    mouse("mouseWheel", x, deltaX=0, deltaY=-400)
    assert browser.evaluate("view.seconds") < whole
    before = browser.evaluate("view.start")
    for kind, place in (("mousePressed", x + 300), ("mouseMoved", x), ("mouseReleased", x)):
        mouse(kind, place, button="left", buttons=1, clickCount=1)
    assert browser.evaluate("view.start") > before


def test_stages_count_without_the_spans_inside_them(browser: Browser, file: Path) -> None:
    spans = (
        Span(1, 1, "build", "build", 0.0, 10.0, "pyopencl", "axpy"),
        Span(1, 1, "lookup", "lookup", 1.0, 2.0, "pocl", "axpy", "miss"),
        Span(1, 1, "compile", "clang", 3.0, 4.0, "pocl"),
        Span(1, 2, "compile", "clang", 3.0, 1.0, "pocl", "scale"),
    )
    process = {"process": 1, "command": "python", "host": "here", "rank": None}
    browser.open(page(Trace(("python",), wall_seconds=10.0, processes=(process,), spans=spans)), file)
    stages = [row.text.split()[:2] for row in rows(browser, "stages")]
    assert stages == [["build", "4.00"], ["compile", "5.00"], ["lookup", "2.00"]]
    # A span without a kernel of its own belongs to that of the span around it.
    slowest = [row.text.split()[:2] for row in rows(browser, "slowest")]
    assert slowest == [["axpy", "10.0"], ["scale", "1.00"]]
