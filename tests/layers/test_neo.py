"""What Intel's compiler wrote on its own, and what its driver would: read, damaged, carried, counted, cleared."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.layers import got, orphans, somebody
from support.tracing import no_file_events

from cachectl.layers.base.conformance import LayerConformance, nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Busy, Damaged, LayerError
from cachectl.layers.base.facts import Artifact, Entry, Problem, Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import neo_binaries
from cachectl.layers.neo import NeoCompilerCache

if TYPE_CHECKING:
    from homes import Home

DATA = Path(__file__).parents[1] / "data" / "neo-ocloc-22.43.tar.gz"
#: What ocloc 22.43 stored of one source with two kernels, for Skylake and for Arc: wrapped, bare, and as SPIR-V.
WRAPPED = ("90acc8ebe339bbdf", "a759d5e93348ae0d")
BARE = ("43c3b6a22730c983", "c081d9943ea50613")
SPIRV = ("7accbe5d8c3df6d1", "d45d9b649667820f")


def unpack(folder: Path) -> None:
    """Lay out what ocloc wrote, flat as it is, and the wrapped programs again as a newer driver keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DATA) as tar:
        for member in tar:
            if member.isfile():
                tar.extract(member, folder, set_attrs=False)
    for name in WRAPPED:
        deep = folder / name[0] / name[1] / f"{name}.cl_cache"
        deep.parent.mkdir(parents=True)
        shutil.copyfile(folder / f"{name}.ocloc_cache", deep)
        (deep.parent / "stats").write_bytes(struct.pack("=QQQ", 1, 1, 1))
    (folder / "stats").write_bytes(struct.pack("=QQQ", 5, 2, 1))
    account(folder, sum(path.stat().st_size for path in folder.rglob("*_cache")))


def account(folder: Path, size: int) -> None:
    (folder / "config.file").write_bytes(struct.pack("=Q", size))


def accounted(folder: Path) -> int:
    (size,) = struct.unpack("=Q", (folder / "config.file").read_bytes())
    assert isinstance(size, int)
    return size


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*_cache") if not path.parts[-2].startswith(".cachectl"))


class TestConformance(LayerConformance):
    """The shipped suite."""

    def make(self, environment: Environment) -> NeoCompilerCache:
        return NeoCompilerCache(environment)

    def seed(self, environment: Environment) -> None:
        unpack(environment.home / ".cache" / "neo_compiler_cache")


@pytest.fixture
def layer(tmp_path: Path) -> NeoCompilerCache:
    home = tmp_path / "home"
    unpack(home / ".cache" / "neo_compiler_cache")
    return NeoCompilerCache(Environment({"HOME": str(home)}, home, processes=nobody(tmp_path / "processes")))


def folder_of(layer: NeoCompilerCache) -> Path:
    return layer.roots()[0].path


def by_key(layer: NeoCompilerCache) -> dict[str, Entry]:
    return {entry.key: entry for entry in layer.entries()}


def test_every_kind_of_program_names_its_kernels(layer: NeoCompilerCache) -> None:
    entries = by_key(layer)
    assert len(entries) == 8
    assert {entry.kernels for entry in entries.values()} == {("axpy", "scale")}
    kinds = {key: entry.detail["kind"] for key, entry in entries.items()}
    assert {kinds[f"{name}.ocloc_cache"] for name in SPIRV} == {"SPIR-V"}
    assert {kinds[f"{name}.ocloc_cache"] for name in (*WRAPPED, *BARE)} == {"patch tokens"}
    assert {entries[f"{name}.ocloc_cache"].device for name in WRAPPED} == {"graphics core 12", "graphics core 3079"}
    assert "9/0/90acc8ebe339bbdf.cl_cache" in entries
    assert list(layer.store.verify(layer.roots()[0])) == []
    usage = layer.store.usage(layer.roots()[0])
    assert (usage.entries, usage.files) == (8, 8 + 4)


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


