"""``report --html``: what it writes of real homes, and its page in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.browser import Browser
from support.hostile_names import HOSTILE
from support.reports import make_report
from support.timelines import make_timeline

from cachectl.verbs.report import draw
from cachectl.watching.timeline import Timeline
from cachectl.watching.timeline_files import page

ENTER, ESCAPE, RIGHT = "\ue007", "\ue00c", "\ue014"
DASH, BELOW = "\N{EN DASH}", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"


def data_of(text: str) -> Any:  # noqa: ANN401 - JSON
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# ---------------------------------------------------------------------- the command


@pytest.mark.real
def test_the_page_has_what_report_and_ls_and_doctor_print(warm: Home) -> None:
    printed = warm.cachectl("report", "--html", "page.html")
    data = data_of((warm.path / "page.html").read_text())
    report, listed = warm.json("report"), warm.json("ls")
    assert printed.stdout == warm.cachectl("report").stdout
    assert data["total"] == [report["total"]["entries"], report["total"]["bytes"]]
    words = data["words"]
    assert sorted(row[3] for row in data["entries"]) == sorted(entry["key"] for entry in listed["entries"])
    assert {words[row[2]] for row in data["entries"] if row[2] is not None} >= {"lk0"}
    findings = warm.json("doctor", check=False)["findings"]
    assert [row[4] for row in data["findings"]] == [one["fix"] for one in findings]


def test_it_replaces_only_its_own_pages_and_goes_to_standard_output(home: Home) -> None:
    mine = home.path / "notes.html"
    mine.write_text("<!doctype html>\n<html lang='en'>mine")
    refused = home.cachectl("report", "--html", "notes.html", check=False)
    assert (refused.returncode, mine.read_text()[-4:]) == (1, "mine")
    home.cachectl("report", "--html", "notes.html", "--force")
    assert data_of(mine.read_text())["entries"] == []
    assert home.cachectl("report", "--html", "-").stdout.startswith("<!doctype html>")
    assert home.json("report", "--html", "notes.html")["schema"] == "cachectl/report/1"


def test_it_has_standard_output_and_one_user_to_itself(home: Home) -> None:
    done = home.cachectl("report", "--html", "-", "--json", check=False)
    assert (done.returncode, "both write to standard output" in done.stderr) == (2, True)
    assert home.cachectl("report", "--html", "page.html", "--all-users", check=False).returncode
    assert not (home.path / "page.html").exists()


# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("canvas", ["map", "chart"])
def test_both_pages_are_drawn_without_a_word_or_a_request(
    browser: Browser, tmp_path: Path, canvas: str, width: int, scheme: str
) -> None:
    drawn = draw(*make_report()) if canvas == "map" else page(make_timeline())
    browser.open(drawn, tmp_path / "page.html", width=width, scheme=scheme)
    assert browser.colours(canvas) > 8
    assert (browser.messages, browser.requests) == ([], [])
    assert not browser.is_wider_than_the_screen()
    assert browser.background() == {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 21, 26)"}[scheme]


def test_the_map_is_walked_by_keys_and_by_mouse(browser: Browser, tmp_path: Path) -> None:
    browser.open(draw(*make_report()), tmp_path / "page.html")
    browser.press("map", RIGHT)
    first = browser.evaluate("chosen.name")
    assert first in browser.find("tip").text
    browser.press("map", RIGHT)
    second = browser.evaluate("chosen.name")
    assert second != first
    browser.press("map", ENTER)
    assert browser.evaluate("shown.name") == second
    assert browser.find("path").text.split() == ["all", "layers", BELOW, second]
    browser.press("map", ESCAPE)
    assert browser.evaluate("shown === tree")
    browser.find("map").click()
    browser.settle()
    assert browser.evaluate("shown.outer === tree")
    # The table says the same to those who do not see the map.
    shown = browser.evaluate("shown.children.slice(0, 8).map((node) => node.name)")
    rows = browser.chrome.find_elements("css selector", "#level tbody tr")
    assert [row.find_element("tag name", "button").text for row in rows] == shown
    assert browser.messages == []


def test_areas_are_as_large_as_the_bytes_and_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    browser.open(draw(*make_report()), tmp_path / "page.html")
    areas = browser.evaluate("areas.filter((a) => !a.depth).map((a) => [a.x, a.y, a.width, a.height, a.node.bytes])")
    size = browser.evaluate("[canvas.clientWidth * canvas.clientHeight, tree.bytes]")
    for place, (x, y, width, height, amount) in enumerate(areas):
        assert width * height / size[0] == pytest.approx(amount / size[1], rel=1e-3)
        for left, top, across, down, _ in areas[:place]:
            apart = (
                left + across <= x + 1e-6,
                x + width <= left + 1e-6,
                top + down <= y + 1e-6,
                y + height <= top + 1e-6,
            )
            assert any(apart)


def test_entries_are_searched_sorted_and_filtered(browser: Browser, tmp_path: Path) -> None:
    report, listing, findings = make_report()
    browser.open(draw(report, listing, findings), tmp_path / "page.html")
    wanted = [entry for entry in listing.entries if entry.kernels == ("energy_002",)]
    browser.press("search", "energy_002")
    assert browser.find("matches").text.startswith(f"{len(wanted)} entries")
    titles = browser.chrome.find_elements("css selector", "#entries th button")
    next(one for one in titles if one.text.startswith("size")).click()
    assert browser.evaluate("listed.rows.map((row) => row.bytes)") == sorted(entry.bytes for entry in wanted)
    browser.press("search", *"\b" * len("energy_002"))
    browser.find("only-stale").click()
    stale = sum(entry.stale is True for entry in listing.entries)
    assert browser.find("matches").text.startswith(f"{stale:,} entries")


def test_hostile_names_are_only_shown(browser: Browser, tmp_path: Path) -> None:
    report, listing, findings = make_report(40)
    names = [HOSTILE[place % len(HOSTILE)] for place in range(len(listing.entries))]
    entries = tuple(
        replace(entry, kernels=(name,), key=name, device=name)
        for entry, name in zip(listing.entries, names, strict=True)
    )
    hostile = tuple(replace(one, message=HOSTILE[0], fix=HOSTILE[2]) for one in findings)
    drawn = draw(report, replace(listing, entries=entries), hostile)
    browser.open(drawn, tmp_path / "page.html")
    browser.press("map", RIGHT, ENTER, RIGHT, ENTER)
    browser.press("search", "script")
    browser.read_logs((tmp_path / "page.html").as_uri())
    assert browser.chrome.title == "cachectl report"
    assert "</script>" in browser.find("entries").text
    assert (browser.messages, browser.requests) == ([], [])


def test_an_empty_home_is_a_page_too(browser: Browser, home: Home) -> None:
    home.cachectl("report", "--html", "page.html")
    file = home.path / "page.html"
    browser.open(file.read_bytes(), file)
    browser.press("map", RIGHT, ENTER, ESCAPE)
    assert (browser.messages, browser.requests) == ([], [])
    assert "No problem was found." in browser.find("findings").text
    browser.open(page(Timeline(("true",), 0.0, 0.01, (), ())), file)
    browser.press("chart", "+n0")
    assert (browser.messages, browser.requests) == ([], [])


def test_a_hundred_thousand_entries_are_drawn_in_two_seconds(browser: Browser, tmp_path: Path) -> None:
    drawn = draw(*make_report(100_000))
    before = browser.processor_seconds()
    browser.open(drawn, tmp_path / "page.html")
    # Of a processor: the machine may be doing other things.
    assert browser.processor_seconds() - before < 2
