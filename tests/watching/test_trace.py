"""Which cache served a run: counted cold, warm and after a purge, for every kind of build, while other programs run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Driver, Home
from support.dictionaries import rows_of
from support.tracing import layer_of, numbers, trace
from tiers import real, thorough, thorough_only

#: A program of two builds, one of them by loopy.
TWO = ("thirteen.py", "1", "1", "live")
#: A program of three builds, two of them by loopy.
THREE = ("thirteen.py", "2", "1", "live")
#: Runs four copies of a program at once.
FOUR = 'for _ in 1 2 3 4; do "$0" "$@" >/dev/null & done; wait'
#: The layers that such a program uses, with the beginnings of the names of their dictionaries.
USED = {"loopy": "loopy-", "pyopencl-invoker": "pyopencl-", "pyopencl": "", "pocl": ""}


def rows(home: Home, beginning: str) -> int:
    """Ask sqlite itself how many rows the dictionaries of a layer hold."""
    return sum(map(rows_of, (home.path / ".cache/pytools").glob(f"pdict-v5-{beginning}*.sqlite")))


BEGINNING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context = kernels.started()[0]
def source(name):
    return "__kernel void %s(__global int *a) { a[0] = 1; }" % name
def attempt(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except (cl.RuntimeError, TypeError, AttributeError, ValueError):
        return None
"""


