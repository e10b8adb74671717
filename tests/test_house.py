"""``python -m benchmarks.house`` counts what it says it counts, and fails above a ceiling."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house

LAYER = '''"""A docstring is no code."""
import os, re  # a comment is none
from cachectl.layers.base import (
    facts,
)


class Base:
    title: str

    def where(self): ...


class Layer(Base):
    def get(self):
        import json
        os.unlink("x")

    def _private(self): ...
'''
VERB = """from dataclasses import dataclass
SCHEMA = "cachectl/toy/1"
@dataclass(frozen=True)
class Layer: ...
def purge(rows):
    rows.execute("delete from dict")
    rows.execute(f"select {SCHEMA}")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "layers/base/layer.py": LAYER,
        "orchestrator/verb.py": VERB,
        "orchestrator/pages/page.js": "let a\n\n",
        "tests/test_x.py": "x = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_measure_is_counted_in_the_files(checkout: Path) -> None:
    figures = house.measure(checkout)
    del figures["tokens"]
    assert figures == {
        "lines": 19 + 7,
        "web_lines": 2,
        "test_lines": 1,
        "test_tokens": 3,
        "import_lines": 1 + 3 + 1 + 1,
        "names_p90": 4,
        "names_max": 4,
        "classes": 3,
        "dataclasses": 1,
        "schemas": 1,
        "classes_named_twice": 1,
        "removing_modules": 2,
        "layer_members": 3,
        "store_members": 0,
    }


def test_a_measure_above_its_ceiling_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measure", lambda: {"lines": 11})
    monkeypatch.setattr(house, "measure_commands", dict)
    for ceiling, status in ((10, 1), (11, 0)):
        monkeypatch.setattr(house, "ceilings", lambda most=ceiling: {"lines": {"ceiling": most, "goal": 5}})
        assert house.main(["--check"]) == status
        assert ("above its ceiling" in capsys.readouterr().out) is bool(status)


def test_every_measure_of_this_checkout_has_a_ceiling() -> None:
    assert house.ceilings().keys() == {**house.measure(), **house.measure_commands()}.keys()
