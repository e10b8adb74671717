"""A page is one file: its policy allows its own style and script, and nothing in the data leaves its place."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

import pytest
from homes import Home
from support.pages import HOSTILE, make_timeline

from cachectl.layers.core.entry import Entry
from cachectl.listing import Listing
from cachectl.pages import BEGINNING, embeddable
from cachectl.verbs.report import draw
from cachectl.watching.timeline import page


def texts(drawn: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", drawn, re.DOTALL)


def data_of(drawn: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(texts(drawn, "script")[0])


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_leaves_the_data_of_a_page(name: str) -> None:
    embedded = embeddable({"name": name, name: 1})
    assert embedded.isascii()
    assert "<" not in embedded
    assert json.loads(embedded)["name"] == name


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone_and_no_other_file() -> None:
    drawn = page(make_timeline(1, 2)).decode()
    assert drawn.startswith(BEGINNING)
    (policy,) = re.findall(r'content="(default-src [^"]*)"', drawn)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    data, script = texts(drawn, "script")
    for text in (*texts(drawn, "style"), script):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert json.loads(data)["command"] == "python simulate.py --order 3"
    tags = " ".join(re.findall(r"<\w[^>]*>", drawn.replace(data, "").replace(script, "")))
    assert not re.search(r"\s(src|srcset|action|style|on\w+)=", tags)
    assert re.findall(r'\shref="([^"]*)"', tags) == ["data:,", "https://ui.perfetto.dev"]


@pytest.mark.parametrize("name", ["shared", "timeline", "report"])
def test_scripts_make_no_markup_of_texts_and_styles_load_nothing(name: str) -> None:
    room = files("cachectl.pages")
    script, style = (room.joinpath(f"{name}.{ending}").read_text() for ending in ("js", "css"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|fetch|XMLHttp|import\(", script)
    assert not re.search(r"url\(|@import", style)
    assert "</" not in script + style


@pytest.mark.real
def test_the_page_has_what_report_and_ls_and_doctor_print(warm: Home) -> None:
    printed = warm.cachectl("report --html page.html")
    assert data_of(warm.cachectl("report --html -").stdout).keys() >= {"entries", "findings"}
    data, total = data_of((warm.path / "page.html").read_text()), warm.json("report")["total"]
    assert printed.stdout == warm.cachectl("report").stdout
    # It is not known of every entry whether it is stale.
    assert data["total"] == [total["entries"], total["bytes"], 0, False]
    keys = sorted(entry["key"] for entry in warm.json("ls")["entries"])
    assert sorted(row[4] for row in data["entries"]) == keys
    assert {data["words"][row[3]] for row in data["entries"] if row[3] is not None} >= {"lk0"}
    kernels = [[", ".join(one["kernels"]), ", ".join(one["layers"])] for one in warm.json("ls")["kernels"]]
    assert [row[:2] for row in data["kernels"]] == kernels
    findings = warm.json("doctor", check=False)["findings"]
    assert [row[4] for row in data["findings"]] == [one["fix"] for one in findings]


def test_the_largest_of_many_entries_are_listed_and_the_rest_are_summed(home: Home) -> None:
    entries = [Entry("pocl", f"key{size}", home.path, size, 1, stale=size == 1 or None) for size in range(5_010)]
    rows = data_of(draw(home.stack.report(), Listing(tuple(entries), ()), ()).decode())["entries"]
    assert [row[4] for row in rows[:5_000]] == [f"key{size}" for size in range(5_009, 9, -1)]
    assert [(row[4], row[5], row[8]) for row in rows[5_000:]] == [
        ("9 smaller entries", sum(range(2, 10)), 9),
        ("1 smaller entry", 1, 1),
    ]
