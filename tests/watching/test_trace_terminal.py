"""Traced runs on a terminal: PoCL colours its messages there. Also messages that cannot be understood."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from homes import CACHECTL, Home
from support.tracing import layer_of, numbers, real, trace
from tiers import needing

from cachectl.layers.inside.pocl_messages import Messages

if TYPE_CHECKING:
    from conftest import Driver

CHATTY = "chatty.py"


@pytest.fixture(scope="session", params=["wheel", *needing("debian_pocl", "built_pocl")])
def driver(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    if request.param == "wheel":
        return {}
    other: Driver = request.getfixturevalue(request.param)
    return other.variables


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
def test_a_terminal_shows_what_a_pipe_shows(home: Home, driver: Mapping[str, Any]) -> None:
    """Cold, PoCL compiles all; warm, it finds the program and the object file, and links again."""
    document = home.path / "trace.json"
    command = traced(home, document)
    cold = home.terminal(*command, columns=80, PYOPENCL_NO_CACHE="1", **driver).stdout
    check_screen(cold)
    assert pocl_of(document) == ((0, 3, 3, "exact"), [(True, None)] * 3)
    assert re.search(r"compiled +built\n", cold)
    warm = home.terminal(*command, columns=40, PYOPENCL_NO_CACHE="1", **driver).stdout
    check_screen(warm)
    expected = ((2, 1, 1, "exact"), [(False, "pocl"), (False, "pocl"), (True, None)])
    assert pocl_of(document) == expected
    assert re.search(r"pocl +built\n", warm)
    assert re.search(r"pocl +compiled\n", warm)
    home.run(*command, PYOPENCL_NO_CACHE="1", **driver)
    assert pocl_of(document) == expected


@real
def test_another_drivers_builds_are_no_hits_of_pocls(home: Home, intel_driver: Driver) -> None:
    """With PoCL loaded beside it, a build by Intel's driver is unknown: that driver prints no messages."""
    libraries = Path(intel_driver.variables["OCL_ICD_VENDORS"]).read_text()
    folder = home.path / "vendors"
    folder.mkdir()
    (folder / "intel.icd").write_text(libraries)
    program = (
        "import pyopencl as cl; names = [p.name for p in cl.get_platforms()]; assert len(names) == 2, names;"
        "intel = next(p for p in cl.get_platforms() if p.name.startswith('Intel'));"
        "cl.Program(cl.Context(intel.get_devices()), '__kernel void one(__global int *a) { a[0] = 1; }').build()"
    )
    variables: dict[str, Any] = {**intel_driver.variables, "OCL_ICD_VENDORS": str(folder), "PYOPENCL_NO_CACHE": "1"}
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
    read = Messages(whole)
    assert (read.devices, read.wrote, read.clear) == (1, ["/c/AB/CD"], True)
    assert read.others == other * 3
    # PoCL prints a message in three parts.
    parts = re.fullmatch(rb"(.*\| )((?:\x1b\[\d+m)* (?:\x1b\[0m)?)", head, re.DOTALL)
    assert parts is not None
    for torn in (head + other, parts[1] + other + parts[2]):
        read = Messages(torn + BUILDING + torn + WRITING)
        assert (read.devices, read.wrote, read.clear) == (1, ["/c/AB/CD"], True)
        assert read.others == other * 2


@pytest.mark.parametrize("head", HEADS)
def test_messages_that_were_cut(head: bytes) -> None:
    """A killed process leaves the beginning of a message, which is not shown and proves nothing."""
    for end in range(head.index(b"line 1:") + 7, len(head + BUILDING) - 9):
        read = Messages((head + BUILDING)[:end])
        assert (read.devices, read.clear) == (0, False)
        assert Messages((head + BUILDING)[:end]).others.strip(b" \x1b[0123456789m|\n") == b""


@pytest.mark.parametrize("head", HEADS)
def test_other_words_are_not_clear(head: bytes) -> None:
    """An unknown text of a function that looks programs up leaves all unknown; one of another function does not."""
    read = Messages(head + BUILDING + head + b"Storing the module\nmine\n")
    assert (read.devices, read.clear, read.others) == (1, False, b"mine\n")
    elsewhere = head.replace(b"compile_and_link_program", b"int llvm_codegen(char *, unsigned int)")
    read = Messages(head + BUILDING + elsewhere + b"Generating an object file directly.\n")
    assert (read.devices, read.clear, read.others) == (1, True, b"")
