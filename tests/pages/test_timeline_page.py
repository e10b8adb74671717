"""The page of a timeline, in a real browser."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import Browser
from support.hostile_names import HOSTILE
from support.timelines import make_timeline

from cachectl.watching.timeline import Process, Span, Timeline
from cachectl.watching.timeline_files import page

ENTER, HOME, END, ESCAPE, RIGHT = "\ue007", "\ue011", "\ue010", "\ue00c", "\ue014"


def test_the_keyboard_zooms_moves_and_searches(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(make_timeline()), tmp_path / "page.html")
    whole = browser.evaluate("view.seconds")
    browser.press("chart", "++")
    assert browser.evaluate("view.seconds") == pytest.approx(whole / 1.5**2)
    browser.press("chart", HOME)
    assert browser.evaluate("view.start") == 0
    browser.press("chart", RIGHT)
    assert browser.evaluate("view.start") > 0
    browser.press("chart", END)
    assert browser.evaluate("view.start + view.seconds") == pytest.approx(whole)
    browser.press("chart", "-")
    assert browser.evaluate("view.seconds") == pytest.approx(whole / 1.5)
    browser.press("chart", "0")
    assert browser.evaluate("[view.start, view.seconds]") == [0, whole]
    browser.press("chart", "/")
    assert browser.evaluate("document.activeElement.id") == "search"
    browser.press("search", "energy_002", ENTER)
    assert "spans of 1 kernel" in browser.find("matches").text
    assert "kernel energy_002" in browser.evaluate("document.getElementById('said').textContent")
    assert "energy_002" in browser.find("tip").text
    browser.press("chart", "n", ENTER)
    assert browser.evaluate("view.seconds") < whole / 10
    browser.press("chart", ESCAPE)
    assert not browser.find("tip").is_displayed()
    assert browser.messages == []


def test_the_mouse_zooms_moves_and_shows_details(browser: Browser, tmp_path: Path) -> None:
    timeline = make_timeline()
    browser.open(page(timeline), tmp_path / "page.html")
    whole, box = browser.evaluate("view.seconds"), browser.find("chart").rect
    x, y = box["x"] + 60, box["y"] + 60

    def mouse(kind: str, x: float, **more: object) -> None:
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        browser.settle()

    mouse("mouseMoved", x)
    assert "import loopy" in browser.find("tip").text
    mouse("mouseWheel", x, deltaX=0, deltaY=-400)
    assert browser.evaluate("view.seconds") < whole
    before = browser.evaluate("view.start")
    mouse("mousePressed", x + 300, button="left", buttons=1, clickCount=1)
    mouse("mouseMoved", x, button="left", buttons=1)
    mouse("mouseReleased", x, button="left", clickCount=1)
    assert browser.evaluate("view.start") > before
    mouse("mouseWheel", x, deltaX=0, deltaY=4000)
    assert browser.evaluate("view.seconds") == whole


def test_the_table_lists_matches_with_times_and_leads_to_them(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(make_timeline(ranks=1)), tmp_path / "page.html")
    browser.press("search", "mass_000")
    rows = browser.chrome.find_elements("css selector", "#spans tbody tr")
    assert rows
    assert all("mass_000" in row.text for row in rows)
    button = rows[0].find_element("tag name", "button")
    button.click()
    browser.settle()
    assert browser.evaluate("chosen.of") == "mass_000"
    assert browser.find("tip").is_displayed()


def test_stages_count_without_the_spans_inside_them(browser: Browser, tmp_path: Path) -> None:
    spans = (
        Span(1, 1, "build", "build", 0.0, 10.0, "pyopencl", "axpy"),
        Span(1, 1, "lookup", "lookup", 1.0, 2.0, "pocl", "axpy", "miss"),
        Span(1, 1, "compile", "clang", 3.0, 4.0, "pocl"),
        Span(1, 2, "compile", "clang", 3.0, 1.0, "pocl", "scale"),
    )
    timeline = Timeline(("python",), 0.0, 10.0, (Process(1, "python", "here"),), spans)
    browser.open(page(timeline), tmp_path / "page.html")
    rows = [row.text for row in browser.chrome.find_elements("css selector", "#stages tbody tr")]
    assert [row.split()[:3] for row in rows] == [
        ["build", "4.00", "s"],
        ["compile", "5.00", "s"],
        ["lookup", "2.00", "s"],
    ]
    assert rows[2].endswith("1 in 2.00 s")
    # A span without a kernel of its own belongs to that of the span around it.
    slowest = [row.text.split()[:2] for row in browser.chrome.find_elements("css selector", "#slowest tbody tr")]
    assert slowest == [["axpy", "10.0"], ["scale", "1.00"]]


def test_own_times_of_a_thread_add_up_to_its_outer_spans(browser: Browser, tmp_path: Path) -> None:
    timeline = make_timeline(ranks=2)
    browser.open(page(timeline), tmp_path / "page.html")
    ends: dict[tuple[int, int], float] = defaultdict(float)
    outer: dict[tuple[int, int], float] = defaultdict(float)
    for span in sorted(timeline.spans, key=lambda span: (span.start, -span.seconds)):
        thread = (span.process, span.thread)
        if span.start >= ends[thread] - 1e-7:
            outer[thread] += span.seconds
            ends[thread] = span.start + span.seconds
    assert browser.evaluate("spans.reduce((sum, span) => sum + span.own, 0)") == pytest.approx(sum(outer.values()))


def test_hostile_names_are_only_shown(browser: Browser, tmp_path: Path) -> None:
    made = make_timeline(ranks=1, kernels=len(HOSTILE))
    rename = dict(zip(dict.fromkeys(span.kernel for span in made.spans if span.kernel), HOSTILE, strict=True))
    spans = tuple(replace(span, kernel=rename.get(span.kernel or ""), name=HOSTILE[0]) for span in made.spans)
    processes = (replace(made.processes[0], command=HOSTILE[0], host=HOSTILE[2]),)
    timeline = replace(made, command=HOSTILE, processes=processes, spans=spans)
    browser.open(page(timeline), tmp_path / "page.html")
    browser.press("search", "script", ENTER)
    browser.press("chart", "n", ENTER)
    browser.read_logs((tmp_path / "page.html").as_uri())
    assert browser.chrome.title == "cachectl trace: timeline"
    assert HOSTILE[0] in browser.find("tip").text
    assert (browser.messages, browser.requests) == ([], [])


def test_twenty_thousand_spans_are_drawn_smoothly(browser: Browser, tmp_path: Path) -> None:
    timeline = make_timeline(ranks=16, kernels=165)
    assert len(timeline.spans) > 20_000
    browser.open(page(timeline), tmp_path / "page.html")
    before = browser.processor_seconds()
    frames = 60
    browser.evaluate(
        f"(() => {{ for (let n = 0; n < {frames}; n += 1) {{ showPart(0, whole * (1 - n / 100)); drawNow(); }} }})()"
    )
    # Sixteen milliseconds are a frame at 60 Hz.
    assert (browser.processor_seconds() - before) / frames < 0.016
