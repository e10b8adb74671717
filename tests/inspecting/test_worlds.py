"""Worlds: a state that is made, what the library shows in it, the finding, and the library after the printed fix.

The table below is the evidence for ``fix_tested``: a code without a world here says in the catalogue why its fix is
advice. States of products that cannot run here are made of files, and the finding has to go with the fix.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from homes import pocl_driver
from support.doctor import ALONE, leak, stale_lock
from support.layers import register_driver, sql
from support.miopen_kernels import FIND
from tiers import as_root

from benchmarks.commands import at_home
from cachectl.layers.core.finding import Severity
from cachectl.layers.registry import catalogue

#: Builds and runs one kernel, of a name that is given.
PROGRAM = """
import sys, numpy, pyopencl as cl
(device,) = [device for platform in cl.get_platforms() for device in platform.get_devices()]
context = cl.Context([device])
queue, data = cl.CommandQueue(context), numpy.arange(16, dtype=numpy.float32)
memory = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=data)
name = sys.argv[1]
program = cl.Program(context, "__kernel void %s(__global float *a) { a[get_global_id(0)] *= 2; }" % name).build()
getattr(program, name)(queue, (16,), (4,), memory)
cl.enqueue_copy(queue, data, memory)
assert data[3] == 6
"""
#: Stores a row of a dictionary of its own.
STORE = "from pytools.persistent_dict import WriteOncePersistentDict as D; D('mine').store_if_not_present('key', 1)"
POCL, PYTOOLS = (sys.executable, "-c", PROGRAM, "double_it"), (sys.executable, "-c", STORE)
Mount = Callable[..., Path]


class World(NamedTuple):
    """A state: its code, what makes it (and may return variables), the program that meets it, and what that shows.

    Without a ``program`` the product cannot run here.
    """

    code: str
    make: Callable[[Path, Mount], Mapping[str, str] | None]
    severity: Severity
    program: tuple[str, ...] = POCL
    symptom: str = ""
    layer: str = "pocl"
    verb: str = "doctor"


def _variables(home: Path) -> dict[str, str]:
    return {**at_home(home), **pocl_driver(), "PATH": os.environ["PATH"]}


def _dictionary(home: Path) -> Path:
    subprocess.run(PYTOOLS, env=_variables(home), check=True)
    (path,) = (home / ".cache/pytools").glob("*.sqlite")
    return path


def _kcache(home: Path) -> Path:
    return home / ".cache/pocl/kcache"


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def noexec(home: Path, mount: Mount) -> None:
    """Mount as Docker's ``--tmpfs`` does."""
    mount("-t", "tmpfs", "-o", "noexec", "none", on=home / ".cache/pocl")


def read_only(home: Path, mount: Mount) -> None:
    mount("-t", "tmpfs", "-o", "ro", "none", on=home / ".cache/pocl")


def closed_folder(home: Path, _mount: Mount) -> None:
    _made(_kcache(home)).chmod(0o500)


def closed_file(home: Path, _mount: Mount) -> None:
    _dictionary(home).chmod(0o400)


def no_folder(home: Path, _mount: Mount) -> None:
    _made(home / ".cache").joinpath("pocl").write_text("something")


def dangling(home: Path, _mount: Mount) -> None:
    _made(home / ".cache").joinpath("pocl").symlink_to(home / "scratch/of a job")


def full(home: Path, mount: Mount) -> None:
    """Fill a small file system with a cache."""
    mount("-t", "tmpfs", "-o", "size=3m", "none", on=home / ".cache/pocl")
    subprocess.run(POCL, env=_variables(home), check=True)
    (program,) = _kcache(home).glob("??/*/program.bc")
    with (program.parent / "build.log").open("wb") as log:
        while log.tell() < 16 << 20:
            try:
                os.write(log.fileno(), bytes(4096))
            except OSError:
                break
    os.utime(program.parent / "build.log", (1, 1))


def writable(home: Path, _mount: Mount) -> None:
    _made(_kcache(home)).chmod(0o777)


def anothers(home: Path, _mount: Mount) -> None:
    os.chown(_made(_kcache(home)).parent, 54321, -1)


def off(_home: Path, _mount: Mount) -> dict[str, str]:
    return {"POCL_KERNEL_CACHE": "0"}


def misread(_home: Path, _mount: Mount) -> dict[str, str]:
    return {"POCL_KERNEL_CACHE": "true"}


def nowhere(_home: Path, _mount: Mount) -> dict[str, str]:
    return {"POCL_CACHE_DIR": ""}


