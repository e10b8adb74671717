"""Helpers shared by the tests of trouble."""

from __future__ import annotations

from pathlib import Path

from cachectl.layers.core.conformance import nobody
from cachectl.layers.core.environment import Environment


def environment(home: Path, aside: Path) -> Environment:
    return Environment(
        {"HOME": str(home), "TMPDIR": str(aside)},
        home=home,
        cwd=home,
        temporary=aside,
        processes=nobody(aside / "processes"),
        lock_timeout=0.1,
    )
