"""Rusticl itself fills, finds and misses what cachectl lists, places and clears."""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homes import Home, make_home
from support.layers import assigned, clear, clear_damaged, got, listed, python, running, verified
from support.mesa import FOLDERS, RUSTICL, STORES, rusticl
from support.tracing import numbers, trace

from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.root import Condition
from cachectl.layers.mesa.cache import MesaShaderCache
from cachectl.layers.pyopencl import PyOpenCLBinaries

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def rusticl_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name the device of Rusticl here, or skip; in CI, where it is installed, it must be there."""
    done = rusticl(make_home(tmp_path_factory.mktemp("probe") / "home"), 1)
    if done["device"] is None:
        reason = "Rusticl shows no device: apt-get install mesa-opencl-icd"
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    return str(done["device"])


@pytest.fixture
def cold(home: Home, rusticl_device: str) -> Home:
    assert rusticl_device
    return home


@pytest.mark.parametrize("store", STORES)
def test_rusticl_runs_what_a_base_keeps(store: str, cold: Home, tmp_path: Path) -> None:
    """New entries are only in its own root, and the second run stores nothing."""
    base = str(tmp_path / "base")
    program = (sys.executable, str(cold.programs / "rusticl.py"))
    # PoCL, which the same loader starts, says nothing here.
    variables: dict[str, Any] = {**RUSTICL, **STORES[store]}
    cold.cachectl("run", f"--isolated={base}", "--", *program, "2", **variables)
    before = snapshot(Path(base), times=True)
    kept = own_keys(cold, "--root", base)
    for _ in range(2):
        done = cold.cachectl("run --base", base, "--isolated=own", "--", *program, "3", **variables)
        assert json.loads(done.stdout.splitlines()[-1])["results"] == [2.0, 103.0, 204.0]
        keys = own_keys(cold, "--root", "own")
        assert len(keys - kept) == 2
        assert kept <= keys
    assert snapshot(Path(base), times=True) == before


def without(home: Home, *names: str) -> Home:
    return replace(home, variables={name: value for name, value in home.variables.items() if name not in names})


def own_keys(home: Home, *root: str) -> set[str]:
    return {one["key"] for one in home.json("ls mesa", *root)["entries"]}


def test_a_trace_counts_one_miss_of_a_cut_entry_and_none_of_another_program(cold: Home) -> None:
    """The store after a miss opens the entry again; an entry that names no kernel may be the other program's."""
    rusticl(cold, 1)
    kernel = cold.json("ls mesa --kernel rk0")["entries"][0]["key"]
    os.truncate(cold.path / ".cache" / FOLDERS["multi-file"] / kernel, 100)
    program = (sys.executable, str(cold.programs / "rusticl.py"))
    assert numbers(trace(cold, *program, "1", **RUSTICL), "mesa")[1] == 1
    assert cold.json("purge mesa --key", kernel)["total"]["removed"] == 1
    rusticl(cold, 1)
    with subprocess.Popen((*program, "3"), env={**cold.variables, **RUSTICL}, stdout=subprocess.DEVNULL) as other:
        document = trace(cold, "sh", "-c", f"{shlex.join((*program, '1'))}; sleep 4", **RUSTICL)
    assert (other.returncode, numbers(document, "mesa")[1]) == (0, None)
    assert document["verdict"].startswith("Unknown: every observed lookup hit")


@pytest.mark.parametrize("store", STORES)
def test_rusticl_fills_what_is_reported_listed_and_purged(store: str, cold: Home) -> None:
    variables = STORES[store]
    rusticl(cold, 2, **variables)
    entries = cold.json("ls mesa")["entries"]
    assert len(entries) == 4
    assert {one["root"] for one in entries} == {str(cold.path / ".cache" / FOLDERS[store])}
    assert sorted(one["kernels"][0] for one in entries if one["kernels"]) == ["rk0", "rk1"]
    assert {one["device"] for one in entries} == {"llvmpipe"}
    keys = {one["key"] for one in entries}
    # First hits; then the removed entries are missed, and stored again.
    for purged in (False, True):
        if purged:
            assert cold.json("purge --all")["total"]["failed"] == 0
            assert own_keys(cold) == set()
        rusticl(cold, 2, **variables)
        assert own_keys(cold) == keys
        assert cold.json("verify mesa")["findings"] == []
    # Damage that Mesa never repairs is found, and the printed command repairs it.
    layer = MesaShaderCache(cold.environment(**variables))
    bad = next(name for name, found in listed(layer).items() if found.details.kernels is None)
    whole = got(layer, bad).data
    damaged = whole[:-5] + bytes(byte ^ 0xFF for byte in whole[-5:])
    files = [path for path in (cold.path / ".cache").glob("mesa*/**/*") if path.is_file()]
    holder = next(path for path in files if whole in path.read_bytes())
    holder.write_bytes(holder.read_bytes().replace(whole, damaged))
    if store != "database":
        # A database is dropped as a whole instead.
        rusticl(cold, 2, **variables)
        assert damaged in holder.read_bytes()
    (finding,) = cold.json("verify mesa", check=False)["findings"]
    assert (finding["key"], finding["severity"]) == (bad, "recompiles every run")
    cold.cachectl(*finding["fix"].split()[1:])
    assert rusticl(cold, 2, **variables)["results"] == [2.0, 103.0]
    assert got(layer, bad).data == whole


