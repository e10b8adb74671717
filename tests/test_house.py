"""``python -m benchmarks.house`` counts what it says it counts, and fails above a ceiling."""

from pathlib import Path

import pytest

from benchmarks import house

#: Files of a checkout, and what is counted in them.
FILES = {
    "layers/core/layer.py": """'''A docstring is no code.'''
import os, re  # a comment is none
from cachectl.layers.core import (
    facts,
)
class Base:
    title: str
    def where(self): ...
class Layer(Base):
    def get(self):
        os.unlink("x")
    def _private(self): ...
""",
    "orchestrator/verb.py": """from dataclasses import dataclass
SCHEMA = "cachectl/toy/1"
@dataclass(frozen=True)
class Layer: ...
def purge(rows):
    rows.execute("delete from dict")
    rows.execute(f"select {SCHEMA}")
""",
    "orchestrator/pages/page.js": "let a\n\n",
    "tests/test_x.py": "x = 1\n",
}
COUNTED = {
    "lines": 19,
    "web_lines": 2,
    "test_lines": 1,
    "test_tokens": 3,
    "import_lines": 5,
    "names_p90": 3,
    "names_max": 3,
    "classes": 3,
    "dataclasses": 1,
    "schemas": 1,
    "classes_named_twice": 1,
    "removing_modules": 2,
    "layer_members": 2,
    "store_members": 0,
}


def test_each_measure_is_counted_in_the_files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    figures = house.measure(tmp_path)
    del figures["tokens"]
    assert figures == COUNTED


def test_a_measure_above_its_ceiling_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(house, "measure", lambda: {"lines": 11})
    monkeypatch.setattr(house, "measure_commands", dict)
    for ceiling, status in ((10, 1), (11, 0)):
        monkeypatch.setattr(house, "ceilings", lambda most=ceiling: {"lines": {"ceiling": most, "goal": 5}})
        assert house.main(["--check"]) == status
        assert ("above its ceiling" in capsys.readouterr().out) is bool(status)
