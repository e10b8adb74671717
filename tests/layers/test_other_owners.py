"""Caches of another user that the superuser changes with ``--over-others``, while that user acts against it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tiers import thorough

NOBODY: Final = 65534
OTHER: Final = 1234
FIND: Final = "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
LINES: Final = "one=S:1.5,0,A\ntwo=S:2.5,0,B\n"
KERNELS: Final = Path(".nv", "ComputeCache")
TUNING: Final = Path(".config", "miopen")
SECONDS: Final = 6
#: Exchanges two names again and again.
EXCHANGE: Final = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
one, other = (name.encode() for name in sys.argv[1:3])
end = time.monotonic() + float(sys.argv[3])
print("ready", flush=True)
while time.monotonic() < end:
    libc.renameat2(-100, one, -100, other, 2)
    time.sleep(0.0003)
"""
pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs the superuser, who becomes another user",
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def give(folder: Path, user: int) -> None:
    """Give a whole folder to a user."""
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, user, user)


def cachectl(home: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a command over a home; return its status, its output and its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "cachectl", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def removed(said: str) -> int:
    """Return how many entries a purge has removed."""
    return int(json.loads(said)["total"]["removed"])


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the owner, the mode and the content of everything below a folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_uid, status.st_mode, content)
    return found


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """As the other user, exchange two names all the time."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    command = [*user, sys.executable, "-c", EXCHANGE, str(one), str(other), str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/") as attack:
        assert attack.stdout is not None
        if attack.stdout.readline() != b"ready\n":
            pytest.skip("this Python is not one that another user can start")
        yield
        attack.kill()


@pytest.fixture
def attacked(shared: Path, compute_cache: Callable[[Path], None]) -> tuple[Path, Path]:
    """Make the home of nobody and that of a victim, both with entries of a tree and of a text file."""
    for name, user in (("home", NOBODY), ("victim", OTHER)):
        compute_cache(shared / name / KERNELS)
        (shared / name / TUNING).mkdir(parents=True)
        (shared / name / TUNING / FIND).write_text(LINES)
        give(shared / name, user)
    return shared / "home", shared / "victim"


def test_files_changed_for_another_user_keep_their_owner(attacked: tuple[Path, Path]) -> None:
    home, _ = attacked
    bundle = str(home.parent / "bundle.zip")
    assert cachectl(home, "push", bundle, "cuda", "miopen-tuning", "--force")[0] == 0
    for layer, entries in (("cuda", 40), ("miopen-tuning", 2)):
        status, said, _ = cachectl(home, "purge", layer, "--over-others", "--json")
        assert (status, removed(said)) == (0, entries)
    status, _, wrong = cachectl(home, "pull", bundle, "cuda", "miopen-tuning", "--trust", "--over-others")
    assert status == 0, wrong
    assert sorted((home / TUNING / FIND).read_text().splitlines()) == LINES.splitlines()
    assert sum(path.is_file() for path in (home / KERNELS).rglob("*")) == 41
    assert {path.lstat().st_uid for path in home.rglob("*")} == {NOBODY}


@pytest.mark.parametrize(("layer", "folder"), [("cuda", KERNELS), *thorough(("miopen-tuning", TUNING))])
@pytest.mark.parametrize("verb", [("purge",), *thorough((("prune", "--max-size", "0"),))])
def test_a_link_does_not_lead_the_superuser_into_the_cache_of_a_third_user(
    attacked: tuple[Path, Path], layer: str, folder: Path, verb: tuple[str, ...]
) -> None:
    """The owner of the link decides what the path means, so that nothing is done that this user could not do."""
    home, victim = attacked
    (home / folder).rename(home / "kept")
    (home / folder).symlink_to(victim / folder)
    os.lchown(home / folder, NOBODY, NOBODY)
    before = state(victim)
    assert cachectl(home, verb[0], layer, *verb[1:], "--over-others", "--wait", "0.5")[0] == 1
    assert state(victim) == before


@pytest.mark.parametrize(("layer", "folder"), [("miopen-tuning", TUNING), *thorough(("cuda", KERNELS))])
def test_an_exchange_does_not_lead_the_superuser_there_either(
    attacked: tuple[Path, Path], layer: str, folder: Path
) -> None:
    home, victim = attacked
    link = home / "link"
    link.symlink_to(victim / folder)
    os.lchown(link, NOBODY, NOBODY)
    before = state(victim)
    with exchanging(home / folder, link):
        end = time.monotonic() + SECONDS - 2
        while time.monotonic() < end:
            cachectl(home, "purge", layer, "--over-others", "--wait", "0.5")
    assert state(victim) == before


def test_an_installation_that_the_owner_cannot_read_is_enough(attacked: tuple[Path, Path], tmp_path: Path) -> None:
    """The superuser's cachectl may lie in a folder that is closed to everybody else."""
    import cachectl as package

    home, _ = attacked
    closed = tmp_path / "closed"
    shutil.copytree(Path(package.__file__).parent, closed / "cachectl", ignore=shutil.ignore_patterns("__pycache__"))
    closed.chmod(0o700)
    for layer, entries in (("cuda", 40), ("miopen-tuning", 2)):
        variables = {"PYTHONPATH": str(closed), "PYTHONDONTWRITEBYTECODE": "1"}
        status, said, wrong = cachectl(home, "purge", layer, "--over-others", "--json", **variables)
        assert (status, removed(said)) == (0, entries), wrong
