"""``cachectl run``: the child's caches off or elsewhere, its status and its surroundings its own."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, PROGRAMS, Home
from tiers import real, thorough, thorough_only

from cachectl.layers.core.conformance import snapshot
from cachectl.stack import Stack

KERNELS = (sys.executable, f"{PROGRAMS}/kernels.py", "2")


@thorough_only
@real
@pytest.mark.parametrize("how", ["--no-cache", pytest.param("--isolated", marks=thorough_only)])
def test_a_run_is_cold_every_time_and_leaves_nothing(warm: Home, how: str) -> None:
    before = snapshot(warm.path, times=True)
    for _ in range(1 if how == "--no-cache" else 2):
        done = warm.cachectl("run", how, "--", *KERNELS, POCL_DEBUG="general,llvm")
        assert done.stderr.count("Writing program.bc") == 2
        assert "Using a cached" not in done.stderr or how == "--isolated"
    assert snapshot(warm.path, times=True) == before


@thorough_only
@real
def test_no_cache_of_one_layer_leaves_the_others_on(warm: Home) -> None:
    for layer, compiled in (("pocl", 2), ("loopy", 0)):
        done = warm.cachectl("run --no-cache --layer", layer, "--", *KERNELS, POCL_DEBUG="general,llvm")
        assert done.stderr.count("Writing program.bc") == compiled
        assert ("code generation cache hit" in done.stdout) == (layer == "pocl")


@real
@thorough_only
def test_isolated_in_a_named_folder_is_kept_and_warm(home: Home) -> None:
    for compiled in (2, 0):
        done = home.cachectl("run --isolated=kept --", *KERNELS, POCL_DEBUG="general,llvm")
        assert done.stderr.count("Writing program.bc") == compiled
    assert not (home.path / ".cache").exists()
    # What eval of `env --root` shows, without it.
    script = home.cachectl("env --root kept --shell sh").stdout
    moved: dict[str, Any] = dict(line.removeprefix("export ").split("=", 1) for line in script.splitlines())
    for words in ("ls -q", "verify", "dir pocl loopy"):
        assert home.cachectl(f"{words} --root kept").stdout == home.cachectl(words, **moved).stdout
    (key, other) = home.cachectl("ls --root kept -q pocl").stdout.splitlines()
    assert not home.json("ls")["entries"]
    home.cachectl("get pocl", key, "--root=kept", "-o", "entry")
    assert home.json("push --root=kept bundle.zip pocl --key", other)["total"]["placed"] == 1
    entries = Stack.below("kept", home.environment()).report().total.entries
    assert entries == home.json("report --root=kept")["total"]["entries"]


def test_the_status_is_the_childs_and_a_double_dash_may_be(home: Home) -> None:
    for how, script, status in (
        *(("--no-cache", "exit 7", 7), ("--no-cache", "kill -9 $$", 137)),
        ("--isolated", "kill -TERM $$", 143),
    ):
        assert home.cachectl("run", how, "--", "sh", "-c", script, check=False).returncode == status
    done = home.cachectl("run --no-cache -- sh -c", 'echo "$@"', "sh", "--", "--json")
    assert done.stdout == "-- --json\n"


@real
def test_a_layer_without_a_switch_is_not_silently_left_on(home: Home) -> None:
    command = [sys.executable, f"{home.programs}/dictionary.py", "3"]
    home.refused("run --no-cache --layer pytools --", *command, says="pytools: has no switch")
    assert not (home.path / ".cache").exists()
    home.cachectl("run --no-cache --", *command)
    assert not (home.path / ".cache/pytools").exists()


@thorough_only
@real
def test_isolating_one_layer_leaves_the_others_in_use(home: Home) -> None:
    (home.path / ".cache/pocl").mkdir(parents=True)
    done = home.cachectl("run --isolated --layer loopy --", *KERNELS)
    assert "pyopencl-invoker stores its entries in the same folder" in done.stderr
    entries = {layer["layer"]: layer["entries"] for layer in home.json("report loopy pocl")["layers"]}
    assert entries == {"loopy": 0, "pocl": 2}


def test_caches_that_other_programs_begin_or_replace_stay_in_the_root(home: Home) -> None:
    """What they have is linked, and used in its place. Nothing there is replaced."""
    cache = home.path / ".cache"
    for folder in ("fonts", "pytools"):
        (cache / folder).mkdir(parents=True)
    (cache / "settings").write_text("old")
    program = 'cd "$XDG_CACHE_HOME"; ls; mkdir new; echo font >fonts/one; echo new >other; mv other settings'
    assert home.cachectl("run --no-cache -- sh -c", program).stdout == "fonts\nsettings\n"
    assert sorted(os.listdir(cache)) == ["fonts", "pytools", "settings"]
    assert [(cache / name).read_text() for name in ("fonts/one", "settings")] == ["font\n", "old"]


SIGNALS = [
    ("run --isolated", "", signal.SIGINT, 130),
    ("run --isolated", "trap 'exit 5' TERM; ", signal.SIGTERM, 5),
    *(("bench", trap, signal.SIGTERM, 143) for trap in ("", "trap 'exit 0' TERM; ")),
    *thorough(
        *(
            ("run --isolated", "", number, 128 + number)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
        )
    ),
]


@pytest.mark.parametrize(("verb", "trap", "number", "status"), SIGNALS)
def test_a_signal_reaches_the_child_and_the_scratch_goes(
    home: Home, verb: str, trap: str, number: int, status: int
) -> None:
    """A child that takes it well has the last word in a run; a comparison ends all the same."""
    log = home.path / "log"
    script = f'{trap}mkdir -p "$XDG_CACHE_HOME/new"; echo $XDG_CACHE_HOME >{log}; while :; do sleep 0.05; done'
    command = [*CACHECTL, *verb.split(), "--", "sh", "-c", script]
    with subprocess.Popen(command, env=home.variables, cwd=home.path, stdout=subprocess.DEVNULL) as started:
        while not (log.exists() and log.read_text().endswith("\n")):
            assert started.poll() is None
        started.send_signal(number)
        assert started.wait(600) == status
    assert not Path(log.read_text().strip()).parent.exists()


def test_signals_that_the_caller_ignores_are_ignored_by_the_child(home: Home) -> None:
    command = f"trap '' HUP; exec {sys.executable} -m cachectl run --no-cache -- sh -c 'kill -HUP $$; echo alive'"
    assert home.run("sh", "-c", command).stdout == "alive\n"


def test_an_interrupt_typed_at_the_terminal_reaches_the_child_once(home: Home) -> None:
    program = """
import signal, time
taken = []
signal.signal(signal.SIGINT, lambda *_: taken.append(1))
print('ready', flush=True)
deadline = time.monotonic() + 300
while not taken and time.monotonic() < deadline: time.sleep(0.01)
time.sleep(0.5)
raise SystemExit(10 + len(taken))
"""
    command = [*CACHECTL, "run", "--no-cache", "--", sys.executable, "-c", program]
    child, controller = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, dict(home.variables))  # noqa: S606 - no shell is wanted
    seen = b""
    while b"ready" not in seen:
        seen += os.read(controller, 1024)
    os.write(controller, b"\x03")
    _, status = os.waitpid(child, 0)
    os.close(controller)
    assert os.waitstatus_to_exitcode(status) == 11
