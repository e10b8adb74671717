"""What a trace says first: whether a run was warm, what it lost, and what has changed since the last traced run."""

import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import zlib
from base64 import b85encode
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, PROGRAMS, Driver, Home
from support.tracing import numbers, trace
from tiers import real, thorough, thorough_only

from cachectl.layers.base.errors import CachectlError
from cachectl.watching import ledger
from cachectl.watching.differences import renamed

SOURCE = """#include "common.h"
#define FACTOR 3
__kernel void stamp(__global int *a) { a[0] = FACTOR * SEED + common(); }
"""
HEADER = "inline int common(void) { return 1; }\n"
PURGED = "its entry in pocl is missing: cachectl purge removed it on 2"


@pytest.fixture
def seeded(home: Home) -> Home:
    (home.path / "stamp.cl").write_text(SOURCE)
    (home.path / "common.h").write_text(HEADER)
    return home


def run(home: Home, *options: str, **variables: str) -> dict[str, Any]:
    """Trace the program, with these options of the trace and variables."""
    return trace(home, "seeded.py", "-I.", f"-DSEED={variables.pop('seed', '1')}", options=options, **variables)


def reasons(document: dict[str, Any]) -> dict[str, str]:
    return {one["kernel"]: one["because"] for one in document["missed"] if one["kernel"]}


def ledger_of(home: Home) -> Path:
    return home.path / ".local/state/cachectl/ledger/ledger.json"


@real
def test_cold_then_warm_then_one_option(seeded: Home) -> None:
    """A run is compared with the last traced one, and what changes in each run is said to."""
    cold = run(seeded)
    assert cold["verdict"].startswith("Cold: ")
    assert cold["verdict"].endswith(" went into compiling 2 kernels, none of which a remembered run built.")
    assert run(seeded)["verdict"].startswith("Warm: every lookup hit (")
    slow = run(seeded, seed="17")
    reason = "the option `-DSEED=1` changed to `-DSEED=17`"
    assert (slow["said"].splitlines()[0], reasons(slow)) == (slow["verdict"], {"stamp": reason})
    assert slow["verdict"].endswith(f" s went into compiling `stamp`, because {reason}.")
    assert all(0 < one["seconds"] < slow["wall_seconds"] for one in slow["missed"])
    run(seeded, seed="18")
    again = run(seeded, seed="19")
    assert again["verdict"].endswith("it changed in each of the last 3 runs.")
    # A build of before the last run hits.
    assert reasons(run(seeded)) == {}


def edit(file: str, old: str, new: str) -> Callable[[Home], dict[str, str]]:
    def change(home: Home) -> dict[str, str]:
        text = (home.path / file).read_text()
        assert old in text
        (home.path / file).write_text(text.replace(old, new))
        return {}

    return change


def reorder(home: Home) -> dict[str, str]:
    first, second, *rest = SOURCE.splitlines(keepends=True)
    (home.path / "stamp.cl").write_text("".join((second, first, *rest)))
    return {}


def missing(home: Home) -> dict[str, str]:
    for folder in (home.path / ".cache/pocl/kcache").glob("*/*/stamp"):
        shutil.rmtree(folder.parent)
    return {}


def other_loopy(home: Home) -> dict[str, str]:
    """Put loopy before the installed one, with another version."""
    spec, over = find_spec("loopy"), home.path / "over"
    assert spec is not None
    shutil.copytree(Path(str(spec.origin)).parent, over / "loopy", ignore=shutil.ignore_patterns("__pycache__"))
    information = over / "loopy-1999.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: loopy\nVersion: 1999.9\n")
    return {"PYTHONPATH": str(over)}


def variables(**changes: str) -> Callable[[Home], dict[str, str]]:
    return lambda home: {name: value.format(home=home.path) for name, value in changes.items()}


