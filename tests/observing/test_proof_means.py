"""Proofs without events, without folders above a root, and on systems that run out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.proof import READ, one_file, prove, said_of

from cachectl.observing.access_times import why_not_kept
from cachectl.observing.file_events import FileEvents
from cachectl.observing.proof import Proof, Verdict, Watch
from cachectl.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from homes import Home


# ---------------------------------------------------------------------- where events cannot be had


class NoEvents(FileEvents):
    """A system without file events."""

    def _open(self) -> None:
        raise OSError(38, "no such thing here")


class Overwhelmed(FileEvents):
    """A reader that is too slow: the kernel drops what it cannot hold."""

    def _drain(self, notify: object) -> None:
        del notify


def watched(home: Home, act: Callable[[], object], *, events: FileEvents, access_times: bool = True) -> Proof:
    """Watch the ComputeCache of a home while something is done."""
    stack = Stack(home.environment(), plugins=False)
    watch = Watch(stack, [stack["cuda"]], events=events, access_times=access_times)
    act()
    return watch.end()


@pytest.fixture
def entry(home: Home, compute_cache: Callable[[Path], None]) -> Path:
    """Return a file of a ComputeCache that a real driver wrote."""
    compute_cache(home.path / ".nv" / "ComputeCache")
    return one_file(home, "cuda")


def test_access_times_replace_missing_events(home: Home, entry: Path) -> None:
    if (why := why_not_kept(home.path)) is not None:
        pytest.skip(why)
    proof = watched(home, lambda: [path.lstat() for path in home.path.rglob("*")], events=NoEvents())
    assert proof.holds
    assert proof.attestations[0].means[0].startswith("access times of ")
    proof = watched(home, entry.read_bytes, events=NoEvents())
    assert [(touch.path, touch.what) for touch in proof.attestations[0].touches] == [(entry, ("was read",))]
    proof = watched(home, entry.unlink, events=NoEvents())
    assert [(touch.path, touch.what) for touch in proof.attestations[0].touches] == [(entry, ("vanished",))]
    assert not list(entry.parents[2].glob(".cachectl*"))


def test_without_any_means_nothing_is_claimed(home: Home, entry: Path) -> None:
    proof = watched(home, entry.read_bytes, events=NoEvents(), access_times=False)
    assert proof.of(Verdict.UNKNOWN) == ("cuda",)
    assert not proof.holds
    proof = watched(home, entry.unlink, events=NoEvents(), access_times=False)
    assert proof.of(Verdict.FAILS) == ("cuda",)


def test_an_empty_root_needs_no_means(home: Home) -> None:
    (home.path / ".nv" / "ComputeCache").mkdir(parents=True)
    proof = watched(home, lambda: None, events=NoEvents(), access_times=False)
    assert proof.holds


def test_lost_events_are_admitted(home: Home, entry: Path) -> None:
    neighbour = entry.parent / "neighbour"

    def storm() -> None:
        for _ in range(20_000):
            neighbour.touch()
            neighbour.unlink()

    proof = watched(home, storm, events=Overwhelmed())
    assert "file events came faster" in proof.attestations[0].unknown[0]
    assert not proof.holds


def test_files_of_a_killed_trial_are_recognised(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Stack(home.environment())["cuda"]
    root = layer.roots()[0]
    root.path.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "read_bytes", lambda _: os._exit(9))
        why_not_kept(root.path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(root.path.iterdir())) == 1
    layer.clear(layer.plan_clear())
    assert list(root.path.iterdir()) == []


def test_a_file_system_without_access_times_is_found_out(home: Home, entry: Path) -> None:
    folder = entry.parents[2]
    kept = home.path / "kept"
    shutil.move(folder, kept)
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noatime", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting takes privileges")
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        proof = watched(home, entry.read_bytes, events=NoEvents())
        assert proof.attestations[0].unknown[0].endswith("its file system keeps no access times")
        assert proof.of(Verdict.UNKNOWN) == ("cuda",)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("limit", "says"), [("watches", "max_user_watches"), ("instances", "max_user_instances")])
def test_the_systems_limits_are_met_and_named(home: Home, entry: Path, limit: str, says: str) -> None:
    # A user namespace may lower its own limits, and no program outside it is touched.
    program = f'echo 0 > /proc/sys/user/max_inotify_{limit} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", program, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are closed here")
    code = READ.format(file=str(entry))
    ours = [sys.executable, "-m", "cachectl", "run", "--no-cache", "--layer", "cuda", "--prove", "--"]
    read = home.run(*inside, *ours, sys.executable, "-c", code, check=False)
    unread = home.run(*inside, *ours, "true", check=False)
    if why_not_kept(home.path) is None:
        assert f"{entry} was read" in read.stderr
        assert "access times of " in unread.stderr
    else:
        assert says in unread.stderr
        assert unread.returncode == 1


def test_roots_that_are_awaited_in_one_folder_are_all_seen(home: Home) -> None:
    """Two roots that are not there yet share the folder above them: neither hides the other."""
    cache = home.path / ".cache"
    cache.mkdir()
    for name in ("pytools", "pyopencl"):
        come_and_go = (
            f"import os; p = {str(cache / name)!r}; os.mkdir(p); open(p + '/x', 'w').write('1'); os.unlink(p + '/x');"
            "os.rmdir(p)"
        )
        done = home.cachectl("run", "--no-cache", "--prove", "--", sys.executable, "-c", come_and_go, check=False)
        assert done.returncode == 1
        assert "proof fails" in done.stderr.splitlines()[-1]


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


def test_a_root_that_comes_and_goes_in_what_stays_is_seen(home: Home) -> None:
    top = str(home.path / ".cache")
    steps = "os.mkdir(top); await_watch(top); os.mkdir(top + '/pocl'); await_watch(top + '/pocl'); "
    code = CACHE.format(top=top) + steps + MAKE + "shutil.rmtree(top + '/pocl')"
    status, lines = prove(home, ["--no-cache"], code)
    assert status == 1
    assert f"{top}/pocl/kcache appeared, vanished" in said_of("pocl", lines)
    assert lines[-1] == "cachectl: proof fails for pocl"
    assert lines[-2].startswith("cachectl: proof: other programs that use these caches count too; ")


def test_files_of_others_above_a_root_do_not_affect_the_proof(home: Home) -> None:
    code = "import os; os.makedirs('.cache/fonts'); open('.cache/fonts/x', 'w').close(); os.mkdir('.config')"
    status, lines = prove(home, ["--no-cache"], code)
    assert (status, lines[-1]) == (0, "cachectl: proof holds")


def test_a_folder_put_in_the_place_of_the_one_above_a_root_leaves_the_proof_open(home: Home) -> None:
    (home.path / ".nv").mkdir()
    code = "import os, shutil; os.rename('.nv', 'aside'); os.makedirs('.nv/ComputeCache'); shutil.rmtree('.nv')"
    status, lines = prove(home, ["--no-cache"], code + "; os.rename('aside', '.nv')")
    assert status == 1
    assert lines[-1] == "cachectl: proof cannot be given for cuda"


def test_the_folder_above_a_root_shows_a_change_without_events(home: Home) -> None:
    root = home.path / ".nv" / "ComputeCache"
    assert watched(home, lambda: None, events=NoEvents()).holds

    def come_and_go() -> None:
        root.mkdir(parents=True)
        shutil.rmtree(root.parent)

    proof = watched(home, come_and_go, events=NoEvents())
    assert proof.of(Verdict.UNKNOWN) == ("cuda",)
    assert proof.attestations[0].unknown[0].endswith("is unknown: no such thing here")


def test_a_place_that_is_made_and_unmade_for_ever_costs_no_recursion(home: Home) -> None:
    top = home.path / ".nv"

    def again_and_again() -> None:
        for _ in range(3_000):
            top.mkdir()
            top.rmdir()

    proof = watched(home, again_and_again, events=FileEvents())
    assert proof.of(Verdict.UNKNOWN) == ("cuda",)


# ---------------------------------------------------------------------- systems that run out

DESCRIPTORS = """
import os, sys
from resource import RLIMIT_NOFILE, setrlimit
from cachectl.observing.file_events import FileEvents
setrlimit(RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[1])):
    os.close(taken.pop())
free = len(os.listdir("/proc/self/fd"))
events = FileEvents()
print(events.why_not)
print(len(os.listdir("/proc/self/fd")) == free, events.stop())
"""
THREADS = """
import os
from resource import RLIMIT_AS, setrlimit
from cachectl.observing.file_events import FileEvents
pages = int(open("/proc/self/statm").read().split()[0])
before = len(os.listdir("/proc/self/fd"))
setrlimit(RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (4 << 20),) * 2)
events = FileEvents()
print(events.why_not)
print(len(os.listdir("/proc/self/fd")) == before, events.stop())
"""


@pytest.mark.parametrize("free", [1, 2])
def test_a_pipe_that_cannot_be_had_leaks_nothing(home: Home, free: int) -> None:
    """The first descriptor goes to the watch, and there are none, or one, for the pipe."""
    done = home.run(sys.executable, "-c", DESCRIPTORS, str(free))
    assert done.stdout.splitlines() == ["Too many open files", "True ()"]


def test_a_thread_that_cannot_be_had_leaks_nothing(home: Home) -> None:
    done = home.run(sys.executable, "-c", THREADS)
    assert done.stdout.splitlines() == ["can't start new thread", "True ()"]
