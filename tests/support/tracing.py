"""Helpers shared by the tests of tracing."""

import errno
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from documents import validated
from homes import Home


def trace(home: Home, *command: str, options: tuple[str, ...] = (), **variables: Any) -> dict[str, Any]:  # noqa: ANN401 - as Home.cachectl
    """Trace a command, or a program of tests/programs; return the document, and what was printed and said."""
    if command[0].endswith(".py"):
        command = (sys.executable, str(home.programs / command[0]), *command[1:])
    options = (*options, "--json", "trace.json", "--force", "--")
    done = home.cachectl("trace", *options, *command, **variables)
    document = validated(json.loads((home.path / "trace.json").read_text()))
    return {**document, "printed": done.stdout, "said": done.stderr}


def layer_of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(layer for layer in document["layers"] if layer["layer"] == name)


def numbers(document: Mapping[str, Any], layer: str) -> tuple[int | None, int | None, int | None]:
    counted = layer_of(document, layer)
    return counted["hits"], counted["misses"], counted["stores"]


def no_file_events() -> NoReturn:
    raise OSError(errno.ENOSYS, "not here")
