"""Which cache served a run: counted cold, warm and after a purge, and beside other programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.tracing import numbers, real, trace
from tiers import thorough

from cachectl.layers.inside import dictionaries, observer
from cachectl.switching.run import CannotStart
from cachectl.watching.notes import read_events

if TYPE_CHECKING:
    from homes import Home
#: A program of two builds, one of them by loopy.
TWO = ("thirteen.py", "1", "1", "live")
#: A program of three builds, two of them by loopy.
THREE = ("thirteen.py", "2", "1", "live")


def rows(home: Home, beginning: str) -> int:
    """Ask sqlite itself how many rows the dictionaries of a layer hold."""
    total = 0
    for path in (home.path / ".cache" / "pytools").glob(f"pdict-v5-{beginning}*.sqlite"):
        with closing(sqlite3.connect(path)) as connection:
            total += connection.execute("select count(*) from dict").fetchone()[0]
    return total


@real
def test_cold_warm_and_after_a_purge(home: Home) -> None:
    """Stores are the rows and programs that are there afterwards; a warm run stores nothing and misses nothing."""
    cold = trace(home, *TWO)
    assert cold["exit_status"] == 0
    assert cold["schema"] == "cachectl/trace/1"
    for layer, beginning in (("loopy", "loopy-"), ("pyopencl-invoker", "pyopencl-")):
        hits, misses, stores = numbers(cold, layer)
        assert (hits, stores) == (0, misses)
        assert stores == rows(home, beginning) > 0
    assert numbers(cold, "pyopencl") == (0, 2, 2)
    assert numbers(cold, "pocl") == (0, 2, 2)
    assert len(list((home.path / ".cache" / "pocl" / "kcache").rglob("program.bc"))) == 2
    warm = trace(home, *TWO)
    for layer in ("loopy", "pyopencl-invoker", "pyopencl", "pocl"):
        hits, misses, stores = numbers(warm, layer)
        assert (misses, stores) == (0, 0)
        assert hits
    assert numbers(warm, "pyopencl") == (2, 0, 0)
    home.cachectl("purge", "pyopencl")
    purged = trace(home, *TWO)
    assert numbers(purged, "pyopencl") == (0, 2, 2)
    assert numbers(purged, "loopy") == numbers(warm, "loopy")


@pytest.mark.thorough
@real
def test_the_numbers_are_those_of_the_libraries_own_logs(home: Home) -> None:
    """PyOpenCL says hit or miss for each program, PoCL prints what it builds and writes: beside it, not in it."""
    document = home.path / "trace.json"
    program = (sys.executable, str(home.programs / "binaries.py"), "5")
    for expected in ("miss", "hit"):
        done = home.cachectl("trace", "--json", str(document), "--", *program)
        said = Counter(re.findall("binary cache (hit|miss)", done.stdout))
        assert said == {expected: 5}
        hits, misses, _ = numbers(json.loads(document.read_text()), "pyopencl")
        assert (hits, misses) == (said["hit"], said["miss"])


@pytest.mark.thorough
@real
def test_pocl_says_the_same_of_itself(home: Home) -> None:
    """Cold and warm, PoCL's own messages in a run without a trace count as many programs built and written."""
    program = (sys.executable, str(home.programs / "thirteen.py"), "8", "5")
    assert numbers(trace(home, "thirteen.py", "8", "5"), "pocl") == (0, 13, 13)
    traced_warm = numbers(trace(home, "thirteen.py", "8", "5"), "pocl")
    said = home.run(*program, POCL_DEBUG="llvm").stderr
    builds, writes = said.count("building program with options"), said.count("Writing program.bc")
    assert traced_warm == (builds - writes, writes, writes) == (13, 0, 0)
    shutil.rmtree(home.path / ".cache" / "pocl" / "kcache")
    said = home.run(*program, POCL_DEBUG="llvm").stderr
    assert (said.count("building program with options"), said.count("Writing program.bc")) == (13, 13)


@pytest.mark.thorough
@real
def test_four_programs_at_once_are_counted_together(home: Home) -> None:
    """Children's numbers add up: each of four warm programs hits all it asks for."""
    trace(home, *THREE)
    one = trace(home, *THREE)
    four = trace(home, "four.py", str(home.programs / "thirteen.py"), "2", "1", "live")
    for layer in ("loopy", "pyopencl-invoker", "pyopencl", "pocl"):
        hits, misses, stores = numbers(one, layer)
        assert hits
        assert numbers(four, layer) == (4 * hits, misses, stores)


