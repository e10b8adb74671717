"""PyOpenCL's binary cache: its lock, its header check, its halves."""

import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest
from homes import Driver, Home
from support.layers import clear, got, orphans, python, register_driver, root_of, running, usage_of, verified, write

from cachectl.layers.base.errors import Busy
from cachectl.layers.core.conformance import nobody
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.root import Condition
from cachectl.layers.core.selection import Selection
from cachectl.layers.host import drivers
from cachectl.layers.pyopencl import PyOpenCLBinaries
from cachectl.layers.stores.archive import pack, unpack

pytestmark = pytest.mark.real


@pytest.fixture
def layer(warm: Home) -> PyOpenCLBinaries:
    return PyOpenCLBinaries(warm.environment()._replace(lock_timeout=0.1))


def base(layer: PyOpenCLBinaries) -> Path:
    return next(root_of(layer).iterdir())


def test_kernels_are_read(layer: PyOpenCLBinaries) -> None:
    assert sorted(entry.details.kernels or () for entry in layer.entries()) == [("pk0",), ("pk1",), ("pk2",)]


def judged(layer: PyOpenCLBinaries) -> list[tuple[bool | None, str | None]]:
    """Return whether each entry is stale, and why."""
    return [(entry.stale, entry.stale_because) for entry in layer.entries()]


@pytest.mark.thorough
def test_whether_an_entry_with_a_changed_header_can_be_hit_is_unknown(home: Home) -> None:
    """A container or another machine with the same home may have the old header."""
    header = write(home.path / "include/answer.h", "#define ANSWER 42\n")
    program = (
        "import pyopencl as cl, pyopencl.characterize as c; from binaries import device\n"
        "c.has_src_build_cache = lambda _: None\n"
        "source = '#include \"answer.h\"\\n__kernel void with_header(__global int *a) { *a = ANSWER; }'\n"
        f"cl.Program(cl.Context([device()]), source).build(['-I', {str(header.parent)!r}])"
    )
    path = f"{home.programs}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    home.run(sys.executable, "-c", program, PYTHONPATH=path)
    layer = PyOpenCLBinaries(home.environment())
    assert judged(layer) == [(False, None)]
    os.utime(header)
    assert judged(layer) == [(False, None)]
    header.write_text("#define ANSWER 43\n")
    because = f"unknown: {header}, which it includes, "
    assert judged(layer) == [(None, f"{because}has changed here")]
    header.unlink()
    assert judged(layer) == [(None, f"{because}is not here")]
    header.write_text("#define ANSWER 42\n")
    assert judged(layer) == [(False, None)]


HOLDER = """
import sys
from pyopencl.cache import CacheLockManager, CleanupManager

cleanups = CleanupManager()
CacheLockManager(cleanups, sys.argv[1])
print(flush=True)
sys.stdin.readline()
cleanups.clean_up()
"""


def test_a_lock_that_pyopencl_holds_is_waited_for_and_never_broken(layer: PyOpenCLBinaries) -> None:
    layer = PyOpenCLBinaries(layer.environment._replace(processes=Path("/proc")))
    lock, entry, plan = base(layer) / "lock", next(layer.entries()), layer.plan_clear()
    artifact = got(layer, entry.key)
    members = unpack(artifact.data)
    without_source = artifact._replace(data=pack({name: members[name] for name in ("binary", "info")}))
    with running(*python(HOLDER, lock.parent)) as holder:
        outcome = layer.clear(plan)
        assert outcome.removed == 0
        assert f"locked by PID {holder.pid} (python" in outcome.failed[0].because
        with pytest.raises(Busy):
            layer.put(entry.key, without_source, replace=True)
        assert layer.get(entry.key) == artifact
        assert lock.exists()
        # A waiting purge ends once the holder releases the lock.
        patient = PyOpenCLBinaries(layer.environment._replace(lock_timeout=120))
        assert holder.stdin is not None
        Timer(0.5, holder.stdin.close).start()
        assert patient.clear(plan).removed == 3
        assert holder.wait() == 0
    assert not lock.exists()


def test_a_missing_half_is_a_problem_and_a_cut_one_is_found(layer: PyOpenCLBinaries) -> None:
    missing, cut = list(layer.entries())[:2]
    (missing.root / missing.key / "binary").unlink()
    info = cut.root / cut.key / "info"
    info.write_bytes(info.read_bytes()[:-5])
    assert [problem.message for problem in usage_of(layer).problems] == ["binary is missing"]
    broken = {finding.key: "info: broken pickle" in finding.message for finding in verified(layer)}
    assert broken == {missing.key: False, cut.key: True}


#: The state with a release and the drivers of some makers. Older releases keep the programs of every driver.
STATES = {
    "2024.2.4 PoCL": Condition.BYPASSED,
    "2026.1 PoCL NVIDIA": Condition.BYPASSED,
    "2026.1 PoCL Intel": Condition.ENABLED,
    "2026.1": Condition.UNKNOWN,
    "2024.1 PoCL": Condition.ENABLED,
    "2024.2.2 PoCL": Condition.ENABLED,
}


