"""Proofs without events, without folders above a root, and on systems that run out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import Home
from support.proof import one_file, prove, said_of

from cachectl.stack import Stack
from cachectl.watching import events
from cachectl.watching.events import FileEvents
from cachectl.watching.proof import FAILS, UNKNOWN, Proof, Watch

# ---------------------------------------------------------------------- where events cannot be had


def no_events() -> None:
    raise OSError(38, "no such thing here")


def watched(home: Home, act: Callable[[], object]) -> Proof:
    stack = Stack(home.environment(), plugins=False)
    watch = Watch(stack, [stack["cuda"]])
    act()
    return watch.end()


@pytest.fixture
def entry(home: Home, compute_cache: Callable[[Path], None]) -> Path:
    """Return a file of a ComputeCache that a real driver wrote."""
    compute_cache(home.path / ".nv" / "ComputeCache")
    return one_file(home, "cuda")


def test_without_events_no_reading_is_excluded(home: Home, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "open_queue", no_events)
    proof = watched(home, entry.read_bytes)
    assert proof.of(UNKNOWN) == ("cuda",)
    assert proof.attestations[0].unknown == ("no file events (no such thing here)",)
    assert not proof.holds
    assert watched(home, entry.unlink).of(FAILS) == ("cuda",)


def test_lost_events_are_admitted(home: Home, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is too slow: the kernel drops what it cannot hold."""
    monkeypatch.setattr(FileEvents, "_drain", lambda *_: None)
    neighbour = entry.parent / "neighbour"

    def storm() -> None:
        for _ in range(20_000):
            neighbour.touch()
            neighbour.unlink()

    proof = watched(home, storm)
    assert "file events came faster" in proof.attestations[0].unknown[0]
    assert not proof.holds


@pytest.mark.parametrize(("limit", "says"), [("watches", "max_user_watches"), ("instances", "max_user_instances")])
@pytest.mark.usefixtures("entry")
def test_the_systems_limits_are_met_and_named(home: Home, limit: str, says: str) -> None:
    # A user namespace may lower its own limits, and no program outside it is touched.
    program = f'echo 0 > /proc/sys/user/max_inotify_{limit} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", program, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are closed here")
    ours = [sys.executable, "-m", "cachectl", "run", "--no-cache", "--layer", "cuda", "--prove", "--"]
    done = home.run(*inside, *ours, "true", check=False)
    assert says in done.stderr
    assert done.returncode == 1


# ---------------------------------------------------------------------- roots without a folder above them

#: A program can see what watches it: it goes on once cachectl, which has started it, has come after to a folder.
CACHE = """
import os, shutil, time
top = {top!r}
root = top + '/pocl/kcache'
def watches():
    shown = '/proc/%d/fdinfo/' % os.getppid()
    for descriptor in os.listdir(shown):
        try:
            yield from (line for line in open(shown + descriptor) if line.startswith('inotify'))
        except OSError:
            pass
def await_watch(folder):
    mark, deadline = ' ino:%x ' % os.stat(folder).st_ino, time.monotonic() + 120
    while not any(mark in line for line in watches()) and time.monotonic() < deadline: time.sleep(0.01)
    time.sleep(0.1)
"""
MAKE = "os.makedirs(root + '/AB'); open(root + '/AB/program.bc', 'w').close(); "


@pytest.mark.parametrize("awaited", [False, True])
def test_a_root_that_comes_and_goes_with_all_above_it_does_not_pass(home: Home, *, awaited: bool) -> None:
    top = str(home.path / ".cache")
    first, second = ("await_watch(top); ", "await_watch(top + '/pocl'); ") if awaited else ("", "")
    code = CACHE.format(top=top) + "os.mkdir(top); " + first + MAKE + second + "shutil.rmtree(top)"
    status, lines = prove(home, ["--no-cache"], code)
    assert status == 1
    # Whether it was seen itself, or only the folder in which it was, depends on who is faster.
    if awaited:
        assert f"{top}/pocl/kcache appeared, vanished" in said_of("pocl", lines)
    else:
        assert "pocl" in lines[-1]
    assert f"{top} vanished; its content meanwhile is unknown" in said_of("pyopencl", lines)


def test_files_of_others_above_a_root_do_not_affect_the_proof(home: Home) -> None:
    code = "import os; os.makedirs('.cache/fonts'); open('.cache/fonts/x', 'w').close(); os.mkdir('.config')"
    status, lines = prove(home, ["--no-cache"], code)
    assert (status, lines[-1]) == (0, "cachectl: proof holds")


def test_a_folder_put_in_the_place_of_the_one_above_a_root_does_not_pass(home: Home) -> None:
    (home.path / ".nv").mkdir()
    code = "import os, shutil; os.rename('.nv', 'aside'); os.makedirs('.nv/ComputeCache'); shutil.rmtree('.nv')"
    status, lines = prove(home, ["--no-cache"], code + "; os.rename('aside', '.nv')")
    assert status == 1
    # Whether the root in the new folder was seen depends on who is faster.
    assert lines[-1] in ("cachectl: proof cannot be given for cuda", "cachectl: proof fails for cuda")