#: What is changed between two runs, the kernel that misses, and the reason that is given.
CAUSES = (
    (edit("stamp.cl", "FACTOR 3", "FACTOR 4"), "stamp", "the macro `FACTOR` changed from 3 to 4"),
    *thorough(
        (edit("stamp.cl", "a[0]", "a[1]"), "stamp", "the source changed (in 1 line)"),
        (edit("stamp.cl", "*a) { a[0]", "*b) { b[0]"), "stamp", "the source differs only in names (`b` was `a`)"),
        (reorder, "stamp", "the lines of the source are in another order"),
        (variables(POCL_EXTRA_BUILD_FLAGS="-DZ=1"), "stamp", "POCL_EXTRA_BUILD_FLAGS changed from unset to -DZ=1"),
        (variables(PUTENV="POCL_KERNEL_CACHE=0"), "stamp", "the pocl cache is off (POCL_KERNEL_CACHE=0"),
        (edit("common.h", "1", "2"), "stamp", "the header {home}/common.h changed"),
        (missing, "stamp", "its entry in pocl is missing"),
        (variables(SET="POCL_KERNEL_CACHE=0"), "stamp", "the pocl cache is off (POCL_KERNEL_CACHE=0"),
        (variables(POCL_DEVICES="basic"), "stamp", "the device changed from "),
        (
            variables(POCL_CACHE_DIR="{home}/other"),
            "stamp",
            "the pocl cache moved from {home}/.cache/pocl/kcache to {home}/other (POCL_CACHE_DIR)",
        ),
        (variables(POCL_KERNEL_CACHE="0"), "stamp", "the pocl cache is off (POCL_KERNEL_CACHE=0"),
        (other_loopy, "twice", "loopy changed from "),
        (variables(BARRIERS="0"), "twice", "its key in loopy changed, though its source and options did not"),
    ),
)


@real
def test_a_kernel_that_is_compiled_for_a_new_size_at_its_launch_is_not_warm(home: Home) -> None:
    """PoCL finds the program, and compiles the kernel when it is launched with work-groups of another size."""
    sizes = ("8", "8", "16", "16")
    verdicts = [trace(home, "shape.py", size, options=("--expect-warm",), check=False) for size in sizes]
    assert [(one["warm"], one["exit_status"]) for one in verdicts] == [(False, 0), (True, 0), (False, 0), (True, 0)]
    assert verdicts[2]["verdict"] == "Compiled at launch, for a new work-group size: shape (16x1x1)."


@real
def test_a_build_that_fails_is_not_warm(seeded: Home) -> None:
    """Its compiler runs in each start, though the program goes on."""
    verdicts = [run(seeded, BROKEN="1") for _ in range(2)]
    expected = r"1 build failed(, which took [\d.]+ s)?\. .*ry observed lookup hit \(\d+\)\."
    assert re.fullmatch(expected, verdicts[1]["verdict"])
    assert verdicts[1]["warm"] is False


