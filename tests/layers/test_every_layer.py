"""What every layer does, on what its library wrote: the shipped suite, and tables of obstacles."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mesa
from support.layers import clear, got, keys_of, orphans, problems, python, root_of, running, somebody, verified, write
from support.miopen_kernels import ARGS, CODE, FIND, KEY, NAME, key_of, packed, store, user_file
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
    held,
)

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Busy, Damaged, LayerError, Refused
from cachectl.layers.core.conformance import LayerConformance, snapshot
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import Layer, put_many
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.switch import Ability
from cachectl.layers.cuda import entries as cuda
from cachectl.layers.registry import built_in_layer
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.old_locks import find_old_locks

#: Layers whose library runs here, and the fixture that fills a home with what it stores.
REAL = {"loopy": "fill", "pyopencl-invoker": "fill", "pyopencl": "fill", "pocl": "fill", "pytools": "fill_sumpy"}


class TestConformance(LayerConformance):
    """The shipped suite over every built-in layer."""

    @pytest.fixture(
        autouse=True,
        params=[
            *(name for name in PRODUCTS if name not in REAL),
            *(pytest.param(name, marks=pytest.mark.real, id=f"real {name}") for name in REAL),
        ],
    )
    def _product(self, request: pytest.FixtureRequest) -> None:
        name = request.param
        if name in REAL:
            fill = request.getfixturevalue(REAL[name])
            self.product = Product(name, lambda home: fill(self.environment(home)))
        else:
            self.product = PRODUCTS[name]

    def environment(self, home: Path) -> Environment:
        environment = super().environment(home)
        variables = {name: value.format(home=home) for name, value in self.product.variables.items()}
        # Releases before 2025 use the home of the account.
        variables |= {"MESA_SHADER_CACHE_DIR": str(home / ".cache")} if self.product.layer == "mesa" else {}
        return environment._replace(topology=home / "no-gpus").with_variables(variables)

    def make(self, environment: Environment) -> Layer:
        return built_in_layer(self.product.layer, environment)

    def seed(self, environment: Environment) -> None:
        self.product.fill(environment.home_folder)


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
    with running(*python(HOLD, kind, path)) as holder:
        outcome = layer.clear(plan)
        assert (outcome.removed, outcome.skipped, len(outcome.failed)) == (0, (), 1)
        assert f"locked by PID {holder.pid} (python" in outcome.failed[0].because
        with pytest.raises(Busy, match=rf"locked by PID {holder.pid} \(python"):
            layer.put(first.key, first)
        if name == "miopen-tuning":
            seen = type(layer)(layer.environment._replace(processes=Path("/proc")))
            assert f"0.1 s by PID {holder.pid} (" in next(find_old_locks(seen.store, layer.roots()[0])).message
    assert layer.get(first.key) is None
    assert got(layer, second.key) == second
    layer.put(first.key, first)
    assert layer.clear(plan).removed == 1
    assert verified(layer) == []


def write_again(path: Path) -> None:
    """Write a file again, like a program that missed its entry."""
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


#: Changes the first entry in a home: the files to write again, or a function.
CHANGES: dict[str, str | Callable[[Path], object]] = {
    "cuda": ".nv/ComputeCache/?/?/*",
    "neo": ".cache/neo_compiler_cache/*.ocloc_cache",
    "comgr": ".cache/comgr/llvmcache-*",
    "mesa multi-file": ".cache/mesa_shader_cache/??/*",
    "pocl": lambda home: write(home / ".cache/pocl/kcache" / POCL_KEY / "add/0-0-0/add.so", b"\x7fELF"),
    "miopen": lambda home: store(user_file(home), {(NAME, ARGS): packed(CODE)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_entry_that_changed_since_the_plan_is_skipped(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    plan = layer.plan_clear()
    home, change = tmp_path / "home", CHANGES[name]
    if isinstance(change, str):
        write_again(min(home.glob(change)))
    else:
        change(home)
    outcome = layer.clear(plan)
    (note,) = outcome.skipped
    assert (note.because, outcome.removed) == ("changed since it was planned", len(plan.entries) - 1)
    assert keys_of(layer) == [note.key]


def number_in(file: Path) -> int:
    return int.from_bytes(file.read_bytes()[:8], "little")


def sizes_in(root: Path) -> dict[int, int]:
    paths = root.glob("?/?/*")
    return {cuda.identifier_of(str(path.relative_to(root))): path.stat().st_size - 28 for path in paths}


#: What the account of a product says of a root, and what it should say.
ACCOUNTS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "cuda": (lambda root: dict(cuda.split_index((root / "index").read_bytes())[0]), sizes_in),
    "neo": (lambda root: number_in(root / "config.file"), held),
    "mesa multi-file": (
        lambda root: number_in(root / "index"),
        lambda root: sum(path.stat().st_blocks * 512 for path in root.glob("??/*")),
    ),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_an_account_is_right_after_every_change(tmp_path: Path, name: str) -> None:
    layer, (says, holds) = PRODUCTS[name].filled(tmp_path), ACCOUNTS[name]
    root, first = root_of(layer), got(layer, keys_of(layer)[0])
    before = says(root)
    for selection in ({"key": first.key}, {}):
        assert clear(layer, **selection).removed >= 1
        assert says(root) == holds(root) != before
        layer.put(first.key, first)
        assert says(root) == holds(root)
        assert verified(layer) == []


def test_an_artifact_of_another_layer_form_or_key_is_refused(tmp_path: Path) -> None:
    layer = PRODUCTS["cuda"].filled(tmp_path)
    artifact, other, *_ = [got(layer, key) for key in keys_of(layer)]
    key, before = artifact.key, snapshot(tmp_path)
    for foreign in (artifact._replace(layer="another"), artifact._replace(form="another/0"), other):
        with pytest.raises(Refused):
            layer.put(key, foreign)
    for character in ("\n", "\x1b", "\x7f", "\u202e"):
        strange = artifact._replace(key=f"{key[:-1]}{character}{key[-1]}")
        with pytest.raises(LayerError, match="is not a key of this layer"):
            layer.put(strange.key, strange)
    assert snapshot(tmp_path) == before


NEW_KEY = "AB/" + "E" * 37
COMPILES, FAILS = Severity.RECOMPILES, Severity.FAILS


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[at] ^= 1
        return bytes(damaged)

    return flip


#: A product, a file of an entry ("" for the first one), the damage, the effect on the library, and verify's words.
Row = tuple[str, str, Callable[[bytes], bytes], Severity, str]
DAMAGE: list[Row] = [
    ("cuda", "", flipped(-1), Severity.HARMLESS, "checksum"),
    ("cuda", "", flipped(40), Severity.HARMLESS, "hash of its key"),
    ("neo", DEEP, lambda data: data[:900], COMPILES, ""),
    ("neo", f"{BARE[0]}.ocloc_cache", lambda data: data[:900], FAILS, ""),
    ("neo", f"{SPIRV[0]}.ocloc_cache", lambda _: b"", COMPILES, ""),
    ("comgr", comgr_key("axpy.bc"), lambda data: data[:-1], COMPILES, ""),
    ("comgr", comgr_key("axpy-gfx906.o"), lambda _: comgr_entry(compiled()["axpy-gfx906.o"][:-100]), FAILS, ""),
    ("comgr", comgr_key("spirv"), lambda _: b"", COMPILES, ""),
    ("pocl", f"{POCL_KEY}/program.bc", lambda _: b"", FAILS, "program.bc: is empty"),
    ("pocl", f"{POCL_KEY}/program.bc", lambda _: b"junk", FAILS, "program.bc: is not LLVM bitcode"),
    ("pocl", f"{POCL_KEY}/k/0-0-0/k.so", lambda _: b"junk", FAILS, "is not an ELF file"),
    # PoCL links it itself.
    ("pocl", f"{POCL_KEY}/k/0-0-0/k.so.o", lambda _: b"", Severity.HEALS, "PoCL compiles the kernel again"),
]


@pytest.mark.parametrize("row", DAMAGE)
def test_damage_is_reported_with_its_effect_neither_put_nor_got_and_removed_alone(tmp_path: Path, row: Row) -> None:
    name, file, damage, severity, words = row
    layer = PRODUCTS[name].filled(tmp_path)
    keys = keys_of(layer)
    path = root_of(layer) / (file or keys[0])
    key = POCL_KEY if name == "pocl" else file or keys[0]
    artifact = got(layer, key)
    damaged = damage(path.read_bytes() if path.exists() else b"")
    data = pack({**unpack(artifact.data), file[len(key) + 1 :]: damaged}) if name == "pocl" else damaged
    with pytest.raises(Damaged):
        layer.put(key, artifact._replace(data=data), replace=True)
    assert got(layer, key) == artifact
    path.write_bytes(damaged)
    (finding,) = (found for found in verified(layer) if found.code == "damaged")
    assert (finding.key, finding.severity, words in finding.message) == (key, severity, True)
    assert finding.fix == f"cachectl purge --damaged {layer.name}"
    if severity is not Severity.HARMLESS:
        with pytest.raises(Damaged):
            layer.get(key)
    assert layer.clear(layer.plan_clear(damaged=True)).removed == 1
    assert verified(layer) == []
    assert keys_of(layer) == [other for other in keys if other != key]


#: Keys and bytes that cannot be put, and a part of the reason.
REFUSED = {
    "miopen": [
        (key_of(args=" -DX='a'"), CODE, "a quote"),
        (key_of(name="kernel.cl"), CODE, "does not end in .o"),
        (KEY, b"", "is empty"),
        (key_of("../gfx90a6e.ukdb"), CODE, "is not a key"),
        (key_of("notes/gfx90a6e.ukdb"), CODE, "is not a key"),
        (KEY.rpartition("::")[0], CODE, "is not a key"),
    ],
    "miopen-tuning": [
        (f"{FIND}::a", b"b=S:1", "another key"),
        (f"{FIND}::a", b"a=S", "no value has an id"),
        (f"{FIND}::a", b"a=S:1\n", "more than one line"),
        *((key, b"x=S:1,0,A", f"^miopen-tuning: '{key}' is not a key") for key in ("bogus::x", FIND)),
        *((f"{file}::a", b"a=S:1", "is not a key")
          for file in ("notes.txt", f"../{FIND}", "gfx90a6e.HIP.fdb.txt")),
    ],
    "pocl": [
        *((NEW_KEY, pack(files), "holds no program") for files in ({}, {"last_accessed": b""}, {"build.log": b"x"})),
        *((NEW_KEY, pack({path: b"x"}), "unsafe member") for path in ("../escape", "/etc/passwd", "k/../../x")),
        (NEW_KEY, pack({"thesis.tex": b"x"}), "does not belong to an entry"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "data", "words"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_what_the_library_could_not_use_is_not_put(
    tmp_path: Path, name: str, key: str, data: bytes, words: str
) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(LayerError, match=words):
        layer.put(key, Artifact(name, key, layer.store.forms[0], data))
    assert {path: what for path, what in snapshot(tmp_path).items() if "lock" not in path} == before


#: Names that are not of a product's entries, and the name of an entry for a link.
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
    """A variable may name the user's home, which has such files."""
    layer, (strangers, named) = PRODUCTS[name].filled(tmp_path), STRANGERS[name]
    root, keys = root_of(layer), keys_of(layer)
    outside = write(tmp_path / "outside/entry", next(path for path in root.rglob("*") if path.is_file()).read_bytes())
    for stranger in (*strangers, named):
        write(root / stranger, "somebody else's own file, longer than a header")
    (root / named).unlink()
    (root / named).symlink_to(outside)
    if not (root / "f").exists():
        (root / "f").symlink_to(outside.parent)
    assert keys_of(layer) == keys
    assert {finding.thing for finding in verified(layer)} <= {None}
    assert clear(layer).removed == len(keys)
    assert all((root / stranger).read_text().startswith("somebody") for stranger in strangers)
    assert outside.exists()
    with pytest.raises(LayerError, match="is not a key"):
        layer.put("stats", Artifact(layer.name, "stats", layer.store.forms[0], outside.read_bytes()))
    assert layer.get(strangers[-1]) is None