@pytest.mark.thorough
@real
def test_another_program_beside_does_not_count(home: Home) -> None:
    """Lookups of an untraced program on the same caches are not counted."""
    trace(home, *THREE)
    waiting = (
        "import subprocess, sys; import pyopencl;"
        "environment = dict(__import__('os').environ); del environment['CACHECTL_TRACE'];"
        f"environment['PYTHONPATH'] = {home.variables.get('PYTHONPATH', '')!r};"
        "sys.exit(subprocess.run(sys.argv[1:], env=environment, stdout=subprocess.DEVNULL).returncode)"
    )
    document = home.path / "trace.json"
    other = (sys.executable, str(home.programs / "kernels.py"), "8")
    home.cachectl("trace", "--json", str(document), "--", sys.executable, "-c", waiting, *other)
    assert numbers(json.loads(document.read_text()), "loopy") == (0, 0, 0)


@real
def test_kernels_and_reasons(home: Home) -> None:
    """Each build is listed with who served it; a miss beside an entry of the same kernel says what may differ."""
    cold = trace(home, "thirteen.py", "1", "1", options=("--explain",))
    assert [(kernel["kernels"], kernel["served_by"]) for kernel in cold["kernels"]] == [
        (["lk0"], None),
        (["pk0"], None),
    ]
    assert {miss["because"] for miss in cold["misses"]} == {"cold: no entry like it"}
    warm = trace(home, "thirteen.py", "1", "1", options=("--explain",))
    assert [kernel["served_by"] for kernel in warm["kernels"]] == ["pocl", "pocl"]
    assert warm["misses"] == []
    assert all(kernel["seconds"] > 0 for kernel in warm["kernels"])
    for path in (home.path / ".cache" / "pytools").glob("pdict-v5-loopy-*"):
        path.rename(path.with_name(path.name.replace("2025.2", "2024.1")))
    explained = trace(home, "thirteen.py", "1", "1", options=("--explain",))
    reasons = {miss["because"] for miss in explained["misses"] if miss["layer"] == "loopy"}
    assert any("an entry of the same kernel is there, but" in reason for reason in reasons)


@pytest.mark.thorough
@real
def test_a_miss_distinguishes_the_source_from_the_options(home: Home) -> None:
    """Of PyOpenCL's programs it is known whether the source is the same, and so the rest must differ."""
    program = f"""
import sys
sys.path.insert(0, {str(home.programs)!r})
import kernels, pyopencl as cl
from pyopencl import characterize
characterize.has_src_build_cache = lambda device: None
context = cl.Context([kernels.device()])
cl.Program(context, "__kernel void one(__global int *a) {{ a[0] = " + sys.argv[1] + "; }}").build(sys.argv[2:])
"""
    document = home.path / "trace.json"

    def reasons(*arguments: str) -> set[str]:
        command = (sys.executable, "-c", program, *arguments)
        home.cachectl("trace", "--explain", "--json", str(document), "--", *command)
        misses = json.loads(document.read_text())["misses"]
        return {miss["because"] for miss in misses if miss["layer"] == "pyopencl"}

    assert reasons("1") == {"cold: no entry like it"}
    assert reasons("1") == set()
    assert reasons("1", "-DTWO=2") == {
        "an entry of the same source is there, but build options, include path, device or driver differ"
    }
    assert reasons("2") == {"an entry of the same kernel is there, but its source is another"}


