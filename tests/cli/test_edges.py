"""The command line under misuse: odd names, closed streams, huge numbers, narrow terminals."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from homes import Home
from support.hostile import hash_tree
from tiers import thorough, thorough_only

from cachectl.cli.main import MEANT, VERBS
from cachectl.verbs.env import format_changes

KEY = "3/f/433a72c95049e7"
TRANSCRIPT = Path(__file__).parent / "screens/misuse.txt"
CACHECTL = f"{shlex.quote(sys.executable)} -m cachectl"
#: What no transcript can hold: any bytes, a new line, and a number of 400 digits. Status, and words of what is said.
ODD = [
    (("prune", "--max-size", f"{'9' * 400}B"), 2, "is too large"),
    (("put", "loopy", os.fsdecode(b"\xff"), "/dev/null"), 1, "not an artifact file"),
    (("get", "loopy", os.fsdecode(b"\xff")), 1, "no entry has the key"),
    (("env", "--root", "x\ny", "--layer", "cuda", "--shell", "csh"), 1, "csh cannot quote"),
    *(
        ((word,), 2, f"unknown command {word!r}; did you mean {verb}?")
        for word, verb in MEANT.items()
        if word not in VERBS
    ),
]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


@thorough_only
def test_misuse_is_one_line_and_leaves_nothing(cuda: Home) -> None:
    """Each line of the transcript in turn; ``CACHECTL_SCREENS=write`` writes what is said again."""
    (cuda.path / "file").write_text("x")
    (cuda.path / "photographs").mkdir()
    os.mkfifo(cuda.path / "pipe.zip")
    before = hash_tree(cuda.path)
    shown = ""
    for line in re.findall(r"^\$ cachectl (.*)$", TRANSCRIPT.read_text(encoding="utf-8"), re.MULTILINE):
        done = cuda.cachectl(*shlex.split(line), check=False)
        assert done.stdout == "", line
        shown += f"$ cachectl {line}\n{one_line(done)}\nstatus {done.returncode}\n\n".replace(str(cuda.path), "~")
    if os.environ.get("CACHECTL_SCREENS") == "write":
        TRANSCRIPT.write_text(shown, encoding="utf-8")
    assert shown == TRANSCRIPT.read_text(encoding="utf-8")
    for arguments, status, words in ODD:
        done = cuda.cachectl(*arguments, check=False)
        assert (done.returncode, done.stdout, words in one_line(done)) == (status, "", True), arguments
    assert {name: what for name, what in hash_tree(cuda.path).items() if b"/.local" not in name} == before


def test_a_deleted_working_folder_is_named(home: Home) -> None:
    folder = home.path / "gone"
    done = home.run("sh", "-c", f"mkdir {folder}; cd {folder}; rmdir {folder}; {CACHECTL} report", check=False)
    assert f"{folder}: No such file or directory; cd to a directory that you can use" in one_line(done)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("ls >&-", 1, "Bad file descriptor: standard output"),
        ("report --json >/dev/full", 1, "No space left on device: standard output"),
        ("report --html - >/dev/full", 1, "No space left on device: standard output"),
        ("put pocl key - <&-", 1, "Bad file descriptor: standard input"),
        ("run --no-cache -- true <&- >&- 2>&-", 0, ""),
        *thorough(
            ("ls -q >/dev/full", 1, "No space left on device: standard output"),
            ("purge 2>&-", 2, ""),
            ("--version >&- 2>&-", 0, ""),
        ),
    ],
)
def test_closed_and_full_streams_are_one_line(cuda: Home, line: str, status: int, words: str) -> None:
    done = cuda.run("sh", "-c", f"{CACHECTL} {line}", check=False)
    assert (done.returncode, done.stderr) == (status, f"cachectl: {words}\n" if words else "")


@pytest.mark.parametrize("unbuffered", ["", *thorough("1")], ids=lambda unbuffered: "at once" if unbuffered else "late")
@pytest.mark.parametrize(
    "line", [*("ls", "doctor --json"), *thorough("report", "ls --csv", "ls --help", "purge --all --dry-run --json")]
)
def test_a_reader_that_has_gone_ends_a_verb_quietly(cuda: Home, line: str, unbuffered: str) -> None:
    """Also where errors go into the pipe as well."""
    for errors in ("", "2>&1"):
        script = f"{{ {CACHECTL} {line} {errors}; echo $? >status; }} | true"
        done = cuda.run("sh", "-c", script, PYTHONUNBUFFERED=unbuffered)
        assert (cuda.path / "status").read_text().strip() in ("0", "141")
        assert not done.stderr


def test_a_small_artifact_needs_little_memory(home: Home) -> None:
    done = home.run("sh", "-c", f"ulimit -v 800000; {CACHECTL} put pocl key - </dev/null", check=False)
    assert done.stderr.startswith("cachectl: not an artifact file of cachectl get")


def test_an_interrupt_while_modules_are_loaded_is_silent(home: Home) -> None:
    program = """