def zebin(folder: Path, kind: int = 6, value: int = 12 << 22 | 55 << 14 | 8) -> bytes:
    """Let the system's assembler make an ELF file with the sections of a zebin, and give it the type of one."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (folder / "zebin.s").write_text(ZEBIN.format(kind=kind, value=value))
    subprocess.run(["gcc", "-c", "zebin.s", "-o", "zebin.o"], cwd=folder, check=True)
    data = bytearray((folder / "zebin.o").read_bytes())
    data[16:20] = struct.pack("<HH", 0xFF12, 205)
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "value", "device"),
    [(6, 12 << 22 | 55 << 14 | 8, "12.55.8"), (1, 1270, "product family 1270"), (2, 9, "graphics core 9")],
)
def test_a_zebin_names_kernels_device_and_version(tmp_path: Path, kind: int, value: int, device: str) -> None:
    about = neo_binaries.describe(zebin(tmp_path, kind, value))
    assert (about.kind, about.kernels, about.device) == ("zebin", ("axpy", "dot"), device)
    assert about.versions == {"zebin": "1.32"}


def test_put_and_a_purge_of_damage_set_the_account_right(layer: NeoCompilerCache) -> None:
    root = layer.roots()[0]
    key = f"{SPIRV[0]}.ocloc_cache"
    artifact = got(layer, key)
    before = accounted(root.path)
    outcome = layer.clear(layer.plan_clear(Selection(key="9/0/90acc8ebe339bbdf.cl_cache")))
    assert outcome.removed == 1
    assert accounted(root.path) == held(root.path) == before - outcome.bytes_freed
    assert list(layer.store.verify(root)) == []
    layer.clear(layer.plan_clear())
    assert accounted(root.path) == 0
    layer.put(key, artifact)
    assert accounted(root.path) == len(artifact.data)
    data = (root.path / key).read_bytes()
    (root.path / key).write_bytes(data[:-4])
    findings = list(layer.store.verify(root))
    assert [finding.code for finding in findings] == ["damaged", "index"]
    assert layer.clear(layer.plan_clear(damaged=True)).removed == 1
    assert accounted(root.path) == 0


def test_without_an_account_the_driver_counts_itself(layer: NeoCompilerCache) -> None:
    (folder_of(layer) / "config.file").unlink()
    assert layer.clear(layer.plan_clear(Selection(kernel="axpy"))).removed == 8
    assert not (folder_of(layer) / "config.file").exists()


def test_a_file_that_is_not_an_account_is_left_and_reported(layer: NeoCompilerCache) -> None:
    path = folder_of(layer) / "config.file"
    path.write_bytes(b"size = 5 # somebody's own")
    (found,) = layer.store.verify(layer.roots()[0])
    assert (found.key, found.severity) == ("config.file", Severity.WASTES)
    assert layer.clear(layer.plan_clear()).removed == 8
    assert path.read_bytes() == b"size = 5 # somebody's own"
    subprocess.run(["sh", "-c", found.fix], check=True)
    assert list(layer.store.verify(layer.roots()[0])) == []


@pytest.mark.parametrize(("counted", "words"), [(10**9, "too early"), (1, "beyond its limit")])
def test_an_account_with_a_wrong_sum_is_reported(layer: NeoCompilerCache, counted: int, words: str) -> None:
    account(folder_of(layer), counted)
    (found,) = layer.store.verify(layer.roots()[0])
    assert (found.code, words in found.message) == ("index", True)


def test_the_drivers_lock_is_waited_for_before_anything_goes(layer: NeoCompilerCache) -> None:
    layer = NeoCompilerCache(replace(layer.environment, lock_timeout=0.1))
    plan = layer.plan_clear()
    with (folder_of(layer) / "config.file").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = layer.clear(plan)
        assert outcome.removed == 0
        assert [note.because for note in outcome.failed] == ["locked by another process for more than 0.1 s"]
        artifact = got(layer, next(layer.entries()).key)
        with pytest.raises(Busy):
            layer.put(artifact.key, artifact)
        assert len(by_key(layer)) == 8
    assert layer.clear(plan).removed == 8


def test_an_account_replaced_by_a_pipe_waits_for_nobody(layer: NeoCompilerCache) -> None:
    path = folder_of(layer) / "config.file"
    path.unlink()
    os.mkfifo(path)
    assert [note.because for note in layer.clear(layer.plan_clear()).failed] == ["cannot open: a pipe, no plain file"]
    assert list(layer.store.verify(layer.roots()[0])) == []


def test_the_effect_of_an_unreadable_entry_is_reported(layer: NeoCompilerCache) -> None:
    large = layer.roots()[0].path / "0123456789abcdef.cl_cache"
    large.touch()
    os.truncate(large, (1 << 30) + 1)
    (given,) = (finding for finding in layer.store.verify(layer.roots()[0]) if finding.key == large.name)
    assert given.severity is Severity.RECOMPILES
    assert given.message.endswith("; the driver compiles it again at every run, and never replaces it")


def test_damage_is_reported_with_its_effect_in_the_driver(layer: NeoCompilerCache, tmp_path: Path) -> None:
    root = layer.roots()[0]
    wrapped, bare = root.path / "9/0/90acc8ebe339bbdf.cl_cache", root.path / f"{BARE[0]}.ocloc_cache"
    wrapped.write_bytes(wrapped.read_bytes()[:900])
    bare.write_bytes(bare.read_bytes()[:900])
    (root.path / "0123456789abcdef.cl_cache").write_bytes(b"")
    (root.path / "0123456789abcdff.cl_cache").write_bytes(zebin(tmp_path)[:-100])
    found = {finding.key: finding.severity for finding in layer.store.verify(root) if finding.code == "damaged"}
    assert found == {
        "9/0/90acc8ebe339bbdf.cl_cache": Severity.RECOMPILES,
        f"{BARE[0]}.ocloc_cache": Severity.FAILS,
        "0123456789abcdef.cl_cache": Severity.RECOMPILES,
        "0123456789abcdff.cl_cache": Severity.FAILS,
    }
    with pytest.raises(Damaged, match="cut short"):
        layer.get("9/0/90acc8ebe339bbdf.cl_cache")
    assert "damaged" in {problem.code for problem in layer.store.scan(root) if isinstance(problem, Problem)}


def test_other_files_are_neither_listed_nor_removed(layer: NeoCompilerCache, tmp_path: Path) -> None:
    root = layer.roots()[0]
    upper, misplaced = "0123456789ABCDEF.cl_cache", "a/0123456789abcdef.cl_cache"
    strangers = ["a/b/notes.cl_cache", upper, misplaced, "stats.txt", "a/stats"]
    for name in strangers:
        (root.path / name).parent.mkdir(parents=True, exist_ok=True)
        (root.path / name).write_text("mine")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "fedcba9876543210.cl_cache").write_bytes(zebin(tmp_path))
    (root.path / "f").symlink_to(tmp_path / "outside")
    assert layer.clear(layer.plan_clear()).removed == 8
    assert all((root.path / name).read_text() == "mine" for name in strangers)
    assert (tmp_path / "outside" / "fedcba9876543210.cl_cache").exists()
    with pytest.raises(LayerError, match="is not a key"):
        layer.put("stats", Artifact("neo", "stats", "neo-entry/1", zebin(tmp_path)))
    assert layer.get("a/stats") is None


def test_a_left_temporary_goes_once_no_driver_runs(layer: NeoCompilerCache, tmp_path: Path) -> None:
    left = folder_of(layer) / "cl_cache.aB3xYz"
    left.write_bytes(b"half")
    left.chmod(0o600)
    assert list(orphans(layer)) == [left.name]
    busy = somebody(tmp_path / "busy", "/usr/lib/intel-opencl/libigdrcl.so")
    plan = NeoCompilerCache(replace(layer.environment, processes=busy)).plan_clear()
    assert ([note.key for note in plan.skipped], len(plan.entries)) == ([left.name], 8)
    layer.clear(layer.plan_clear())
    assert not left.exists()


def test_looking_does_not_look_like_use(layer: NeoCompilerCache) -> None:
    paths = list(folder_of(layer).rglob("*_cache"))
    for path in paths:
        # Older than the last change: on most file systems the next reading would count.
        os.utime(path, (1, path.stat().st_mtime))
    list(layer.entries())
    list(layer.store.verify(layer.roots()[0]))
    assert {path.stat().st_atime for path in paths} == {1.0}


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
    unpack(home.path / ".cache" / "neo_compiler_cache")
    home.cachectl("trace", "--json", "trace.json", "--", "python3", "-I", "-S", "-c", DRIVER)
    layers = json.loads((home.path / "trace.json").read_text())["layers"]
    (traced,) = (layer for layer in layers if layer["layer"] == "neo")
    assert (traced["hits"], traced["misses"], traced["stores"]) == (3, 1, 1)
    assert traced["evidence"] == "inferred"
