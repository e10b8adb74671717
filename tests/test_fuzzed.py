"""Inputs of the fuzzer, replayed: seeds that real libraries wrote, and whatever was ever found to break a parser."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
SPEC = importlib.util.spec_from_file_location("fuzz_parsers", FUZZ / "fuzz_parsers.py")
assert SPEC is not None
assert SPEC.loader is not None
PARSERS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PARSERS)


@pytest.mark.parametrize("path", sorted(FUZZ.glob("*/*")), ids=lambda path: path.name)
def test_an_input_harms_no_parser(path: Path) -> None:
    PARSERS.one_input(path.read_bytes())
