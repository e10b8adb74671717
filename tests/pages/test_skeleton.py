"""A page is one file: its policy allows its own style and script, and nothing in the data leaves its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from support.hostile_names import HOSTILE
from support.timelines import make_timeline

from cachectl.pages import BEGINNING
from cachectl.pages.skeleton import embeddable
from cachectl.watching.timeline_files import page


class Elements(HTMLParser):
    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self._open = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._open = ""


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_leaves_the_data_of_a_page(name: str) -> None:
    embedded = embeddable({"name": name, name: 1})
    assert embedded.isascii()
    assert "<" not in embedded
    assert json.loads(embedded)["name"] == name


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embeddable(float("nan"))


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone() -> None:
    drawn = page(make_timeline(1, 2))
    assert drawn.startswith(BEGINNING.encode())
    found = Elements(drawn)
    policy = next(value for _, name, value in found.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    data, script = found.texts["script"]
    for text in (*found.texts["style"], script):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert json.loads(data)["command"] == "python simulate.py --order 3"


def test_a_page_names_no_other_file() -> None:
    found = Elements(page(make_timeline(1, 2)))
    assert not [one for one in found.attributes if one[1] in {"src", "srcset", "action", "style"} or one[1][:2] == "on"]
    assert [value for _, name, value in found.attributes if name == "href"] == ["data:,"]


@pytest.mark.parametrize("name", ["shared", "timeline", "report"])
def test_scripts_make_no_markup_of_texts_and_styles_load_nothing(name: str) -> None:
    room = files("cachectl.pages")
    script, style = (room.joinpath(f"{name}.{ending}").read_text() for ending in ("js", "css"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|fetch|XMLHttp|import\(", script)
    assert not re.search(r"url\(|@import", style)
    assert "</" not in script + style
