"""NEO's and comgr's caches, around what the real compilers wrote: read, damaged, carried, counted, cleared."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.layers import got, orphans, somebody
from support.tracing import no_file_events

from cachectl.layers.base.conformance import LayerConformance, nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Busy, Damaged, LayerError
from cachectl.layers.base.facts import Artifact, Condition, Problem, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.comgr import ComgrCache, policy_complaint
from cachectl.layers.neo import NeoCompilerCache
from cachectl.layers.neo.entries import NeoCodec
from cachectl.stack import Stack
from cachectl.verbs.doctor import diagnosis

if TYPE_CHECKING:
    from homes import Home

DATA = Path(__file__).parents[1] / "data"
#: What ocloc 22.43 stored of one source with two kernels, for Skylake and for Arc: wrapped, bare,
#: and as SPIR-V.
WRAPPED = ("90acc8ebe339bbdf", "a759d5e93348ae0d")
BARE = ("43c3b6a22730c983", "c081d9943ea50613")
SPIRV = ("7accbe5d8c3df6d1", "d45d9b649667820f")
DEEP = "9/0/90acc8ebe339bbdf.cl_cache"


def fill_neo(folder: Path) -> None:
    """Lay out what ocloc wrote, flat as it is, and the wrapped programs again as a newer driver keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DATA / "neo-ocloc-22.43.tar.gz") as tar:
        for member in tar:
            if member.isfile():
                tar.extract(member, folder, set_attrs=False)
    for name in WRAPPED:
        deep = folder / name[0] / name[1] / f"{name}.cl_cache"
        deep.parent.mkdir(parents=True)
        shutil.copyfile(folder / f"{name}.ocloc_cache", deep)
        (deep.parent / "stats").write_bytes(struct.pack("=QQQ", 1, 1, 1))
    (folder / "stats").write_bytes(struct.pack("=QQQ", 5, 2, 1))
    (folder / "config.file").write_bytes(struct.pack("=Q", held(folder)))


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*_cache"))