def traced(home: Home, lines: str, *arguments: str, begin: str = BEGINNING, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    return trace(home, sys.executable, "-c", f"{begin}\n{lines}", str(home.programs), *arguments, **options)


@real
def test_cold_warm_and_after_a_purge(home: Home) -> None:
    """Stores are the rows and programs that are there afterwards; a warm run stores nothing and misses nothing.

    Each build is listed with who served it, and each kernel that missed with the reason.
    """
    cold = trace(home, *TWO, options=("--explain",))
    assert [(kernel["kernels"], kernel["served_by"]) for kernel in cold["kernels"]] == [
        (["lk0"], None),
        (["pk0"], None),
    ]
    assert {one["because"] for one in cold["missed"] if one["kernel"]} == {"no remembered run built it"}
    for layer, beginning in USED.items():
        hits, misses, stores = numbers(cold, layer)
        assert (hits, stores) == (0, misses)
        assert stores == (rows(home, beginning) if beginning else 2) > 0
        listed = home.json(f"ls {layer}")["entries"]
        assert layer == "pocl" or layer_of(cold, layer)["bytes"] == sum(entry["bytes"] for entry in listed) > 0
    assert len(list((home.path / ".cache/pocl/kcache").rglob("program.bc"))) == 2
    warm = trace(home, *TWO, options=("--explain",))
    assert warm["missed"] == []
    for layer in USED:
        hits, misses, stores = numbers(warm, layer)
        assert (misses, stores) == (0, 0)
        assert hits
    assert numbers(warm, "pyopencl") == (2, 0, 0)
    home.cachectl("purge pyopencl")
    purged = trace(home, *TWO, options=("--explain",))
    assert numbers(purged, "pyopencl") == (0, 2, 2)
    (because,) = {one["because"] for one in purged["missed"] if "pyopencl" in one["layers"]}
    assert because.startswith("its entry in pyopencl is missing: cachectl purge removed it on 2")
    assert (cold["warm"], warm["warm"], purged["warm"]) == (False, True, False)


@thorough_only
@real
def test_the_numbers_are_those_of_the_libraries_own_messages(home: Home) -> None:
    """Cold and warm, also by PoCL's messages in a run without a trace."""
    for expected in ("miss", "hit"):
        document = trace(home, "binaries.py", "5")
        assert Counter(re.findall("binary cache (hit|miss)", document["printed"])) == {expected: 5}
        assert numbers(document, "pyopencl") == ((0, 5, 5) if expected == "miss" else (5, 0, 0))
    program = (sys.executable, f"{home.programs}/thirteen.py", "8", "5")
    assert numbers(trace(home, "thirteen.py", "8", "5"), "pocl") == (0, 13, 13)
    for expected_writes in (0, 13):
        if expected_writes:
            shutil.rmtree(home.path / ".cache/pocl/kcache")
        else:
            assert numbers(trace(home, "thirteen.py", "8", "5"), "pocl") == (13, 0, 0)
        said = home.run(*program, POCL_DEBUG="llvm").stderr
        assert (said.count("building program with options"), said.count("Writing program.bc")) == (13, expected_writes)


@thorough_only
@real
def test_four_programs_at_once_are_counted_together(home: Home) -> None:
    """Children's numbers add up: each of four warm programs hits all it asks for."""
    trace(home, *THREE)
    one = trace(home, *THREE)
    four = trace(home, "sh", "-c", FOUR, sys.executable, f"{home.programs}/thirteen.py", *THREE[1:])
    for layer in USED:
        hits, misses, stores = numbers(one, layer)
        assert hits
        assert numbers(four, layer) == (4 * hits, misses, stores)


@real
def test_the_program_notices_nothing(home: Home) -> None:
    site = home.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins; builtins.mine = 'ran'")
    program = (
        "import sys, os; import pyopencl as cl; print(mine, sys.stdin.read()); cl.get_platforms();"
        "sys.stderr.write('to stderr\\n'); sys.stderr.flush(); os.write(2, b'raw\\n'); sys.exit(7)"
    )
    paths = os.pathsep.join(filter(None, [str(site), home.variables.get("PYTHONPATH")]))
    done = subprocess.run(
        [*CACHECTL, "trace", "--", sys.executable, "-c", program],
        env={**home.variables, "PYTHONPATH": paths},
        input="typed",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, "POCL:" in done.stderr) == (7, "ran typed\n", False)
    assert done.stderr.startswith("to stderr\nraw\n")


def test_a_run_without_python_is_inferred_or_unknown(home: Home) -> None:
    document = trace(home, "true")
    loopy, pocl = layer_of(document, "loopy"), layer_of(document, "pocl")
    assert (loopy["evidence"], loopy["hits"], pocl["evidence"], pocl["stores"]) == ("none", None, "inferred", 0)
    assert "no Python of the run" in loopy["why"]


@thorough_only
@real
@pytest.mark.parametrize("by", ["the program", "the user"])
def test_messages_that_others_asked_for_stay_theirs(home: Home, by: str) -> None:
    """They are printed as they are without a trace, and no number is called exact that was not heard."""
    lines, late = "cl.Program(context, source('one')).build()", "os.environ['POCL_DEBUG'] = 'llvm'\ncontext = "
    begin = BEGINNING.replace("context = ", late, 1) if by == "the program" else BEGINNING
    variables: dict[str, Any] = {} if by == "the program" else {"POCL_DEBUG": "llvm"}
    document = traced(home, lines, begin=begin, **variables)
    shutil.rmtree(home.path / ".cache/pocl/kcache")
    plain = home.run(sys.executable, "-c", f"{begin}\n{lines}", str(home.programs), **variables)
    assert document["said"].count("LLVM |") == plain.stderr.count("LLVM |") > 0
    assert (layer_of(document, "pocl")["evidence"], layer_of(document, "pocl")["stores"]) == ("inferred", 1)


BLOCK = """
import json, os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import cachectl, kernels
from pytools.persistent_dict import WriteOncePersistentDict
dictionary = WriteOncePersistentDict("mine", safe_sync=False)
dictionary.store_if_not_present(1, 2)
EARLIER = "import pyopencl; pyopencl.get_platforms(); print('ready', flush=True); input()"
earlier = subprocess.Popen([sys.executable, "-c", EARLIER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
earlier.stdout.readline()
with cachectl.traced() as recorder:
    context, queue = kernels.started()
    if not (idle := os.fork()):
        signal.pause()
    kernels.compile_and_check(context, queue, 0)
    dictionary.store_if_not_present(1, 2)
    dictionary.clear_in_mem_cache()
    dictionary.fetch(1)
    dictionary.fetch(1)
    try:
        dictionary.fetch(3)
    except KeyError:
        pass
os.kill(idle, signal.SIGKILL)
earlier.communicate(b"end")
kernels.compile_and_check(context, queue, 1)
t = recorder.trace
counted = [[t[name].hits, t[name].misses, t[name].stores] for name in ("pytools", "pocl", "loopy")]
stages = {span.stage for span in t.spans}
print(json.dumps([*counted, t["pocl"].evidence, WriteOncePersistentDict.fetch.__qualname__, "lookup" in stages]))
"""


@real
@thorough_only
def test_a_block_of_this_process_with_libraries_that_are_loaded(home: Home) -> None:
    """A lookup in memory is none, a store of what is there is none; after the block nothing is counted or replaced.

    A fork of the program that looks nothing up makes no count doubtful, nor does a child that was started earlier.
    """
    said = home.run(sys.executable, "-c", BLOCK, str(home.programs)).stdout.splitlines()[-1]
    mine, pocl, (hits, misses, stores), *others = json.loads(said)
    assert (mine, pocl, others) == ([1, 1, 0], [0, 1, 1], ["exact", "WriteOncePersistentDict.fetch", True])
    assert (hits, misses) == (0, stores)
    # The kernel after the block has added its own rows.
    assert rows(home, "loopy-") == 2 * stores > 0


FAILING = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
context, queue = kernels.started()
source = "__kernel void ok(__global float *a) { a[0] = 1; }"
thread = threading.Thread(target=lambda: cl.Program(context, source).build())
thread.start()
failures = 0
while thread.is_alive() or not failures:
    try:
        cl.Program(context, "__kernel void bad() { no; }").build()
    except cl.RuntimeError:
        failures += 1
thread.join()
"""


@real
@thorough_only
def test_hits_are_unknown_if_builds_failed_while_others_ran(home: Home) -> None:
    """A failed build prints as little as one that hit; what was stored is counted by PoCL's messages all the same."""
    document = trace(home, sys.executable, "-c", FAILING, str(home.programs))
    pocl = layer_of(document, "pocl")
    assert (pocl["hits"], pocl["misses"], pocl["stores"], pocl["evidence"]) == (None, 1, 1, "inferred")
    assert "hits are not known" in pocl["why"]
    # The time of a failure is no stage of the cache.
    stages = {stage["stage"]: stage["hit"] for stage in document["summary"]["stages"]}
    assert ("build" in stages, stages.get("lookup", 0)) == (True, 0)


@real
def test_a_warning_of_a_block_names_its_line(home: Home) -> None:
    lines = (
        "import cachectl, pytools.persistent_dict as module",
        "del module.WriteOncePersistentDict.fetch",
        "with cachectl.traced():",
        "    pass",
    )
    program = home.path / "program.py"
    program.write_text("\n".join(lines))
    said = home.run(sys.executable, str(program)).stderr
    assert f"{program}:3: RuntimeWarning: trace: pytools.persistent_dict cannot be watched" in said


def test_a_fork_that_leaves_the_block_leaves_the_trace_to_its_parent(home: Home) -> None:
    lines = (
        "import os, sys, cachectl",
        "from cachectl.watching import ledger",
        "from cachectl.layers.host.here import this_environment",
        "with cachectl.traced() as recorder:",
        "    if not os.fork():",
        "        sys.exit()",
        "    os.wait()",
        "print(bool(recorder.trace.verdict), len(ledger.read(this_environment()).runs))",
    )
    done = home.run(sys.executable, "-c", "\n".join(lines))
    assert (done.stdout, done.stderr) == ("True 1\n", "")


#: Programs that close what they did not open, and then get the number of a file of ours for their own.
CLOSING = {
    "events": (
        "from pytools.persistent_dict import PersistentDict\nfirst = PersistentDict('first', safe_sync=False)\n"
        "first.store(1, 2); os.closerange(3, 256); f = open('mine.txt', 'w')\n"
        "second = PersistentDict('second', safe_sync=False); second.store(1, 2); f.write('mine'); f.close()\n"
        "print(second.fetch(1))"
    ),
    "messages": (
        "cl.Program(context, source('one')).build(); os.closerange(3, 256); f = open('mine.txt', 'w'); f.write('mine');"
        "f.flush(); cl.Program(context, source('two')).build(); f.close(); print(2)"
    ),
}


@thorough_only
@real
@pytest.mark.parametrize("what", CLOSING)
def test_nothing_goes_into_a_file_of_the_programs(home: Home, what: str) -> None:
    assert traced(home, CLOSING[what])["printed"] == "2\n"
    assert (home.path / "mine.txt").read_text() == "mine"
    for path in (home.path / ".cache/pytools").glob("*second*.sqlite"):
        assert path.read_bytes().startswith(b"SQLite format 3")


@real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows what a process has loaded")
@pytest.mark.parametrize("how", thorough("a shell", "cleared variables"))
def test_a_child_that_cannot_be_watched_is_named(home: Home, how: str) -> None:
    """The numbers of the others are then a lower bound."""
    hidden = f"sys.path[:0] = {[str(home.programs)]!r}; sys.argv = {[f'{home.programs}/kernels.py', '1']!r};"
    hidden = f"import os, runpy, subprocess, sys; {hidden} runpy.run_path(sys.argv[0], run_name='__main__')"
    starts = {
        "cleared variables": "subprocess.run([sys.executable, '-c', sys.argv[1]], env={'HOME': os.environ['HOME']})",
        "a shell": "os.system(f'{sys.executable} -I -c \"{sys.argv[1]}\"')",
    }
    program = f"import os, subprocess, sys; {starts[how]}; {hidden}"
    document = trace(home, sys.executable, "-c", program, hidden)
    (unwatched,) = document["unwatched"]
    assert set(unwatched["layers"]) >= {"loopy", "pyopencl-invoker", "pocl"}
    assert "not counted" in document["said"]
    assert {layer_of(document, name)["evidence"] for name in ("loopy", "pocl")} == {"inferred"}


def test_a_library_of_an_unknown_form_is_left_alone_and_named(home: Home, tmp_path: Path) -> None:
    """The program runs as without a trace; a warning and the reason of the layer say that nothing was counted."""
    package = tmp_path / "site/pytools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "persistent_dict.py").write_text(
        "class WriteOncePersistentDict:\n    def fetch(self, key):\n        return key\n"
    )
    program = "from pytools.persistent_dict import WriteOncePersistentDict as D; print(D().fetch('fetched'))"
    paths = os.pathsep.join(filter(None, [str(package.parent), home.variables.get("PYTHONPATH")]))
    document = trace(home, sys.executable, "-c", program, PYTHONPATH=paths)
    assert document["printed"] == "fetched\n"
    assert document["said"].count("cachectl: pytools.persistent_dict cannot be watched (AttributeError: ") == 1
    for layer in (layer_of(document, name) for name in ("loopy", "pyopencl-invoker", "pytools")):
        assert (layer["evidence"], layer["hits"]) == ("none", None)
        assert layer["why"].startswith("pytools.persistent_dict cannot be watched")


