"""What a trace reads: messages of PoCL, on a terminal too, and notes in a folder that the program can write to."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Driver, Home
from support.tracing import layer_of, numbers, trace
from tiers import real, thorough_only

from cachectl.layers.inside.pocl_messages import read_messages
from cachectl.watching.program_events import read_events

CHATTY = "chatty.py"


def pocl_of(document: Path) -> tuple[tuple[Any, ...], list[tuple[bool | None, str | None]]]:
    """Return what a trace counted of PoCL, and of each build whether it was compiled and who served it."""
    read = json.loads(document.read_text())
    counted = (*numbers(read, "pocl"), layer_of(read, "pocl")["evidence"])
    return counted, [(kernel["compiled"], kernel["served_by"]) for kernel in read["kernels"]]


def check_screen(screen: str) -> None:
    """Check that the screen shows no message of PoCL's, and each line of the program's C code once."""
    assert not re.search(r"LLVM|P[Oo]CL: |program\.bc|BUILDING|all build options", screen)
    said = json.loads(next(line for line in screen.splitlines() if line.startswith('{"lines"')))
    printed = [int(number) for number in re.findall(r"\x1b\[1mfrom C (\d+)\x1b\[0m\n", screen)]
    assert sorted(printed) == list(range(said["lines"]))


def traced(home: Home, document: Path) -> tuple[str, ...]:
    options = ("trace", "--explain", "--json", str(document), "--")
    return (*CACHECTL, *options, sys.executable, str(home.programs / CHATTY))


@pytest.mark.thorough
@real
def test_a_terminal_shows_what_a_pipe_shows(home: Home, any_pocl: Mapping[str, Any]) -> None:
    """Cold, PoCL compiles all; warm, it finds the program and the object file, and links again."""
    document = home.path / "trace.json"
    command = traced(home, document)
    cold = home.terminal(*command, columns=80, PYOPENCL_NO_CACHE="1", **any_pocl).stdout
    check_screen(cold)
    assert pocl_of(document) == ((0, 3, 3, "exact"), [(True, None)] * 3)
    assert re.search(r"compiled +built\n", cold)
    warm = home.terminal(*command, columns=40, PYOPENCL_NO_CACHE="1", **any_pocl).stdout
    check_screen(warm)
    expected = ((2, 1, 1, "exact"), [(False, "pocl"), (False, "pocl"), (True, None)])
    assert pocl_of(document) == expected
    assert re.search(r"pocl +built\n", warm)
    home.run(*command, PYOPENCL_NO_CACHE="1", **any_pocl)
    assert pocl_of(document) == expected


@real
def test_another_drivers_builds_are_no_hits_of_pocls(home: Home, intel_driver: Driver) -> None:
    """With PoCL loaded beside it, a build by Intel's driver is unknown: that driver prints no messages."""
    libraries = Path(intel_driver["OCL_ICD_VENDORS"]).read_text()
    folder = home.path / "vendors"
    folder.mkdir()
    (folder / "intel.icd").write_text(libraries)
    program = (
        "import pyopencl as cl; names = [p.name for p in cl.get_platforms()]; assert len(names) == 2, names;"
        "intel = next(p for p in cl.get_platforms() if p.name.startswith('Intel'));"
        "cl.Program(cl.Context(intel.get_devices()), '__kernel void one(__global int *a) { a[0] = 1; }').build()"
    )
    variables: dict[str, Any] = {**intel_driver, "OCL_ICD_VENDORS": str(folder), "PYOPENCL_NO_CACHE": "1"}
    kernels = trace(home, sys.executable, "-c", program, **variables)["kernels"]
    assert [(kernel["compiled"], kernel["served_by"]) for kernel in kernels] == [(None, None)]


TIME = b"[2026-11-21 22:03:22.001397571]"
#: The beginning of a message: 3.0 in a file and on a terminal, 8.0 in a file and on a terminal.
HEADS = (
    TIME + b" POCL: in fn compile_and_link_program at line 1:\n  *** INFO ***  |      LLVM |  ",
    b"\x1b[34m" + TIME + b"\x1b[0mPOCL: in fn compile_and_link_program \x1b[0mat line 1:\n"
    b" \x1b[32m |      LLVM | \x1b[1m\x1b[31m \x1b[0m",
    TIME + b" PoCL: in fn compile_and_link_program at line 1:  *** INFO ***  |      LLVM |  ",
    b"\x1b[34m" + TIME + b" \x1b[0mPoCL: in fn compile_and_link_program \x1b[0mat line 1:\n"
    b"\x1b[32m |      LLVM | \x1b[1m\x1b[31m \x1b[0m",
)
BUILDING = b"   BUILDING for device: pthread\n"
WRITING = b"Writing program.bc to /c/AB/CD/program.bc.\n"