@cache
def compiled() -> dict[str, bytes]:
    """Return one module with the kernels axpy and scale, and a function that is none: bitcode, objects of two GPUs."""
    with tarfile.open(DATA / "amdgpu-llvm14.tar.gz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def entry(output: bytes, log: bytes = b"") -> bytes:
    """Return an entry in the form of ``serializeCacheEntry``."""
    return struct.pack("<Q", len(output)) + output + struct.pack("<Q", len(log)) + log


def name_of(what: str) -> str:
    return f"llvmcache-{hashlib.sha256(what.encode()).hexdigest()}"


OUTPUTS = ("axpy.bc", "axpy-gfx906.o", "axpy-gfx90a.o")


def fill_comgr(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for what in OUTPUTS:
        (folder / name_of(what)).write_bytes(entry(compiled()[what], b"a warning\n"))
    module = bytes.fromhex("030223070000010000000000010000000000000038000100")
    (folder / name_of("spirv")).write_bytes(entry(module))
    (folder / "llvmcache.timestamp").touch()


class Product(NamedTuple):
    """A layer, and what its folder holds: counts of entries, those that name kernels, and all files."""

    layer: type[Layer]
    folder: str
    fill: Callable[[Path], None]
    counts: tuple[int, int, int]
    library: str
    temporary: str
    #: Names that are no entries of the product's.
    strangers: tuple[str, ...]
    #: An entry's name, for a link.
    named: str


PRODUCTS = {
    "neo": Product(
        NeoCompilerCache,
        ".cache/neo_compiler_cache",
        fill_neo,
        (8, 8, 12),
        "/usr/lib/intel-opencl/libigdrcl.so",
        "cl_cache.aB3xYz",
        ("a/b/notes.cl_cache", "0123456789ABCDEF.cl_cache", "a/0123456789abcdef.cl_cache", "stats.txt", "a/stats"),
        "0123456789abcdef.cl_cache",
    ),
    "comgr": Product(
        ComgrCache,
        ".cache/comgr",
        fill_comgr,
        (4, 3, 5),
        "/opt/rocm/lib/libamd_comgr.so.3",
        "amdgpu-compiler-0a1b2c.tmp.o",
        # The caches of other users of LLVM have shorter names, or another beginning.
        ("llvmcache-" + "a" * 40, "Thin-abc", "llvmcache-" + "A" * 64, "llvmcache-" + "a" * 65),
        name_of("link"),
    ),
}


@pytest.fixture(params=PRODUCTS)
def product(request: pytest.FixtureRequest) -> Product:
    return PRODUCTS[request.param]


def filled(product: Product, folder: Path) -> Layer:
    """Fill a home, and return the layer in it on a machine without programs, GPUs and network file systems."""
    home = folder / "home"
    product.fill(home / product.folder)
    environment = Environment({"HOME": str(home)}, home, cwd=home / "cwd", processes=nobody(folder / "processes"))
    return product.layer(replace(environment, mounts=home / "no-mounts", topology=home / "no-gpus"))


@pytest.fixture
def layer(product: Product, tmp_path: Path) -> Layer:
    return filled(product, tmp_path)


@pytest.fixture
def neo(tmp_path: Path) -> Layer:
    return filled(PRODUCTS["neo"], tmp_path)


def folder_of(layer: Layer) -> Path:
    return layer.roots()[0].path


class TestConformance(LayerConformance):
    """The shipped suite."""

    @pytest.fixture(autouse=True)
    def _made(self, product: Product) -> None:
        self.product = product

    def make(self, environment: Environment) -> Layer:
        return self.product.layer(replace(environment, topology=environment.home / "no-gpus"))

    def seed(self, environment: Environment) -> None:
        self.product.fill(environment.home / self.product.folder)


# ---------------------------------------------------------------------- what every such layer does


def test_every_entry_and_file_is_counted_and_whole(product: Product, layer: Layer) -> None:
    root = layer.roots()[0]
    usage = layer.store.usage(root)
    named = [entry for entry in layer.entries() if entry.kernels == ("axpy", "scale")]
    assert (usage.entries, len(named), usage.files) == product.counts
    assert list(layer.store.verify(root)) == []


@pytest.mark.parametrize(
    ("name", "key", "about"),
    [
        ("comgr", name_of("axpy.bc"), ("LLVM bitcode", None)),
        ("comgr", name_of("axpy-gfx906.o"), ("code object", "gfx906")),
        ("comgr", name_of("axpy-gfx90a.o"), ("code object", "gfx90a")),
        ("comgr", name_of("spirv"), ("SPIR-V", None)),
        ("neo", f"{SPIRV[0]}.ocloc_cache", ("SPIR-V", None)),
        ("neo", f"{BARE[0]}.ocloc_cache", ("patch tokens", "graphics core 12")),
        ("neo", f"{WRAPPED[0]}.ocloc_cache", ("patch tokens", "graphics core 12")),
        ("neo", f"{WRAPPED[1]}.ocloc_cache", ("patch tokens", "graphics core 3079")),
        ("neo", DEEP, ("patch tokens", "graphics core 12")),
    ],
)
def test_entries_name_their_kind_and_device(tmp_path: Path, name: str, key: str, about: tuple[str, str]) -> None:
    (found,) = filled(PRODUCTS[name], tmp_path).entries(Selection(key=key))
    assert (found.detail["kind"], found.device) == about


COMPILES, FAILS = Severity.RECOMPILES, Severity.FAILS
#: A key, how its bytes are damaged, and the effect on the library.
DAMAGE: list[tuple[str, str, Callable[[bytes], bytes], Severity]] = [
    ("neo", DEEP, lambda data: data[:900], COMPILES),
    ("neo", f"{BARE[0]}.ocloc_cache", lambda data: data[:900], FAILS),
    ("neo", f"{SPIRV[0]}.ocloc_cache", lambda _: b"", COMPILES),
    ("comgr", name_of("axpy.bc"), lambda data: data[:-1], COMPILES),
    ("comgr", name_of("axpy-gfx906.o"), lambda _: entry(compiled()["axpy-gfx906.o"][:-100]), FAILS),
    ("comgr", name_of("spirv"), lambda _: b"", COMPILES),
]


@pytest.mark.parametrize(("name", "key", "damage", "severity"), DAMAGE)
def test_damage_is_reported_with_its_effect_and_removed_alone(
    tmp_path: Path, name: str, key: str, damage: Callable[[bytes], bytes], severity: Severity
) -> None:
    layer = filled(PRODUCTS[name], tmp_path)
    root = layer.roots()[0]
    (root.path / key).write_bytes(damage((root.path / key).read_bytes()))
    found = [finding for finding in layer.store.verify(root) if finding.code == "damaged"]
    assert [(finding.key, finding.severity) for finding in found] == [(key, severity)]
    with pytest.raises(Damaged):
        layer.get(key)
    problems = [(thing.path, thing.code) for thing in layer.store.scan(root) if isinstance(thing, Problem)]
    assert problems == [(root.path / key, "damaged")]
    assert layer.clear(layer.plan_clear(damaged=True)).removed == 1
    assert list(layer.store.verify(root)) == []


def test_other_files_are_neither_listed_nor_removed(product: Product, layer: Layer, tmp_path: Path) -> None:
    folder = folder_of(layer)
    for name in product.strangers:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (tmp_path / "outside").mkdir()
    outside = tmp_path / "outside" / product.named
    shutil.copyfile(folder / next(layer.entries()).key, outside)
    (folder / product.named).symlink_to(outside)
    (folder / "f").symlink_to(outside.parent)
    assert layer.clear(layer.plan_clear()).removed == product.counts[0]
    assert all((folder / name).read_text() == "mine" for name in product.strangers)
    assert outside.exists()
    with pytest.raises(LayerError, match="is not a key"):
        layer.put("stats", Artifact(layer.name, "stats", layer.store.forms[0], outside.read_bytes()))
    assert layer.get(product.strangers[-1]) is None


def test_one_kernel_goes_from_all_that_name_it(product: Product, layer: Layer) -> None:
    entries, named, _ = product.counts
    plan = layer.plan_clear(Selection(kernel="axpy"))
    left = f"{entries - named} entry has no known kernel name and was left, in {folder_of(layer)}"
    assert [note.because for note in plan.skipped] == ([left] if entries > named else [])
    assert layer.clear(plan).removed == named
    assert len(list(layer.entries())) == entries - named


def test_a_left_temporary_goes_once_nobody_compiles(product: Product, layer: Layer, tmp_path: Path) -> None:
    left = folder_of(layer) / product.temporary
    left.write_bytes(b"half")
    left.chmod(0o600)
    assert list(orphans(layer)) == [left.name]
    busy = somebody(tmp_path / "busy", product.library)
    plan = product.layer(replace(layer.environment, processes=busy)).plan_clear()
    assert ([note.key for note in plan.skipped], len(plan.entries)) == ([left.name], product.counts[0])
    layer.clear(layer.plan_clear())
    assert not left.exists()


def test_looking_does_not_look_like_use(layer: Layer) -> None:
    paths = [entry.root / entry.key for entry in layer.entries()]
    for path in paths:
        # Older than the last change: on most file systems the next reading would count.
        os.utime(path, (1, path.stat().st_mtime))
    list(layer.entries())
    list(layer.store.verify(layer.roots()[0]))
    assert {path.stat().st_atime for path in paths} == {1.0}


# ---------------------------------------------------------------------- comgr


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        *(
            (policy, None)
            for policy in (
                "",
                "prune_interval=30s:prune_after=24h:cache_size=50%",
                "cache_size_bytes=30g:cache_size_files=0",
                "cache_size_bytes=0x10M",
                "prune_interval=1h:",
            )
        ),
        ("prune_interval=1h:prune_expiration=0h", "it knows no 'prune_expiration'"),
        ("cache_size=101%", "cache_size=101%"),
        ("cache_size=5", "cache_size=5 is not an integer with %"),
        ("cache_size_bytes=5GB", "cache_size_bytes=5GB"),
        ("cache_size_bytes=99999999999999999999", "no number"),
        ("cache_size_files=-1", "not an integer"),
        ("prune_after=1d", "of s, m or h"),
        ("prune_after=", "of s, m or h"),
        ("1g", "it knows no '1g'"),
        (":prune_after=1h", "it knows no ''"),
    ],
)
def test_the_policy_is_read_as_llvm_reads_it(policy: str, wrong: str | None) -> None:
    said = policy_complaint(policy)
    assert (said is None) if wrong is None else (said is not None and wrong in said)


