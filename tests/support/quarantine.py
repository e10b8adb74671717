"""Helpers shared by the tests of quarantine."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.clearing.quarantine import plan
from cachectl.inspecting.verify import findings
from cachectl.layers.base.facts import Quarantined
from cachectl.layers.base.layer import Layer
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def one(folder: Path, pattern: str) -> Path:
    return min(folder.rglob(pattern))


def empty_bitcode(home: Path) -> Path:
    path = one(home / ".cache" / "pocl", "lk0.so").parents[2] / "program.bc"
    path.write_bytes(b"")
    # What is compiled already needs no bitcode: a launch of another size does.
    for native in path.parent.rglob("*.so"):
        native.unlink()
    return path


def junk_native(home: Path) -> Path:
    path = one(home / ".cache" / "pocl", "lk0.so")
    path.write_bytes(b"no shared object at all")
    return path


def cut_info(home: Path) -> Path:
    path = one(home / ".cache" / "pyopencl", "info")
    path.write_bytes(path.read_bytes()[:20])
    return path


def cut_dictionary(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-loopy-schedule-cache*")
    path.write_bytes(path.read_bytes()[:3000])
    return path


def garbage_dictionary(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-pyopencl-invoker*")
    path.write_bytes(b"no database" * 1000)
    return path


def cut_rows(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-loopy-code-gen*")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update dict set key_value = substr(key_value, 1, 40)")
    return path


@dataclass(frozen=True)
class Breakage:
    """One way in which a cache breaks: how it is made, in which layer it is found, which program meets it."""

    make: Callable[[Path], Path]
    layer: str
    program: tuple[str, ...]


BREAKAGES = {
    "empty program.bc": Breakage(empty_bitcode, "pocl", ("kernels.py", "8")),
    "junk .so": Breakage(junk_native, "pocl", ("kernels.py", "8")),
    "truncated info": Breakage(cut_info, "pyopencl", ("binaries.py", "3")),
    "truncated pdict": Breakage(cut_dictionary, "loopy", ("kernels.py", "8")),
    "garbage pdict": Breakage(garbage_dictionary, "pyopencl-invoker", ("kernels.py", "8")),
    "truncated rows": Breakage(cut_rows, "loopy", ("kernels.py", "8")),
}


def works(home: Home, program: tuple[str, ...]) -> bool:
    return home.run(sys.executable, str(home.programs / program[0]), *program[1:], check=False).returncode == 0


def quarantine_all(home: Home) -> None:
    stack = Stack(home.environment())
    plan(list(stack), findings(stack), named=False).apply()


def held(layer: Layer) -> list[Quarantined]:
    return [thing for thing in layer.quarantined() if isinstance(thing, Quarantined)]
