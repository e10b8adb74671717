"""What PoCL did in each build: options, devices, binaries and threads."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from support.tracing import numbers, real
from tiers import thorough

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Driver
    from homes import Home


REPEATING = """
import sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context = cl.Context([kernels.device()])
for _ in range(9):
    cl.Program(context, "__kernel void often(__global int *a) { a[0] = 1; }").build()
cl.Program(context, "__kernel void once(__global int *a) { a[0] = 1; }").build()
"""


@real
def test_a_program_that_is_built_again_and_again_is_named(home: Home) -> None:
    """Caches are warm then, and the time of all these lookups shows nowhere else."""
    command = (sys.executable, "-c", REPEATING, str(home.programs))
    done = home.cachectl("trace", "--explain", "--json", "trace.json", "--", *command)
    (found,) = json.loads((home.path / "trace.json").read_text())["rebuilt"]
    assert (found["kernels"], found["builds"]) == (["often"], 9)
    assert "often: one process built the same program 9 times, all but the first in " in done.stderr
    table = done.stderr.partition("served by")[2].partition("\n\n")[0]
    rows = [line.split()[1:] for line in table.splitlines()[1:]]
    assert sorted(rows) == [["1", "compiled", "often"], ["1", "compiled", "once"], ["8", "pocl", "often"]]


SPEAKING = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
library = ctypes.CDLL(None)
stream = ctypes.c_void_p.in_dll(library, "stderr")
context = cl.Context([kernels.device()])
library.fputs(b"from C, before\\n", stream)
cl.Program(context, "__kernel void one(__global int *a) { a[0] = 1; }").build()
sys.stderr.write("from Python, after\\n")
stream = ctypes.c_void_p.in_dll(library, "stderr")
library.fputs(b"from C, at the end\\n", stream)
"""


@real
@pytest.mark.thorough
def test_output_of_c_code_stays_with_the_program_that_captures_it(home: Home) -> None:
    """It is there, complete and before what is printed after the next build, for the parent that reads it."""
    parent = (
        "import subprocess, sys; done = subprocess.run([sys.executable, *sys.argv[1:]], stderr=-1, text=True);"
        "print(done.stderr.splitlines())"
    )
    command = (sys.executable, "-c", parent, "-c", SPEAKING, str(home.programs))
    said = home.cachectl("trace", "--", *command)
    assert said.stdout == "['from C, before', 'from Python, after', 'from C, at the end']\n"
    assert "from C" not in said.stderr


CROWDED = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context = cl.Context([kernels.device()])
def build(name):
    cl.Program(context, "__kernel void %s(__global int *a) { a[0] = 1; }" % name).build()
build("known")
gate = threading.Barrier(2)
def at_once(name):
    gate.wait()
    build(name)
threads = [threading.Thread(target=at_once, args=(name,)) for name in ("known", "new" + sys.argv[2])]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.thorough
@real
def test_no_simultaneous_build_is_wrongly_called_compiled(home: Home) -> None:
    """A served build is never called compiled: the answer is right or unknown."""
    document = home.path / "trace.json"
    for round_number in "123":
        command = (sys.executable, "-c", CROWDED, str(home.programs), round_number)
        home.cachectl("trace", "--json", str(document), "--", *command)
        built = json.loads(document.read_text())["kernels"]
        known = [kernel for kernel in built if kernel["kernels"] == ["known"]][-1]
        new = next(kernel for kernel in built if kernel["kernels"] == [f"new{round_number}"])
        assert known["compiled"] in (False, None)
        assert new["compiled"] in (True, None)
        assert new["served_by"] is None


OPTIONS = """
import sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context = cl.Context([kernels.device()])
for options in ("", "-DTWO=2"):
    cl.Program(context, "__kernel void one(__global int *a) { a[0] = 1; }").build(options)
"""


@real
@pytest.mark.thorough
def test_a_miss_names_the_options_that_differ_within_the_run(home: Home) -> None:
    """PoCL's keys are hashes, but what was built before in the same run is known."""
    document = home.path / "trace.json"
    command = (sys.executable, "-c", OPTIONS, str(home.programs))
    home.cachectl("trace", "--explain", "--json", str(document), "--", *command)
    reasons = [miss["because"] for miss in json.loads(document.read_text())["misses"] if miss["layer"] == "pocl"]
    assert reasons == [
        "cold: no entry like it",
        "the same source was built before in this run, with options '' there, '-DTWO=2' here",
    ]


BEGINNING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context = cl.Context([kernels.device()])
def source(name):
    return "__kernel void %s(__global int *a) { a[0] = 1; }" % name