def test_a_network_file_system_is_a_hazard_named_once(tmp_path: Path) -> None:
    environment = filled(PRODUCTS["comgr"], tmp_path).environment
    environment.mounts.write_text("1 1 0:1 / / rw - nfs4 server:/ rw\n")
    assert ComgrCache(environment).state().condition is Condition.UNKNOWN
    (found,) = diagnosis(Stack(environment, plugins=False).named(["comgr"])).findings
    assert (found.code, found.severity, "SIGBUS" in found.message) == ("network", Severity.RISKS, True)
    (tmp_path / "named").mkdir()
    named = environment.with_variables({"AMD_COMGR_CACHE_DIR": str(tmp_path / "named")})
    assert ComgrCache(named).state().condition is Condition.ENABLED


# ---------------------------------------------------------------------- NEO

ZEBIN = r"""
.section .text.axpy,"ax"
.byte 1,2,3
.section .text.dot,"ax"
.byte 4
.section .text.Intel_Symbol_Table_Void_Program,"ax"
.byte 5
.section .note.intelgt.compat,"",@note
.long 8, 4, {kind}
.asciz "IntelGT"
.long {value}
.long 8, 5, 4
.asciz "IntelGT"
.asciz "1.32"
.balign 4
.section .ze_info,""
.ascii "kernels:\n  - name: axpy\n"
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    ("kind", "value", "device"),
    [(6, 12 << 22 | 55 << 14 | 8, "12.55.8"), (1, 1270, "product family 1270"), (2, 9, "graphics core 9")],
)
def test_a_zebin_names_kernels_device_and_version(tmp_path: Path, kind: int, value: int, device: str) -> None:
    """The system's assembler makes an ELF file with the sections of a zebin; it gets the type of one."""
    (tmp_path / "zebin.s").write_text(ZEBIN.format(kind=kind, value=value))
    subprocess.run(["gcc", "-c", "zebin.s", "-o", "zebin.o"], cwd=tmp_path, check=True)
    data = bytearray((tmp_path / "zebin.o").read_bytes())
    data[16:20] = struct.pack("<HH", 0xFF12, 205)
    about = NeoCodec().describe(bytes(data))
    assert (about.kind, about.kernels, about.device) == ("zebin", ("axpy", "dot"), device)
    assert about.versions == {"zebin": "1.32"}
    assert NeoCodec().check(bytes(data)) is None
    assert "cut short" in str(NeoCodec().check(bytes(data[:-100])))


