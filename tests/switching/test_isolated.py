"""Isolated roots: the links in them that stand for the user cache folder, and their end when a command was killed."""

import os
import signal
import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from homes import CACHECTL, Home
from support.layers import write

from cachectl.layers.base import processes
from cachectl.layers.disk.temporaries import abandoned_temporaries, remove_abandoned
from cachectl.stack import Stack
from cachectl.switching import child


@pytest.fixture
def cache(home: Home) -> Path:
    """Return the real user cache folder."""
    (home.path / "tmp").mkdir()
    folder = home.path / ".cache"
    folder.mkdir()
    return folder


def linked(home: Home, root: Path, **changes: str) -> list[str]:
    """Link the user cache folder below a root, without the entries of every layer; return the names in it."""
    environment = home.environment(**changes)
    child.link_cache_home(environment, Stack(environment), root)
    return sorted(os.listdir(root / "xdg"))


def test_layers_that_move_are_hidden_and_others_are_linked(home: Home, cache: Path, tmp_path: Path) -> None:
    """A layer with a variable of its own hides nothing. New files of others in linked folders are in their place."""
    (cache / "proj/pocl").mkdir(parents=True)
    (cache / "pytools").mkdir()
    assert linked(home, tmp_path, POCL_CACHE_DIR=f"{cache}/proj/pocl") == ["proj"]
    (tmp_path / "xdg/proj/mine").write_text("mine")
    assert (cache / "proj/mine").read_text() == "mine"
    # A root that is used again shows what is there now, also if earlier a link to what is isolated was left.
    (cache / "proj").rename(cache / "new")
    (tmp_path / "xdg/pytools").symlink_to(cache / "pytools")
    (tmp_path / "xdg/kept").write_text("of another program")
    assert linked(home, tmp_path) == ["kept", "new"]
    # A root in itself, or in the cache folder, links to no part of itself.
    root = cache / "scratch/root"
    assert linked(home, root) == ["new"]
    (root / "xdg/more").write_text("mine")
    assert linked(home, root, XDG_CACHE_HOME=f"{root}/xdg") == ["more", "new"]


@pytest.mark.usefixtures("cache")
def test_a_forked_child_leaves_its_parents_root_alone(home: Home) -> None:
    block = ExitStack()
    folder = block.enter_context(child.isolated_root(home.environment()))
    forked = os.fork()
    if forked == 0:
        block.close()
        os._exit(0)
    os.waitpid(forked, 0)
    assert folder.is_dir()
    block.close()
    assert not folder.exists()


def test_a_root_goes_even_if_it_is_read_only_and_nothing_behind_its_links(home: Home, cache: Path) -> None:
    (cache / "fonts").mkdir()
    (cache / "fonts/one").write_text("font")
    with child.isolated_root(home.environment()) as folder:
        assert linked(home, folder) == ["fonts"]
        (folder / "a/b").mkdir(parents=True)
        (folder / "a/b").chmod(stat.S_IRUSR)
        (folder / "a").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not folder.exists()
    assert (cache / "fonts/one").read_text() == "font"


# ---------------------------------------------------------------------- what killed commands left

#: Says its number and its caches, then waits.
WAITS = """
mkdir -p "$XDG_CACHE_HOME/pytools"
echo mine >"$XDG_CACHE_HOME/other"
echo $$ "$XDG_CACHE_HOME"
exec sleep 600
"""


@pytest.fixture
def temporary(home: Home) -> Path:
    """Return the temporary folder of the home, which is nobody else's."""
    folder = home.path / "tmp"
    folder.mkdir(mode=0o700)
    return folder


def killed(home: Home, temporary: Path, verb: str) -> list[str]:
    """Kill a command of cachectl while the program that it runs waits; return what that one has printed."""
    command = [*CACHECTL, *verb.split(), "--", "sh", "-c", WAITS]
    variables = {"XDG_CACHE_HOME": f"{home.path}/.cache", **home.variables, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, text=True, cwd=home.path, start_new_session=True
    ) as running:
        assert running.stdout is not None
        words = running.stdout.readline().split()
        running.kill()
        # The program holds the pipe open.
        running.stdout.close()
    return words


def end(pid: str) -> None:
    os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if b") Z " in Path(f"/proc/{pid}/stat").read_bytes():
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)