@real
@thorough_only
def test_another_program_with_a_kernel_of_the_same_name_is_new(seeded: Home) -> None:
    run(seeded)
    edit("stamp.cl", "FACTOR 3", "FACTOR 5")(seeded)
    other = seeded.path / "other.py"
    other.write_text(f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n" + (PROGRAMS / "seeded.py").read_text())
    because = reasons(trace(seeded, sys.executable, str(other), "-I.", "-DSEED=1"))["stamp"]
    assert because == "no remembered run of other.py built it; seeded.py built another kernel of this name"


@real
def test_a_run_that_is_killed_in_a_build_says_so(home: Home) -> None:
    """If a shell hides it, and other builds hit, it is unknown whether the layer missed."""
    code = (
        f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import os, threading, binaries, pyopencl as cl;"
        "context, queue = binaries.started();"
        "cl.Program(context, '__kernel void one(__global int *a) { a[0] = 1; }').build(cache_dir=False);"
        "threading.Timer(1.5, os.kill, (os.getpid(), 9)).start();"
        "body = ''.join(f'a[{n}] = sin((float)a[{n + 1}]) * {n};' for n in range(9000));"
        "cl.Program(context, '__kernel void long_one(__global int *a) {' + body + '}').build(cache_dir=False)"
    )
    program, options = (sys.executable, "-c", code), ("--expect-warm", "--layer", "pocl")
    verdict = trace(home, *program, check=False)["verdict"]
    assert verdict.startswith("The command ended with status 137. A build began and did not end.")
    assert "No cache was used" not in verdict
    hidden = trace(home, "sh", "-c", '"$@"; true', "sh", *program, options=options, check=False)
    assert (hidden["exit_status"], numbers(hidden, "pocl")) == (0, (1, None, 0))
    assert hidden["said"].endswith("cachectl: not warm: misses in pocl cannot be counted\n")


@real
def test_a_database_that_stops_a_run_is_named(seeded: Home) -> None:
    run(seeded)
    for database in (seeded.path / ".cache/pytools").glob("pdict-v5-loopy-*.sqlite"):
        database.write_bytes(b"\x37" * database.stat().st_size)
    verdict = trace(seeded, "seeded.py", "-I.", "-DSEED=1", check=False)["verdict"]
    assert verdict.startswith("The command ended with status 1. In loopy, pdict-v5-loopy-")


@real
@thorough_only
def test_a_name_stands_for_the_builds_of_several_programs(seeded: Home) -> None:
    """What was built before is known, though another program has built a kernel of that name since."""
    run(seeded)
    (seeded.path / "stamp.cl").write_text(SOURCE.replace("FACTOR 3", "FACTOR 4"))
    run(seeded)
    (seeded.path / "stamp.cl").write_text(SOURCE)
    shutil.rmtree(seeded.path / ".cache/pocl")
    assert reasons(run(seeded))["stamp"] == "the pocl cache was empty"


@thorough_only
@real
@pytest.mark.parametrize(("change", "kernel", "because"), CAUSES)
def test_the_cause_of_a_miss_is_named(
    seeded: Home, change: Callable[[Home], dict[str, str]], kernel: str, because: str
) -> None:
    """What was changed is named, and nothing else; kernels that it does not concern hit."""
    run(seeded)
    changed = run(seeded, **change(seeded))
    named = reasons(changed)
    because = because.format(home=os.path.realpath(seeded.path))
    assert named.pop(kernel).startswith(because)
    assert all(reason.startswith(because[:20]) for reason in named.values()), named
    assert because[:20] in changed["verdict"]


@real
@pytest.mark.thorough
def test_another_driver_is_named(seeded: Home, debian_pocl: Driver, built_pocl: Driver) -> None:
    run(seeded, **debian_pocl)
    changed = run(seeded, **built_pocl)
    assert reasons(changed)["stamp"].startswith("the driver is PoCL ")
    assert "the driver changed from PoCL 3.1" in reasons(changed)["stamp"]


@thorough_only
@real
def test_entries_on_disk_are_asked_where_no_run_is_known(seeded: Home, debian_pocl: Driver, built_pocl: Driver) -> None:
    seeded.run(sys.executable, f"{PROGRAMS}/seeded.py", "-I.", "-DSEED=1", **debian_pocl)
    assert reasons(run(seeded, **built_pocl))["stamp"].startswith("pocl has an entry of it for llvm 15.")


@real
@pytest.mark.thorough
def test_a_cache_that_is_off_costs_code_generation(seeded: Home) -> None:
    """Nothing is looked up there, so no kernel misses; the stages that its hits save are summed."""
    run(seeded)
    off = run(seeded, LOOPY_NO_CACHE="1")
    assert off["verdict"].startswith("The loopy cache is off (LOOPY_NO_CACHE=1 switches loopy code generation off): ")
    assert " s of preprocess, " in off["verdict"]
    free = run(seeded, PYOPENCL_NO_CACHE="1")["verdict"]
    assert (free[:6], free.partition(". ")[2]) == ("Warm: ", "Off, at no measurable cost: pyopencl-invoker, pyopencl.")


@real
@pytest.mark.thorough
def test_a_run_with_a_store_has_a_verdict(seeded: Home, other: Home, tmp_path: Path) -> None:
    """It is that of a trace, and is kept for the next; what the store brought hits."""
    program = ("--", sys.executable, str(PROGRAMS / "kernels.py"), "2")
    around = (f"run --store {tmp_path}/store --trust", *program)
    cold, warm = (home.cachectl(*around).stderr for home in (seeded, other))
    assert "cachectl: Cold: " in cold
    assert "\ncachectl: Warm: every lookup hit (" in warm
    inner = other.cachectl(*around[:1], "--", *CACHECTL, "trace", *program).stderr
    # The outer one does not hear a driver that the inner one listens to.
    assert "Warm: every lookup hit (" in inner
    assert "Unknown: every observed lookup hit (" in inner
    assert other.json("report", "--since", "1d")["runs"]["missed"] == 0


@real
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "verdict"),
    [
        (".cache/pytools", "No cache was used: the loopy cache is closed ("),
        (
            ".cache/pocl",
            "the pocl cache is closed ({home}/.cache/pocl/kcache has something other than a directory at",
        ),
    ],
)
def test_a_closed_folder_is_named_where_it_fails_a_run(seeded: Home, place: str, verdict: str) -> None:
    """Another closed cache, which no program of the run uses, is not the reason."""
    (seeded.path / ".cache").mkdir(exist_ok=True)
    (seeded.path / place).touch()
    program = (sys.executable, str(PROGRAMS / "seeded.py"), "-I.", "-DSEED=1")
    mesa = {"MESA_SHADER_CACHE_DIR": str(seeded.path / "stamp.cl")}
    done = seeded.cachectl("trace --json trace.json --", *program, check=False, **mesa)
    assert (done.returncode, verdict.format(home=os.path.realpath(seeded.path)) in done.stderr) == (1, True), done
    assert "cache of mesa" not in done.stderr