@real
def test_the_program_notices_nothing(home: Home) -> None:
    """Output, status, standard input and the user's own sitecustomize are as without a trace."""
    site = home.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins; builtins.mine = 'ran'")
    program = (
        "import sys, os; import pyopencl as cl; print(mine, sys.stdin.read()); cl.get_platforms();"
        "sys.stderr.write('to stderr\\n'); sys.stderr.flush(); os.write(2, b'raw\\n'); sys.exit(7)"
    )
    paths = os.pathsep.join(filter(None, [str(site), home.variables.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "cachectl", "trace", "--", sys.executable, "-c", program],
        env={**home.variables, "PYTHONPATH": paths},
        input="typed",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout == "ran typed\n"
    assert done.stderr.startswith("to stderr\nraw\n")
    assert "POCL:" not in done.stderr


@pytest.mark.thorough
@real
def test_events_of_a_killed_program_are_kept(home: Home) -> None:
    """Events are written as they happen; the status is 128 and the signal."""
    program = (
        f"import sys; sys.path.insert(0, {str(home.programs)!r}); import kernels, os, signal, pyopencl as cl;"
        "c = cl.Context([kernels.device()]); q = cl.CommandQueue(c); kernels.compile_and_check(c, q, 0);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    document = home.path / "trace.json"
    done = home.cachectl("trace", "--json", str(document), "--", sys.executable, "-c", program, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    read = json.loads(document.read_text())
    assert read["exit_status"] == 128 + signal.SIGKILL
    assert numbers(read, "pocl") == (0, 1, 1)
    assert numbers(read, "loopy")[2] == rows(home, "loopy-")


def test_a_run_without_python_is_inferred_or_unknown(home: Home) -> None:
    """Numbers that could not be watched are null, with the reason."""
    document = home.path / "trace.json"
    home.cachectl("trace", "--json", str(document), "--", "true")
    layers = {layer["layer"]: layer for layer in json.loads(document.read_text())["layers"]}
    assert layers["loopy"]["evidence"] == "none"
    assert layers["loopy"]["hits"] is None
    assert "no Python of the run" in layers["loopy"]["why"]
    assert layers["pocl"]["evidence"] == "inferred"
    assert layers["pocl"]["stores"] == 0


LATE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import kernels, pyopencl as cl
os.environ["POCL_DEBUG"] = "llvm"
cl.Program(cl.Context([kernels.device()]), "__kernel void one(__global int *a) { a[0] = 1; }").build()
"""


@pytest.mark.thorough
@real
def test_messages_that_a_program_asks_for_itself_stay_its_own(home: Home) -> None:
    """They are printed as they are without a trace, and no number is called exact that was not heard."""
    document = home.path / "trace.json"
    command = (sys.executable, "-c", LATE, str(home.programs))
    traced = home.cachectl("trace", "--json", str(document), "--", *command)
    shutil.rmtree(home.path / ".cache" / "pocl" / "kcache")
    plain = home.run(*command)
    assert traced.stderr.count("LLVM |") == plain.stderr.count("LLVM |") > 0
    (pocl,) = [layer for layer in json.loads(document.read_text())["layers"] if layer["layer"] == "pocl"]
    assert (pocl["evidence"], pocl["stores"]) == ("inferred", 1)


@pytest.mark.thorough
@real
def test_messages_that_the_user_asked_for_stay_his(home: Home) -> None:
    """Where POCL_DEBUG is set already, PoCL prints where it always does, and is judged by its marks."""
    document = home.path / "trace.json"
    program = (sys.executable, str(home.programs / "thirteen.py"), "1", "1")
    done = home.cachectl("trace", "--json", str(document), "--", *program, POCL_DEBUG="llvm")
    assert "Writing program.bc" in done.stderr
    (pocl,) = [layer for layer in json.loads(document.read_text())["layers"] if layer["layer"] == "pocl"]
    assert (pocl["evidence"], pocl["stores"]) == ("inferred", 2)


@real
def test_a_block_of_this_process(home: Home) -> None:
    """From Python the same numbers, for the block alone."""
    program = f"""
import json, sys
sys.path.insert(0, {str(home.programs)!r})
import cachectl
import kernels, pyopencl as cl
with cachectl.traced() as cold:
    context = cl.Context([kernels.device()])
    queue = cl.CommandQueue(context)
    kernels.compile_and_check(context, queue, 0)
kernels.compile_and_check(context, queue, 1)
print(json.dumps([cold["loopy"].misses, cold["loopy"].stores, cold["pocl"].stores, cold["loopy"].evidence]))
"""
    done = home.run(sys.executable, "-c", program)
    misses, stores, programs, evidence = json.loads(done.stdout.splitlines()[-1])
    assert misses == stores > 0
    assert programs == 1
    assert evidence == "exact"
    # The kernel after the block has added its own rows, which the block does not count.
    assert rows(home, "loopy-") == 2 * stores


def test_misuse_is_one_line(home: Home) -> None:
    """No command, and no folder for the document, are noticed before anything is run."""
    assert home.cachectl("trace", check=False).returncode == 2
    nowhere = home.cachectl("trace", "--json", "/nowhere/at/all.json", "--", "true", check=False)
    assert (nowhere.returncode, len(nowhere.stderr.splitlines())) == (2, 1)
    ran = home.path / "ran"
    (home.path / "folder.json").mkdir()
    (home.path / "link.json").symlink_to("/nowhere/a.json")
    for wrong in (("folder.json",), ("link.json",), ("a.json", "--json", "./a.json")):
        done = home.cachectl("trace", "--timeline", *wrong, "--", "touch", str(ran), check=False)
        assert (done.returncode, len(done.stderr.splitlines()), ran.exists()) == (2, 1, False)
    missing = home.cachectl("trace", "--", "no-such-command", check=False)
    assert missing.returncode == 127
    assert issubclass(CannotStart, OSError)


DICTIONARY = """
import sys, warnings
import cachectl
from pytools.persistent_dict import PersistentDict, WriteOncePersistentDict
dictionary = WriteOncePersistentDict("mine", safe_sync=False)
dictionary.store_if_not_present(1, 2)
with cachectl.traced() as t:
    dictionary.store_if_not_present(1, 2)
    dictionary.clear_in_mem_cache()
    dictionary.fetch(1)
    dictionary.fetch(1)
    try:
        dictionary.fetch(3)
    except KeyError:
        pass
fetch = WriteOncePersistentDict.fetch
print(t["pytools"].hits, t["pytools"].misses, t["pytools"].stores, fetch.__qualname__)
"""


@pytest.mark.thorough
@real
def test_libraries_loaded_before_are_watched_and_restored(home: Home) -> None:
    """A lookup in memory is none, a store of what is there is none; after the block the methods are the old ones."""
    said = home.run(sys.executable, "-c", DICTIONARY).stdout
    assert said == "1 1 0 WriteOncePersistentDict.fetch\n"


CLOSING = """
import os
from pytools.persistent_dict import PersistentDict
first = PersistentDict("first", safe_sync=False)
first.store(1, 2)
os.closerange(3, 100)
with open("mine.txt", "w") as file:
    second = PersistentDict("second", safe_sync=False)
    second.store(1, 2)
    file.write("mine")
print(second.fetch(1))
"""


@pytest.mark.thorough
@real
def test_a_program_that_closes_what_it_did_not_open(home: Home) -> None:
    """No event goes into a file of the program's that has got the number of ours."""
    done = home.cachectl("trace", "--", sys.executable, "-c", CLOSING)
    assert done.stdout == "2\n"
    assert (home.path / "mine.txt").read_text() == "mine"
    for path in (home.path / ".cache" / "pytools").glob("*second*.sqlite"):
        assert path.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.thorough
@real
def test_a_build_that_fails_is_no_hit(home: Home) -> None:
    """Nor is it served by anybody."""
    program = f"""
import sys
sys.path.insert(0, {str(home.programs)!r})
import kernels, pyopencl as cl
context = cl.Context([kernels.device()])
try:
    cl.Program(context, "__kernel void bad() {{ no such thing; }}").build()
except cl.RuntimeError:
    pass
"""
    document = home.path / "trace.json"
    home.cachectl("trace", "--json", str(document), "--", sys.executable, "-c", program)
    assert numbers(json.loads(document.read_text()), "pocl") == (0, 0, 0)


@pytest.mark.thorough
@real
def test_children_that_are_not_watched_print_nothing_new(home: Home) -> None:
    """PoCL's messages are asked of the traced interpreter alone."""
    child = "import subprocess, sys; print(subprocess.run([sys.executable, '-I', sys.argv[1], '1'], stderr=-1).stderr)"
    program = home.path / "one.py"
    program.write_text("import pyopencl as cl; [p.get_devices() for p in cl.get_platforms()]")
    done = home.cachectl("trace", "--", sys.executable, "-c", child, str(program))
    assert "POCL" not in done.stdout + done.stderr


@pytest.mark.thorough
@real
def test_bytes_stored_are_those_on_the_disk(home: Home) -> None:
    """Of every layer that is known exactly, after a cold run, the bytes are those of what is there."""
    cold = trace(home, *THREE)
    stored = {layer["layer"]: layer["bytes"] for layer in cold["layers"]}
    for layer, beginning in (("loopy", "loopy-"), ("pyopencl-invoker", "pyopencl-")):
        there = 0
        for path in (home.path / ".cache" / "pytools").glob(f"pdict-v5-{beginning}*.sqlite"):
            with closing(sqlite3.connect(path)) as connection:
                there += connection.execute("select coalesce(sum(length(key_value)), 0) from dict").fetchone()[0]
        assert stored[layer] == there > 0
    listed = json.loads(home.cachectl("ls", "--json", "pyopencl").stdout)["entries"]
    assert stored["pyopencl"] == sum(entry["bytes"] for entry in listed) > 0


@real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows what a process has loaded")
@pytest.mark.parametrize("how", thorough("a shell", "-I", "cleared variables"))
def test_a_child_that_cannot_be_watched_is_named(home: Home, how: str) -> None:
    """The numbers of the others are then a lower bound."""
    kernels = (str(home.programs / "kernels.py"), "1")
    hidden = f"import sys, runpy; sys.path[:0] = {[str(home.programs)]!r}; sys.argv = {list(kernels)!r};"
    hidden += "runpy.run_path(sys.argv[0], run_name='__main__')"
    starts = {
        "-I": "subprocess.run([sys.executable, '-I', '-c', sys.argv[1]])",
        "cleared variables": "subprocess.run([sys.executable, '-c', sys.argv[1]], env={'HOME': os.environ['HOME']})",
        "a shell": "os.system(f'{sys.executable} -I -c \"{sys.argv[1]}\"')",
    }
    program = f"import os, runpy, subprocess, sys; {starts[how]}; sys.argv = {list(kernels)!r};"
    program += f"sys.path[:0] = {[str(home.programs)]!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    document = home.path / "trace.json"
    done = home.cachectl("trace", "--json", str(document), "--", sys.executable, "-c", program, hidden)
    read = json.loads(document.read_text())
    (unwatched,) = read["unwatched"]
    assert set(unwatched["layers"]) >= {"loopy", "pyopencl-invoker", "pocl"}
    assert "not counted" in done.stderr
    evidence = {layer["layer"]: layer["evidence"] for layer in read["layers"]}
    assert evidence["loopy"] == evidence["pocl"] == "inferred"


@pytest.mark.thorough
@real
def test_children_that_use_no_cache_or_are_forked_change_nothing(home: Home) -> None:
    """Numbers stay exact beside other Pythons and commands, and beside forks of a watched one."""
    program = (
        f"import sys; sys.path.insert(0, {str(home.programs)!r}); sys.argv = ['kernels.py', '1'];"
        "import os, runpy, subprocess, time; subprocess.run([sys.executable, '-I', '-c', 'import sqlite3, time; "
        "time.sleep(.3)']); subprocess.run(['sleep', '.2']);"
        "runpy.run_path(sys.path[0] + '/kernels.py', run_name='__main__');"
        "child = os.fork(); child or (time.sleep(.3), os._exit(0)); os.waitpid(child, 0)"
    )
    document = home.path / "trace.json"
    home.cachectl("trace", "--json", str(document), "--", sys.executable, "-c", program)
    read = json.loads(document.read_text())
    assert read["unwatched"] == []
    assert {layer["layer"]: layer["evidence"] for layer in read["layers"]}["loopy"] == "exact"


def test_a_library_of_an_unknown_form_is_left_alone_and_named(home: Home, tmp_path: Path) -> None:
    """The program runs as without a trace; a warning and the reason of the layer say that nothing was counted."""
    package = tmp_path / "site" / "pytools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "persistent_dict.py").write_text(
        "class WriteOncePersistentDict:\n    def fetch(self, key):\n        return key\n"
    )
    program = "from pytools.persistent_dict import WriteOncePersistentDict as D; print(D().fetch('fetched'))"
    paths = os.pathsep.join(filter(None, [str(package.parent), home.variables.get("PYTHONPATH")]))
    command = (sys.executable, "-c", program)
    done = home.cachectl("trace", "--json", "trace.json", "--", *command, PYTHONPATH=paths)
    assert done.stdout == "fetched\n"
    assert done.stderr.count("cachectl: pytools.persistent_dict cannot be watched (AttributeError: ") == 1
    layers = {layer["layer"]: layer for layer in json.loads((home.path / "trace.json").read_text())["layers"]}
    for name in ("loopy", "pyopencl-invoker", "pytools"):
        assert (layers[name]["evidence"], layers[name]["hits"]) == ("none", None)
        assert layers[name]["why"].startswith("pytools.persistent_dict cannot be watched")


def test_what_a_watcher_replaced_before_it_failed_is_restored(tmp_path: Path) -> None:
    notes = observer.Notes([str(tmp_path)], str(tmp_path), {})
    library = SimpleNamespace(first=len)

    def watch(module: SimpleNamespace, notes: observer.Notes) -> None:
        notes.put(module, "first", None)
        notes.put(module, "second", None)

    notes.fit("library", watch, library)
    assert library.first is len
    (failed,) = [event for event in read_events(tmp_path).events if event["event"] == "failed"]
    assert (failed["library"], failed["error"]) == ("library", "KeyError: 'second'")
    notes.stop()


def test_dictionaries_are_called_as_the_program_calls_them(tmp_path: Path) -> None:
    """Releases of pytools add arguments of their own, by position and by name."""

    class PersistentDict:
        identifier = "mine"

        def fetch(self, *arguments: object, **options: object) -> object:
            return arguments, options

        store = _fetch = fetch

    class WriteOncePersistentDict(PersistentDict):
        fetch = store = _fetch = PersistentDict.fetch

    module = SimpleNamespace(
        PersistentDict=PersistentDict, WriteOncePersistentDict=WriteOncePersistentDict, NoSuchEntryError=KeyError
    )
    notes = observer.Notes([str(tmp_path)], str(tmp_path), {})
    dictionaries.watch(module, notes)
    for kind in (PersistentDict, WriteOncePersistentDict):
        for method in ("fetch", "store", "_fetch"):
            call = getattr(kind(), method)
            assert call("key", 1, _stacklevel=2) == (("key", 1), {"_stacklevel": 2})
            assert call(key="key") == ((), {"key": "key"})
    notes.stop()


@real
def test_a_layer_that_takes_no_part_is_named_with_the_reason(home: Home, tmp_path: Path) -> None:
    """Off by a variable, and closed by a file in the place of its root; a layer that is used is not named."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "pocl"
    command = (sys.executable, "-c", "import loopy")
    tracing = ("trace", "--json", "trace.json", "--", *command)
    done = home.cachectl(*tracing, LOOPY_NO_CACHE="1", POCL_CACHE_DIR=str(place))
    named = ["loopy: disabled (LOOPY_NO_CACHE=1)", f"pocl: closed ({place}: Not a directory)"]
    shown = done.stderr.splitlines()
    assert set(named) <= set(shown)
    document = json.loads((home.path / "trace.json").read_text())
    layers = {layer["layer"]: (layer["state"], layer["state_why"]) for layer in document["layers"]}
    assert layers["loopy"] == ("disabled", "LOOPY_NO_CACHE=1")
    assert layers["pytools"] == (None, None)
    stopped = [state for state, _ in layers.values() if state is not None]
    assert f"{len(layers) - len(stopped)} layers: no use seen" in done.stderr.replace("more layers", "layers")
    assert "and no lookup missed; loopy is disabled; pocl is closed" in done.stderr
    trace(home, *TWO)
    layers = {layer["layer"]: layer["state"] for layer in trace(home, *TWO)["layers"]}
    assert {layers[name] for name in ("loopy", "pyopencl-invoker", "pyopencl", "pocl")} == {None}


@real
def test_a_bypassed_layer_is_named(home: Home, tmp_path: Path) -> None:
    """With a folder, the loader of PyOpenCL's wheel finds the wheel's PoCL and no other driver."""
    program = (sys.executable, str(home.programs / "kernels.py"), "1")
    done = home.cachectl("trace", "--", *program, OCL_ICD_VENDORS=str(tmp_path))
    assert "\npyopencl: bypassed (PyOpenCL leaves PoCL to the driver's own cache)\n" in done.stderr
