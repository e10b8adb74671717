"""The main verbs on terminals of four widths, held against kept screens.

``CACHECTL_SCREENS=write pytest tests/cli/test_screens.py`` writes the screens again. Look at them before they are kept.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from homes import Home, make_home, unpack_compute_cache
from tiers import thorough

from cachectl.cli.main import VERBS, main, verb_module
from cachectl.layers.core.environment import Environment

SCREENS = Path(__file__).parent / "screens"
#: What is typed, in the order of a first hour. The numbers of a home are the same on every machine.
LINES = (
    "report",
    "report -v",
    "report neo",
    "dir",
    "ls --sort size --limit 8",
    "purge cuda --kernel 'ka1?' --dry-run",
    "prune --older-than 30d --max-size 130K --dry-run",
    "verify cuda",
    "purge cuda --damaged",
    "layers cuda neo",
    "purge --all",
    "report",
    "reprot",
    "ls cuad",
    "run python x.py",
    "run --isolated python x.py",
)
#: A name as long as that of the folder in which the home is made: paths take as much room on every machine.
SHOWN = "/home/annemarie-becker"
#: A disk in memory, with blocks of 4 KiB.
MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made there has a random name
KEY = "3/f/433a72c95049e7"


@pytest.fixture
def ann() -> Iterator[Home]:
    """Return a home with caches of CUDA, some entries of which are old and one is damaged."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=MEMORY))
    assert len(str(folder)) == len(SHOWN)
    try:
        home = make_home(folder)
        cache = folder / ".nv/ComputeCache"
        unpack_compute_cache(cache)
        (cache / KEY).write_bytes((cache / KEY).read_bytes()[:-1] + b"?")
        (cache / "0/0").mkdir(parents=True, exist_ok=True)
        now = Environment.here().clock()
        for number, path in enumerate(sorted(cache.glob("?/?/*"))):
            then = now - 86400 * (number + 1) + 3600
            os.utime(path, (then, then))
        variables = {name: value for name, value in home.variables.items() if name not in {"COLUMNS", "NO_COLOR"}}
        drivers = {"OCL_ICD_VENDORS": f"{folder}/none", "TMPDIR": str(folder / "tmp"), "TERM": "xterm"}
        (folder / "tmp").mkdir(mode=0o700)
        yield Home(folder, {**variables, **drivers})
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="needs a disk in memory")
@pytest.mark.parametrize("columns", [80, *thorough(40, 120, 200)])
def test_screens_are_as_they_were_kept(ann: Home, columns: int) -> None:
    # Imported here, they need not be imported in each copy of this process.
    for verb in {line.split()[0] for line in LINES} & VERBS.keys():
        verb_module(verb)
    shown = "".join(f"$ cachectl {line}\n{screen(ann, columns, line)}\n" for line in LINES)
    kept = SCREENS / f"{columns}.txt"
    if os.environ.get("CACHECTL_SCREENS") == "write":
        kept.write_text(shown, encoding="utf-8")
    assert shown == kept.read_text(encoding="utf-8")


def screen(home: Home, columns: int, line: str) -> str:
    """Return what a command writes on a terminal, then its messages, and its status if that is not 0.

    A copy of this process runs it: to start Python anew for each would take most of the time.
    """
    with tempfile.TemporaryFile() as errors:
        child, terminal = os.forkpty()
        if not child:
            _run(home, columns, shlex.split(line), errors.fileno())
        written = b""
        # Linux reports the end of a terminal as an error.
        with suppress(OSError):
            while piece := os.read(terminal, 65536):
                written += piece
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        text = written.decode().replace("\r\n", "\n") + errors.read().decode()
    text = re.sub("\x1b\\[[0-9;]*m", "", text).replace(str(home.path), SHOWN)
    text = re.sub(r"\b\ds\b", "1s", text)
    return text + (f"status {status}\n" if status else "")


def _run(home: Home, columns: int, words: list[str], errors: int) -> NoReturn:
    """Run a command on the terminal of this process, and end it."""
    status = 70
    try:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(home.variables)
        os.chdir(home.path)
        tempfile.tempdir = None
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        processes = home.path.parent / "no-processes"
        try:
            status = main(words, environment=replace(Environment.here(), processes=processes))
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
