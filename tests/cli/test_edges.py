"""The command line under misuse: odd names, closed streams, huge numbers, narrow terminals."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest
from tiers import thorough

from cachectl.cli.main import MEANT, VERBS
from cachectl.findings import damage
from cachectl.layers.base.environment import Environment
from cachectl.listing import Trouble
from cachectl.stack import Stack
from cachectl.verbs.env import format_changes

if TYPE_CHECKING:
    from pathlib import Path

    from homes import Home

KEY = "3/f/433a72c95049e7"
CACHECTL = f"{shlex.quote(sys.executable)} -m cachectl"


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        # What follows -- is an argument, not the option that would have kept a purge dry, and not somebody's command.
        (["purge", "--all", "--", "--dry-run"], 2, "--all needs no LAYER"),
        (["get", "pocl", "--", "-KEY"], 1, "no entry has the key '-KEY'"),
        (["purge", "--all", "--dry"], 2, "cachectl purge: unrecognized arguments: --dry; did you mean --dry-run?"),
        (["ls", "--foo"], 2, "cachectl ls: unrecognized arguments: --foo; try cachectl ls --help"),
        (["--vers"], 2, "write the command first, not --vers; did you mean --version?"),
        (["report", "POCL"], 2, "unknown layer 'POCL'; did you mean pocl?"),
        (["push"], 2, "cachectl push: the following arguments are required: TARGET; try"),
        (["purge"], 2, "cachectl purge: name the layers to purge, or use --all; try cachectl purge --help"),
        (["ls", "--quiet", "--json"], 2, "not allowed with argument"),
        (["prune", "--max-size", "9" * 400 + "B"], 2, "is too large"),
        (["purge", "cuda", "--key", "nope"], 1, "no entry that is selected has the key 'nope'"),
        (["purge", "--all", "--key", "nope", "-n"], 1, "no entry that is selected has the key 'nope'"),
        # A script may write --root "$FOLDER" without that variable.
        (["report", "--root="], 2, "argument --root: no folder is named"),
        (["purge", "pyopencl", "--wait", "forever"], 2, "argument --wait: invalid seconds value: 'forever'"),
        (["env", "--root", ""], 2, "--root '' is not a directory"),
        (["demo", "--kernels", "0"], 2, "0 is less than one"),
        (["put", "loopy", os.fsdecode(b"\xff"), "/dev/null"], 1, "not an artifact file"),
        (["ls", "--older-than", "soon"], 2, "such as 30d"),
        (["ls", "--limit", "-1"], 2, "--limit -1 is negative"),
        (["put", "pocl", "key", "nosuch"], 1, "No such file"),
        (["run", "--no-cache"], 2, "end the line with --"),
        (["run", "--no-cache", "--isolated", "--", "true"], 2, "not allowed with"),
        (["run", "--no-cache", "--", "nosuchcommand"], 127, "cannot start 'nosuchcommand'"),
        (["run", "--no-cache", "--", "/dev/null"], 126, "cannot start '/dev/null'"),
        (["stage", "--", "true"], 2, "nothing to stage: name a SOURCE to start with, or --out FILE"),
        (["prune"], 2, "name a limit: --stale"),
        (["prune", "--max-size", "much"], 2, "such as 500M"),
        (["prune", "--max-size", "5"], 2, "cannot read '5' as a size; write a number and B, K, M, G or T, such as"),
        (["prune", "--older-than", "long"], 2, "such as 30d"),
        (["prune", "nosuch", "--stale"], 2, "unknown layer"),
        (["prune", "miopen-system", "--stale"], 1, "belong to the package"),
        (["schedule"], 2, "required: systemd|cron|slurm-epilog"),
        (["schedule", "slurm-epilog", "--all-users"], 2, "drop --all-users"),
        (["env", "--root", "x\ny", "--layer", "cuda", "--shell", "csh"], 1, "csh cannot quote"),
        (["env"], 2, "choose --disable, --enable, --root or --base"),
        (["run", "python", "x.py"], 2, "choose --no-cache, --base, --isolated, --prove or --store, then write"),
        (["run", "--isolated="], 2, "--isolated: no folder after =; write --isolated=DIR, or --isolated alone"),
        (["trace"], 2, "end the line with -- and the command to run"),
        (["reprot"], 2, "unknown command 'reprot'; did you mean report?"),
        (["--json", "report"], 2, "write the command first, not --json"),
        *(
            ([word], 2, f"unknown command {word!r}; did you mean {verb}?")
            for word, verb in MEANT.items()
            if word not in VERBS
        ),
    ],
)
def test_misuse_is_one_line(cuda: Home, arguments: list[str], status: int, words: str) -> None:
    done = cuda.cachectl(*arguments, check=False)
    assert words in one_line(done)
    assert done.returncode == status
    assert done.stdout == ""


@pytest.mark.parametrize("layer", ["loopy", *thorough("pocl", "cuda", "pyopencl", "miopen", "miopen-tuning")])
def test_a_key_of_undecodable_bytes_is_one_that_nobody_has(cuda: Home, layer: str) -> None:
    assert cuda.cachectl("get", layer, os.fsdecode(b"\xff"), check=False).returncode == 1
    assert "Traceback" not in cuda.cachectl("ls", layer, "--key", os.fsdecode(b"\xff")).stderr


def test_a_deleted_working_folder_is_named(home: Home) -> None:
    folder = home.path / "gone"
    done = home.run("sh", "-c", f"mkdir {folder}; cd {folder}; rmdir {folder}; {CACHECTL} report", check=False)
    assert f"{folder}: No such file or directory; the working folder has gone" in one_line(done)
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
            ("ls nosuch 2>&-", 2, ""),
            ("purge 2>&-", 2, ""),
            ("--version >&- 2>&-", 0, ""),
        ),
    ],
)
def test_closed_and_full_streams_are_one_line(cuda: Home, line: str, status: int, words: str) -> None:
    done = cuda.run("sh", "-c", f"{CACHECTL} {line}", check=False)
    assert (done.returncode, done.stderr) == (status, f"cachectl: {words}\n" if words else "")


def test_an_interrupt_while_modules_are_loaded_is_silent(home: Home) -> None:
    program = """
