"""Helpers shared by the tests of proof."""

from __future__ import annotations

import sys
from pathlib import Path

from homes import PROGRAMS, Home

#: The layers that a user's programs fill, and a file of each in the home that ``rich`` makes.
FILES = {
    "loopy": ".cache/pytools/pdict-v5-loopy-*.sqlite",
    "pyopencl-invoker": ".cache/pytools/pdict-v5-pyopencl-invoker-*.sqlite",
    "pytools": ".cache/pytools/pdict-v5-sumpy-*.sqlite",
    "pyopencl": ".cache/pyopencl/*/*/binary",
    "pocl": ".cache/pocl/kcache/*/*/program.bc",
    "cuda": ".nv/ComputeCache/?/?/*",
    "miopen": ".cache/miopen/*/*.ukdb",
    "miopen-tuning": ".config/miopen/*.ufdb.txt",
}
READ = "open({file!r}, 'rb').read(1)"


def program(count: int, plain: int) -> list[str]:
    return [sys.executable, str(PROGRAMS / "thirteen.py"), str(count), str(plain)]


def prove(home: Home, how: list[str], code: str, **changes: str) -> tuple[int, list[str]]:
    """Run a line of Python under ``run --prove``; return the status, and what was said on standard error."""
    command = ["run", *how, "--prove", "--", sys.executable, "-c", code]
    done = home.cachectl(*command, check=False, **changes)
    return done.returncode, done.stderr.splitlines()


def said_of(layer: str, lines: list[str]) -> str:
    return next(line for line in lines if line.startswith(f"cachectl: proof: {layer}: "))


def one_file(home: Home, layer: str) -> Path:
    return min(home.path.glob(FILES[layer]))
