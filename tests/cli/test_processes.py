"""Each verb as a process of its own, and on a terminal; other tests run commands inside their own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tiers import thorough

from cachectl.cli.main import VERBS

if TYPE_CHECKING:
    from homes import Home

CACHECTL = (sys.executable, "-m", "cachectl")
TRUE = ("--", sys.executable, "-c", "print('child')")
#: One command for each verb, and its status. KEY is a key of PoCL's.
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "report": ((), 0),
    "dir": ((), 0),
    "ls": (("-q",), 0),
    "get": (("pocl", "KEY", "-o", "entry"), 0),
    "put": (("pocl", "KEY", "artifact"), 0),
    "purge": (("pocl", "--dry-run"), 0),
    "prune": (("--stale", "--dry-run"), 0),
    "verify": ((), 0),
    "doctor": ((), 0),
    "run": (("--no-cache", *TRUE), 0),
    "env": (("--disable", "--shell", "sh"), 0),
    "trace": (TRUE, 0),
    "bench": (("-n", "1", "--layer", "x", *TRUE), 2),
    "push": (("", "pocl"), 2),
    "pull": (("missing", "--trust"), 1),
    "store": (("ls", "missing"), 1),
    "stage": (TRUE, 2),
    "config": ((), 0),
    "schedule": (("cron",), 0),
    "layers": ((), 0),
    "completion": (("bash",), 0),
    "demo": (("--kernels", "none"), 2),
}
#: The verbs whose process the default run compares; it runs every verb inside its own process.
FEW = ("report", "purge", "run", "push", "demo")
#: Numbers that differ from run to run: seconds, free space, and folders of one command.
VARYING = re.compile(r"[\d.]+ [KMGT]iB and [\d,]+ files free|\d+\.\d+ s|cachectl-\w+|[0-9.]+ (?:ms|s)\b")


def test_each_verb_is_here() -> None:
    assert COMMANDS.keys() == VERBS.keys()


@pytest.mark.real
@pytest.mark.parametrize("verb", [*FEW, *thorough(*(verb for verb in COMMANDS if verb not in FEW))])
def test_a_process_does_what_a_command_inside_another_does(verb: str, warm: Home) -> None:
    arguments, status = COMMANDS[verb]
    key = warm.cachectl("ls", "pocl", "-q", "--limit", "1").stdout.strip()
    warm.cachectl("get", "pocl", key, "-o", "artifact")
    words = [verb, *(key if word == "KEY" else word for word in arguments)]
    here, process = warm.cachectl(*words, check=False), warm.process(*words, check=False)
    assert process.returncode == status, process.stderr
    assert "Traceback" not in process.stderr
    assert (here.returncode, *map(settled, (here.stdout, here.stderr))) == (
        process.returncode,
        *map(settled, (process.stdout, process.stderr)),
    )


def settled(text: str) -> str:
    return VARYING.sub("…", text)


@pytest.mark.parametrize("unbuffered", ["", *thorough("1")], ids=lambda unbuffered: "at once" if unbuffered else "late")
@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        *("ls", "report", "doctor --json", "ls --help"),
        *thorough("ls -q", "ls --csv", "dir", "layers", "verify", "config", "--help", "completion bash"),
        *thorough("purge --all --dry-run --json", "env --disable"),
    ],
)
def test_a_reader_that_has_gone_ends_a_verb_quietly(cuda: Home, line: str, unbuffered: str, *, errors: bool) -> None:
    """With ``errors`` they go into the pipe as well."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*CACHECTL, *line.split()],
        env={**cuda.variables, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=writer if errors else subprocess.PIPE,
        text=True,
        check=False,
        timeout=600,
    )
    os.close(writer)
    assert done.returncode in (0, 141)
    assert not done.stderr
