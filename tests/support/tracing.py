"""Helpers shared by the tests of tracing."""

from __future__ import annotations

import errno
import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from documents import validated

if TYPE_CHECKING:
    from homes import Home

real = pytest.mark.real


def trace(home: Home, *command: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Trace a program of tests/programs and read the document."""
    document = home.path / "trace.json"
    program = (sys.executable, str(home.programs / command[0]), *command[1:])
    home.cachectl("trace", *options, "--json", str(document), "--", *program)
    return dict(validated(json.loads(document.read_text())))


def numbers(document: dict[str, Any], layer: str) -> tuple[int | None, int | None, int | None]:
    (found,) = [one for one in document["layers"] if one["layer"] == layer]
    return found["hits"], found["misses"], found["stores"]


def no_file_events() -> NoReturn:
    """Stand in for the kernel's file events where there are none."""
    raise OSError(errno.ENOSYS, "not here")