@pytest.mark.parametrize("store", STORES)
def test_rusticl_runs_what_was_put(store: str, cold: Home, other: Home) -> None:
    """One kernel's machine code under the other's key: its result proves that it came from the cache."""
    variables = STORES[store]
    assert rusticl(cold, 2, **variables)["results"] == [2.0, 103.0]
    layer = MesaShaderCache(cold.environment(**variables))
    artifacts = {name: got(layer, name) for name in listed(layer)}
    rusticl(other, 1, **variables)
    code = {name for name, artifact in artifacts.items() if not artifact.detail["kernels"]}
    first = code & listed(MesaShaderCache(other.environment(**variables))).keys()
    (mine,), (foreign,) = first, code - first
    clear(layer)
    for name, artifact in artifacts.items():
        layer.put(name, artifact)
    assert rusticl(cold, 2, **variables)["results"] == [2.0, 103.0]
    assert listed(layer).keys() == artifacts.keys()
    layer.put(mine, artifacts[foreign]._replace(key=mine), replace=True)
    assert rusticl(cold, 2, **variables)["results"] == [103.0, 103.0]
    clear(layer, key=mine)
    assert rusticl(cold, 2, **variables)["results"] == [2.0, 103.0]
    assert got(layer, mine).data == artifacts[mine].data


def test_a_purge_or_push_of_one_cache_says_that_the_other_is_of_no_use_alone(cold: Home) -> None:
    program = (
        "import pyopencl as cl; from rusticl import device, wait_for_the_store\n"
        "cl.Program(cl.Context([device()]), '__kernel void one(__global int *a) { *a = 1; }').build()\n"
        "wait_for_the_store()"
    )
    rusticl(cold, 1)
    cold.run(sys.executable, "-c", program, PYTHONPATH=str(cold.programs), **RUSTICL)
    said = "mesa: entries of programs that pyopencl holds too cannot be hit without pyopencl's entries"
    lines = (
        "push mesa.zip mesa",
        "push both.zip mesa pyopencl",
        "push both.zip",
        "purge --all -n",
        "purge pyopencl",
        "purge pyopencl",
    )
    assert [said in cold.cachectl(line).stderr for line in lines] == [True, False, False, False, True, False]


def test_read_only_files_are_left_and_reported(cold: Home) -> None:
    shipping = {**STORES["single-file"], "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS": "ship"}
    rusticl(cold, 2, **shipping)
    (own,) = (path for path in (cold.path / ".cache").rglob("foz_cache.foz") if path.stat().st_size > 16)
    shipped = [own.with_name("ship.foz"), own.with_name("ship_idx.foz")]
    shutil.copy(own, shipped[0])
    shutil.copy(own.with_name("foz_cache_idx.foz"), shipped[1])
    before = [path.read_bytes() for path in shipped]
    home = replace(cold, variables={**cold.variables, **shipping})
    assert home.json("purge mesa")["total"]["removed"] == 4
    rusticl(home, 2)
    # An entry found elsewhere is not stored again.
    assert home.json("ls mesa")["entries"] == []
    assert [path.read_bytes() for path in shipped] == before
    kept = home.path / "kept"
    program = (sys.executable, str(home.programs / "rusticl.py"), "2")
    home.cachectl("run", f"--isolated={kept}", "--", *program, **RUSTICL)
    assert sum(path.stat().st_size > 16 for path in kept.rglob("foz_cache.foz")) == 1


def test_a_program_that_runs_on_meets_a_purge_without_an_error(cold: Home) -> None:
    for variables in STORES.values():
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); import rusticl, pyopencl as cl; d = rusticl.device();"
            "c = cl.Context([d]); q = cl.CommandQueue(c); rusticl.build_and_run(c, q, 0); print('ready', flush=True);"
            "sys.stdin.readline(); print([rusticl.build_and_run(c, q, i)[0] for i in (0, 1)])"
        )
        (cold.path / ".cache").mkdir(exist_ok=True)
        own = {**cold.variables, **RUSTICL, "POCL_CACHE_DIR": str(cold.path / "pocl"), **variables}
        with running(*python(program, cold.programs), env=own) as child:
            assert cold.json("purge mesa")["total"]["failed"] == 0
            assert child.communicate("\n")[0] == "[2.0, 103.0]\n"
            assert child.returncode == 0
        assert cold.json("verify mesa")["findings"] == []


@pytest.mark.parametrize("value", ["true", "1", "Yes", "T", "false", "0", "", "on", "2", "abc"])
def test_rusticl_reads_the_switch_as_we_do(value: str, cold: Home) -> None:
    rusticl(cold, 1, MESA_SHADER_CACHE_DISABLE=value)
    layer = MesaShaderCache(cold.environment(MESA_SHADER_CACHE_DISABLE=value))
    assert (layer.state().condition is Condition.DISABLED) == (not listed(layer))


