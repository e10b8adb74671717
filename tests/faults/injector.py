"""Run cachectl commands in which the Nth call on a home fails, or kills the process. ``faults.c`` is the shim.

:class:`Injector` keeps one interpreter with everything imported and forks it for each command. A fault then costs as
much as the command itself. The server is this file run as a program, with the shim in ``LD_PRELOAD``.
"""

import ctypes
import errno
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Kinds of calls, as in faults.c.
READS = 1
WRITES = 2
LOCKS = 4
#: Not an error, but the end of the process.
KILL = -1
_SHIM = Path(__file__).with_name("faults.c")
#: A push waits for the lock of each of a dozen dictionaries.
_SECONDS = 150
#: Modules that act when they are imported, or that need pytest.
_NOT_IMPORTED = ("cachectl.__main__", "cachectl.pytest_plugin", "cachectl.layers.core.conformance")


@dataclass(frozen=True)
class Fault:
    """Which call of which kinds is to fail: ``error`` 0 only counts, :data:`KILL` kills, else it is an errno."""

    kinds: int
    nth: int = 0
    error: int = 0
    #: Whether every later call of these kinds fails too, as on a disk that is full or gone.
    sticky: bool = False

    def __str__(self) -> str:
        """Name the fault for a table."""
        what = {0: "count", KILL: "SIGKILL"}.get(self.error) or errno.errorcode[self.error]
        return f"{what} at {self.nth}{' and after' if self.sticky else ''}"


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status (negative: a signal), its output, the calls counted, and the one that failed."""

    status: int
    stdout: str
    stderr: str
    seen: int
    where: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - JSON
        """Read the standard output."""
        return json.loads(self.stdout)


def compiled_shim(folder: Path) -> Path:
    """Compile the shim into a folder. Raises :class:`FileNotFoundError` where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sysconfig.get_platform().split("-")[0] != "linux":
        raise FileNotFoundError("needs a C compiler on Linux with glibc")
    library = folder / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SHIM, "-ldl"], check=True)
    return library


class Injector:
    """An interpreter that runs commands under faults, one after the other."""

    def __init__(self, shim: Path, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": str(shim)},
            text=True,
        )

    def close(self) -> None:
        """End the interpreter."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(self, *arguments: str, home: Path, fault: Fault, variables: Mapping[str, str] | None = None) -> Ended:
        """Run a cachectl command in a home; the fault meets calls on paths below that home."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        # The server does without the benchmarks.
        from benchmarks.commands import at_home

        own = {**at_home(home), **(variables or {})}
        request = {"arguments": arguments, "home": str(home), "variables": own, **vars(fault)}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        stdout, stderr = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ended(answer["status"], stdout, stderr, answer["seen"], answer["where"])


# ---------------------------------------------------------------------- the server's side


def _serve(folder: Path) -> None:
    import cachectl

    # The imports of a command would take longer than the command itself.
    for module in pkgutil.walk_packages(cachectl.__path__, "cachectl."):
        if module.name not in _NOT_IMPORTED:
            importlib.import_module(module.name)

    shim = ctypes.CDLL(None)
    shim.fault_seen.restype = ctypes.c_long
    shim.fault_where.restype = ctypes.c_char_p
    shim.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(shim, request, folder)
        _, status = os.waitpid(child, 0)
        shim.fault_disarm()
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "seen": shim.fault_seen(),
            "where": shim.fault_where().decode(errors="replace"),
        }
        print(json.dumps(answer), flush=True)


def _child(shim: ctypes.CDLL, request: Mapping[str, Any], folder: Path) -> None:
    status = 70
    try:
        os.setpgid(0, 0)
        signal.alarm(_SECONDS)
        _redirect(folder)
        home = request["home"]
        kept = {name: os.environ[name] for name in ("PATH", "LD_PRELOAD", "PYTHONPATH") if name in os.environ}
        os.environ.clear()
        os.environ.update({**kept, **request["variables"]})
        os.chdir("/")
        shim.fault_arm(os.fsencode(home), request["kinds"], request["nth"], request["error"], int(request["sticky"]))
        status = _status(request["arguments"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _redirect(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _status(arguments: Sequence[str]) -> int:
    import traceback

    from cachectl.cli.main import main

    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except BaseException:  # noqa: BLE001 - a traceback is what the tests look for
        traceback.print_exc()
        return 70


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