@pytest.mark.parametrize("head", HEADS)
def test_messages_are_separated_from_other_output(head: bytes) -> None:
    """Each format is read, also where C code of another thread printed between the parts of a message."""
    other = b"\x1b[1mmine |\x1b[0m\n"
    whole = other + head + BUILDING + other + head + WRITING + other
    others, devices, wrote, clear = read_messages(whole)
    assert (devices, wrote, clear) == (1, ["/c/AB/CD"], True)
    assert others == other * 3
    # PoCL prints a message in three parts.
    parts = re.fullmatch(rb"(.*\| )((?:\x1b\[\d+m)* (?:\x1b\[0m)?)", head, re.DOTALL)
    assert parts is not None
    for torn in (head + other, parts[1] + other + parts[2]):
        others, devices, wrote, clear = read_messages(torn + BUILDING + torn + WRITING)
        assert (devices, wrote, clear) == (1, ["/c/AB/CD"], True)
        assert others == other * 2


@pytest.mark.parametrize("head", HEADS)
def test_messages_that_were_cut(head: bytes) -> None:
    """A killed process leaves the beginning of a message, which is not shown and proves nothing."""
    for end in range(head.index(b"line 1:") + 7, len(head + BUILDING) - 9):
        others, devices, _, clear = read_messages((head + BUILDING)[:end])
        assert (devices, clear) == (0, False)
        assert others.strip(b" \x1b[0123456789m|\n") == b""


@pytest.mark.parametrize("head", HEADS)
def test_other_words_are_not_clear(head: bytes) -> None:
    """An unknown text of a function that looks programs up leaves all unknown; one of another function does not."""
    others, devices, _, clear = read_messages(head + BUILDING + head + b"Storing the module\nmine\n")
    assert (devices, clear, others) == (1, False, b"mine\n")
    elsewhere = head.replace(b"compile_and_link_program", b"int llvm_codegen(char *, unsigned int)")
    others, devices, _, clear = read_messages(head + BUILDING + elsewhere + b"Generating an object file directly.\n")
    assert (devices, clear, others) == (1, True, b"")


STARTED = {"pid": 7, "event": "started", "program": ["p"], "host": "h", "rank": 0}
WHEN = {"pid": 7, "start": 1, "end": 2, "thread": 7}
HIT = {**WHEN, "event": "hit", "layer": "pytools", "dictionary": "loopy-code-gen", "kernels": ["one"]}
SPAN = {**WHEN, "event": "span", "stage": "launch", "name": "wait"}
POCL = {"pid": 7, "event": "messages", "layer": "pocl", "lookups": 1, "wrote": ["/nowhere"], "upto": 0}
BUILD: dict[str, Any] = {
    **dict.fromkeys(("kind", "source", "options", "platform", "driver", "binary"), "text"),
    **dict.fromkeys(("heard", "failed", "compiled"), True),
    **{name: [] for name in ("kernels", "devices", "compiles")},
    **WHEN,
    "event": "build",
    "layer": "pyopencl",
    "at": 1.0,
}
GOOD = (STARTED, HIT, SPAN, POCL, BUILD)
#: Values that no field can have, and some that other fields can have.
NEVER: tuple[Any, ...] = ({}, [{}], ["a\0b"], "a\0b", -1, 1 << 70, float("nan"), [[1, 2, 3]])
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("pid", "rank", "start", "end", "thread", "upto", "lookups"), ("7", 1.5, True, [])),
    **dict.fromkeys(("seconds", "at"), ("0.5", True, [])),
    **dict.fromkeys(("event", "host", "stage", "name", "layer", "dictionary", "source", "driver"), (7, ["x"], True)),
    **dict.fromkeys(("heard", "failed", "compiled"), ("yes", 0, [])),
    **dict.fromkeys(("program", "kernels", "devices", "wrote"), ("/a", [1])),
    "compiles": (7, [7], [[1]], [["1", 2]]),
}
LINES = {
    "types": [
        json.dumps({**event, name: value}) for event in GOOD for name in event for value in NEVER + OTHERS.get(name, ())
    ],
    "missing": [json.dumps({**event, name: None}) for event in GOOD for name in ("pid", "event")],
    "needed": [json.dumps({"pid": 7, "event": event["event"]}) for event in (*GOOD, {"event": "other"})],
    "backwards": [json.dumps({**event, "end": 0}) for event in GOOD if "end" in event],
    "text": ["no event at all", "[]", "null", "{}"],
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
for name in ("4.messages", "999999999999.events"):
    with open(name, "wb") as sparse:
        sparse.truncate(1 << 40)
for number, lines in enumerate(sys.argv[1:], 10**9):
    with open(f"{number}.events", "w", errors="surrogateescape") as file:
        file.write(lines)
sys.exit(7)
"""


@thorough_only
def test_whatever_lies_in_the_folder_the_status_is_the_commands(home: Home) -> None:
    lines = ["\n".join(lines).replace("\0", "") for lines in LINES.values()]
    options = ("trace", "--explain", "--json", "trace.json", "--", sys.executable, "-c")
    assert home.run("timeout", "300", *CACHECTL, *options, OWN, check=False).returncode == 7
    done = home.cachectl(*options, PLANT, *lines, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (7, False)
    document = json.loads((home.path / "trace.json").read_text())
    # A process may have noted there what was not read.
    loopy = layer_of(document, "loopy")
    names = ("1.events: not a plain file", "2.events", "3.events", "999999999999.events: over the limit")
    assert (loopy["evidence"], [name for name in names if name not in loopy["why"]]) == ("inferred", [])
