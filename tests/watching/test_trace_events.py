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

STARTED = {"pid": 7, "at": 1.0, "event": "started"}
BUILD = {
    **STARTED,
    "event": "build",
    "layer": "pyopencl",
    "driver": "pocl",
    "kind": "build",
    "seconds": 0.5,
    "failed": False,
    "binary": None,
    "heard": True,
    "compiled": True,
    "kernels": ["one"],
    "source": "0" * 64,
    "options": "",
    "devices": ["cpu"],
    "platform": "Portable Computing Language",
}
POCL = {**STARTED, "event": "messages", "layer": "pocl", "lookups": 1, "wrote": ["/nowhere"], "upto": 0}
HIT = {**STARTED, "event": "hit", "layer": "pytools", "dictionary": "loopy-code-gen", "kernels": ["one"]}
SPAN = {**STARTED, "event": "span", "stage": "launch", "name": "wait", "start": 1, "end": 2, "thread": 7}
NO_NUMBERS: tuple[Any, ...] = ("7", -1, 1.5, True, None, 1 << 70)
NO_SECONDS: tuple[Any, ...] = ("0.5", None, -1, True, float("nan"), float("inf"), [])
NO_TEXTS: tuple[Any, ...] = (None, "/a", [1], ["/a\0b"])
NO_INTERVALS: tuple[Any, ...] = (None, 7, [7], [[1]], [[2, 1]], [[1, 2, 3]], [["1", 2]])
WRONG: dict[str, list[dict[str, Any]]] = {
    "no event": [{"event": 7}, {"pid": 7}, {"event": ["hit"], "pid": 7}, {**STARTED, "event": "other"}],
    "numbers": [{**STARTED, "pid": value} for value in NO_NUMBERS],
    "seconds": [{**BUILD, "seconds": value} for value in NO_SECONDS],
    "flags": [{**BUILD, "heard": "yes"}, {**BUILD, "failed": 0}, {**BUILD, "compiled": "no"}, {**BUILD, "binary": []}],
    "texts": [{**BUILD, "kernels": "one"}, {**BUILD, "kernels": [1]}, {**BUILD, "source": 1}, {**BUILD, "devices": {}}],
    "layers": [{**HIT, "layer": None}, {**HIT, "dictionary": ["x"]}, {**STARTED, "event": "store"}],
    "spans": [
        *({**SPAN, name: value} for name in ("start", "end", "thread") for value in NO_NUMBERS),
        *({**SPAN, "stage": value} for value in (*NO_TEXTS, "other")),
        *({**SPAN, "name": value} for value in (*NO_NUMBERS[1:], "a\0b")),
        {name: value for name, value in SPAN.items() if name != "end"},
        *({**HIT, "start": value} for value in NO_NUMBERS),
        *({**STARTED, "monotonic": value} for value in NO_NUMBERS),
        *({**STARTED, name: 7} for name in ("host", "program")),
        *({**STARTED, "rank": value} for value in NO_NUMBERS if value is not None),
        *({**BUILD, "compiles": value} for value in NO_INTERVALS),
    ],
    "pocl": [
        *({**POCL, "upto": value} for value in NO_NUMBERS),
        *({**POCL, "wrote": value} for value in NO_TEXTS),
        *({**POCL, "lookups": value} for value in NO_NUMBERS if value is not None),
        {**STARTED, "event": "messages"},
        {**BUILD, "driver": 7},
    ],
}
LINES = {
    **{name: "".join(json.dumps(event) + "\n" for event in events) for name, events in WRONG.items()},
    "text": 'no event at all\n[]\nnull\n7\n"event"\n{}\n',
    "bytes": "\x00\x01\udcff\udcfe\n",
    "depth": "[" * 100_000 + "\n",
    "digits": '{"event": "started", "pid": ' + "9" * 10_000 + "}\n",
    "cut": json.dumps(STARTED),
}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_line_counts_only_if_every_field_has_its_type(tmp_path: Path, lines: str) -> None:
    good = "".join(json.dumps(event) + "\n" for event in (STARTED, BUILD, POCL, HIT))
    (tmp_path / "7.events").write_text(good, errors="surrogateescape")
    assert (len(read_events(tmp_path).events), read_events(tmp_path).unread) == (4, [])
    (tmp_path / "7.events").write_text(good + lines, errors="surrogateescape")
    assert (len(read_events(tmp_path).events), read_events(tmp_path).unread) == (
        4,
        ["7.events: lines that are no events"],
    )


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
    noted = read_events(folder)
    assert noted.events == []
    assert [line.partition(":")[0] for line in noted.unread] == ["1.events", "2.events", "3.events"]
    assert [len(said) for said in messages_after(folder, noted.events)] == [16 << 20]
    with (folder / "5.events").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert read_events(folder).unread[-1] == "5.events: over the limit on the size of a trace"


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
    lines = [text.replace("\0", "") for text in LINES.values()]
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