def ranks(home: Path, _mount: Mount) -> dict[str, str]:
    _made(_kcache(home))
    return {"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}


def leaked(home: Path, _mount: Mount) -> None:
    os.utime(leak(home, b"kernel"), (1, 1))


def unreadable(home: Path, _mount: Mount) -> None:
    subprocess.run(POCL, env=_variables(home), check=True)
    for folder in _kcache(home).glob("??"):
        folder.chmod(0)


def cut(home: Path, _mount: Mount) -> None:
    subprocess.run(POCL, env=_variables(home), check=True)
    (code,) = _kcache(home).glob("??/*/*/*/*.so")
    os.truncate(code, 1000)


def renamed(home: Path, _mount: Mount) -> None:
    subprocess.run(POCL, env=_variables(home), check=True)
    (code,) = _kcache(home).rglob("double_it.so")
    code.rename(code.with_name("another.so"))
    code.parents[1].rename(code.parents[2] / "another")


def cut_dictionary(home: Path, _mount: Mount) -> None:
    _dictionary(home).write_bytes(b"SQLite format 3\0" + bytes(4096))


def lock(home: Path, _mount: Mount) -> dict[str, str]:
    stale_lock(home)
    return {"OCL_ICD_VENDORS": register_driver(home, "libamdocl64.so")}


def no_file(home: Path, _mount: Mount) -> None:
    path = _dictionary(home)
    path.unlink()
    path.mkdir()


def tuning(home: Path, _mount: Mount) -> dict[str, str]:
    _made(home / ".config/miopen")
    return {"MIOPEN_FIND_ENFORCE": "SEARCH_DB_UPDATE"}


def quoted(home: Path, _mount: Mount) -> dict[str, str]:
    (_made(home / '"."') / FIND).write_text("k=S:1,0,A\n")
    return {"MIOPEN_USER_DB_PATH": "."}


def newline(home: Path, _mount: Mount) -> None:
    (_made(home / ".config/miopen") / FIND).write_text("k=S:1,0,A")


def columns(home: Path, _mount: Mount) -> None:
    sql(_made(home / ".cache/miopen/3.3.0") / "gfx90a6e.ukdb", "CREATE TABLE kern_db(a, b)")


WORLDS = (
    World("noexec", noexec, Severity.FAILS, symptom="failed to map segment from shared object"),
    World("closed", read_only, Severity.FAILS),
    World("closed", closed_folder, Severity.FAILS),
    World("closed", closed_file, Severity.FAILS, PYTOOLS, "attempt to write a readonly database", "pytools"),
    World("no-folder", no_folder, Severity.FAILS),
    World("no-folder", dangling, Severity.FAILS),
    World("full", full, Severity.FAILS),
    World("writable", writable, Severity.UNSAFE),
    World("owner", anothers, Severity.UNSAFE),
    World("off", off, Severity.RECOMPILES),
    World("variable", misread, Severity.RECOMPILES),
    World("variable", nowhere, Severity.FAILS),
    World("ranks", ranks, Severity.RISKS),
    World("leaked", leaked, Severity.WASTES),
    World("unreadable", unreadable, Severity.FAILS),
    World("damaged", cut, Severity.FAILS, verb="verify", symptom="Bus error"),
    World("doubtful", renamed, Severity.RISKS, verb="verify"),
    World("damaged", cut_dictionary, Severity.FAILS, PYTOOLS, "file is not a database", "pytools", "verify"),
    World("tuning", tuning, Severity.RECOMPILES, (), layer="miopen-tuning"),
    World("quoted", quoted, Severity.RECOMPILES, (), layer="miopen-tuning"),
    World("newline", newline, Severity.HEALS, (), layer="miopen-tuning", verb="verify"),
    World("columns", columns, Severity.FAILS, (), layer="miopen", verb="verify"),
    World("lock", lock, Severity.FAILS, (), layer="pyopencl"),
    World("no-file", no_file, Severity.FAILS, PYTOOLS, "unable to open database file", "pytools", "verify"),
)


#: Those that the default run makes.
ALWAYS = (closed_file,)
#: Codes whose fix another test runs.
ELSEWHERE = {
    "editable": "test_an_editable_loopy_that_was_changed_is_found_and_the_purge_makes_it_count",
    "cap": "test_cap_of_cuda",
    "stale": "test_programs_of_a_pocl_that_was_seen_here_and_has_gone_are_stale",
}


@as_root
@pytest.mark.real
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(world, id=world.make.__name__, marks=[] if world.make in ALWAYS else [pytest.mark.thorough])
        for world in WORLDS
    ],
)
def test_a_fix_mends_what_the_library_shows(
    world: World,
    open_folder: Path,
    mount: Mount,
    held_to_modes: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    # Below pytest's own folder, which nobody else can enter, nobody else can write.
    home = _made(open_folder / "home")
    variables = {**_variables(home), **(world.make(home, mount) or {})}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = (*held_to_modes, "sh", "-c", script)
        return subprocess.run(
            command, env=variables, cwd=home, capture_output=True, text=True, check=False, timeout=100
        )

    program = shlex.join(world.program) or "true"
    if world.program:
        met = run(program)
        fails = world.severity is Severity.FAILS
        assert (bool(met.returncode), world.symptom in met.stderr) == (fails, True), met.stderr
    cachectl = f"{shlex.quote(sys.executable)} {ALONE if world.make is lock else '-m cachectl'}"
    asked = f"{cachectl} {world.verb} {world.layer} --json"
    found = [one for one in json.loads(run(asked).stdout)["findings"] if one["code"] == world.code]
    assert [one["severity"] for one in found] == [world.severity.value], found
    assert found[0]["fix_tested"]
    # For a table, with --junitxml.
    record_property("fix", found[0]["fix"])
    mended = run(
        f'set -e; cachectl() {{ {cachectl} "$@"; }}; {{ {found[0]["fix"]}; }} >&2\n{program}\n{asked} || test $? = 1'
    )
    assert mended.returncode == 0, mended.stderr
    left = json.loads(mended.stdout.splitlines()[-1] if "\n{" in mended.stdout else mended.stdout)["findings"]
    assert [one for one in left if (one["code"], one["severity"]) == (world.code, world.severity.value)] == []


def test_every_code_has_a_world_or_says_why_not() -> None:
    codes = {code.name: code for code in catalogue()}
    assert all(world.severity in codes[world.code].severities for world in WORLDS)
    tested = {*ELSEWHERE, *(world.code for world in WORLDS)}
    assert {code.name for code in catalogue() if not code.advice} == tested
    others = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert all(f"def {name}(" in others for name in ELSEWHERE.values())