@real
@pytest.mark.thorough
def test_a_diff_is_shown(seeded: Home) -> None:
    run(seeded)
    edit("stamp.cl", "a[0]", "a[1]")(seeded)
    said = run(seeded, "--explain")["said"].splitlines()
    assert {"--- stamp (before)", "+++ stamp (this run)"} <= set(said)
    assert {line[:1] for line in said if "__kernel void stamp" in line} == {"-", "+"}


# ---------------------------------------------------------------------- the ledger


@thorough_only
@real
def test_the_ledger_is_private_and_can_be_left_and_removed(seeded: Home) -> None:
    """Without it nothing is compared and nothing is kept; what is remembered is nobody else's to read."""
    assert run(seeded, "--no-ledger")["verdict"].endswith("; earlier runs were not compared.")
    assert not ledger_of(seeded).exists()
    run(seeded)
    file = ledger_of(seeded)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    kept = file.read_bytes()
    assert run(seeded, "--no-ledger", seed="2")["verdict"].endswith("; earlier runs were not compared.")
    assert file.read_bytes() == kept
    assert "was removed" in seeded.cachectl("trace --forget").stderr
    assert (file.exists(), "no ledger" in seeded.cachectl("trace --forget").stderr) == (False, True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "damaged; cachectl trace --forget removes it"),
        ('{"schema": "cachectl/ledger/2"}', "not a ledger of this cachectl; cachectl trace --forget removes it"),
    ],
)
def test_a_ledger_that_cannot_be_used_is_left_alone(home: Home, content: str, says: str) -> None:
    """One line, never an error of the program that is traced."""
    file = ledger_of(home)
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text(content)
    done = home.cachectl("trace --", sys.executable, "-c", "import pytools.persistent_dict")
    (line,) = [line for line in done.stderr.splitlines() if str(file) in line]
    assert (says in line, file.read_text()) == (True, content)


def of_ledger(kernels: str = "{}", runs: str = "") -> str:
    rest = '"removals": [], "portable": [], "kept": {}'
    return f'{{"schema": "cachectl/ledger/1", "kernels": {kernels}, "runs": [{runs}], {rest}}}'