@pytest.mark.parametrize("verb", ["run --isolated", "run --no-cache", "trace"])
def test_a_killed_command_is_cleared_away_once_its_program_has_ended(home: Home, temporary: Path, verb: str) -> None:
    pid, caches = killed(home, temporary, verb)
    kept = set(os.listdir(temporary))
    assert len(kept) == 2
    # Never under a program that runs.
    home.cachectl("run --isolated -- true", TMPDIR=str(temporary))
    assert set(os.listdir(temporary)) == kept
    assert (Path(caches) / "other").is_file()
    end(pid)
    home.cachectl("purge --all --dry-run", TMPDIR=str(temporary))
    assert set(os.listdir(temporary)) == kept
    assert home.cachectl("run --isolated -- true", TMPDIR=str(temporary)).stderr == ""
    assert os.listdir(temporary) == []


def test_a_program_that_is_just_being_executed_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows no environment in that moment, and has no file open in the folder."""
    process = tmp_path / "proc/4711"
    process.mkdir(parents=True)
    for path in (tmp_path / "proc/self", process):
        path.mkdir(exist_ok=True)
        (path / "maps").touch()
    (process / "environ").touch()
    (process / "exe").symlink_to("/bin/sleep")
    (process / "cwd").symlink_to("/")
    monkeypatch.setattr(time, "sleep", lambda _: (process / "environ").write_bytes(b"TMPDIR=/tmp/cachectl-0/x\0"))
    assert processes.mentioning(Path("/tmp/cachectl-0/x"), tmp_path / "proc") is True  # noqa: S108 - nothing is there
    assert processes.mentioning(Path("/tmp/cachectl-0/y"), tmp_path / "proc") is False  # noqa: S108


@pytest.mark.parametrize("next_one", ["trace -- true", "bench -n 1 -- true", "purge --all"])
def test_each_command_clears_away_what_is_left(home: Home, temporary: Path, next_one: str) -> None:
    folder = temporary / "cachectl-0123456789abcdef"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_bytes(b"12345")
    folder.with_name(f"{folder.name}.lock").write_text('{"host": [], "pid": 1, "start": [1]}')
    (found,) = abandoned_temporaries(home.environment())
    assert found == folder
    # A command that was killed before it made its folder left only the lock.
    write(temporary / "cachectl-fedcba9876543210.lock", '{"host": [], "pid": 1, "start": [1]}')
    done = home.cachectl(next_one, TMPDIR=str(temporary))
    assert ("removed 1 temporary folder" in done.stderr) == next_one.startswith("purge")
    assert os.listdir(temporary) == []


def test_a_link_with_the_name_of_a_temporary_folder_changes_nothing_behind_it(home: Home, temporary: Path) -> None:
    closed = home.path / "else/closed"
    closed.mkdir(parents=True, mode=0o500)
    (temporary / "cachectl-0123456789abcdef").symlink_to(closed.parent)
    home.cachectl("purge --all", TMPDIR=str(temporary))
    assert stat.S_IMODE(closed.stat().st_mode) == 0o500


def test_the_folder_of_a_living_process_stays(home: Home, temporary: Path) -> None:
    with child.isolated_root(home.environment()._replace(processes=Path("/proc"))) as root:
        (root / "file").touch()
        home.cachectl("purge --all", TMPDIR=str(temporary))
        assert (root / "file").exists()
        # Also where the program has closed what it did not open, and the lock with it.
        lock = root.with_name(f"{root.name}.lock")
        descriptors = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        (number,) = [int(link.name) for link in descriptors if os.path.realpath(link) == str(lock)]
        os.close(number)
        home.cachectl("purge --all", TMPDIR=str(temporary))
        assert (root / "file").exists()
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    "record", [None, "", "{}", "[]", "notes", '{"host": "x", "pid": "x", "start": 1}', '{"host": "x", "pid": 1}']
)
def test_a_folder_without_a_record_of_its_owner_stays(home: Home, temporary: Path, record: str | None) -> None:
    """Its name alone does not show that cachectl has made it."""
    folder = temporary / "cachectl-0123456789abcdef"
    write(folder / "results", b"12345")
    if record is not None:
        folder.with_name(f"{folder.name}.lock").write_text(record)
    names = set(os.listdir(temporary))
    assert abandoned_temporaries(home.environment()) == ()
    assert home.cachectl("purge --all", TMPDIR=str(temporary)).stderr == ""
    assert (remove_abandoned(home.environment()), set(os.listdir(temporary))) == (0, names)
    assert (folder / "results").read_bytes() == b"12345"


def test_other_things_in_the_folder_are_left(home: Home, temporary: Path) -> None:
    names = {"cachectl-notes", "cachectl-0123456789abcdeg", "thesis", "cachectl-stage-0123456789abcde"}
    for name in names:
        (temporary / name).mkdir()
    os.mkfifo(temporary / "cachectl-0123456789abcdef.lock")
    home.cachectl("purge --all", TMPDIR=str(temporary))
    assert set(os.listdir(temporary)) == {*names, "cachectl-0123456789abcdef.lock"}
