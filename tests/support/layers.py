"""Helpers shared by the tests of all layers."""

import os
import resource
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import nobody
from cachectl.layers.core.entry import Artifact, Entry, Problem, Usage
from cachectl.layers.core.finding import Finding, Severity
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.selection import Selection


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


def assigned(words: str) -> dict[str, str]:
    """Read variables as a shell is given them."""
    return dict(word.split("=", 1) for word in shlex.split(words))


def got(layer: Layer, key: str) -> Artifact:
    artifact = layer.get(key)
    assert artifact is not None
    return artifact


def keys_of(layer: Layer) -> list[str]:
    return [entry.key for entry in layer.entries()]


def listed(layer: Layer) -> dict[str, Entry]:
    return {entry.key: entry for entry in layer.entries()}


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def on_disk(*paths: Path) -> int:
    """Return the bytes that files and folders take on the disk, without what is in the folders."""
    return 512 * sum(path.lstat().st_blocks for path in paths)


def fill_up(disk: Path) -> Path:
    """Leave no free byte on a disk; return the file that takes the room."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Limit a resource of this process, as :func:`resource.setrlimit` does."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def sql(path: Path, script: str) -> None:
    """Run statements in a database of sqlite."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.commit()


def select(path: Path, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query of a database of sqlite."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {query}").fetchall()


def orphans(layer: Layer) -> dict[str, str]:
    """Return the orphans of the first root, with why each is one."""
    found = (thing for thing in layer.store.scan(layer.roots()[0]) if isinstance(thing, Entry))
    return {thing.key: str(thing.because) for thing in found if thing.is_orphan}


def somebody(folder: Path, library: str) -> Path:
    """Make a substitute for ``/proc`` in which this process alone runs, and has loaded a library."""
    (nobody(folder) / str(os.getpid())).mkdir()
    (folder / str(os.getpid()) / "maps").write_text(f"7f00 {library}\n")
    return folder


def verified(layer: Layer) -> list[Finding]:
    return [finding for root in layer.roots() for finding in layer.store.verify(root)]


def problems(layer: Layer) -> list[str]:
    """Return the codes of what a scan cannot read."""
    return [found.code for root in layer.roots() for found in layer.store.scan(root) if isinstance(found, Problem)]


def findings(layer: Layer) -> list[tuple[str, Severity]]:
    return [(finding.code, finding.severity) for finding in verified(layer)]


def clear(layer: Layer, **selection: Any) -> Outcome:  # noqa: ANN401 - fields of a selection
    """Plan a removal, and apply it."""
    return layer.clear(layer.plan_clear(Selection(**selection)))


def clear_damaged(layer: Layer) -> Outcome:
    """Remove the damaged entries that ``verify`` names."""
    return layer.clear(layer.plan_clear(damaged=True))


def root_of(layer: Layer) -> Path:
    return layer.roots()[0].path


def usage_of(layer: Layer) -> Usage:
    """Return the usage of the first root."""
    return layer.store.usage(layer.roots()[0])


def programs(monkeypatch: pytest.MonkeyPatch, *processes: int) -> None:
    """Let these processes use the library of any layer."""
    monkeypatch.setattr("cachectl.layers.base.processes.using", lambda _libraries, **_: processes)


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


def register_driver(folder: Path, name: str) -> str:
    """Register a driver that is never loaded; return the ICD file."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / name
    library.symlink_to(sys.executable)
    file = folder / f"{name}.icd"
    file.write_text(f"{library}\n")
    return str(file)