def with_runs(*runs: str) -> list[str]:
    return [of_ledger(runs=run) for run in runs]


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "null", "3", '"text"', "[" * 100_000, "\x00", "\ufeff{}", "", "{} {}"),
        *with_runs("[1, 1e999, 1, 1, 1, 1]", "[NaN, 1, 1, 1, 1, 1]", "[1, 1, 1, -Infinity, 1, 1]"),
        *with_runs(f"[1, 1{'0' * 400}, 1, 1, 1, 1]", f"[1{'0' * 5000}, 1, 1, 1, 1, 1]", "[1, 1, 1, 1e300, 1, 1]"),
        *with_runs("[-1, 1, 1, 1, 1, 1]", '["1", 1, 1, 1, 1, 1]', "[true, 1, 1, 1, 1, 1]", "[[], 1, 1, 1, 1, 1]"),
        *with_runs("[1, 1, 1, 1, 1]", "{}"),
        *(of_ledger('{"k": []}'), of_ledger('{"k": {}}'), of_ledger('[["k", {}]]')),
        of_ledger().replace('"kernels"', '"schema": [], "kernels"'),
    ],
)
def test_a_ledger_of_another_form_is_said_once_by_each_verb_that_reads_it(home: Home, content: str) -> None:
    file = ledger_of(home)
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text(of_ledger(runs="[1, 2, 3, 4, 5, 6]"))
    assert ledger.read(home.environment()).runs == [ledger.Run(1, 2, 3, 4, 5, 6)]
    file.write_bytes(content.encode())
    with pytest.raises(CachectlError, match="trace --forget removes it"):
        ledger.read(home.environment())
    done = home.cachectl("report --since 1d")
    assert (done.stderr.count("\n"), str(file) in done.stderr) == (1, True)


def test_a_source_that_cannot_be_unpacked_is_unknown() -> None:
    bomb = b85encode(zlib.compress(bytes(64 << 20))).decode()
    for packed in (bomb, "!", "\x00", ledger.pack("text")[:-2], b85encode(zlib.compress(b"\xff")).decode()):
        assert ledger.Build(packed=packed).text is None
    assert ledger.Build(packed=ledger.pack("text")).text == "text"


def test_a_ledger_that_cannot_be_written_is_said(home: Home) -> None:
    (home.path / ".local").write_text("in the way")
    done = home.cachectl("trace --", sys.executable, "-c", "import pytools.persistent_dict")
    (line,) = [line for line in done.stderr.splitlines() if ".local" in line]
    assert line.startswith("cachectl: ")


STAYS_OFF = """
import sys
sys.path.insert(0, sys.argv[1])
import cachectl, kernels, pyopencl
try:
    with cachectl.disabled(strict=False):
        context, queue = kernels.started()
        raise ValueError
except ValueError:
    pass
with cachectl.traced() as recorder:
    pyopencl.Program(context, "__kernel void once(__global int *a) { a[0] = 1; }").build(cache_dir=False)
with cachectl.disabled(strict=False) as held:
    print(held["pocl"].status)
print(recorder.trace.verdict, recorder.trace["pocl"].state)
"""


@thorough_only
@real
def test_a_driver_that_started_in_a_cold_block_is_said_to_stay_off(home: Home) -> None:
    said = home.run(sys.executable, "-c", STAYS_OFF, str(home.programs)).stdout
    assert said.startswith("off\n")
    assert said.endswith("pocl cache is off (its driver started in a block of disabled(), and stays off). disabled\n")


@real
def test_a_command_that_fails_warm_is_said_to_have_failed(home: Home) -> None:
    code = "import pytools, sys; sys.exit(3)"
    document = trace(home, sys.executable, "-c", code, check=False)
    assert document["verdict"].startswith("The command ended with status 3. ")
    assert document["warm"] is None


