"""Helpers shared by the tests of all layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachectl.layers.base.conformance import nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Artifact, Entry
from cachectl.layers.base.layer import Layer


def environment_of(home: Path, **variables: str) -> Environment:
    """Return an environment of a home, on a machine without programs, GPUs and network file systems."""
    return Environment(
        {"HOME": str(home), **variables},
        home,
        cwd=home,
        temporary=home / "tmp",
        processes=nobody(home.parent / "processes"),
        mounts=home / "no-mounts",
        topology=home / "no-gpus",
    )


def got(layer: Layer, key: str) -> Artifact:
    artifact = layer.get(key)
    assert artifact is not None
    return artifact


def orphans(layer: Layer) -> dict[str, str]:
    """Return the orphans of the first root, with why each is one."""
    found = (thing for thing in layer.store.scan(layer.roots()[0]) if isinstance(thing, Entry))
    return {thing.key: thing.because for thing in found if thing.because is not None}


def somebody(folder: Path, library: str) -> Path:
    """Make a substitute for ``/proc`` in which this process alone runs, and has loaded a library."""
    (nobody(folder) / str(os.getpid())).mkdir()
    (folder / str(os.getpid()) / "maps").write_text(f"7f00 {library}\n")
    return folder


@contextmanager
def running(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401 - as of subprocess
    """Have a program run that has printed a line; it is killed at the end."""
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline()
            yield program
        finally:
            program.kill()


def python(script: str, *arguments: str | Path) -> tuple[str | Path, ...]:
    """Return the command that runs a script of the test."""
    return (sys.executable, "-c", script, *arguments)
