"""User accounts of tests that run as the superuser, and a cachectl that every user can start."""

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

import cachectl

#: The status of these tools while another process, such as another worker, changes the password file.
_LOCKED = 1
_SECONDS = 30.0


@contextmanager
def account(name: str, home: Path) -> Iterator[str]:
    _repeat("useradd", "--create-home", "--home-dir", str(home), name)
    try:
        yield name
    finally:
        _repeat("userdel", "--force", name)
        shutil.rmtree(home, ignore_errors=True)


def _repeat(*command: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode == _LOCKED:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if done.returncode:
        message = f"{' '.join(command)}: {done.stderr}"
        raise RuntimeError(message)


def install_for_all(base: Path) -> tuple[str, ...]:
    """Return how to start a cachectl that every user can read: the tested one, or a copy in a folder."""
    if _start(sys.executable):
        return (sys.executable, "-I", "-m", "cachectl")
    found = (shutil.which(f"python3{minor}", path=os.defpath) for minor in ("", *(f".{n}" for n in range(10, 16))))
    probe = "import sys; sys.exit(sys.version_info < (3, 10))"
    system = next(
        (one for one in found if one and subprocess.run([one, "-c", probe], check=False).returncode == 0), None
    )
    if system is None:
        pytest.skip("needs a Python 3.10 that every user can start")
    subprocess.run([system, "-m", "venv", "--without-pip", f"{base}/venv"], check=True)
    (site,) = (base / "venv").glob("lib/python3*/site-packages")
    shutil.copytree(Path(cachectl.__file__).parent, site / "cachectl")
    for file in metadata.files("platformdirs") or ():
        if ".." not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), site / file)
    assert _start(f"{base}/venv/bin/python")
    return (f"{base}/venv/bin/python", "-I", "-m", "cachectl")


def _start(*python: str) -> bool:
    command = (*python, "-I", "-m", "cachectl", "--version")
    nobody = pwd.getpwnam("nobody").pw_uid
    try:
        done = subprocess.run(command, check=False, user=nobody, extra_groups=[], cwd="/", capture_output=True)
    except PermissionError:
        return False
    return done.returncode == 0
