"""The traced program can write to the trace's folder too, which changes no exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from homes import Home

from cachectl.watching.notes import messages_after, read_events

STARTED = {"pid": 7, "at": 1.0, "event": "started", "program": ["p"], "host": "h"}
WHEN = {"pid": 7, "at": 1.0, "start": 1, "end": 2, "thread": 7}
HIT = {**WHEN, "event": "hit", "layer": "pytools", "dictionary": "loopy-code-gen", "kernels": ["one"]}
SPAN = {**WHEN, "event": "span", "stage": "launch", "name": "wait"}
POCL = {"pid": 7, "event": "messages", "layer": "pocl", "lookups": 1, "wrote": ["/nowhere"], "upto": 0}
BUILD: dict[str, Any] = {
    **dict.fromkeys(("kind", "source", "options", "platform", "driver"), "text"),
    **dict.fromkeys(("heard", "failed", "compiled"), True),
    **{name: [] for name in ("kernels", "devices", "compiles")},
    **WHEN,
    "event": "build",
    "layer": "pyopencl",
    "seconds": 0.5,
}
GOOD = (STARTED, HIT, SPAN, POCL, BUILD)
NO_NUMBERS: tuple[Any, ...] = ("7", -1, 1.5, True, 1 << 70, [])
NO_SECONDS: tuple[Any, ...] = ("0.5", -1, True, float("nan"), float("inf"), [])
NO_TEXTS: tuple[Any, ...] = (7, ["x"], {}, "a\0b", True)
NO_LISTS: tuple[Any, ...] = ("/a", [1], ["/a\0b"], {})
NO_INTERVALS: tuple[Any, ...] = (7, [7], [[1]], [[1, 2, 3]], [["1", 2]])
#: Events, their fields, and values that these cannot have.
WRONG: tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...] = (
    (STARTED, ("pid", "rank"), NO_NUMBERS),
    (STARTED, ("event", "host"), NO_TEXTS),
    (STARTED, ("program",), NO_LISTS),
    (SPAN, ("start", "end", "thread"), NO_NUMBERS),
    (SPAN, ("stage", "name"), NO_TEXTS),
    (HIT, ("layer", "dictionary"), NO_TEXTS),
    (BUILD, ("seconds", "at"), NO_SECONDS),
    (BUILD, ("heard", "failed", "compiled"), ("yes", 0, [])),
    (BUILD, ("kernels", "devices"), NO_LISTS),
    (BUILD, ("source", "driver", "binary"), NO_TEXTS),
    (BUILD, ("compiles",), NO_INTERVALS),
    (POCL, ("upto", "lookups"), NO_NUMBERS),
    (POCL, ("wrote",), NO_LISTS),
)
LINES = {
    "types": [json.dumps({**event, name: value}) for event, names, wrong in WRONG for name in names for value in wrong],
    "missing": [json.dumps({**event, name: None}) for event in GOOD for name in ("pid", "event")],
    "needed": [json.dumps({"pid": 7, "event": event["event"]}) for event in (*GOOD, {"event": "other"})],
    "text": ["no event at all", "[]", "null", "7", '"event"', "{}"],
    "bytes": ["\x00\x01\udcff\udcfe"],
    "depth": ["[" * 100_000],
    "digits": ['{"event": "started", "pid": ' + "9" * 10_000 + "}"],
}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_line_counts_only_if_every_field_has_its_type(tmp_path: Path, lines: list[str]) -> None:
    good = "".join(json.dumps(event) + "\n" for event in GOOD)
    for bad in ("", json.dumps(STARTED), *(f"{line}\n" for line in lines)):
        (tmp_path / "7.events").write_text(good + bad, errors="surrogateescape")
        events, unread = read_events(tmp_path)
        assert (len(events), unread) == (5, ["7.events: lines that are no events"] if bad else []), bad


@pytest.mark.thorough
def test_only_plain_files_of_a_process_are_read_and_only_so_far(tmp_path: Path) -> None:
    folder, other = tmp_path / "events", tmp_path / "other"
    folder.mkdir()
    other.write_text(json.dumps(STARTED) + "\n")
    for name in ("x.events", "7.events.txt", "..events"):
        (folder / name).write_text(json.dumps(STARTED) + "\n")
    os.mkfifo(folder / "1.events")
    os.mkfifo(folder / "1.messages")
    (folder / "2.events").symlink_to(other)
    (folder / "2.messages").symlink_to(other)
    (folder / "3.events").mkdir()
    with (folder / "4.messages").open("wb") as sparse:
        sparse.truncate(1 << 40)
    events, unread = read_events(folder)
    assert events == []
    assert [line.partition(":")[0] for line in unread] == ["1.events", "2.events", "3.events"]
    assert [len(said) for said in messages_after(folder, events)] == [16 << 20]
    with (folder / "5.events").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert read_events(folder)[1][-1] == "5.events: over the limit on the size of a trace"


PLANT = """
import os, sys
folder = os.environ["CACHECTL_TRACE"]
os.mkfifo(os.path.join(folder, "1.events"))
os.mkfifo(os.path.join(folder, "1.messages"))
for number, lines in enumerate(sys.argv[1:], 10**9):
    with open(os.path.join(folder, f"{number}.events"), "w", errors="surrogateescape") as file:
        file.write(lines)
sys.exit(7)
"""


def test_whatever_lies_in_the_folder_the_status_is_the_commands(home: Home) -> None:
    document = home.path / "trace.json"
    options = ("--explain", "--json", str(document))
    lines = ["\n".join(lines).replace("\0", "") for lines in LINES.values()]
    done = home.cachectl("trace", *options, "--", sys.executable, "-c", PLANT, *lines, check=False)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    (loopy,) = [layer for layer in json.loads(document.read_text())["layers"] if layer["layer"] == "loopy"]
    # A process may have noted there what was not read.
    assert loopy["evidence"] == "inferred"
    assert "1.events: a pipe, no plain file" in loopy["why"]


OWN = """
import os
os.rename(path := os.path.join(os.environ["CACHECTL_TRACE"], f"{os.getpid()}.events"), path + "-")
os.mkfifo(path)
from pytools.persistent_dict import WriteOncePersistentDict
WriteOncePersistentDict("mine").store_if_not_present(1, 2)
"""


def test_a_pipe_in_the_place_of_its_notes_keeps_no_program_waiting(home: Home) -> None:
    command = [sys.executable, "-m", "cachectl", "trace", "--", sys.executable, "-c", OWN]
    with subprocess.Popen(command, env=dict(home.variables), cwd=home.path, start_new_session=True) as running:
        deadline = time.monotonic() + 120
        while running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0
