"""Inputs of the fuzzer, replayed: seeds that real libraries wrote, and whatever was ever found to break a parser."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
PARSERS = runpy.run_path(str(FUZZ / "fuzz_parsers.py"))


@pytest.mark.parametrize("path", sorted(FUZZ.glob("*/*")), ids=lambda path: path.name)
def test_an_input_harms_no_parser(path: Path) -> None:
    PARSERS["one_input"](path.read_bytes())
