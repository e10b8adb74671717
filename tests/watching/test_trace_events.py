"""The traced program can write to the trace's folder too, which changes no exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Home
from support.tracing import layer_of

from cachectl.watching.notes import read_events

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


#: A pipe in the place of its own notes, which keeps no program waiting.
OWN = """
import os, sys
os.rename(path := os.path.join(os.environ["CACHECTL_TRACE"], f"{os.getpid()}.events"), path + "-")
os.mkfifo(path)
from pytools.persistent_dict import WriteOncePersistentDict
WriteOncePersistentDict("mine").store_if_not_present(1, 2)
sys.exit(7)
"""
#: Pipes, links, sparse files and lines that are no events, under names of processes.
PLANT = """
import os, sys
os.chdir(os.environ["CACHECTL_TRACE"])
for name in ("1.events", "1.messages"):
    os.mkfifo(name)
open("other", "w").close()
os.symlink("other", "2.events")
os.mkdir("3.events")
for name in ("4.messages", "5.events"):
    with open(name, "wb") as sparse:
        sparse.truncate(1 << 40)
for number, lines in enumerate(sys.argv[1:], 10**9):
    with open(f"{number}.events", "w", errors="surrogateescape") as file:
        file.write(lines)
sys.exit(7)
"""


def test_whatever_lies_in_the_folder_the_status_is_the_commands(home: Home) -> None:
    lines = ["\n".join(lines).replace("\0", "") for lines in LINES.values()]
    trace = (*CACHECTL, "trace", "--explain", "--json", "trace.json", "--", sys.executable, "-c")
    for program in (OWN, PLANT):
        done = home.run("timeout", "300", *trace, program, *lines, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (7, False)
    document = json.loads((home.path / "trace.json").read_text())
    # A process may have noted there what was not read.
    loopy = layer_of(document, "loopy")
    assert loopy["evidence"] == "inferred"
    for name in ("1.events: a pipe, no plain file", "2.events", "3.events", "5.events: over the limit on the size"):
        assert name in loopy["why"]