@pytest.mark.parametrize("installed", STATES)
def test_the_state_depends_on_release_and_drivers(
    layer: PyOpenCLBinaries, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    assert "PoCL" in layer.state().why
    release, *makers = installed.split()
    found = [(maker, "", "") for maker in makers]
    monkeypatch.setattr(drivers, "find_drivers", lambda _environment: found)
    there = PyOpenCLBinaries(layer.environment._replace(installed={"pyopencl": release}.get))
    assert there.state().condition is STATES[installed]


@pytest.mark.parametrize("value", ["0", "", "maybe"])
def test_the_oldest_release_asks_only_whether_its_variable_is_set(layer: PyOpenCLBinaries, value: str) -> None:
    variables = {**layer.environment.variables, "PYOPENCL_NO_CACHE": value}
    there = PyOpenCLBinaries(layer.environment._replace(variables=variables, installed=lambda _name: "2024.1"))
    assert there.state().condition is Condition.DISABLED
    (found,) = [finding for finding in there.diagnose() if finding.code == "variable"]
    outcome = "switches PyOpenCL program binaries off all the same: pyopencl 2024.1 checks only whether it is set"
    assert there.state().why == found.message == f"PYOPENCL_NO_CACHE={value!r} {outcome}"


def test_a_lock_that_nobody_holds_goes(warm: Home, layer: PyOpenCLBinaries) -> None:
    """Even without entries: a program killed under PyOpenCL's lock leaves it behind, and every build waits for it."""
    lock, plan = base(layer) / "lock", layer.plan_clear()
    program = "import os, sys; from pyopencl.cache import CacheLockManager, CleanupManager\n"
    program += "CacheLockManager(CleanupManager(), sys.argv[1]); os.kill(os.getpid(), 9)"
    warm.run(sys.executable, "-c", program, str(lock.parent), check=False)
    # A slow program may hold it.
    assert (lock.exists(), list(orphans(layer)), layer.clear(plan).removed) == (True, [], 0)
    os.utime(lock, (1, 1))
    assert list(orphans(layer)) == [f"{lock.parent.name}/lock"]
    # A purge that did not plan to remove it takes it over; one that did counts it.
    assert layer.clear(layer.plan_clear(Selection(key=next(layer.entries()).key))).removed == 1
    assert not lock.exists()
    lock.touch()
    os.utime(lock, (1, 1))
    plan = layer.plan_clear()
    lock.unlink()
    lock.touch()
    # A lock taken after the plan stays.
    assert [note.because for note in layer.clear(plan).skipped] == ["changed since it was planned"]
    os.utime(lock, (1, 1))
    outcome = clear(layer)
    assert (outcome.orphans_removed, outcome.skipped, outcome.failed) == (1, (), ())
    assert (lock.exists(), lock.parent.is_dir()) == (False, True)


def test_a_dependency_that_is_no_header_makes_nobody_wait(layer: PyOpenCLBinaries, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    entry = next(layer.entries())
    for path in (str(tmp_path / "pipe"), "/dev/zero", "nul\0inside"):
        top = pickle.dumps(_SourceInfo([(path, 1.0, "0" * 32)], None)).replace(b"__main__", b"pyopencl.cache")
        (entry.root / entry.key / "info").write_bytes(top)
        assert (None, f"unknown: {path}, which it includes, is not here") in judged(layer)


class _SourceInfo:
    """Pickles as PyOpenCL's class of that name does."""

    def __init__(self, dependencies: object, log: object) -> None:
        self.dependencies, self.log = dependencies, log


def test_the_next_command_removes_the_lock_of_a_killed_one(warm: Home) -> None:
    lock = base(PyOpenCLBinaries(warm.environment())) / "lock"
    program = (
        "import sys, time; from pathlib import Path; from cachectl.layers.disk.locks import presence_lock\n"
        "from cachectl.layers.host.here import this_environment\n"
        "with presence_lock('pyopencl', Path(sys.argv[1]), this_environment()): print(flush=True); time.sleep(600)"
    )
    with running(*python(program, lock)):
        assert lock.read_bytes().startswith(b"cachectl ")
        assert warm.cachectl("purge pyopencl --wait 0.2", check=False).returncode == 1
    assert lock.exists()
    warm.cachectl("purge pyopencl --wait 0.2")
    assert not lock.exists()


CONTENDER = """
import os, sys, time
from contextlib import suppress
from pathlib import Path
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.host.here import this_environment

kind, lock, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

environment = this_environment()._replace(lock_timeout=600, processes=lock.parent / "processes")

def work():
    os.close(os.open(f"{lock}.inside", os.O_CREAT | os.O_EXCL))
    time.sleep(0.002)
    os.unlink(f"{lock}.inside")

def leave_a_dead_lock():
    mine = Path(f"{lock}.{os.getpid()}")
    mine.touch()
    os.utime(mine, (1, 1))
    with suppress(FileExistsError):
        os.link(mine, lock)
    mine.unlink()

for _ in range(rounds):
    if kind == "cachectl":
        leave_a_dead_lock()
        with presence_lock("pyopencl", lock, environment, 100):
            work()
    else:  # as CacheLockManager does in pyopencl/cache.py, but more impatient
        while True:
            with suppress(FileExistsError):
                handle = os.open(lock, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
                break
            time.sleep(0.001)
        work()
        os.close(handle)
        os.unlink(lock)
"""


def test_one_of_many_processes_takes_over_a_dead_lock(tmp_path: Path) -> None:
    """Many processes find the same dead lock: only one at a time gets in, and no live lock is removed."""
    nobody(tmp_path / "processes")
    commands = [
        [sys.executable, "-c", CONTENDER, kind, str(tmp_path / "lock"), "12"]
        for kind in ["cachectl"] * 6 + ["program"] * 2
    ]
    contenders = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [contender.communicate()[1] for contender in contenders]
    assert {contender.returncode for contender in contenders} == {0}, "\n".join(errors)


INTEL = """
import pyopencl as cl
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
print(cl.Program(context, "__kernel void k(__global int *a) { a[get_global_id(0)] += 1; }").build().k.function_name)
"""


@pytest.fixture
def build(home: Home, intel_driver: Driver) -> Callable[..., str]:
    """Return what builds a program with Intel's driver; requires that it fails if ``fails`` is set, and says why."""

    def run(program: str = INTEL, *, fails: bool = False) -> str:
        done = home.run(sys.executable, "-c", program, check=not fails, **intel_driver)
        assert bool(done.returncode) is fails
        return done.stderr

    run()
    return run


def test_bytes_behind_a_program_of_intels_driver_fail_and_a_damaged_part_recompiles(
    home: Home, intel_driver: Driver, build: Callable[..., str]
) -> None:
    layer = PyOpenCLBinaries(home.environment(**intel_driver))
    (entry,) = layer.entries()
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    binary.write_bytes(data + b"\0")
    build(fails=True)
    (finding,) = verified(layer)
    assert (finding.severity, finding.message) == (Severity.FAILS, "binary: has 1 bytes after its last section")
    begin = data.index(b"BC\xc0\xde")
    binary.write_bytes(data[:begin] + bytes(64) + data[begin + 64 :])
    build()
    (finding,) = verified(layer)
    assert finding.severity is Severity.RECOMPILES
    assert finding.message == "binary: .ocl.ir is not LLVM bitcode; PyOpenCL builds the program again"


def test_a_binary_of_another_build_than_its_source_is_doubtful(
    home: Home, intel_driver: Driver, build: Callable[..., str]
) -> None:
    """PyOpenCL does not read the source, so nothing shows which of the two is another program's."""
    build(INTEL.replace(" k(", " other(").replace(".k.", ".other."))
    layer = PyOpenCLBinaries(home.environment(**intel_driver))
    folders = {entry.details.kernels: entry.root / entry.key for entry in layer.entries()}
    assert verified(layer) == []
    shutil.copyfile(folders["other",] / "binary", folders["k",] / "binary")
    build(fails=True)
    (finding,) = verified(layer)
    assert (finding.code, finding.severity, finding.thing) == ("doubtful", Severity.RISKS, None)
    assert "binary: is of another build than source.cl" in finding.message
    assert home.cachectl(finding.fix.removeprefix("cachectl "), **intel_driver).returncode == 0
    build()
    assert verified(layer) == []


@pytest.mark.parametrize("damage", ["cut in half", "random"])
def test_a_broken_binary_of_intels_driver_is_found_where_its_kind_is_known(
    home: Home, intel_driver: Driver, build: Callable[..., str], damage: str
) -> None:
    """PyOpenCL reads nothing of it, and every run fails. An unknown kind may be another driver's."""
    layer = PyOpenCLBinaries(home.environment(**intel_driver))
    (entry,) = layer.entries()
    assert verified(layer) == []
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    noise = random.Random(5).randbytes(len(data))  # noqa: S311 - damage, repeatable
    binary.write_bytes(data[: len(data) // 2] if damage == "cut in half" else noise)
    assert "KeyError" in build(fails=True)
    if damage == "random":
        assert verified(layer) == []
        assert "binaries whose format only their driver knows" in home.cachectl("verify -v pyopencl").stdout
        return
    (finding,) = verified(layer)
    assert (finding.root / (finding.key or ""), finding.severity) == (binary.parent, Severity.FAILS)
    assert finding.message.startswith("binary: is ")


def test_a_binary_of_a_driver_whose_format_is_unknown_is_left_alone(home: Home) -> None:
    layer = PyOpenCLBinaries(home.environment(OCL_ICD_VENDORS=register_driver(home.path, "libmali.so")))
    folder = root_of(layer) / "pyopencl-compiler-cache-v2-py3.11.7.final.0"
    write(folder / ("0" * 32) / "binary", b"a format of its own")
    assert [finding.message.partition(" ")[0] for finding in verified(layer)] == ["info"]