@real
@thorough_only
def test_a_run_that_is_expected_to_be_warm(seeded: Home) -> None:
    """Of the last the program itself has switched the cache off."""
    program = ("--", sys.executable, str(PROGRAMS / "seeded.py"), "-I.", "-DSEED=1")

    def status(*options: str, **variables: str) -> tuple[int, str]:
        done = seeded.cachectl("trace --expect-warm", *options, *program, check=False, **variables)
        return done.returncode, done.stderr.splitlines()[-1]

    assert status()[0] == 1
    assert status() == (0, status()[1])
    assert status(SET="POCL_KERNEL_CACHE=0") == (1, "cachectl: not warm: pocl: 2 misses")
    assert status("--layer", "loopy", SET="POCL_KERNEL_CACHE=0")[0] == 0
    failing = ("--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert seeded.cachectl("trace --expect-warm", *failing, check=False).returncode == 7
    assert seeded.cachectl("trace --expect-warm -- true", check=False).returncode == 1


@real
def test_a_lookup_that_raises_is_named_with_the_command_that_removes_its_row(home: Home) -> None:
    """Its module has gone; nothing else is said of a run that has failed."""
    (home.path / "simlib.py").write_text("class Grid: pass")
    code = "from pytools.persistent_dict import WriteOncePersistentDict as D; d = D('mine', safe_sync=False); "
    store = "import simlib; d.store_if_not_present('grid', simlib.Grid())"
    home.run(sys.executable, "-c", code + store, PYTHONPATH=".")
    (home.path / "simlib.py").unlink()
    document = trace(home, sys.executable, "-c", f"{code}d.fetch('grid')", check=False)
    raised = "The command ended with status 1. A lookup in mine raised ModuleNotFoundError; "
    assert document["verdict"].startswith(raised)
    command = document["verdict"].partition("cachectl ")[2].removesuffix(" removes the row.")
    assert home.json("ls pytools")["entries"] != []
    home.cachectl(command)
    assert home.json("ls pytools")["entries"] == []


@real
@thorough_only
def test_a_damaged_entry_is_named_after_a_run_that_died(home: Home) -> None:
    """PoCL aborts when it loads the code of another file."""
    trace(home, "shape.py", "8")
    (native,) = (home.path / ".cache/pocl/kcache").rglob("shape.so")
    native.write_bytes(native.read_bytes()[:5000])
    document = trace(home, "shape.py", "8", check=False)
    assert document["verdict"].startswith(f"The command ended with status {document['exit_status']}. In pocl, ")
    assert document["exit_status"] != 0
    assert "; cachectl purge --damaged pocl removes it." in document["verdict"]
    home.cachectl("purge --damaged pocl")
    assert trace(home, "shape.py", "8")["exit_status"] == 0


@real
@thorough_only
def test_programs_that_did_not_end_in_order_leave_it_unknown_whether_a_run_was_warm(home: Home) -> None:
    """A shell hides that its only program was killed after a hit."""
    program = f"{sys.executable} {PROGRAMS}/shape.py 8"
    trace(home, "shape.py", "8")
    code = f"import os, runpy, sys; sys.path.insert(0, '{PROGRAMS}'); sys.argv = ['shape.py', '8']; "
    killed = f"{code}runpy.run_path('{PROGRAMS}/shape.py', run_name='__main__'); os.abort()"
    script = f'{sys.executable} -c "{killed}"; true'
    document = trace(home, "sh", "-c", script, options=("--expect-warm",), check=False)
    assert (document["exit_status"], document["warm"]) == (0, None)
    assert document["verdict"].startswith("Unknown: every observed lookup hit (")
    assert document["verdict"].endswith("did not exit normally.")
    off = trace(home, "sh", "-c", f"{program}; POCL_KERNEL_CACHE=0 {program}", check=False)
    assert reasons(off)["shape"].startswith("the pocl cache is off (POCL_KERNEL_CACHE=0")


#: Opens a dictionary; its only row is stored under the hash of another key.
COLLIDING = """
import sqlite3
from pytools.persistent_dict import WriteOncePersistentDict
rows = WriteOncePersistentDict("mine", safe_sync=False)
"""
FILL = """
rows.store_if_not_present("one", 1)
connection = sqlite3.connect(rows.filename)
connection.execute("update dict set keyhash = ?", (rows.key_builder("two"),))
connection.commit()
"""
READ = """
try:
    rows["two"]
except KeyError:
    print("missed")
"""


@real
def test_a_warning_of_a_watched_call_names_the_line_that_it_names_without_a_trace(home: Home) -> None:
    """Filters go by the module: a program may turn other warnings into errors."""
    home.run(sys.executable, "-c", COLLIDING + FILL)
    program = (sys.executable, "-c", COLLIDING + READ)
    plain, traced = (home.run(*words, *program) for words in ((), (*CACHECTL, "trace", "--")))
    warned = [line for line in plain.stderr.splitlines() if "CollisionWarning" in line]
    assert warned == [line for line in traced.stderr.splitlines() if "CollisionWarning" in line] != []
    assert (plain.stdout, traced.stdout) == ("missed\n", "missed\n")


@pytest.mark.parametrize(
    ("now", "before", "names"),
    [
        ("kernel void a1(global int *x) { x[0] = 1; }", "kernel void a2(global int *x) { x[0] = 1; }", ("a1", "a2")),
        ("kernel void k(global int *y) { y[0] = 1; }", "kernel void k(global int *x) { x[0] = 1; }", ("y", "x")),
        ("kernel void k(global int *x) { x[0] = sin(1); }", "kernel void k(global int *x) { x[0] = cos(1); }", None),
        ("kernel void k(global int *x) { x[0] = 1; }", "kernel void k(global long *x) { x[0] = 1; }", None),
        ("kernel void k(int a, int b) { a = b; }", "kernel void k(int a, int b) { a = a; }", None),
    ],
)
def test_sources_differ_in_names_only_where_nothing_else_does(
    now: str, before: str, names: tuple[str, str] | None
) -> None:
    assert renamed(now, before) == names


BUILD = """
import cachectl, pyopencl
context = pyopencl.create_some_context(interactive=False)
def build(): pyopencl.Program(context, "__kernel void once(__global int *a) { a[0] = 1; }").build()
build()
"""


@real
@thorough_only
def test_a_salted_build_is_no_earlier_run(home: Home) -> None:
    for salted in ("", "with cachectl.disabled(): build()"):
        trace(home, sys.executable, "-c", BUILD + salted)
    home.cachectl("purge pocl")
    assert reasons(trace(home, sys.executable, "-c", BUILD))["once"].startswith(PURGED)


@real
def test_a_store_that_raises_is_named_with_the_command_that_finds_the_cause(home: Home) -> None:
    """Root could write it all the same, so the database itself refuses."""
    code = "from pytools.persistent_dict import WriteOncePersistentDict as D; d = D('mine', safe_sync=False); "
    home.run(sys.executable, "-c", f"{code}d.store('a', 1)")
    (file,) = (home.path / ".cache/pytools").glob("pdict-v5-mine-*.sqlite")
    with sqlite3.connect(file) as database:
        database.execute("CREATE TRIGGER refuse BEFORE INSERT ON dict BEGIN SELECT RAISE(ABORT, 'refused'); END")
    document = trace(home, sys.executable, "-c", f"{code}d.store('b', 2)", check=False)
    assert document["verdict"].startswith(
        "The command ended with status 1. A store in mine raised sqlite3.IntegrityError; cachectl doctor pytools checks"
    )


@real
@thorough_only
def test_a_wait_for_a_locked_dictionary_names_the_program_that_locked_it(seeded: Home) -> None:
    run(seeded)
    (locked,) = (seeded.path / ".cache/pytools").glob("*loopy-code-gen*.sqlite")
    (earlier,) = (seeded.path / ".cache/pytools").glob("*loopy-schedule*.sqlite")
    hold = (
        "import sqlite3, sys, time; locked, earlier = [sqlite3.connect(file) for file in sys.argv[1:]];"
        "count = lambda: earlier.execute('SELECT count(*) FROM dict').fetchone(); before = count();"
        "locked.execute('BEGIN IMMEDIATE'); print('locked', flush=True);"
        "any(time.sleep(0.05) for _ in iter(lambda: count() == before, False)); time.sleep(2)"
    )
    command = (sys.executable, "-c", hold, str(locked), str(earlier))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        document = run(seeded, BARRIERS="1")
    assert re.search(
        rf"spent storing, which waits while PID {holder.pid} \(python.* has the cache locked\.", document["verdict"]
    )