@real
@thorough_only
def test_a_layer_that_takes_no_part_is_named_with_the_reason(home: Home, tmp_path: Path) -> None:
    """Off by a variable, and closed by a file in the place of its root; a layer that is used is not named."""
    (tmp_path / "file").touch()
    place = tmp_path / "file/pocl"
    variables: dict[str, Any] = {"LOOPY_NO_CACHE": "1", "POCL_CACHE_DIR": str(place)}
    document = trace(home, sys.executable, "-c", "import loopy", **variables)
    why = "LOOPY_NO_CACHE=1 switches loopy code generation off"
    named = {
        f"loopy: disabled ({why})",
        f"pocl: closed ({place} has something other than a directory at {place.parent})",
    }
    assert named <= set(document["said"].splitlines())
    assert (layer_of(document, "loopy")["state_why"], layer_of(document, "pytools")["state"]) == (why, None)
    assert document["verdict"] == "No cache was used: no lookup was seen. Off, at no measurable cost: loopy."


# ---------------------------------------------------------------------- builds


CROWDED = """
import threading
cl.Program(context, source("known")).build()
gate = threading.Barrier(2)
def at_once(name):
    gate.wait()
    cl.Program(context, source(name)).build()
threads = [threading.Thread(target=at_once, args=(name,)) for name in ("known", "new" + sys.argv[2])]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@thorough_only
@real
def test_no_simultaneous_build_is_wrongly_called_compiled(home: Home) -> None:
    for round_number in "123":
        built = {kernel["kernels"][0]: kernel for kernel in traced(home, CROWDED, round_number)["kernels"]}
        new = built[f"new{round_number}"]
        assert built["known"]["compiled"] in (False, None)
        assert (new["compiled"] in (True, None), new["served_by"]) == (True, None)


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
    "compiled": ("cl.Program(context, source('one')).compile()", (1, 0)),
    "compiled and linked": ("cl.link_program(context, [cl.Program(context, source('one')).compile()])", (1, 1)),
    "binaries": (
        (
            "p = cl.Program(context, source('one')).build();"
            "cl.Program(context, context.devices, p.get_info(cl.program_info.BINARIES)).build()"
        ),
        (2, 0),
    ),
    # Other Pythons and commands; a fork is known by its stack, not by its title.
    "children that use no cache": (
        (
            "import ctypes, subprocess, time\nsubprocess.run([sys.executable, '-I', '-c', 'import sqlite3, time; "
            "time.sleep(.3)']); subprocess.run(['sleep', '.2'])\ncl.Program(context, source('one')).build()\n"
            "child = os.fork()\nif not child:\n"
            "    stat = open('/proc/self/stat').read().rpartition(') ')[2].split()\n"
            "    ctypes.memset(int(stat[45]), 119, 6)\n    time.sleep(.3)\n    os._exit(0)\nos.waitpid(child, 0)"
        ),
        (1, 0),
    ),
    # After exec the number of the process, and so its files, are the same: nothing is said twice.
    "another program": (
        (
            "stage = int((sys.argv[2:] or ['0'])[0]); cl.Program(context, source(f'one{stage}')).build()\n"
            "stage < 2 and os.execv(sys.executable, [*sys.orig_argv[:3], sys.argv[1], str(stage + 1)])"
        ),
        (3, 0),
    ),
}


@real
@pytest.mark.parametrize("scene", thorough(*SCENES))
def test_lookups_of_pocl_are_counted_for_every_kind_of_build(home: Home, scene: str) -> None:
    """PoCL looks up programs and object files, and links again each time. A failure is no hit, a binary is one."""
    lines, expected = SCENES[scene]
    home.run(sys.executable, "-c", f"{BEGINNING}\n{lines}", str(home.programs))
    document = traced(home, lines)
    pocl = layer_of(document, "pocl")
    assert (pocl["hits"], pocl["misses"], pocl["evidence"]) == (*expected, "exact")
    assert (document["unwatched"], layer_of(document, "loopy")["evidence"]) == ([], "exact")


@thorough_only
@real
def test_each_device_is_a_lookup_of_its_own(home: Home) -> None:
    """A program for two devices is looked up twice, and found for one of them if that is what was there."""
    program = (
        "import sys, pyopencl as cl; devices = next(p for p in cl.get_platforms() if p.name.startswith('Portable'))"
        ".get_devices(); chosen = devices[:int(sys.argv[1])];"
        "cl.Program(cl.Context(chosen), '__kernel void one(__global int *a) { a[0] = 1; }').build()"
    )
    counted = [
        numbers(trace(home, sys.executable, "-c", program, devices, POCL_DEVICES="pthread pthread"), "pocl")[:2]
        for devices in "122"
    ]
    assert [sum(filter(None, one)) for one in counted] == [1, 2, 2]
    assert counted[-1] == (2, 0)


ON_EVERY_POCL = """
import json, pyopencl as cl
found = [platform for platform in cl.get_platforms() if platform.name == "Portable Computing Language"]
for platform in found:
    cl.Program(cl.Context(platform.get_devices()), "__kernel void one(__global int *a) { a[0] = 1; }").build()
