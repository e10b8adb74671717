"""What every layer does, on what its library wrote: the shipped suite, and tables of what lies in the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import mesa
from support.layers import clear, got, keys_of, orphans, python, root_of, running, somebody, verified
from support.miopen_kernels import ARGS, CODE, FIND, NAME, packed, store, user_file
from support.products import (
    BARE,
    DEEP,
    LINE,
    POCL_KEY,
    PRODUCTS,
    SPIRV,
    Product,
    comgr_entry,
    comgr_key,
    compiled,
    place,
)

from cachectl.layers.core.conformance import LayerConformance, snapshot
from cachectl.layers.core.environment import Environment
from cachectl.layers.core.errors import Busy, Damaged, LayerError, Refused
from cachectl.layers.core.facts import Ability, Artifact, Problem, Severity
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.selection import Selection
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries, PyOpenCLInvoker
from cachectl.layers.pytools import LoopyDictionaries, PytoolsDictionaries
from cachectl.layers.stores.archive import pack, unpack

#: Layers whose library runs here, and the fixture that fills a home with what it stores.
REAL = {
    LoopyDictionaries: "fill",
    PyOpenCLInvoker: "fill",
    PyOpenCLBinaries: "fill",
    PoclKernels: "fill",
    PytoolsDictionaries: "fill_sumpy",
}


class TestConformance(LayerConformance):
    """The shipped suite over every built-in layer."""

    @pytest.fixture(
        autouse=True,
        params=[
            *(name for name in PRODUCTS if name not in {"pocl", "pytools"}),
            *(pytest.param(layer, marks=pytest.mark.real, id=f"real {layer.name}") for layer in REAL),
        ],
    )
    def _product(self, request: pytest.FixtureRequest) -> None:
        if isinstance(request.param, str):
            self.product = PRODUCTS[request.param]
        else:
            fill = request.getfixturevalue(REAL[request.param])
            self.product = Product(request.param, lambda home: fill(self.environment(home)))

    def environment(self, home: Path) -> Environment:
        environment = super().environment(home)
        variables = {name: value.format(home=home) for name, value in self.product.variables.items()}
        return replace(environment, topology=home / "no-gpus").with_variables(variables)

    def make(self, environment: Environment) -> Layer:
        return self.product.layer(environment)

    def seed(self, environment: Environment) -> None:
        self.product.fill(environment.home)


# ---------------------------------------------------------------------- locks and changes

#: Holds the lock of a file as its library does, until its input ends.
HOLD = """
import fcntl, sys
held = open(sys.argv[2], "r+b")
getattr(fcntl, sys.argv[1])(held, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""
LOCKS = [
    ("cuda", "lockf", ".nv/ComputeCache/index"),
    ("neo", "flock", ".cache/neo_compiler_cache/config.file"),
    ("mesa single-file", "flock", ".cache/*/*/*/foz_cache.foz"),
    ("mesa database", "flock", ".cache/*/mesa_cache.db"),
    ("miopen-tuning", "lockf", f".config/miopen/miopen-lockfiles/{FIND}.lock"),
]


@pytest.mark.parametrize(("name", "kind", "file"), LOCKS, ids=[row[0] for row in LOCKS])
def test_a_held_lock_is_waited_for_before_anything_goes(tmp_path: Path, name: str, kind: str, file: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path, lock_timeout=0.1)
    *_, first, second = [got(layer, entry.key) for entry in layer.entries()]
    assert clear(layer, key=first.key).removed == 1
    plan = layer.plan_clear(Selection(key=second.key))
    (path,) = (tmp_path / "home").glob(file)
    with running(*python(HOLD, kind, path)):
        outcome = layer.clear(plan)
        assert (outcome.removed, outcome.skipped, len(outcome.failed)) == (0, (), 1)
        assert "locked by another process" in outcome.failed[0].because
        with pytest.raises(Busy):
            layer.put(first.key, first)
    assert layer.get(first.key) is None
    assert got(layer, second.key) == second
    layer.put(first.key, first)
    assert layer.clear(plan).removed == 1
    assert verified(layer) == []


def _write_again(pattern: str) -> Callable[[Path], object]:
    """Return what writes a file again, as a program does that finds a cache without the entry."""

    def write(home: Path) -> None:
        path = min(home.glob(pattern))
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    return write


#: Changes the first entry in a home.
CHANGES: dict[str, Callable[[Path], object]] = {
    "cuda": _write_again(".nv/ComputeCache/?/?/*"),
    "neo": _write_again(".cache/neo_compiler_cache/*.ocloc_cache"),
    "comgr": _write_again(".cache/comgr/llvmcache-*"),
    "mesa multi-file": _write_again(".cache/mesa_shader_cache/??/*"),
    "pocl": lambda home: place(home / ".cache/pocl/kcache", POCL_KEY, {"add/0-0-0/add.so": b"\x7fELF"}),
    "miopen": lambda home: store(user_file(home), {(NAME, ARGS): packed(CODE)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_entry_that_changed_since_the_plan_is_skipped(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    plan = layer.plan_clear()
    CHANGES[name](tmp_path / "home")
    outcome = layer.clear(plan)
    (note,) = outcome.skipped
    assert (note.because, outcome.removed) == ("changed since it was planned", len(plan.entries) - 1)
    assert keys_of(layer) == [note.key]


# ---------------------------------------------------------------------- damage

COMPILES, FAILS = Severity.RECOMPILES, Severity.FAILS


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[at] ^= 1
        return bytes(damaged)

    return flip


#: A product, a key ("" for the first), a file of the entry if it has several, how that is damaged, what verify says of
#: it, and the effect on the library.
DAMAGE: list[tuple[str, str, str, Callable[[bytes], bytes], str, Severity]] = [
    ("cuda", "", "", flipped(-1), "checksum", Severity.HARMLESS),
    ("cuda", "", "", flipped(40), "hash of its key", Severity.HARMLESS),
    ("neo", DEEP, "", lambda data: data[:900], "", COMPILES),
    ("neo", f"{BARE[0]}.ocloc_cache", "", lambda data: data[:900], "", FAILS),
    ("neo", f"{SPIRV[0]}.ocloc_cache", "", lambda _: b"", "", COMPILES),
    ("comgr", comgr_key("axpy.bc"), "", lambda data: data[:-1], "", COMPILES),
    ("comgr", comgr_key("axpy-gfx906.o"), "", lambda _: comgr_entry(compiled()["axpy-gfx906.o"][:-100]), "", FAILS),
    ("comgr", comgr_key("spirv"), "", lambda _: b"", "", COMPILES),
    ("pocl", POCL_KEY, "program.bc", lambda _: b"", "program.bc: is empty", FAILS),
    ("pocl", POCL_KEY, "program.bc", lambda _: b"junk", "program.bc: is not LLVM bitcode", FAILS),
    ("pocl", POCL_KEY, "k/0-0-0/k.so", lambda _: b"junk", "is not an ELF file", FAILS),
    # PoCL links it itself.
    ("pocl", POCL_KEY, "k/0-0-0/k.so.o", lambda _: b"", "PoCL compiles the kernel again", Severity.HEALS),
]


@pytest.mark.parametrize(("name", "key", "file", "damage", "words", "severity"), DAMAGE)
def test_damage_is_reported_with_its_effect_neither_put_nor_got_and_removed_alone(  # noqa: PLR0917 - a table
    tmp_path: Path, name: str, key: str, file: str, damage: Callable[[bytes], bytes], words: str, severity: Severity
) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    root, count = layer.roots()[0], len(keys_of(layer))
    key = key or next(layer.entries()).key
    artifact, path = got(layer, key), root.path / key / file
    damaged = damage(path.read_bytes() if path.exists() else b"")
    data = pack({**unpack(artifact.data), file: damaged}) if file else damaged
    with pytest.raises(Damaged):
        layer.put(key, replace(artifact, data=data), replace=True)
    assert got(layer, key) == artifact
    path.write_bytes(damaged)
    (finding,) = (found for found in layer.store.verify(root) if found.code == "damaged")
    assert (finding.key, finding.severity, words in finding.message) == (key, severity, True)
    assert finding.fix == f"cachectl purge --damaged {layer.name}"
    if severity is not Severity.HARMLESS:
        with pytest.raises(Damaged):
            layer.get(key)
    assert layer.clear(layer.plan_clear(damaged=True)).removed == 1
    assert list(layer.store.verify(root)) == []
    assert len(keys_of(layer)) == count - 1


# ---------------------------------------------------------------------- what is not the layer's own

#: Names that are no entries of a product's, and an entry's name, for a link.
STRANGERS = {
    "cuda": (("0/0/0123456789abcd", "notes.txt"), "0/1/0123456789abcd"),
    "neo": (
        ("a/b/notes.cl_cache", "0123456789ABCDEF.cl_cache", "a/0123456789abcdef.cl_cache", "stats.txt", "a/stats"),
        "0123456789abcdef.cl_cache",
    ),
    # The caches of other users of LLVM have shorter names, or another beginning.
    "comgr": (
        ("llvmcache-" + "a" * 40, "Thin-abc", "llvmcache-" + "A" * 64, "llvmcache-" + "a" * 65),
        comgr_key("link"),
    ),
    "miopen": (("notes.ukdb", "3.3.0.x/notes.txt", "x/gfx90a6e.ukdb"), "3.3.0.x/gfx906_60.ukdb"),
    "miopen-tuning": (("notes.temp", "notes.txt"), FIND.replace("gfx90a6e", "gfx906_60")),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_other_files_are_neither_listed_nor_removed(tmp_path: Path, name: str) -> None:
    """A variable may name the home of the user, who has files with such names."""
    layer, (strangers, named) = PRODUCTS[name].filled(tmp_path), STRANGERS[name]
    root, keys = layer.roots()[0], keys_of(layer)
    outside = tmp_path / "outside/entry"
    outside.parent.mkdir()
    shutil.copyfile(next(path for path in root.path.rglob("*") if path.is_file()), outside)
    for stranger in (*strangers, named):
        (root.path / stranger).parent.mkdir(parents=True, exist_ok=True)
    for stranger in strangers:
        (root.path / stranger).write_text("somebody else's own file, longer than a header")
    (root.path / named).symlink_to(outside)
    if not (root.path / "f").exists():
        (root.path / "f").symlink_to(outside.parent)
    assert keys_of(layer) == keys
    assert {finding.thing for finding in layer.store.verify(root)} <= {None}
    assert clear(layer).removed == len(keys)
    assert all((root.path / stranger).read_text().startswith("somebody") for stranger in strangers)
    assert outside.exists()
    with pytest.raises(LayerError, match="is not a key"):
        layer.put("stats", Artifact(layer.name, "stats", layer.store.forms[0], outside.read_bytes()))
    assert layer.get(strangers[-1]) is None


#: What an interrupted change leaves, by its name below the root, and what a program that may be at it has mapped.
TEMPORARIES = [
    ("neo", "cl_cache.aB3xYz", "/usr/lib/intel-opencl/libigdrcl.so"),
    ("comgr", "amdgpu-compiler-0a1b2c.tmp.o", "/opt/rocm/lib/libamd_comgr.so.3"),
    ("mesa multi-file", f"{mesa.key('a')}.tmp", "/home/u/.cache/mesa_shader_cache/index"),
    ("miopen-tuning", f"{FIND}.temp", "/opt/rocm/lib/libMIOpen.so.1"),
    ("miopen-tuning", f".cachectl-stage-{'0' * 32}", "/opt/rocm/lib/libMIOpen.so.1"),
]


@pytest.mark.parametrize(("name", "file", "library"), TEMPORARIES)
def test_a_left_temporary_goes_once_nobody_may_write_it(tmp_path: Path, name: str, file: str, library: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    left = root_of(layer) / file
    left.write_bytes(b"half")
    left.chmod(0o600)
    assert list(orphans(layer)) == [file]
    for processes in (somebody(tmp_path / "busy", library), Path("/no such folder")):
        busy = type(layer)(replace(layer.environment, processes=processes))
        clear(busy)
        assert left.exists()
    assert clear(layer).failed == ()
    assert not left.exists()


@pytest.mark.parametrize("name", ["cuda", "neo", "comgr", "mesa multi-file", "pocl"])
def test_looking_does_not_look_like_use(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    paths = [path for path in root_of(layer).rglob("*") if path.is_file() and path.name != "index"]
    for path in paths:
        # Older than the last change: on most file systems the next reading would count.
        os.utime(path, (1, path.stat().st_mtime))
    assert not [found for found in layer.store.scan(layer.roots()[0]) if isinstance(found, Problem)]
    verified(layer)
    assert {path.stat().st_atime for path in paths} == {1.0}


@pytest.mark.parametrize("name", ["miopen-system", "miopen-system-tuning"])
def test_what_a_package_installed_is_read_and_never_changed(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    before = snapshot(tmp_path, times=True)
    artifact = got(layer, next(layer.entries()).key)
    assert artifact.data in (CODE, LINE.encode())
    assert None not in [layer.abilities()[one] for one in (Ability.PUT, Ability.CLEAR, Ability.RELOCATE)]
    own = name.replace("-system", "")
    for words, act in (
        (f"put into the layer {own},", lambda: layer.put(artifact.key, artifact)),
        ("package manager", layer.plan_clear),
        ("MIOPEN_SYSTEM_DB_PATH", lambda: layer.relocate(Path("/elsewhere"))),
    ):
        with pytest.raises(Refused, match=words):
            act()
    assert snapshot(tmp_path, times=True) == before