def accounted(layer: Layer) -> int:
    (size,) = struct.unpack("=Q", (folder_of(layer) / "config.file").read_bytes())
    assert isinstance(size, int)
    return size


def test_put_and_a_purge_set_the_account_right(neo: Layer) -> None:
    root, key = neo.roots()[0], f"{SPIRV[0]}.ocloc_cache"
    artifact = got(neo, key)
    before = accounted(neo)
    outcome = neo.clear(neo.plan_clear(Selection(key=DEEP)))
    assert accounted(neo) == held(root.path) == before - outcome.bytes_freed < before
    assert list(neo.store.verify(root)) == []
    neo.clear(neo.plan_clear())
    assert accounted(neo) == 0
    neo.put(key, artifact)
    assert accounted(neo) == len(artifact.data)


@pytest.mark.parametrize("content", [None, b"size = 5 # somebody's own"])
def test_an_account_that_is_missing_or_not_the_drivers_is_not_written(neo: Layer, content: bytes | None) -> None:
    """Without one the driver counts itself."""
    path = folder_of(neo) / "config.file"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    findings = list(neo.store.verify(neo.roots()[0]))
    assert [(one.key, one.severity) for one in findings] == ([("config.file", Severity.WASTES)] if content else [])
    assert neo.clear(neo.plan_clear()).removed == 8
    assert (path.read_bytes() if path.exists() else None) == content
    for finding in findings:
        subprocess.run(["sh", "-c", finding.fix], check=True)
    assert list(neo.store.verify(neo.roots()[0])) == []


