"""``run --base``: warm from a folder that nobody may write, new entries in a root of one's own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, PROGRAMS, Home, make_home
from support.hostile import hash_tree
from tiers import as_root, needing, real, thorough_only

from cachectl.layers.core.conformance import snapshot
from cachectl.layers.disk.own_roots import own_root

#: The loopy kernels that the filled home has, and all its programs in PoCL's cache.
KNOWN, FILLED = 8, 11

NOBODY = 65534
#: Starts a program of another user, who may read every file. The secure bit keeps that right in access(2), which PoCL
#: asks whether its library of kernels is there: without it, the kernel drops all rights of another user in that call.
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--securebits=+no_setuid_fixup"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
INTEL = """
import logging, sys
import pyopencl as cl
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
for number in range(int(sys.argv[1])):
    source = "__kernel void k%d(__global int *a) { a[get_global_id(0)] += 1; }" % number
    cl.Program(context, source).build()
"""

Mount = Callable[..., Path]


def program(name: str, count: int) -> list[str]:
    return [sys.executable, str(PROGRAMS / name), str(count)]


def state(folder: Path) -> object:
    """Return content, times and modes of everything below a folder, and of the folder."""
    return snapshot(folder, times=True), hash_tree(folder)


def publish(folder: Path) -> None:
    """Let every user read a folder, and nobody write to it."""
    subprocess.run(["chmod", "-R", "a=rX", str(folder)], check=True)


def freeze(mount: Mount, folder: Path) -> None:
    """Make a folder read-only for the superuser too."""
    mount("--bind", str(folder), on=folder)
    mount("-o", "remount,bind,ro", on=folder)


@pytest.fixture
def base(filled: Home, tmp_path: Path) -> Path:
    """Return a folder like that of ``run --isolated=DIR`` with what PoCL, loopy and PyOpenCL have stored."""
    folder = tmp_path / "base"
    shutil.copytree(filled.path / ".cache/pocl/kcache", folder / "pocl")
    shutil.copytree(filled.path / ".cache/pytools", folder / "xdg/pytools")
    return folder


def stores(done: subprocess.CompletedProcess[str]) -> int:
    """Return how many programs PoCL has compiled in a run with its messages on."""
    return done.stderr.count("Writing program.bc")


@real
def test_a_base_warms_a_run_and_stays_as_it_is(home: Home, base: Path) -> None:
    publish(base)
    before = state(base)
    start = f"run --base {base} --"
    done = home.cachectl(start, *program("kernels.py", KNOWN + 1), POCL_DEBUG="general,llvm")
    assert f"base: pocl: {FILLED} copied" in done.stderr
    assert stores(done) == 1
    assert done.stdout.count("code generation cache hit") == KNOWN
    assert done.stdout.count("code generation cache miss") == 1
    own = own_root(home.environment(), base)
    assert home.json(f"report --root {own} pocl")["total"]["entries"] == FILLED + 1
    again = home.cachectl(f"{start} true")
    assert f"base: pocl: {FILLED} already present" in again.stderr
    assert home.json("report pocl")["total"]["entries"] == FILLED + 1
    assert state(base) == before
    home.cachectl(start, *CACHECTL, "purge", "--all")
    assert not list(own.glob("pocl/??/*"))
    home.cachectl(f"{start} true")
    for line in ("prune pocl --max-size 0B --dry-run", "purge pocl --dry-run", "purge pocl"):
        assert home.json(line)["total"]["removed"] == FILLED
    assert not list(own.glob("pocl/??/*"))
    assert state(base) == before


@thorough_only
@real
@as_root
@pytest.mark.parametrize("mounted", [False, True])
def test_a_base_of_the_superuser_serves_another_user(
    base: Path, open_folder: Path, mount: Mount, *, mounted: bool
) -> None:
    """The other user may read every file, because the Python of the tests may lie in a closed home."""
    base = base.rename(open_folder / "site")
    publish(base)
    if mounted:
        freeze(mount, base)
    before = state(base)
    home = make_home(open_folder / "theirs")
    os.chown(home.path, NOBODY, NOBODY)
    command = [*AS_NOBODY, *CACHECTL, "run", "--base", str(base), "--"]
    for compiled in (1, 0):
        done = home.run(*command, *program("kernels.py", KNOWN + 1), POCL_DEBUG="general,llvm")
        assert stores(done) == compiled
        assert done.stdout.count("code generation cache hit") == KNOWN + 1 - compiled
    assert state(base) == before
    assert {path.lstat().st_uid for path in home.path.rglob("*")} == {NOBODY}


@thorough_only
@real
def test_a_temporary_root_is_warm_and_keeps_nothing_and_env_moves_to_an_own_one(home: Home, base: Path) -> None:
    command = ("run", "--base", str(base), "--isolated", "--", *program("kernels.py", KNOWN + 1))
    for _ in range(2):
        assert stores(home.cachectl(*command, POCL_DEBUG="general,llvm")) == 1
    assert not own_root(home.environment(), base).exists()
    assert f"base: pocl: {FILLED} copied" in home.cachectl(f"run --base {base} --isolated=own -- true").stderr
    script = (
        f"{home.cachectl('env --root own --shell sh').stdout}\nexec {sys.executable} {PROGRAMS / 'kernels.py'} {KNOWN}"
    )
    ran = home.run("sh", "-c", script, POCL_DEBUG="general,llvm")
    assert stores(ran) == 0
    assert ran.stdout.count("code generation cache hit") == KNOWN


@thorough_only
@real
@pytest.mark.parametrize("driver", ["wheel", *needing("intel_driver")])
def test_binaries_of_pyopencl(
    request: pytest.FixtureRequest, home: Home, tmp_path: Path, mount: Mount, driver: str
) -> None:
    """A program builds as many programs as its last argument says."""
    variables: dict[str, Any] = {} if driver == "wheel" else request.getfixturevalue(driver)
    command = (sys.executable, *([f"{PROGRAMS}/binaries.py"] if driver == "wheel" else ["-c", INTEL]))
    base = tmp_path / "base"
    home.cachectl(f"run --isolated={base} --", *command, "2", **variables)
    freeze(mount, base)
    before = state(base)
    for misses in (1, 0):
        done = home.cachectl(f"run --base {base} --", *command, "3", **variables)
        assert done.stdout.count("binary cache hit") == 3 - misses
        assert done.stdout.count("binary cache miss") == misses
    assert state(base) == before


def test_a_base_and_an_own_root_do_not_contain_one_another(home: Home) -> None:
    (home.path / "base/own").mkdir(parents=True)
    for base, own in (("base", "base"), ("base", "base/new"), ("base/own", "base")):
        home.refused(f"run --base {base} --isolated={own} -- true", says="must not contain one another", status=2)
    assert [path.name for path in (home.path / "base").rglob("*")] == ["own"]


def test_a_base_without_entries_and_one_that_others_can_write_say_so(home: Home, open_folder: Path) -> None:
    base = open_folder / "base"
    base.mkdir()
    base.chmod(0o777)
    done = home.cachectl(f"run --base {base} -- true")
    assert f"base: {base} has no entry of any layer" in done.stderr
    assert f"other users can write to {base}" in done.stderr


@as_root
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_an_own_root_that_another_user_made_is_refused(home: Home, tmp_path: Path, planted: str) -> None:
    """The name is made from the path of the base: where others may create, another user can make it first."""
    private, shared, start = (tmp_path / name for name in ("private", "shared", "base"))
    for folder in (start, private):
        folder.mkdir(mode=0o700)
    home = Home(home.path, {**home.variables, "XDG_CACHE_HOME": str(shared)})
    own = own_root(home.environment(), start)
    own.parent.mkdir(parents=True)
    shared.chmod(0o1777)
    own.symlink_to(private) if planted == "link" else own.mkdir()
    places = (shared / "cachectl", own.parent, own)
    for path in places:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    run = f"run --base {start} -- echo it-runs"
    for line in (run, run.replace("--base", "--store store --trust --base")):
        done = home.cachectl(line, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "belongs to nobody" in done.stderr
    assert [list(path.iterdir()) for path in (own, private)] == [[], []]
    # A folder of one's own that is not private has a private one in it.
    for path in places:
        os.chown(path, 0, 0, follow_symlinks=False)
    if planted == "folder":
        assert home.cachectl(run).stdout == "it-runs\n"
        assert os.listdir(own) == ["cachectl-0"]


@real
def test_the_own_root_of_a_base_is_one_place_for_every_verb(home: Home, base: Path) -> None:
    """Within a run the switched root is the own root that commands look for: it was counted, and limited, twice."""
    run = f"run --base {base} --layer pocl --"
    home.cachectl(run, "true")
    held = home.json("report pocl")["total"]
    assert held["entries"] == FILLED

    def inside(line: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(home.cachectl(run, *CACHECTL, *line.split(), "--json").stdout)

    report = inside("report pocl")
    assert (report["total"]["entries"], report["total"]["bytes"]) == (FILLED, held["bytes"])
    for listed in (inside("ls pocl"), home.json("ls pocl")):
        assert len({entry["key"] for entry in listed["entries"]}) == len(listed["entries"]) == FILLED
    assert inside(f"prune pocl --max-size {held['bytes']}B --dry-run")["total"]["removed"] == 0
    assert inside("purge pocl --dry-run")["total"]["removed"] == FILLED
    key = home.json("ls pocl")["entries"][0]["key"]
    assert home.cachectl("get pocl", key, "-o", str(home.path / "one")).returncode == 0