import builtins, sys
from cachectl.cli.main import main
load = builtins.__import__
def interrupt(name, *rest):
    if name == "cachectl.layer_set":
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
    done = cuda.cachectl("ls", "cuda", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    done = cuda.cachectl("report", "cuda", PYTHONIOENCODING="ascii", CUDA_CACHE_PATH=str(folder))
    assert done.stdout.isascii()
    assert "\\xe9" in done.stdout


@pytest.mark.parametrize("name", ["", ".", "..", "/", "new/", "nosuch/file"])
def test_an_impossible_file_name_is_refused(cuda: Home, name: str) -> None:
    done = cuda.cachectl("get", "cuda", KEY, "-o", name, check=False)
    invalid = (2, f"cachectl: {name!r} is not a valid name of a file")
    missing = (1, "cachectl: No such file or directory: nosuch/file")
    assert (done.returncode, one_line(done)) == (missing if name == "nosuch/file" else invalid)


def test_get_writes_through_links_and_into_pipes(cuda: Home) -> None:
    command = [sys.executable, "-m", "cachectl", "get", "cuda", KEY]
    expected = subprocess.run(command, env=cuda.variables, capture_output=True, check=True).stdout
    real, link, pipe, out = (cuda.path / name for name in ("real", "link", "pipe", "out"))
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to("real")
    cuda.cachectl("get", "cuda", KEY, "-o", str(link), "--force")
    assert link.is_symlink()
    assert real.read_bytes() == expected
    assert real.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    get = f"{CACHECTL} get cuda {KEY} -o"
    cuda.run("sh", "-c", f"{get} pipe & cat pipe > read; wait")
    assert (cuda.path / "read").read_bytes() == expected
    cuda.run("sh", "-c", f"{{ printf before; {get} /dev/stdout; printf after; }} > out")
    assert out.read_bytes() == b"before" + expected + b"after"
    cuda.run("sh", "-c", f"{get} /dev/stdout | cat > out")
    assert out.read_bytes() == expected
    cuda.cachectl("get", "cuda", KEY, "-o", "/dev/null")
    assert not os.path.isfile("/dev/null")
    assert not [name for name in os.listdir(cuda.path) if "stage" in name]


def test_ls_reports_problems_and_goes_on(cuda: Home) -> None:
    broken = cuda.path / ".cache" / "pytools" / "pdict-v5-loopy-x-3.11.7.final.0.sqlite"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"this is no database, and longer than the header of one would be" * 9)
    done = cuda.cachectl("ls", check=False)
    assert done.returncode == 1
    assert "loopy: " in one_line(done)
    assert str(broken) in done.stderr
    listed = cuda.json("ls", check=False)
    assert [problem["layer"] for problem in listed["problems"]] == ["loopy"]
    assert len(listed["entries"]) == 40


def test_a_root_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    (tmp_path / ".cache" / "pocl" / "kcache").mkdir(parents=True)
    stack = Stack(Environment({"HOME": str(tmp_path)}, home=tmp_path), plugins=False)
    for name in ("scan", "usage"):
        monkeypatch.setattr(stack["pocl"].store, name, refuse)
    monkeypatch.setattr(stack["cuda"], "roots", refuse)
    pocl, cuda, _ = stack.report(layers=("pocl", "cuda", "loopy")).layers
    assert {problem.message for problem in pocl.problems} == {"Input/output error"}
    assert cuda.failures == ("Input/output error",)
    noticed: list[Trouble] = []
    assert list(stack.entries(notice=noticed.append)) == []
    assert {(trouble.layer, trouble.failed) for trouble in noticed} == {("pocl", True), ("cuda", True)}
    with pytest.warns(RuntimeWarning, match="Input/output error"):
        list(stack.entries())
    outcomes = {outcome.layer: outcome for outcome in stack.plan_clear().apply().layers}
    assert outcomes["cuda"].failed
    assert not outcomes["loopy"].failed
    assert {finding.layer for finding in damage(stack).findings} >= {"cuda"}


def test_a_value_of_any_bytes_reaches_the_shell(home: Home) -> None:
    folder = os.fsdecode(b"/tmp/\xff'x\ny")
    program = f'eval "$({CACHECTL} env --root {shlex.quote(folder)} --shell sh)"; printf %s "$POCL_CACHE_DIR"'
    done = subprocess.run(["/bin/sh", "-c", program], env=home.variables, capture_output=True, check=True)
    assert done.stdout == b"/tmp/\xff'x\ny/pocl"
    assert format_changes({"A": "a\u2018b\u201bc'"}, "powershell") == ["$env:A = 'a\u2018\u2018b\u201b\u201bc'''"]


def test_a_terminal_need_not_obey_what_a_key_holds(home: Home) -> None:
    program = "from cachectl.cli import output; output.show_raw(['a\\x1b[31mb'])"
    assert home.terminal(sys.executable, "-c", program).stdout == "a\\x1b[31mb\n"


def test_a_warning_stands_on_a_line_without_the_progress(home: Home) -> None:
    program = "from cachectl.cli import output\nwith output.progress() as show: show('purging'); output.warn('w')"
    shown = home.terminal(sys.executable, "-c", program).stdout
    assert "purging\r\x1b[Kcachectl: w\n" in shown