@pytest.mark.parametrize(("counted", "words"), [(10**9, "too early"), (1, "beyond its limit")])
def test_an_account_with_a_wrong_sum_is_reported(neo: Layer, counted: int, words: str) -> None:
    (folder_of(neo) / "config.file").write_bytes(struct.pack("=Q", counted))
    (found,) = neo.store.verify(neo.roots()[0])
    assert (found.code, words in found.message) == ("index", True)


def test_the_drivers_lock_is_waited_for_before_anything_goes(neo: Layer) -> None:
    layer = NeoCompilerCache(replace(neo.environment, lock_timeout=0.1))
    plan = layer.plan_clear()
    with (folder_of(layer) / "config.file").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = layer.clear(plan)
        assert outcome.removed == 0
        assert [note.because for note in outcome.failed] == ["locked by another process for more than 0.1 s"]
        artifact = got(layer, next(layer.entries()).key)
        free = f"0123456789abcdef.{artifact.key.rpartition('.')[2]}"
        with pytest.raises(Busy):
            layer.put(free, replace(artifact, key=free))
        assert len(list(layer.entries())) == 8
    assert layer.clear(plan).removed == 8


def test_an_account_replaced_by_a_pipe_waits_for_nobody(neo: Layer) -> None:
    path = folder_of(neo) / "config.file"
    path.unlink()
    os.mkfifo(path)
    assert [note.because for note in neo.clear(neo.plan_clear()).failed] == ["cannot open: a pipe, no plain file"]
    assert list(neo.store.verify(neo.roots()[0])) == []


def test_the_effect_of_an_unreadable_entry_is_reported(neo: Layer) -> None:
    large = folder_of(neo) / "0123456789abcdef.cl_cache"
    large.touch()
    os.truncate(large, (1 << 30) + 1)
    (given,) = (finding for finding in neo.store.verify(neo.roots()[0]) if finding.key == large.name)
    assert given.severity is Severity.RECOMPILES
    assert given.message.endswith("; the driver compiles it again at every run, and never replaces it")


def test_a_move_makes_the_folder_without_which_nothing_is_kept(home: Home) -> None:
    program = 'test -d "$NEO_CACHE_DIR" && echo "$NEO_CACHE_PERSISTENT."'
    assert home.cachectl("run", "--isolated", "--", "sh", "-c", program).stdout == ".\n"
    home.cachectl("env", "--root", str(home.path / "moved"), "--layer", "neo", "--shell", "sh")
    assert (home.path / "moved" / "neo").is_dir()
    off = home.cachectl("run", "--no-cache", "--", "sh", "-c", 'echo "$NEO_CACHE_PERSISTENT"')
    assert off.stdout == "0\n"


DRIVER = """
import os, struct, sys
from pathlib import Path
folder = Path.home() / ".cache" / "neo_compiler_cache"
if os.environ.get("NEO_CACHE_STATS") == "1":
    (folder / "stats").write_bytes(struct.pack("=QQQ", 8, 3, 1))
(folder / "0123456789abcdef.cl_cache").write_bytes((folder / "7accbe5d8c3df6d1.ocloc_cache").read_bytes())
"""


def test_a_trace_reads_what_the_driver_counts(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where file events cannot be had."""
    monkeypatch.setattr("cachectl.watching.events.open_queue", no_file_events)
    fill_neo(home.path / ".cache" / "neo_compiler_cache")
    home.cachectl("trace", "--json", "trace.json", "--", "python3", "-I", "-S", "-c", DRIVER)
    layers = json.loads((home.path / "trace.json").read_text())["layers"]
    (traced,) = (layer for layer in layers if layer["layer"] == "neo")
    assert (traced["hits"], traced["misses"], traced["stores"]) == (3, 1, 1)
    assert traced["evidence"] == "inferred"
