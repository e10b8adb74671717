"""A wrapped command runs with its own status, whatever becomes of what nobody asked for; else a line says how to."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import CACHECTL, SAYS_SEVEN, Home
from support.layers import fill_up
from support.miopen_kernels import add_kernels
from tiers import NOBODY, as_root, thorough

from cachectl.layers.base.errors import CachectlError
from cachectl.switching import child

ANOTHER = "TMPDIR=/var/tmp cachectl"


@pytest.fixture
def without_temporaries(home: Home) -> Home:
    """Return a home in which no temporary folder can be made, neither in TMPDIR nor in the state folder."""
    deep = home.path / "tmp"
    # The names in it are longer than any path may be.
    part = "d" * 250
    while len(f"{deep}/{part}") < 4060:
        deep /= part
    deep /= "d" * (4070 - len(str(deep)))
    made = home.path / "tmp"
    made.mkdir()
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(made)
        for name in deep.relative_to(made).parts:
            os.mkdir(name, 0o700)
            os.chdir(name)
    finally:
        os.fchdir(before)
        os.close(before)
    return type(home)(home.path, {**home.variables, "TMPDIR": str(deep)})


#: What runs without a temporary folder, and what is not started; with the status, and words that are said.
WITHOUT_TEMPORARIES = [
    ("run --store store --trust", 7, "cachectl: nothing is pulled or pushed, and there is no verdict: "),
    ("run --isolated", 1, os.strerror(errno.ENAMETOOLONG)),
    *thorough(
        ("run --store store --trust --isolated=root", 7, "cachectl: nothing is pulled or pushed, and there is no ver"),
        *((line, 1, os.strerror(errno.ENAMETOOLONG)) for line in ("run --no-cache", "bench")),
    ),
]


@pytest.mark.parametrize(("line", "status", "words"), WITHOUT_TEMPORARIES)
def test_a_command_runs_without_a_temporary_folder_unless_that_was_asked_for(
    without_temporaries: Home, line: str, status: int, words: str
) -> None:
    done = without_temporaries.cachectl(line, "--", *SAYS_SEVEN, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "RAN\n" if status == 7 else "", 1)
    assert words in done.stderr
    assert ANOTHER in done.stderr


@as_root
def test_a_full_disk_of_temporary_files(home: Home, mount: Callable[..., Path], tmp_path: Path) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", on=tmp_path / "disk")
    fill_up(disk)
    done = home.cachectl("run --store store --trust --", *SAYS_SEVEN, check=False, TMPDIR=str(disk))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (7, "RAN\n", 1)
    said = home.refused("run --isolated -- echo RAN", says=str(disk), TMPDIR=str(disk))
    assert (ANOTHER in said, said.count("\n")) == (True, 1)


@as_root
@pytest.mark.parametrize("options", thorough("ro", "nr_inodes=1"))
def test_a_closed_disk_of_temporary_files_is_left_for_the_state_folder(
    home: Home, mount: Callable[..., Path], tmp_path: Path, options: str
) -> None:
    disk = mount("-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", on=tmp_path / "disk")
    for way in ("--store store --trust", "--isolated"):
        done = home.cachectl(f"run {way} --", *SAYS_SEVEN, check=False, TMPDIR=str(disk))
        assert (done.returncode, done.stdout) == (7, "RAN\n")
        assert f"using {home.path}/.local/state/cachectl/scratch" in done.stderr


@pytest.mark.parametrize("streams", [">/dev/full 2>&-", *thorough("2>&-", ">&-", "2>/dev/full", "<&- >&- 2>&-")])
def test_a_stream_that_cannot_be_written_changes_no_status(home: Home, streams: str) -> None:
    for line in ("trace --json -", "run --store store --trust"):
        words = ("sh", "-c", f'"$@" {streams}', "sh", *CACHECTL, *line.split(), "--", "sh", "-c", "exit 7")
        assert home.run(*words, check=False).returncode == 7


def test_a_file_that_cannot_be_written_after_the_run_leaves_the_status_of_the_command(home: Home) -> None:
    (home.path / "folder").mkdir()
    line = ("trace", "--json", "folder/t.json", "--", "sh", "-c")
    for status in (7, 0):
        done = home.cachectl(*line, f"mkdir folder; rm -rf folder; exit {status}", check=False)
        assert done.returncode == (status or 1)
        assert "cachectl: a file is missing: " in done.stderr
        (home.path / "folder").mkdir()


def test_a_wrong_option_ends_with_two_before_the_command(home: Home) -> None:
    for options in ("--digest abc", "--trust --sign nokey", "--allowed-signers nolist"):
        done = home.cachectl(f"run --store store {options} -- echo RAN", check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), options
    # Whatever becomes of the store, the command runs.
    assert home.cachectl("run --store ssh://nohost.invalid/x --trust -- echo RAN").stdout == "RAN\n"


def test_a_digest_of_another_store_ends_with_two_before_the_command(home: Home) -> None:
    add_kernels(home, [1])
    digest, other = home.json("push store miopen")["digest"], "AB" * 32
    run = "run --store store --digest"
    said = home.refused(f"{run} {other} -- echo RAN", status=2, says="store: ")
    assert (said.count("\n"), digest[:16] in said, "ab" * 8 in said) == (1, True, True)
    assert home.cachectl(f"{run} {digest.upper()} -- echo RAN").stdout == "RAN\n"
    # The same store, but damaged.
    for pack in (home.path / "store/packs").iterdir():
        pack.write_bytes(b"")
    home.stack.purge()
    done = home.cachectl(f"{run} {digest} -- echo RAN")
    assert (done.stdout, done.stderr.count("\n")) == ("RAN\n", 1)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no room", "/full"), CachectlError("no"), SystemExit(3)])
def test_an_extra_that_fails_is_one_line_and_a_fault_of_ours_says_so(error: BaseException) -> None:
    lines: list[str] = []

    def fail() -> None:
        raise error

    assert child.try_extra("nothing more", fail, lines.append) is None
    (line,) = lines
    assert line.startswith("nothing more: ")
    assert (child.FAULT in line) == isinstance(error, SystemExit)
    assert ("/full: no room" in line) == isinstance(error, OSError)


@as_root
def test_a_base_or_root_that_another_user_can_write_is_said(home: Home, open_folder: Path) -> None:
    base, writable = open_folder / "base", open_folder / "writable"
    for folder in (base, writable):
        folder.mkdir()
    os.chown(base, NOBODY, NOBODY)
    writable.chmod(0o777)
    for line, what in (
        (f"run --base {base}", f"--base {base}: another user can write to it ({base} belongs to nobody)"),
        (f"run --isolated={base}", f"--isolated {base}: another user can write to it ({base} belongs to nobody)"),
        (f"run --isolated={writable}/root", f"(other users can write to {writable})"),
    ):
        done = home.cachectl(line, "--", "echo", "RAN")
        assert done.stdout == "RAN\n"
        (said,) = [one for one in done.stderr.splitlines() if "another user can write to it" in one]
        assert what in said
    # In a sticky folder nobody else can replace it.
    writable.chmod(0o1777)
    for root in (writable / "root", open_folder / "own"):
        assert not home.cachectl(f"run --isolated={root} -- true").stderr


def test_no_process_is_shown(home: Home) -> None:
    """A container may hide ``/proc``."""
    alone = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && exec "$@"',
        "sh",
    )
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False, stderr=-3).returncode:
        pytest.skip("needs a user namespace")
    for line in ("trace", "run --isolated"):
        done = home.run(*alone, *CACHECTL, *line.split(), "--", *SAYS_SEVEN, check=False)
        assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (7, "RAN\n", False)