import builtins, sys
from cachectl.cli.main import main
load = builtins.__import__
def interrupt(name, *rest):
    if "layer_set" in (rest[2] or ()):
        raise KeyboardInterrupt
    return load(name, *rest)
builtins.__import__ = interrupt
sys.exit(main(["report"]))
"""
    done = home.run(sys.executable, "-c", program, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ascii_is_enough(cuda: Home) -> None:
    folder = cuda.path / "é"
    (folder / "0").mkdir(parents=True)
    assert cuda.cachectl("ls cuda", PYTHONIOENCODING="ascii").stdout.isascii()
    done = cuda.cachectl("report cuda", PYTHONIOENCODING="ascii", CUDA_CACHE_PATH=str(folder))
    assert done.stdout.isascii()
    assert "\\xe9" in done.stdout


def test_get_writes_through_links_and_into_pipes(cuda: Home) -> None:
    script = f"{CACHECTL} get cuda {KEY}"
    expected = subprocess.run(["sh", "-c", script], env=cuda.variables, capture_output=True, check=True).stdout
    real, link, out = (cuda.path / name for name in ("real", "link", "out"))
    real.touch(mode=0o600)
    link.symlink_to("real")
    cuda.cachectl(f"get cuda {KEY} -o link --force")
    assert (link.is_symlink(), real.read_bytes(), real.stat().st_mode & 0o777) == (True, expected, 0o600)
    os.mkfifo(cuda.path / "pipe")
    for command, written in (
        (f"{script} -o pipe & cat pipe >out; wait", expected),
        (f"{{ printf before; {script} -o /dev/stdout; printf after; }} >out", b"before" + expected + b"after"),
    ):
        cuda.run("sh", "-c", command)
        assert out.read_bytes() == written
    cuda.cachectl(f"get cuda {KEY} -o /dev/null")
    assert not os.path.isfile("/dev/null")
    assert not list(cuda.path.glob("*stage*"))


def test_a_value_of_any_bytes_reaches_the_shell(home: Home) -> None:
    folder = os.fsdecode(b"/tmp/\xff'x\ny")
    program = f'eval "$({CACHECTL} env --root {shlex.quote(folder)} --shell sh)"; printf %s "$POCL_CACHE_DIR"'
    done = subprocess.run(["/bin/sh", "-c", program], env=home.variables, capture_output=True, check=True)
    assert done.stdout == b"/tmp/\xff'x\ny/pocl"
    assert format_changes({"A": "a\u2018b\u201bc'"}, "powershell") == ["$env:A = 'a\u2018\u2018b\u201b\u201bc'''"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        # A terminal need not obey what a key holds, and a warning stands on a line without the progress.
        ("output.show_raw(['a\\x1b[31mb'])", "a\\x1b[31mb\n"),
        (
            "import time\nwith output.progress('purging') as step: step(9); time.sleep(0.9); output.warn('w')",
            "purging 9\r\x1b[Kcachectl: w\n",
        ),
    ],
)
def test_a_terminal_shows_texts_as_they_are(home: Home, lines: str, shown: str) -> None:
    program = f"from cachectl.cli import output\n{lines}"
    assert shown in home.terminal(sys.executable, "-c", program).stdout