@pytest.mark.parametrize(
    ("variables", "gone"),
    [
        ("MESA_SHADER_CACHE_DIR={home}/one", ()),
        ("MESA_SHADER_CACHE_DIR=relative", ()),
        ("MESA_GLSL_CACHE_DIR={home}/old", ("MESA_SHADER_CACHE_DIR",)),
        ("XDG_CACHE_HOME={home}/xdg", ("MESA_SHADER_CACHE_DIR",)),
        ("XDG_CACHE_HOME=", ("MESA_SHADER_CACHE_DIR",)),
        ("MESA_SHADER_CACHE_DIR= XDG_CACHE_HOME={home}/xdg", ()),
    ],
)
def test_rusticl_keeps_its_cache_where_we_say(variables: str, gone: Iterable[str], cold: Home) -> None:
    changes = assigned(variables.format(home=cold.path))
    home = without(cold, *gone)
    rusticl(home, 1, **changes)
    layer = MesaShaderCache(home.environment(**changes))
    filled = {path.parent.parent for path in cold.path.glob("**/mesa_shader_cache/??/*")}
    assert filled == {root.path for root in layer.roots() if root.role == "multi-file"}
    assert (layer.state().condition in (Condition.DISABLED, Condition.ABSENT)) == (not filled)


def test_a_home_that_is_not_the_account_s_is_one_of_two_places(cold: Home, tmp_path: Path) -> None:
    """Whichever of the two this Mesa uses; under another password file, to keep out of the tester's home."""
    account = tmp_path / "account"
    for folder in (account, cold.path):
        (folder / ".cache").mkdir(parents=True)
    own = pwd.getpwuid(os.getuid())
    (tmp_path / "passwd").write_text(f"somebody:x:{own.pw_uid}:{own.pw_gid}::{account}:/bin/sh\n")
    inside = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/passwd && exec "$@"', str(tmp_path / "passwd"))
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot put another password file in the place of the system's")
    home = without(cold, "MESA_SHADER_CACHE_DIR")
    program = (sys.executable, str(cold.programs / "rusticl.py"), "1")
    home.run(*inside, *program, **RUSTICL, POCL_CACHE_DIR=str(tmp_path / "pocl"))
    filled = {path.parent.parent for path in tmp_path.glob("*/.cache/mesa_shader_cache/??/*")}
    assert len(filled) == 1
    said = json.loads(home.run(*inside, sys.executable, "-m", "cachectl", "report", "mesa", "--json").stdout)
    roots = {Path(root["path"]): root["entries"] for root in said["layers"][0]["roots"]}
    assert {path for path, entries in roots.items() if entries == 2} == filled
    assert {folder / ".cache/mesa_shader_cache" for folder in (account, cold.path)} <= roots.keys()


def test_a_block_reports_whether_it_is_too_late_for_rusticl(cold: Home) -> None:
    """It may be loaded, as in every program; it reads its variables only when a device is requested."""
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import cachectl, pyopencl as cl, rusticl
from cachectl.switching.disabled import StillOn
def run(): c = cl.Context([rusticl.device()]); return rusticl.build_and_run(c, cl.CommandQueue(c), 0)[0]
if sys.argv[2] == "early":
    with cachectl.disabled("mesa") as held: print(held["mesa"].status, run())
else:
    print(run())
    try:
        with cachectl.disabled("mesa"): print("wrong")
    except StillOn as error: print(list(error.layers))
"""
    (cold.path / ".cache").mkdir()
    aside = {**RUSTICL, "POCL_CACHE_DIR": str(cold.path / "pocl")}
    home = replace(cold, variables={**cold.variables, **aside})
    early = home.run(sys.executable, "-c", program, str(cold.programs), "early")
    assert early.stdout.split() == ["off", "2.0"]
    assert cold.json("ls mesa")["entries"] == []
    late = home.run(sys.executable, "-c", program, str(cold.programs), "late")
    assert late.stdout.split() == ["2.0", "['mesa']"]
    assert len(cold.json("ls mesa")["entries"]) == 2


BUILD = """
import pyopencl as cl
from rusticl import device
cl.Program(cl.Context([device()]), "__kernel void k(__global int *a) { a[0] = 1; }").build().k
"""


def test_a_cut_binary_of_pyopencl_aborts_rusticl(cold: Home) -> None:
    def build(*, check: bool = True) -> int:
        program = (sys.executable, "-c", BUILD)
        return cold.run(*program, check=check, **RUSTICL, PYTHONPATH=str(cold.programs)).returncode

    build()
    layer = PyOpenCLBinaries(cold.environment())
    (entry,) = layer.entries()
    assert verified(layer) == []
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    binary.write_bytes(data[:-9])
    assert build(check=False) < 0
    (finding,) = verified(layer)
    assert (finding.severity, finding.thing is None) == (Severity.FAILS, False)
    assert clear_damaged(layer).removed == 1
    build()
    assert verified(layer) == []