#: The leftover of an interrupted change below the root, and what a program that may be writing it has mapped.
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
        busy = type(layer)(layer.environment._replace(processes=processes))
        clear(busy)
        assert left.exists()
    if name == "mesa multi-file":
        # Its writer was killed long ago.
        os.utime(left, (1, 1))
        layer = busy
    assert clear(layer).failed == ()
    assert not left.exists()


@pytest.mark.parametrize("name", ["cuda", "neo", "comgr", "mesa multi-file", "pocl"])
def test_looking_does_not_look_like_use(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    paths = [path for path in root_of(layer).rglob("*") if path.is_file() and path.name != "index"]
    for path in paths:
        # Before the last change: most file systems would record the next read.
        os.utime(path, (1, path.stat().st_mtime))
    assert problems(layer) == []
    verified(layer)
    assert {path.stat().st_atime for path in paths} == {1.0}


@pytest.mark.parametrize("name", ["miopen-system", "miopen-system-tuning"])
def test_what_a_package_installed_is_read_and_never_changed(tmp_path: Path, name: str) -> None:
    layer = PRODUCTS[name].filled(tmp_path)
    before = snapshot(tmp_path, times=True)
    artifact = got(layer, next(layer.entries()).key)
    assert artifact.data in (CODE, LINE.encode())
    acts: dict[Ability, tuple[str, list[Callable[[], object]]]] = {
        Ability.PUT: (
            f"put into the layer {name.replace('-system', '')},",
            [lambda: layer.put(artifact.key, artifact), lambda: put_many(layer, [])],
        ),
        Ability.CLEAR: ("package manager", [layer.plan_clear]),
        Ability.RELOCATE: ("MIOPEN_SYSTEM_DB_PATH", [lambda: layer.relocate(Path("/elsewhere"))]),
    }
    reasons = {ability: reason for ability, reason in layer.abilities().items() if reason is not None}
    assert reasons.keys() - {Ability.KERNELS} == acts.keys()
    for ability, (words, uses) in acts.items():
        assert words in reasons[ability]
        for use in uses:
            with pytest.raises(Refused, match=re.escape(f"cannot {ability.value}: {reasons[ability]}")):
                use()
    assert snapshot(tmp_path, times=True) == before
