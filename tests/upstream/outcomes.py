"""A pytest plug-in that writes each test's outcome the moment it is known, so that a crash loses none.

``OUTCOMES`` names the file: a line ``started ID`` or ``OUTCOME ID`` each. Tests that have a line there are left out:
after a crash the next session goes on behind the test that crashed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILE = Path(os.environ["OUTCOMES"])


def _write(word: str, item: str) -> None:
    with FILE.open("a") as file:
        file.write(f"{word} {item}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {line.partition(" ")[2] for line in FILE.read_text().splitlines()} if FILE.exists() else set()
    done = [item for item in items if item.nodeid in known]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write("started", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        expected = hasattr(report, "wasxfail")
        word = {"skipped": "xfailed", "passed": "xpassed"}.get(report.outcome) if expected else None
        _write(word or (report.outcome if report.when == "call" or report.skipped else "error"), report.nodeid)
