"""AMD's comgr cache, laid out as its source says around what LLVM really compiled for AMD's GPUs."""

from __future__ import annotations

import hashlib
import struct
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.layers import orphans, somebody

from cachectl.layers.base.conformance import LayerConformance, nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged
from cachectl.layers.base.facts import Condition, Problem, Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.comgr import ComgrCache
from cachectl.layers.formats import bitcode, comgr_entries
from cachectl.stack import Stack
from cachectl.verbs.doctor import diagnosis

if TYPE_CHECKING:
    from homes import Home

#: One module with the kernels axpy and scale, and a function that is none: bitcode, and objects of two GPUs.
DATA = Path(__file__).parents[1] / "data" / "amdgpu-llvm14.tar.gz"
SPIRV = bytes.fromhex("030223070000010000000000010000000000000038000100")


@cache
def compiled() -> dict[str, bytes]:
    with tarfile.open(DATA) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def entry(output: bytes, log: bytes = b"") -> bytes:
    """Return an entry in the form of ``serializeCacheEntry``."""
    return struct.pack("<Q", len(output)) + output + struct.pack("<Q", len(log)) + log


def name_of(what: str) -> str:
    return f"llvmcache-{hashlib.sha256(what.encode()).hexdigest()}"


OUTPUTS = ("axpy.bc", "axpy-gfx906.o", "axpy-gfx90a.o")


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for what in OUTPUTS:
        (folder / name_of(what)).write_bytes(entry(compiled()[what], b"a warning\n"))
    (folder / name_of("spirv")).write_bytes(entry(SPIRV))
    (folder / "llvmcache.timestamp").touch()


class TestConformance(LayerConformance):
    """The shipped suite."""

    def make(self, environment: Environment) -> ComgrCache:
        return ComgrCache(replace(environment, topology=environment.home / "no-gpus"))

    def seed(self, environment: Environment) -> None:
        fill(environment.home / ".cache" / "comgr")


@pytest.fixture
def layer(tmp_path: Path) -> ComgrCache:
    home = tmp_path / "home"
    fill(home / ".cache" / "comgr")
    environment = Environment({"HOME": str(home)}, home, cwd=home / "cwd", processes=nobody(tmp_path / "processes"))
    return ComgrCache(replace(environment, mounts=home / "no-mounts", topology=home / "no-gpus"))


def folder_of(layer: ComgrCache) -> Path:
    return layer.roots()[0].path


def test_bitcode_and_code_objects_name_kernels_and_device(layer: ComgrCache) -> None:
    entries = {one.key: one for one in layer.entries()}
    given = {what: entries[name_of(what)] for what in OUTPUTS}
    assert {what: (one.detail["kind"], one.kernels, one.device) for what, one in given.items()} == {
        "axpy.bc": ("LLVM bitcode", ("axpy", "scale"), None),
        "axpy-gfx906.o": ("code object", ("axpy", "scale"), "gfx906"),
        "axpy-gfx90a.o": ("code object", ("axpy", "scale"), "gfx90a"),
    }
    assert (entries[name_of("spirv")].detail["kind"], entries[name_of("spirv")].kernels) == ("SPIR-V", None)
    assert list(layer.store.verify(layer.roots()[0])) == []
    usage = layer.store.usage(layer.roots()[0])
    assert (usage.entries, usage.files) == (4, 5)


@pytest.mark.real
def test_bitcode_of_a_real_opencl_compiler_names_its_kernels(filled: Home) -> None:
    programs = list((filled.path / ".cache" / "pocl" / "kcache").glob("*/*/program.bc"))
    named = [bitcode.kernels(path.read_bytes()) for path in programs]
    assert named
    assert all(named)


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        ("", None),
        ("prune_interval=30s:prune_after=24h:cache_size=50%", None),
        ("cache_size_bytes=30g:cache_size_files=0", None),
        ("cache_size_bytes=0x10M", None),
        ("prune_interval=1h:", None),
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
    said = comgr_entries.policy_complaint(policy)
    assert (said is None) if wrong is None else (said is not None and wrong in said)


