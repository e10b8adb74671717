"""Purges while programs run that have held their builds for longer than any compile takes."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from homes import Home, age
from support.layers import assigned, clear, keys_of, programs, python, root_of, running, write
from tiers import real, thorough_only

from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pocl import programs as pocl_kernels


def holding(home: Home, variables: Mapping[str, str], *numbers: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a program that has built some kernels, and will request their binaries."""
    program = home.programs / "holding.py"
    return running(sys.executable, program, *numbers, env={**home.variables, **variables}, cwd=home.path)


def layer_of(home: Home) -> PoclKernels:
    """Return the layer that sees the processes of this machine."""
    return PoclKernels(home.environment()._replace(processes=Path("/proc")))


@thorough_only
@real
def test_a_purge_leaves_what_programs_hold(
    home: Home, any_pocl: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And removes everything that other programs built before that one started."""
    # A test cannot wait for ten minutes.
    monkeypatch.setattr(pocl_kernels, "ENTRY_REST", 0.0)
    home.python("named.py", *(f"older{number}" for number in range(3)), **any_pocl)
    with holding(home, any_pocl, *map(str, range(6))):
        pass
    age(home.path / ".cache/pocl")
    layer = layer_of(home)
    assert len(keys_of(layer)) == 7
    # Built before and hit now, and built now.
    with holding(home, any_pocl, "0", "6", "7") as program:
        held = {entry.key for entry in layer.entries() if (entry.used or 0) > time.time() - 3600}
        assert len(held) == 3
        time.sleep(0.1)
        plan = layer.plan_clear()
        named = f"PID {program.pid} ("
        because = {note.key: note.because for note in plan.skipped if note.key in held}
        assert because.keys() == held
        assert all(named in reason and "purge again when that has ended" in reason for reason in because.values())
        outcome = layer.clear(plan)
        assert (outcome.removed, outcome.failed) == (6, ())
        assert set(keys_of(layer)) == held
        output, _ = program.communicate("go on\n", timeout=300)
        assert program.returncode == 0
        assert output.splitlines()[-1] == '{"results": [0, 6, 7]}'
    assert clear(layer).removed == 3


def test_an_entry_is_held_by_programs_that_ran_when_it_was_used(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs started one and two hours ago; none can hold what is older."""
    layer = PoclKernels(home.environment())
    for hours, letter in ((1.5, "C"), (3, "D")):
        folder = root_of(layer) / "AB" / (letter * 37)
        write(folder / "program.bc", b"BC\xc0\xde")
        for path in (folder / "program.bc", folder):
            os.utime(path, (time.time() - hours * 3600,) * 2)
    programs(monkeypatch, 4711, 4712)
    monkeypatch.setattr("cachectl.layers.base.processes.age_of", lambda pid, **_: {4711: 7200.0, 4712: 3600.0}[pid])
    plan = layer.plan_clear()
    assert [target.key for target in plan.entries] == ["AB/" + "D" * 37]
    assert [(note.key, "PID 4711," in note.because) for note in plan.skipped] == [("AB/" + "C" * 37, True)]
    # A process of unknown age may hold everything.
    monkeypatch.setattr("cachectl.layers.base.processes.age_of", lambda _pid, **_: None)
    assert layer.plan_clear().entries == ()


PROGRAM = f".cache/pocl/kcache/AB/{'C' * 37}/program.bc"
#: Maps the files of its arguments, and waits.
MAPPING = """
import mmap, sys
files = [open(name, "rb") for name in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""


#: Mounts the first argument over the second, and starts a program.
MOUNTED = 'mount --bind "$0" "$1" && shift && exec "$@"'
INSIDE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
#: Programs inside and outside containers, and whether their entries are kept, by the variables they start with; MAPS
#: is the file that one maps.
PROGRAMS = {
    ("outside", "goes"): {
        "another root": "HOME={}/other",
        "another root by its variable": "HOME={} POCL_CACHE_DIR={}/pocl",
    },
    ("outside", "stays"): {
        "this root": "HOME={}",
        "this root by its variable": "HOME={}/other XDG_CACHE_HOME={}/.cache",
        "this root through a link": "HOME={}/link",
        "another root, but a file of this one": f"HOME={{}}/other MAPS={{}}/{PROGRAM}",
        "a root in an unknown folder": "HOME={} POCL_CACHE_DIR=pocl",
        "no home": "PATH=/bin",
        "no variables": "",
    },
    ("inside", "goes"): {"another root": "HOME={}/other", "another folder under its name": "HOME={}/empty"},
    ("inside", "stays"): {
        "this root": "HOME={}",
        "this root under another name": "HOME=/ XDG_CACHE_HOME={}/there",
        "a link": "HOME={}/link",
        "above one that may be a link": "HOME={}/other/../other",
        "a file of this root": f"HOME={{}}/other MAPS={{}}/{PROGRAM.replace('.cache', 'there')}",
    },
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the variables and the mounts of a process")
@pytest.mark.parametrize(("where", "kind"), [(where, kind) for where, kinds in PROGRAMS.items() for kind in kinds])
def test_what_programs_reach_stays(home: Home, where: tuple[str, str], kind: str) -> None:
    """Purge while a program with these variables runs, which maps a file of the home and a driver."""
    inside, spares = where[0] == "inside", where[1] == "stays"
    if inside and subprocess.run((*INSIDE, "mount -t tmpfs none /mnt"), capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are closed here")
    layer, library, program = layer_of(home), home.path / "libpocl.so.2", home.path / PROGRAM
    for folder in (program.parent, *(home.path / name for name in ("there", "other", "empty/.cache/pocl/kcache"))):
        folder.mkdir(parents=True)
    program.write_bytes(b"BC\xc0\xde")
    library.write_bytes(b"a driver")
    (home.path / "link").symlink_to(home.path)
    variables = assigned(PROGRAMS[where][kind].replace("{}", str(home.path)))
    files = [variables.pop("MAPS"), library] if "MAPS" in variables else [library]
    set_to = variables | ({"PATH": os.defpath} if inside else {})
    before = (*INSIDE, MOUNTED, str(home.path / ".cache"), str(home.path / "there")) if inside else ()
    with running(*before, *python(MAPPING, *files), env=set_to) as process:
        plan = layer.plan_clear()
        spared = [note.key for note in plan.skipped if f"PID {process.pid} " in note.because]
        assert spared == (["AB/" + "C" * 37] if spares else [])
        assert layer.clear(plan).removed == (not spares)
