"""The table of ``python -m benchmarks.house`` counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import house

REGISTRY = 'BUILT_IN = {"pocl": "cachectl.layers.pocl:PoclKernels", "toy-tuning": "cachectl.layers.toy:ToyTuning"}\n'
ADAPTER = "import re\nfrom cachectl.layers.base import (\n    facts,\n)\n\n\ndef late():\n    import os\n"
VERB = """from cachectl.layers.pocl import PoclKernels
import pyopencl

def toy_tuning_json(layer):
    return layer.name == "pocl" and "about pocl"
"""
SAMPLE = """class Toy(base.Layer):
    name, title = "a", "b"
    _hidden = 1

    def scan(self): ...
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "layers/base/registry.py": REGISTRY,
        "layers/base/facts.py": "",
        "layers/pocl.py": ADAPTER,
        "layers/toy/__init__.py": "",
        "layers/toy/tuning.py": "\n" * 7,
        "orchestrator/verb.py": VERB,
        "orchestrator/cli/render.py": "import cachectl.cli.main\n\ndef heading(): ...\n",
        "orchestrator/cli/main.py": "def f():\n    from cachectl.cli import render\n",
        "tests/sample_plugin/toy.py": SAMPLE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_figure_is_counted_in_the_files(checkout: Path) -> None:
    figures = {one.what: one for one in house.measure(checkout)}
    assert {what: (one.now, one.where) for what, one in figures.items()} == {
        "files": (8, ""),
        "lines of layers/ and orchestrator/": (1 + 8 + 7 + 5 + 3 + 2, ""),
        "lines of the largest adapter's file": (8, "pocl.py"),
        "lines of the largest product's folder": (7, "toy/"),
        "modules side by side in one folder": (2, "layers/base"),
        "attributes and methods of the sample layer": (3, "name title scan"),
        "import circles": (1, "cli.main cli.render"),
        "lines of import statements": (1 + 3 + 1 + 2 + 1 + 1, ""),
        # The import of the adapter, the name of the function, and the string; neither the library nor the sentence.
        "names of layers outside layers/": (3, "verb 3"),
        "functions that show facts": (2, ""),
    }
    assert figures["files"].held is None
    assert not figures["import circles"].held
    assert figures["modules side by side in one folder"].held


def test_the_table_has_a_line_for_each_figure(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([str(checkout)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["what", "0.1.0", "now", "at", "most", "held", "where"]
    assert len(rows) == len(house.measure(checkout))
    assert house.main([str(checkout), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["now"] for row in document] == [one.now for one in house.measure(checkout)]


@pytest.mark.thorough
def test_this_checkout_is_measured() -> None:
    figures = {one.what: one.now for one in house.measure()}
    assert figures["files"] == len(house.modules())
    assert figures["attributes and methods of the sample layer"] > 2
    assert figures["lines of import statements"] > 100
