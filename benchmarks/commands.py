"""Commands run as children, and what each used: wall seconds, CPU seconds, peak memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Beginnings of variables that would move or switch a cache which is measured.
SWITCHES = (
    *("POCL_", "PYOPENCL_", "LOOPY_", "CG_", "SUMPY_", "CUDA_CACHE", "MIOPEN_", "ROCM_", "XDG_", "NEO_", "MESA_"),
    *("AMD_COMGR_", "HF_", "UV_", "CCACHE_", "PIP_"),
)
#: Stands for the home of a child in what is the same for all of them.
_ANY = Path("/nonexistent/home")
#: The option of ``prctl`` by which a process adopts what its children leave behind (``linux/prctl.h``).
_CHILD_SUBREAPER = 36
#: How much of what a failed command said is worth showing, in characters.
_SAID = 300


class Failed(Exception):
    """A command that was to be measured did not do its work."""


@dataclass(frozen=True, slots=True)
class Used:
    """What one run took: wall and CPU seconds, and peak memory in bytes (0 where it was not asked for)."""

    wall: float = 0.0
    cpu: float = 0.0
    memory: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(self.wall + other.wall, self.cpu + other.cpu, max(self.memory, other.memory))


def cachectl() -> tuple[str, ...]:
    """Return the installed ``cachectl`` of this interpreter: its console script, else ``-m cachectl``."""
    script = Path(sys.executable).with_name("cachectl")
    return (str(script),) if script.exists() else (sys.executable, "-m", "cachectl")


def beside(program: str) -> str | None:
    """Find a program beside this interpreter, else on the path."""
    near = Path(sys.executable).with_name(program)
    return str(near) if near.exists() else shutil.which(program)


def variables(home: Path, **more: str) -> dict[str, str]:
    """Return the variables of a child whose every cache is in a home of its own, never the user's.

    Of those of Python only the path is kept: a ``PYTHONDONTWRITEBYTECODE`` in a developer's shell would have every
    start compile cachectl again, which no installed command does.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*SWITCHES, "PYTHON"))}
    return {**kept, **at_home(home), **more}


def at_home(home: Path) -> dict[str, str]:
    """Return the variables that bring the caches of a user into a home, where they are by default if that is possible.

    Some are elsewhere whatever ``HOME`` says, as in the home of the account. The rules are the layers' own. Where
    Python finds modules stays as it is: the tests watch their children by that.
    """
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    moved = {name: value.replace(str(_ANY), str(home)) for name, value in _moved().items()}
    # MIOpen has its locks, and without a usable home its databases, in the temporary folder.
    return {**path, "HOME": str(home), "TMPDIR": str(home / "tmp"), **moved}


@cache
def _moved() -> dict[str, str]:
    from cachectl.layers.core.root import Scope
    from cachectl.layers.host.here import this_environment
    from cachectl.stack import Stack

    moved: dict[str, str] = {}
    named = {"HOME": str(_ANY), "TMPDIR": str(_ANY / "tmp")}
    for layer in Stack(this_environment()._replace(variables=named, temporary=_ANY / "tmp")):
        if any(root.scope is Scope.USER and _ANY not in root.path.parents for root in layer.roots()):
            moved.update(layer.relocate(_ANY / ".cache").set)
    return moved


def spend(command: Sequence[str], environment: Mapping[str, str], statuses: tuple[int, ...] = (0,)) -> Used:
    """Run a command to its end, unseen, and say what it used apart from memory.

    It prints into a file: into ``/dev/null`` GNU grep would stop at its first match, whatever it was to count.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        child = subprocess.Popen(
            command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=printed, stderr=said
        )
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in statuses:
            said.seek(0)
            complaint = said.read().decode(errors="replace").strip()[-_SAID:]
            raise Failed(f"{' '.join(command)[:_SAID]} ended with status {child.returncode}: {complaint}")
    return Used(wall, usage.ru_utime + usage.ru_stime)


def peak(command: Sequence[str], environment: Mapping[str, str]) -> Used:
    """Run a command and say what memory it used at most.

    The system counts into a child's peak what the process had that it was forked from. So the command is forked from
    a shell, the smallest one there is, which ends at once and leaves it to this process.
    """
    if ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise Failed("this system cannot adopt processes, so no peak can be separated from our own")
    shell = subprocess.Popen(
        (shutil.which("sh") or "sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *command),
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
    )
    number = int(shell.communicate()[0])
    _, status, usage = os.wait4(number, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise Failed(f"{' '.join(command)[:_SAID]} ended with status {code}")
    return Used(0.0, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command and return what it printed."""
    outcome = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise Failed(f"{' '.join(command)[:_SAID]} ended with status {outcome.returncode}: {outcome.stderr[-_SAID:]}")
    return outcome.stdout