def attempt(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except (cl.RuntimeError, TypeError, AttributeError, ValueError):
        return None
"""
#: What a program does on PoCL, and what its own messages say of that in a second run: hits and misses.
SCENES = {
    "a failure in the compiler": ("attempt(cl.Program(context, '__kernel void bad() { no; }').build)", (0, 0)),
    "a failure before the compiler": (
        (
            "cl.Program(context, source('one')).build(); attempt(cl.Program(context, source('two')).build, '-no-such');"
            "attempt(cl.Program(context, source('three')).build, 3.4)"
        ),
        (1, 0),
    ),
    "a failed compile": ("attempt(cl.Program(context, '__kernel void bad() { no; }').compile)", (0, 0)),
    "compiled": ("cl.Program(context, source('one')).compile()", (1, 0)),
    "compiled and linked": ("cl.link_program(context, [cl.Program(context, source('one')).compile()])", (1, 1)),
    "binaries": (
        (
            "p = cl.Program(context, source('one')).build();"
            "cl.Program(context, context.devices, p.get_info(cl.program_info.BINARIES)).build()"
        ),
        (2, 0),
    ),
    "a reloaded library": (
        "import importlib; importlib.reload(cl); cl.Program(context, source('one')).build()",
        (1, 0),
    ),
}


@real
@pytest.mark.parametrize("scene", [next(iter(SCENES)), *thorough(*list(SCENES)[1:])])
def test_lookups_of_pocl_are_counted_for_every_kind_of_build(home: Home, scene: str) -> None:
    """PoCL looks up programs and object files, and links again each time. A failure is no hit, a binary is one."""
    lines, expected = SCENES[scene]
    command = (sys.executable, "-c", f"{BEGINNING}\n{lines}", str(home.programs))
    home.run(*command)
    document = home.path / "trace.json"
    home.cachectl("trace", "--json", str(document), "--", *command)
    (pocl,) = [layer for layer in json.loads(document.read_text())["layers"] if layer["layer"] == "pocl"]
    assert (pocl["hits"], pocl["misses"], pocl["evidence"]) == (*expected, "exact")


@pytest.mark.thorough
@real
def test_each_device_is_a_lookup_of_its_own(home: Home) -> None:
    """A program for two devices is looked up twice, and found for one of them if that is what was there."""
    program = (
        "import sys, pyopencl as cl; devices = next(p for p in cl.get_platforms() if p.name.startswith('Portable'))"
        ".get_devices(); chosen = devices[:int(sys.argv[1])];"
        "cl.Program(cl.Context(chosen), '__kernel void one(__global int *a) { a[0] = 1; }').build()"
    )
    document = home.path / "trace.json"
    counted = []
    for devices in "1", "2", "2":
        command = (sys.executable, "-c", program, devices)
        home.cachectl("trace", "--json", str(document), "--", *command, POCL_DEVICES="pthread pthread")
        hits, misses, _ = numbers(json.loads(document.read_text()), "pocl")
        assert hits is not None
        assert misses is not None
        counted.append(hits + misses)
    assert counted == [1, 2, 2]
    assert (hits, misses) == (2, 0)


@pytest.mark.thorough
@real
def test_no_message_goes_into_a_file_of_the_programs(home: Home) -> None:
    """A program that closes what it did not open gets the number of our file for its own."""
    lines = (
        "cl.Program(context, source('one')).build(); os.closerange(3, 256); f = open('mine.txt', 'w'); f.write('mine');"
        "f.flush(); cl.Program(context, source('two')).build(); f.close()"
    )
    home.cachectl("trace", "--", sys.executable, "-c", f"{BEGINNING}\n{lines}", str(home.programs))
    assert (home.path / "mine.txt").read_text() == "mine"


CAPTURING = """
import ctypes, sys
sys.path.insert(0, "{programs}")
import kernels, pyopencl as cl

def test_output_of_c_code_is_captured(capfd):
    context = cl.Context([kernels.device()])
    cl.Program(context, "__kernel void one(__global int *a) {{ a[0] = 1; }}").build()
    library = ctypes.CDLL(None)
    library.fputs(b"from C", ctypes.c_void_p.in_dll(library, "stderr"))
    assert capfd.readouterr().err == "from C"
"""


@pytest.mark.thorough
@real
def test_a_suite_that_captures_what_c_prints_passes_as_before(home: Home) -> None:
    """Outside a build nothing of the program is redirected."""
    (home.path / "test_it.py").write_text(CAPTURING.format(programs=home.programs))
    home.cachectl("trace", "--", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")


@pytest.mark.thorough
@real
def test_a_trace_within_a_trace_and_the_users_own_site(home: Home) -> None:
    """Both traces hear of all; the user's module is imported as ever, and may fail as ever."""
    site = home.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("VALUE = 42\n")
    paths = os.pathsep.join(filter(None, [str(site), home.variables.get("PYTHONPATH")]))
    inner, outer = home.path / "inner.json", home.path / "outer.json"
    program = "import sitecustomize, sys; print(sitecustomize.VALUE, file=sys.stdout); import runpy; "
    program += f"sys.path.insert(0, {str(home.programs)!r}); sys.argv = ['thirteen.py', '1', '1'];"
    program += "runpy.run_path(sys.path[0] + '/thirteen.py', run_name='__main__')"
    nested = (sys.executable, "-m", "cachectl", "trace", "--json", str(inner), "--", sys.executable, "-c", program)
    done = home.cachectl("trace", "--json", str(outer), "--", *nested, PYTHONPATH=paths)
    assert done.stdout.startswith("42\n")
    assert "Error" not in done.stderr
    for document in (inner, outer):
        assert numbers(json.loads(document.read_text()), "pocl") == (0, 2, 2)
    (site / "sitecustomize.py").write_text("raise KeyError('mine')\n")
    done = home.cachectl("trace", "--json", str(inner), "--", sys.executable, "-c", "", PYTHONPATH=paths)
    assert "KeyError: 'mine'" in done.stderr
    evidence = {layer["layer"]: layer["evidence"] for layer in json.loads(inner.read_text())["layers"]}
    assert evidence["loopy"] == "exact"


@pytest.mark.thorough
@real
def test_a_block_that_raises_is_counted_all_the_same(home: Home) -> None:
    """The numbers are there however the block ends."""
    lines = (
        "import cachectl\ntry:\n    with cachectl.traced() as t:\n        cl.Program(context, source('one')).build()\n"
        "        raise KeyError\nexcept KeyError:\n    print(t['pocl'].misses, t['pocl'].evidence)"
    )
    done = home.run(sys.executable, "-c", f"{BEGINNING}\n{lines}", str(home.programs))
    assert done.stdout == "1 exact\n"


@pytest.mark.thorough
@real
def test_a_process_that_becomes_another_program_says_nothing_twice(home: Home) -> None:
    """After ``exec`` the number of the process, and so its files, are the same."""
    lines = (
        "stage = int(sys.argv[2]); import ctypes; library = ctypes.CDLL(None)\n"
        "cl.Program(context, source(f'one{stage}')).build()\n"
        "library.fputs(b'stage %d\\n' % stage, ctypes.c_void_p.in_dll(library, 'stderr'))\n"
        "stage < 2 and os.execv(sys.executable, [sys.executable, '-c', SELF, sys.argv[1], str(stage + 1)])"
    )
    program = f"SELF = sys.orig_argv[2]\n{lines}"
    document = home.path / "trace.json"
    command = (sys.executable, "-c", f"{BEGINNING}\n{program}", str(home.programs), "0")
    done = home.cachectl("trace", "--json", str(document), "--", *command)
    assert re.findall(r"stage \d", done.stderr) == ["stage 0", "stage 1", "stage 2"]
    assert numbers(json.loads(document.read_text()), "pocl") == (0, 3, 3)


@pytest.mark.thorough
@real
def test_a_worker_that_renames_itself_is_watched_all_the_same(home: Home) -> None:
    """A fork is known by its stack, not by its title."""
    lines = (
        "cl.Program(context, source('one')).build()\nimport ctypes, time\nchild = os.fork()\nif not child:\n"
        "    stat = open('/proc/self/stat').read().rpartition(') ')[2].split()\n"
        "    ctypes.memset(int(stat[45]), 119, 6)\n    time.sleep(.3)\n    os._exit(0)\nos.waitpid(child, 0)"
    )
    document = home.path / "trace.json"
    home.cachectl(
        "trace", "--json", str(document), "--", sys.executable, "-c", f"{BEGINNING}\n{lines}", str(home.programs)
    )
    read = json.loads(document.read_text())
    assert read["unwatched"] == []
    assert numbers(read, "pocl") == (0, 1, 1)


ON_EVERY_POCL = """
import json, pyopencl as cl
found = [platform for platform in cl.get_platforms() if platform.name == "Portable Computing Language"]
for platform in found:
    cl.Program(cl.Context(platform.get_devices()), "__kernel void one(__global int *a) { a[0] = 1; }").build()
print(len({platform.version for platform in found}))
"""


@real
def test_each_of_two_pocls_in_one_process_is_heard(home: Home, debian_pocl: Driver, tmp_path: Path) -> None:
    """The wheel's loader adds the wheel's PoCL to those of a folder; a program of either is counted, cold and warm."""
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    shutil.copy(debian_pocl.variables["OCL_ICD_VENDORS"], vendors)
    command = ("trace", "--json", "trace.json", "--", sys.executable, "-c", ON_EVERY_POCL)
    for expected in ((0, 2, 2), (2, 0, 0)):
        done = home.cachectl(*command, OCL_ICD_VENDORS=str(vendors))
        assert done.stdout == "2\n"
        document = json.loads((home.path / "trace.json").read_text())
        assert numbers(document, "pocl") == expected
        (pocl,) = [layer for layer in document["layers"] if layer["layer"] == "pocl"]
        assert pocl["evidence"] == "exact"