def test_a_network_file_system_is_a_hazard_named_once(tmp_path: Path, layer: ComgrCache) -> None:
    environment = layer.environment
    environment.mounts.write_text("1 1 0:1 / / rw - nfs4 server:/ rw\n")
    assert ComgrCache(environment).state().condition is Condition.UNKNOWN
    (found,) = diagnosis(Stack(environment, plugins=False).named(["comgr"])).findings
    assert (found.code, found.severity, "SIGBUS" in found.message) == ("network", Severity.RISKS, True)
    (tmp_path / "named").mkdir()
    named = environment.with_variables({"AMD_COMGR_CACHE_DIR": str(tmp_path / "named")})
    assert ComgrCache(named).state().condition is Condition.ENABLED


def test_damage_is_reported_with_its_effect_in_comgr(layer: ComgrCache) -> None:
    root = layer.roots()[0]
    cut, inner, empty = (name_of(what) for what in (*OUTPUTS[:2], "empty"))
    (root.path / cut).write_bytes((root.path / cut).read_bytes()[:-1])
    (root.path / inner).write_bytes(entry(compiled()[OUTPUTS[1]][:-100]))
    (root.path / empty).write_bytes(b"")
    findings = list(layer.store.verify(root))
    assert {finding.key: finding.severity for finding in findings} == {
        cut: Severity.RECOMPILES,
        inner: Severity.FAILS,
        empty: Severity.RECOMPILES,
    }
    with pytest.raises(Damaged, match="exactly an output and a log"):
        layer.get(cut)
    given = {one.path.name: one.code for one in layer.store.scan(root) if isinstance(one, Problem)}
    assert given == dict.fromkeys((cut, inner, empty), "damaged")
    assert layer.clear(layer.plan_clear(damaged=True)).removed == 3
    assert list(layer.store.verify(root)) == []
    assert len(list(layer.entries())) == 2


def test_other_files_are_neither_listed_nor_removed(layer: ComgrCache, tmp_path: Path) -> None:
    folder = folder_of(layer)
    # The caches of other users of LLVM have shorter names, or another beginning.
    strangers = ["llvmcache-" + "a" * 40, "Thin-abc", "llvmcache-" + "A" * 64, "llvmcache-" + "a" * 65]
    for name in strangers:
        (folder / name).write_text("mine")
    outside = tmp_path / "outside"
    outside.write_bytes(entry(SPIRV))
    (folder / name_of("link")).symlink_to(outside)
    assert layer.clear(layer.plan_clear()).removed == 4
    assert all((folder / name).read_text() == "mine" for name in strangers)
    assert outside.exists()
    assert (folder / "llvmcache.timestamp").exists()


def test_one_kernel_goes_from_all_that_name_it(layer: ComgrCache) -> None:
    plan = layer.plan_clear(Selection(kernel="axpy"))
    assert [note.because for note in plan.skipped] == [
        f"1 entry has no known kernel name and was left, in {folder_of(layer)}"
    ]
    assert layer.clear(plan).removed == 3
    assert [one.key for one in layer.entries()] == [name_of("spirv")]


def test_a_left_temporary_goes_once_nobody_compiles(layer: ComgrCache, tmp_path: Path) -> None:
    left = folder_of(layer) / "amdgpu-compiler-0a1b2c.tmp.o"
    left.write_bytes(b"half")
    left.chmod(0o600)
    assert list(orphans(layer)) == [left.name]
    busy = somebody(tmp_path / "busy", "/opt/rocm/lib/libamd_comgr.so.3")
    plan = ComgrCache(replace(layer.environment, processes=busy)).plan_clear()
    assert ([note.key for note in plan.skipped], len(plan.entries)) == ([left.name], 4)
    layer.clear(layer.plan_clear())
    assert not left.exists()
