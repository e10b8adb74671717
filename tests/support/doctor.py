"""Helpers shared by the tests of doctor."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from homes import PROGRAMS, pocl_driver

from benchmarks.commands import at_home
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import nobody
from cachectl.layers.core.finding import Finding
from cachectl.layers.host.here import this_environment
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor
from support import dictionaries, layers

#: How Python runs a command on a machine that runs nothing else.
ALONE = str(PROGRAMS / "alone.py")
#: What lies in a home; what came with the tester's MIOpen is another matter.
HOMELY = ("loopy", "pyopencl-invoker", "pytools", "pyopencl", "pocl", "cuda", "miopen", "miopen-tuning")


def environment_of(home: Path, **variables: str) -> Environment:
    """Return an environment of a home that loads one PoCL alone."""
    environment = layers.environment_of(home, **{**pocl_driver(), **variables})
    # A folder that others can write may lie right below the system's.
    return (
        environment._replace(processes=nobody(home / "p"))
        if home.parent == Path(tempfile.gettempdir())
        else environment
    )


def examine(environment: Environment, *names: str) -> list[Finding]:
    return list(doctor(Stack(environment), names).findings)


def coded(findings: Sequence[Finding], code: str) -> list[Finding]:
    return [finding for finding in findings if finding.code == code]


def only(findings: Sequence[Finding], code: str) -> Finding:
    (finding,) = coded(findings, code)
    return finding


def shell(home: Path, script: str, by: str = "-m cachectl", **variables: str) -> subprocess.CompletedProcess[str]:
    command = f'cachectl() {{ {shlex.quote(sys.executable)} {by} "$@"; }}\n'
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        ["sh", "-ec", command + script],
        env={**kept, **pocl_driver(), **at_home(home), **variables},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


def after(home: Path, fix: str, *names: str, **variables: str) -> list[dict[str, str]]:
    """Apply a fix in a shell and return what the doctor, asked there, finds then."""
    done = shell(home, f"{fix} >&2\ncachectl doctor {' '.join(names)} --json || test $? = 1", **variables)
    document = json.loads(done.stdout)
    assert document["schema"] == "cachectl/findings/1"
    found: list[dict[str, str]] = document["findings"]
    return found


def with_miopen(home: Path, folder: str = "rocm-6.2.0", name: str = "libMIOpen.so.1", **variables: str) -> Environment:
    library = home / folder / "lib" / name
    library.parent.mkdir(parents=True)
    library.touch()
    (home / folder / "share/miopen/db").mkdir(parents=True)
    return environment_of(home, LD_LIBRARY_PATH=str(library.parent), **variables)


def on_file_system(environment: Environment, kind: str, point: Path) -> Environment:
    mounts = point / "mounts"
    line = "23 28 0:21 / {} rw - {} server:/export rw\n"
    mounts.write_text(line.format("/", "ext4") + line.format(str(point).replace(" ", "\\040"), kind))
    return environment._replace(mounts=mounts)


def make(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


def dictionary(home: Path, ending: str) -> Path:
    path = home / f".cache/pytools/pdict-v5-mine{ending}.sqlite"
    return dictionaries.dictionary(path, dictionaries.equal_rows(1, dictionaries.NONE)).parent


def leak(home: Path, data: bytes = b"") -> Path:
    leaked = home / ".cache/pocl/kcache" / ("tempfile_aB3dE6" + (".cl" if data else ""))
    leaked.parent.mkdir(parents=True, exist_ok=True)
    leaked.touch(mode=0o600)
    leaked.write_bytes(data)
    return leaked


def stale_lock(home: Path) -> Path:
    lock = home / f".cache/pyopencl/pyopencl-compiler-cache-v2-py{this_environment().python}/lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    return lock