print(len({platform.version for platform in found}))
"""


@real
@pytest.mark.usefixtures("wheel_pocl")
def test_each_of_two_pocls_in_one_process_is_heard(home: Home, debian_pocl: Driver, tmp_path: Path) -> None:
    """The wheel's loader adds the wheel's PoCL to those of a folder; a program of either is counted, cold and warm."""
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    shutil.copy(debian_pocl["OCL_ICD_VENDORS"], vendors)
    for expected in ((0, 2, 2), (2, 0, 0)):
        document = trace(home, sys.executable, "-c", ON_EVERY_POCL, OCL_ICD_VENDORS=str(vendors))
        assert document["printed"] == "2\n"
        seen = layer_of(document, "pocl")
        assert (numbers(document, "pocl"), seen["evidence"]) == (expected, "exact"), seen["why"]


@pytest.mark.parametrize(("line", "status"), [("trace", 0), ("trace --expect-warm", 1)])
def test_a_command_runs_where_nothing_can_be_made_to_watch_it(home: Home, line: str, status: int) -> None:
    done = home.cachectl(f"{line} -- echo ran", TMPDIR="/proc", XDG_STATE_HOME="/proc", check=False)
    assert (done.returncode, done.stdout) == (status, "ran\n")
    assert "the command is not watched: " in done.stderr
    assert "Unknown: the run was not watched." in done.stderr
