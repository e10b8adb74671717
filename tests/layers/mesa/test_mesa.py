"""The layer ``mesa``: the three stores, filled by this file's own code to Mesa's formats, and by Rusticl itself."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pwd
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachectl.clearing.prune import Limits, plan_prune
from cachectl.layers.base.conformance import LayerConformance, nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Busy, Damaged, EntryExists
from cachectl.layers.base.facts import Artifact, Condition, Entry, Orphan, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import zstd
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa.cache import MesaShaderCache, read_limit

if TYPE_CHECKING:
    from homes import Home
    from injector import Injector

OPENCL, GL = "0" * 39 + "1", "f" * 40
STORES = {
    "multi-file": {},
    "single-file": {"MESA_DISK_CACHE_SINGLE_FILE": "1"},
    "database": {"MESA_DISK_CACHE_DATABASE": "true"},
}
FOLDERS = {"multi-file": "mesa_shader_cache", "single-file": "mesa_shader_cache_sf", "database": "mesa_shader_cache_db"}


# ---------------------------------------------------------------------- what Mesa writes, by its sources


def crc(data: bytes) -> int:
    return zlib.crc32(data) ^ 0xFFFFFFFF


def entry(payload: bytes, driver: str = OPENCL, device: str = "llvmpipe", *, glsl: bool = False) -> bytes:
    packed = zlib.compress(payload)
    head = b"\1" + driver.encode() + b"\0" + device.encode() + b"\0" + struct.pack("<BQI", 8, 0, glsl)
    if glsl:
        head += struct.pack("<I", 2) + bytes(40)
    return head + struct.pack("<II", crc(packed), len(payload)) + packed


def kernel(name: str) -> bytes:
    return bytes(60) + b"\x0d\0\0\0" + f"__wrapped_{name}".encode() + bytes(80)


def key(text: str) -> str:
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return f"{digest[:2]}/{digest[2:]}"


def contents() -> dict[str, bytes]:
    """Make two kernels with their machine code, as one build of Rusticl stores them."""
    return {
        key("a"): entry(kernel("rk0")),
        key("b"): entry(b"\x7fELF" + bytes(500)),
        key("c"): entry(kernel("rk1")),
        key("d"): entry(b"\x7fELF" + bytes(700)),
    }


def graphics() -> dict[str, bytes]:
    """Make a program of GL, and machine code for it."""
    return {key("g"): entry(bytes(90), GL, glsl=True), key("h"): entry(b"\x7fELF" + bytes(90), GL)}


def fill(base: Path, store: str, entries: dict[str, bytes], *, part: str = "") -> Path:
    root = base / FOLDERS[store]
    if store == "multi-file":
        fill_tree(root, entries)
    elif store == "single-file":
        fill_foz(root, entries)
    else:
        fill_db(root / part, entries)
    return root


def fill_tree(root: Path, entries: dict[str, bytes]) -> None:
    for name, data in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    blocks = sum(path.stat().st_blocks * 512 for path in root.glob("??/*"))
    (root / "index").write_bytes(struct.pack("<Q", blocks) + bytes(65536 * 20))


def fill_foz(root: Path, entries: dict[str, bytes]) -> None:
    magic = b"\x81FOSSILIZEDB\0\0\0\6"
    for name, data in entries.items():
        header = mesa_entries.read_header(data)
        assert header is not None
        folder = root / header.driver / header.device
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index").write_bytes(bytes(1310728))
        store, index = folder / "foz_cache.foz", folder / "foz_cache_idx.foz"
        for path in (store, index):
            if not path.exists():
                path.write_bytes(magic)
        name40 = name.replace("/", "").encode()
        place = store.stat().st_size + 40
        with store.open("ab") as file:
            file.write(name40 + struct.pack("<IIII", len(data), 1, crc(data), len(data)) + data)
        with index.open("ab") as file:
            file.write(name40 + struct.pack("<IIII", 8, 1, 0, 8) + struct.pack("<Q", place))


def fill_db(folder: Path, entries: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = struct.pack("<8sIQ", b"MESA_DB\0", 1, 77 << 32)
    store, index = head, head
    for name, data in entries.items():
        digest = bytes.fromhex(name.replace("/", ""))
        index += struct.pack("<8sIQQ", digest[:8], len(data), 123456789, len(store))
        store += struct.pack("<20sII", digest, crc(data), len(data)) + data
    (folder / "mesa_cache.db").write_bytes(store)
    (folder / "mesa_cache.idx").write_bytes(index)


def environment(home: Path, **variables: str) -> Environment:
    return Environment(
        {"HOME": str(home), **variables}, home=home, cwd=home, processes=nobody(home.parent / "processes")
    )


def layer_of(home: Path, store: str, **variables: str) -> MesaShaderCache:
    home.mkdir(exist_ok=True)
    return MesaShaderCache(environment(home, **STORES[store], **variables))


def listed(layer: Layer) -> dict[str, Entry]:
    return {found.key: found for found in layer.entries()}


# ---------------------------------------------------------------------- conformance


class OfStore(LayerConformance):
    store: str
    part = ""

    def make(self, environment: Environment) -> Layer:
        return MesaShaderCache(environment)

    def environment(self, home: Path) -> Environment:
        return super().environment(home).with_variables(STORES[self.store])

    def seed(self, environment: Environment) -> None:
        fill(environment.home / ".cache", self.store, contents(), part=self.part)


class TestMultiFile(OfStore):
    store = "multi-file"


class TestSingleFile(OfStore):
    store = "single-file"


class TestDatabase(OfStore):
    store = "database"


class TestDatabaseInParts(OfStore):
    store = "database"
    part = "part3"


# ---------------------------------------------------------------------- places and switches


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MESA_SHADER_CACHE_DIR": "/m", "XDG_CACHE_HOME": "/x"}, ["/m/mesa_shader_cache"]),
        ({"MESA_GLSL_CACHE_DIR": "/g", "XDG_CACHE_HOME": "/x"}, ["/g/mesa_shader_cache"]),
        ({"MESA_GLSL_CACHE_DIR": "/g", "MESA_SHADER_CACHE_DIR": "/m"}, ["/m/mesa_shader_cache"]),
        ({"XDG_CACHE_HOME": "/x"}, ["/x/mesa_shader_cache"]),
        ({"XDG_CACHE_HOME": "rel"}, ["/at/rel/mesa_shader_cache"]),
        ({"HOME": "/home/me"}, ["/home/me/.cache/mesa_shader_cache"]),
        ({}, ["/home/me/.cache/mesa_shader_cache"]),
        ({"HOME": "/else"}, ["/else/.cache/mesa_shader_cache", "/home/me/.cache/mesa_shader_cache"]),
        ({"XDG_CACHE_HOME": ""}, []),
        ({"MESA_SHADER_CACHE_DIR": "", "HOME": "/home/me"}, []),
    ],
)
def test_places(variables: dict[str, str], expected: list[str]) -> None:
    layer = MesaShaderCache(Environment(variables, home=Path("/home/me"), cwd=Path("/at")))
    assert [str(root.path) for root in layer.roots() if root.role == "multi-file"] == expected
    assert len(layer.roots()) == 3 * len(expected)


@pytest.mark.parametrize("store", STORES)
def test_the_store_in_use_comes_first(store: str, tmp_path: Path) -> None:
    assert layer_of(tmp_path / "home", store).roots()[0].role == store


def test_windows_has_none() -> None:
    layer = MesaShaderCache(Environment({}, home=Path("/home/me"), platform="win32"))
    assert layer.roots() == ()
    assert layer.state().condition is Condition.ABSENT


@pytest.mark.parametrize(
    ("variables", "off"),
    [
        *(({"MESA_SHADER_CACHE_DISABLE": value}, True) for value in ("true", "1", "yes", "y", "t", "TRUE")),
        *(({"MESA_SHADER_CACHE_DISABLE": value}, False) for value in ("false", "0", "no", "n", "f", "", "on", "2")),
        ({"MESA_GLSL_CACHE_DISABLE": "true"}, True),
        ({"MESA_GLSL_CACHE_DISABLE": "true", "MESA_SHADER_CACHE_DISABLE": "false"}, False),
        ({"XDG_CACHE_HOME": ""}, True),
        ({"MESA_SHADER_CACHE_DIR": ""}, True),
    ],
)
def test_what_switches_off(variables: dict[str, str], off: bool, tmp_path: Path) -> None:
    layer = MesaShaderCache(environment(tmp_path, **variables))
    assert (layer.state().condition is Condition.DISABLED) == off


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10", (10 << 30, False)),
        ("500M", (500 << 20, True)),
        ("64k", (64 << 10, True)),
        ("2G", (2 << 30, True)),
        ("2T", (2 << 30, False)),
        ("0", (1 << 30, False)),
        ("many", (1 << 30, False)),
        ("-3M", (1 << 30, True)),
    ],
)
def test_a_size_without_unit_is_gigabytes(value: str, expected: tuple[int, bool]) -> None:
    assert read_limit(value) == expected


def findings_of(layer: Layer) -> dict[str, str]:
    return {finding.code + " " + finding.message.partition("=")[0]: finding.fix for finding in layer.diagnose()}


def test_what_is_wrong_with_the_variables_is_said(tmp_path: Path) -> None:
    icd = tmp_path / "rusticl.icd"
    icd.write_text("libRusticlOpenCL.so.1\n")
    home = tmp_path / "home"
    home.mkdir()

    def found(**variables: str) -> dict[str, str]:
        return findings_of(MesaShaderCache(environment(home, OCL_ICD_VENDORS=str(icd), **variables)))

    assert found() == {}
    assert found(MESA_SHADER_CACHE_DISABLE="true") == {
        "off MESA_SHADER_CACHE_DISABLE": "unset MESA_SHADER_CACHE_DISABLE"
    }
    assert list(found(MESA_SHADER_CACHE_DISABLE="on")) == ["variable MESA_SHADER_CACHE_DISABLE"]
    assert list(found(XDG_CACHE_HOME="")) == ["variable XDG_CACHE_HOME"]
    assert found(XDG_CACHE_HOME="rel") == {"variable XDG_CACHE_HOME": f"export XDG_CACHE_HOME={home}/rel"}
    deep = f"{home}/not/there"
    assert found(MESA_SHADER_CACHE_DIR=deep) == {"variable MESA_SHADER_CACHE_DIR": f"mkdir -p {deep}"}
    assert found(HOME="/else") == {"variable HOME": "export MESA_SHADER_CACHE_DIR=/else/.cache"}
    assert list(found(MESA_SHADER_CACHE_MAX_SIZE="500")) == ["variable MESA_SHADER_CACHE_MAX_SIZE"]
    shipped = "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS"
    assert found(**{shipped: "ship"}) == {f"variable {shipped}": f"unset {shipped}"}
    root = fill(home / ".cache", "multi-file", contents())
    (root / "index").write_bytes(struct.pack("<Q", 1000 << 20) + bytes(65536 * 20))
    assert [finding.code for finding in MesaShaderCache(environment(home)).diagnose()] == ["cap"]


# ---------------------------------------------------------------------- whose entries


@pytest.mark.parametrize("store", STORES)
def test_what_gl_keeps_there_is_neither_counted_nor_cleared_unless_named(store: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", store)
    root = fill(tmp_path / "home" / ".cache", store, {**contents(), **graphics()})
    entries = listed(layer)
    assert {name for name, found in entries.items() if found.guest} == set(graphics())
    assert {found.detail["of"] for found in entries.values()} == {"OpenCL", "GL or Vulkan"}
    assert layer.census(layer.roots()[0]).entries == 4
    plan = layer.plan_clear()
    assert plan.entries == 4
    (note,) = plan.skipped
    assert note.because.startswith(f"2 in {root} left")
    assert layer.clear(plan).removed == 4
    assert set(listed(layer)) == set(graphics())
    assert layer.clear(layer.plan_clear(Selection(key=key("g")))).removed == 1
    assert set(listed(layer)) == {key("h")}


def test_without_a_kernel_nothing_tells_whose_a_driver_s_entries_are(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "multi-file")
    fill(tmp_path / "home" / ".cache", "multi-file", {key("x"): entry(b"\x7fELF" + bytes(9), "a" * 40)})
    assert listed(layer)[key("x")].detail["of"] == "unknown"
    assert layer.plan_clear().targets == ()


def test_what_rusticl_itself_stores_is_known_by_its_name(tmp_path: Path) -> None:
    words = [0x07230203, 0x10000, 0, 9, 0, (5 << 16) | 15, 6, 1, *struct.unpack("<2I", b"spirv_k\0")]
    module = struct.pack(f"<{len(words)}I", *words)
    layer = layer_of(tmp_path / "home", "multi-file")
    fill(tmp_path / "home" / ".cache", "multi-file", {key("x"): entry(module, "rusticl", "rusticl")})
    assert listed(layer)[key("x")].kernels == ("spirv_k",)
    assert layer.plan_clear().entries == 1


def test_without_zstd_entries_are_listed_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b"\x28\xb5\x2f\xfd" + bytes(20)
    data = b"\1" + OPENCL.encode() + b"\0llvmpipe\0" + struct.pack("<BQIII", 8, 0, 0, crc(packed), 40) + packed
    layer = layer_of(tmp_path / "home", "multi-file")
    fill(tmp_path / "home" / ".cache", "multi-file", {key("x"): data})
    # A Python may be built without it.
    monkeypatch.setitem(sys.modules, "cachectl.layers.formats.zstd", None)
    monkeypatch.delattr("cachectl.layers.formats.zstd", raising=False)
    found = listed(layer)[key("x")]
    assert (found.device, found.kernels) == ("llvmpipe", None)
    assert "cannot be distinguished" in str(found.guest)
    assert layer.plan_clear().targets == ()
    assert layer.get(key("x")) == Artifact(
        "mesa", key("x"), "mesa-entry/1", data, {"kernels": "", "device": "llvmpipe", "driver": OPENCL}
    )


@pytest.mark.parametrize(("announced", "most"), [(0, 1 << 22), (40, 1 << 22), (1 << 25, 3 << 25), (1 << 31, 1 << 22)])
def test_a_payload_is_unpacked_no_further_than_its_header_says(announced: int, most: int) -> None:
    frame = io.BytesIO()
    with zstd.ZstdFile(frame, "wb") as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    packed = frame.getvalue()
    data = b"\1driver\0llvmpipe\0" + struct.pack("<BQIII", 8, 0, 0, crc(packed), announced) + packed
    tracemalloc.start()
    with pytest.raises(ValueError, match="header"):
        mesa_entries.inflate(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most


# ---------------------------------------------------------------------- stores


@pytest.mark.parametrize("store", STORES)
def test_an_entry_goes_from_one_store_into_another(store: str, tmp_path: Path) -> None:
    source = layer_of(tmp_path / "one", "multi-file")
    fill(tmp_path / "one" / ".cache", "multi-file", contents())
    target = layer_of(tmp_path / "two", store)
    for name in contents():
        artifact = source.get(name)
        assert artifact is not None
        target.put(name, artifact)
    assert {name: found.kernels for name, found in listed(target).items()} == {
        name: found.kernels for name, found in listed(source).items()
    }
    expected = tmp_path / "three"
    fill(expected, store, contents())
    for path in sorted(expected.rglob("*")):
        if path.suffix in (".foz", ".db") or path.parent.name == key("a")[:2]:
            written = tmp_path / "two" / ".cache" / path.relative_to(expected)
            assert written.read_bytes()[20:] == path.read_bytes()[20:]


@pytest.mark.parametrize("store", STORES)
def test_a_different_entry_is_replaced_only_when_asked(store: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", store)
    fill(tmp_path / "home" / ".cache", store, contents())
    artifact = Artifact("mesa", key("b"), "mesa-entry/1", entry(b"\x7fELF, another"))
    with pytest.raises(EntryExists):
        layer.put(key("b"), artifact)
    assert layer.get(key("b")) == replace(_got(layer, key("b")), data=contents()[key("b")])
    layer.put(key("b"), artifact, replace=True)
    assert _got(layer, key("b")).data == artifact.data
    assert all(_got(layer, name).data == contents()[name] for name in contents().keys() - {key("b")})
    assert list(layer.verify(layer.roots()[0])) == []


def _got(layer: Layer, name: str) -> Artifact:
    artifact = layer.get(name)
    assert artifact is not None
    return artifact


@pytest.mark.parametrize("store", STORES)
def test_a_flipped_byte_is_found_moved_aside_and_brought_back(store: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", store)
    root = fill(tmp_path / "home" / ".cache", store, {**contents(), **graphics()})
    bad = {key("c"): contents()[key("c")], key("h"): graphics()[key("h")]}
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for whole in bad.values():
                data = data.replace(whole, whole[:-3] + b"\0\0\0")
            path.write_bytes(data)
    found = list(layer.verify(layer.roots()[0]))
    assert {(finding.key, finding.severity) for finding in found} == {(name, Severity.RECOMPILES) for name in bad}
    with pytest.raises(Damaged):
        layer.get(key("c"))
    outcome = layer.quarantine(layer.plan_quarantine(found), found)
    assert (outcome.removed, outcome.failed, outcome.skipped) == (2, (), ())
    assert list(layer.verify(layer.roots()[0])) == []
    assert listed(layer).keys() == {**contents(), **graphics()}.keys() - bad.keys()
    for thing in list(layer.quarantined()):
        layer.restore(thing)  # type: ignore[arg-type]
    assert {finding.key for finding in layer.verify(layer.roots()[0])} == bad.keys()


@pytest.mark.parametrize("name", ["foz_cache.foz", "foz_cache_idx.foz"])
def test_a_single_file_that_mesa_cannot_use_is_moved_aside_with_its_other_half(name: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "single-file")
    root = fill(tmp_path / "home" / ".cache", "single-file", contents())
    (path,) = root.rglob(name)
    path.write_bytes(b"what is none of Mesa's")
    found = list(layer.verify(layer.roots()[0]))
    assert {Path(str(finding.key)).name for finding in found} == {"foz_cache.foz", "foz_cache_idx.foz"}
    layer.quarantine(layer.plan_quarantine(found), found)
    assert [path.name for path in root.glob("*/*/*")] == ["index"]
    layer.put(key("a"), Artifact("mesa", key("a"), "mesa-entry/1", contents()[key("a")]))
    assert set(listed(layer)) == {key("a")}


def test_a_store_that_a_program_locks_is_waited_for_and_left_as_it_is(tmp_path: Path) -> None:
    import fcntl

    for store, name in (("single-file", "foz_cache.foz"), ("database", "mesa_cache.db")):
        home = tmp_path / store
        fill(home / ".cache", store, contents())
        layer = MesaShaderCache(replace(layer_of(home, store).environment, patience=0.1))
        (path,) = home.rglob(name)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            outcome = layer.clear(layer.plan_clear())
            assert outcome.removed == 0
            assert all("locked by another process" in note.because for note in outcome.failed)
            with pytest.raises(Busy):
                layer.put(key("z"), Artifact("mesa", key("z"), "mesa-entry/1", entry(b"new")))
        assert layer.clear(layer.plan_clear()).removed == 4


def test_a_program_that_has_a_single_file_open_goes_on_using_its_own(tmp_path: Path) -> None:
    """Mesa keeps places in memory: under an open file nothing may move."""
    layer = layer_of(tmp_path / "home", "single-file")
    root = fill(tmp_path / "home" / ".cache", "single-file", contents())
    (path,) = root.rglob("foz_cache.foz")
    before = path.read_bytes()
    with path.open("rb") as program:
        layer.clear(layer.plan_clear(Selection(key=key("a"))))
        assert program.read() == before
    assert path.read_bytes() != before


def test_a_database_gets_another_number_so_that_programs_read_it_again(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "database")
    root = fill(tmp_path / "home" / ".cache", "database", contents())
    inode, before = (root / "mesa_cache.db").stat().st_ino, (root / "mesa_cache.db").read_bytes()[:20]
    layer.clear(layer.plan_clear(Selection(key=key("a"))))
    heads = {(root / f"mesa_cache.{ending}").read_bytes()[:20] for ending in ("db", "idx")}
    assert len(heads) == 1
    assert before not in heads
    assert (root / "mesa_cache.db").stat().st_ino == inode


def test_the_index_counts_what_is_there_after_every_change(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "multi-file")
    root = fill(tmp_path / "home" / ".cache", "multi-file", {**contents(), **graphics()})

    def counted() -> int:
        return int(struct.unpack("<Q", (root / "index").read_bytes()[:8])[0])

    def held() -> int:
        return sum(path.stat().st_blocks * 512 for path in root.glob("??/*"))

    (root / "index").write_bytes(struct.pack("<Q", 1 << 28) + bytes(65536 * 20))
    assert [finding.code for finding in layer.verify(layer.roots()[0])] == ["index"]
    artifact = _got(layer, key("a"))
    layer.clear(layer.plan_clear())
    assert counted() == held() > 0
    layer.put(key("a"), artifact)
    assert counted() == held()
    assert list(layer.verify(layer.roots()[0])) == []


@pytest.mark.parametrize("store", ["multi-file", "single-file"])
def test_an_index_of_one_length_is_no_ground_for_removing_entries(store: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", store)
    root = fill(tmp_path / "home" / ".cache", store, contents())
    held = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "index")
    assert plan_prune([layer], Limits(bytes=held)).plans[0].entries == 0
    assert plan_prune([layer], Limits(bytes=held - 1)).plans[0].entries == 1
    assert layer.census(layer.roots()[0]).bytes == held + 1310728


@pytest.mark.parametrize("store", STORES)
def test_machine_code_goes_with_the_last_kernel_of_its_driver(store: str, tmp_path: Path) -> None:
    """Afterwards nothing would say whose it is: it would be counted as nothing, and never go."""
    fill(tmp_path / ".cache", store, contents() | graphics())
    layer = layer_of(tmp_path, store)
    first = layer.plan_clear(Selection(kernel="rk0"))
    assert [target.key for target in first.targets] == [key("a")]
    assert [note.because for note in first.skipped if "no known kernel name" in note.because] == [
        f"2 entries have no known kernel name and were left, in {layer.roots()[0].path}"
    ]
    assert layer.clear(first).removed == 1
    plan = layer.plan_clear(Selection(kernel="rk*"))
    assert {target.key for target in plan.targets} == {key("b"), key("c"), key("d")}
    assert layer.foresee(plan).removed == 3
    assert not any("no known kernel name" in note.because for note in plan.skipped)
    assert layer.clear(plan).removed == 3
    assert listed(layer).keys() == graphics().keys()


@pytest.mark.parametrize(("store", "arguments"), [("multi-file", ()), ("single-file", ("--kernel", "rk0"))])
def test_what_a_killed_purge_leaves_is_counted_and_goes_with_the_next(
    store: str, arguments: tuple[str, ...], tmp_path: Path, injector: Injector
) -> None:
    from injector import KILL, WRITES, Fault

    home = tmp_path / "home"
    command = ("purge", "mesa", *arguments)
    orphans = 0
    for nth in range(1, 100):
        shutil.rmtree(home, ignore_errors=True)
        root = fill(home / ".cache", store, contents())
        variables = STORES[store]
        done = injector.run(*command, home=home, fault=Fault(WRITES, nth, KILL), variables=variables)
        if done.status == 0:
            break
        stages = list(root.rglob(".cachectl-stage-*"))
        seen = injector.run("report", "mesa", "--json", home=home, fault=Fault(0), variables=variables)
        files = sum(path.is_file() for stage in stages for path in stage.rglob("*"))
        assert sum(one["orphan_files"] for one in seen.json["layers"][0]["roots"]) == files
        orphans += files
        again = injector.run("purge", "mesa", home=home, fault=Fault(0), variables=variables)
        assert again.status == 0, again
        assert list(root.rglob(".cachectl-*")) == []
        assert list(layer_of(home, store).entries()) == []
        assert not list(root.glob("??/*"))
    else:
        pytest.fail("the purge never ends")
    assert nth > 3
    assert orphans > 0 or store == "multi-file"


def test_a_kernel_stays_while_the_machine_code_of_its_driver_cannot_go(tmp_path: Path, injector: Injector) -> None:
    from injector import WRITES, Fault

    home = tmp_path / "home"
    root = fill(home / ".cache", "multi-file", contents())
    done = injector.run("purge", "mesa", "--json", home=home, fault=Fault(WRITES, 1, errno.EIO))
    (layer,) = done.json["layers"]
    assert (done.status, layer["removed"], len(layer["failed"]), len(layer["skipped"])) == (1, 2, 1, 1)
    assert len(list(layer_of(home, "multi-file").entries())) == 2
    assert injector.run("purge", "mesa", home=home, fault=Fault(0)).status == 0
    assert not list(root.glob("??/*"))


def test_temporaries_go_unless_somebody_may_be_writing_them(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "multi-file")
    root = fill(tmp_path / "home" / ".cache", "multi-file", contents())
    (root / f"{key('a')}.tmp").write_bytes(b"half")
    (orphan,) = (found for found in layer.scan(layer.roots()[0]) if isinstance(found, Orphan))
    assert orphan.key == f"{key('a')}.tmp"
    using = replace(layer.environment, processes=Path("/no such folder"))
    assert orphan.key not in {target.key for target in MesaShaderCache(using).plan_clear().targets}
    assert layer.clear(layer.plan_clear()).failed == ()
    assert list(root.glob("??/*")) == []


# ---------------------------------------------------------------------- Rusticl itself


def rusticl(home: Home, count: int = 2, /, **changes: str) -> Any:  # noqa: ANN401 - JSON
    (home.path / ".cache").mkdir(exist_ok=True)
    # PoCL, which the same loader starts, is kept out of what is looked at.
    aside = {"POCL_CACHE_DIR": str(home.path / "pocl")}
    return home.python("rusticl.py", str(count), RUSTICL_ENABLE="llvmpipe", **{**aside, **changes})


@pytest.fixture(scope="session")
def rusticl_device(new_home: Callable[[Path], Home], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name the device of Rusticl here, or skip; in CI, where it is installed, it must be there."""
    done = rusticl(new_home(tmp_path_factory.mktemp("probe") / "home"), 1)
    if done["device"] is None:
        reason = "Rusticl shows no device: apt-get install mesa-opencl-icd"
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    return str(done["device"])


@pytest.fixture(scope="session")
def rusticl_filled(
    rusticl_device: str, new_home: Callable[[Path], Home], tmp_path_factory: pytest.TempPathFactory
) -> Home:
    assert rusticl_device
    home = new_home(tmp_path_factory.mktemp("rusticl") / "home")
    rusticl(home)
    return home


@pytest.fixture
def cold(home: Home, rusticl_device: str) -> Home:
    assert rusticl_device
    return home


@pytest.mark.real
class TestOnRusticl(LayerConformance):
    """The shipped suite on what Rusticl wrote."""

    @pytest.fixture(autouse=True)
    def _filled(self, rusticl_filled: Home) -> None:
        self.home = rusticl_filled

    def make(self, environment: Environment) -> Layer:
        return MesaShaderCache(environment)

    def seed(self, environment: Environment) -> None:
        name = FOLDERS["multi-file"]
        shutil.copytree(self.home.path / ".cache" / name, environment.home / ".cache" / name)


def real(home: Home, store: str) -> MesaShaderCache:
    return MesaShaderCache(home.environment(**STORES[store]))


@pytest.mark.real
@pytest.mark.parametrize("store", STORES)
def test_rusticl_fills_what_is_reported_listed_and_purged(store: str, cold: Home) -> None:
    rusticl(cold, 2, **STORES[store])
    report = cold.json("report", "mesa")["layers"][0]
    assert (report["state"], report["entries"]) == ("enabled", 4)
    entries = cold.json("ls", "mesa")["entries"]
    assert {one["root"] for one in entries} == {str(cold.path / ".cache" / FOLDERS[store])}
    assert sorted(one["kernels"][0] for one in entries if one["kernels"]) == ["rk0", "rk1"]
    assert {one["device"] for one in entries} == {"llvmpipe"}
    assert cold.json("verify", "mesa")["findings"] == []
    keys = {one["key"] for one in entries}
    rusticl(cold, 2, **STORES[store])
    assert {one["key"] for one in cold.json("ls", "mesa")["entries"]} == keys
    assert cold.json("purge", "--all")["total"]["failed"] == 0
    assert cold.json("ls", "mesa")["entries"] == []
    # What was removed is missed, and so stored again.
    rusticl(cold, 2, **STORES[store])
    assert {one["key"] for one in cold.json("ls", "mesa")["entries"]} == keys
    assert cold.json("verify", "mesa")["findings"] == []


@pytest.mark.real
@pytest.mark.parametrize("store", STORES)
def test_rusticl_runs_what_put_has_placed(
    store: str, cold: Home, new_home: Callable[[Path], Home], tmp_path: Path
) -> None:
    """The machine code of one kernel under the key of the other: whatever that computes came out of the cache."""
    assert rusticl(cold, 2, **STORES[store])["results"] == [2.0, 103.0]
    layer = real(cold, store)
    artifacts = {name: _got(layer, name) for name in listed(layer)}
    other = new_home(tmp_path / "other")
    rusticl(other, 1, **STORES[store])
    code = {name for name, artifact in artifacts.items() if not artifact.detail["kernels"]}
    first = code & listed(real(other, store)).keys()
    (mine,), (foreign,) = first, code - first
    layer.clear(layer.plan_clear())
    for name, artifact in artifacts.items():
        layer.put(name, artifact)
    assert rusticl(cold, 2, **STORES[store])["results"] == [2.0, 103.0]
    assert listed(layer).keys() == artifacts.keys()
    layer.put(mine, replace(artifacts[foreign], key=mine), replace=True)
    assert rusticl(cold, 2, **STORES[store])["results"] == [103.0, 103.0]
    layer.clear(layer.plan_clear(Selection(key=mine)))
    assert rusticl(cold, 2, **STORES[store])["results"] == [2.0, 103.0]
    assert _got(layer, mine).data == artifacts[mine].data


@pytest.mark.real
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("by", ["quarantine", "purge"])
def test_what_mesa_never_repairs_is_found_and_mended(store: str, by: str, cold: Home) -> None:
    rusticl(cold, 1, **STORES[store])
    layer = real(cold, store)
    bad = next(name for name, found in listed(layer).items() if found.kernels is None)
    whole = _got(layer, bad).data
    damaged = whole[:-5] + bytes(byte ^ 0xFF for byte in whole[-5:])
    holder = next(
        path for path in (cold.path / ".cache").glob("mesa*/**/*") if path.is_file() and whole in path.read_bytes()
    )
    holder.write_bytes(holder.read_bytes().replace(whole, damaged))
    if store != "database":
        # A database it drops whole instead.
        rusticl(cold, 1, **STORES[store])
        assert damaged in holder.read_bytes()
    (finding,) = cold.json("verify", "mesa", check=False)["findings"]
    assert (finding["key"], finding["severity"]) == (bad, "recompiles every run")
    if by == "quarantine":
        assert cold.cachectl("verify", "--quarantine", "mesa").returncode == 0
    else:
        assert cold.cachectl(*finding["fix"].split()[1:]).returncode == 0
    assert rusticl(cold, 1, **STORES[store])["results"] == [2.0]
    assert _got(layer, bad).data == whole
    assert cold.json("verify", "mesa")["findings"] == []


@pytest.mark.real
def test_read_only_files_answer_after_a_purge_and_are_left_and_told_of(cold: Home) -> None:
    shipping = {**STORES["single-file"], "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS": "ship"}
    rusticl(cold, 2, **shipping)
    (own,) = (path for path in (cold.path / ".cache").rglob("foz_cache.foz") if path.stat().st_size > 16)
    shipped = [own.with_name("ship.foz"), own.with_name("ship_idx.foz")]
    shutil.copy(own, shipped[0])
    shutil.copy(own.with_name("foz_cache_idx.foz"), shipped[1])
    before = [path.read_bytes() for path in shipped]
    home = replace(cold, variables={**cold.variables, **shipping})
    assert home.json("purge", "mesa")["total"]["removed"] == 4
    rusticl(home, 2)
    # What was found elsewhere is not stored again.
    assert home.json("ls", "mesa")["entries"] == []
    assert [path.read_bytes() for path in shipped] == before
    kept = home.path / "kept"
    program = (sys.executable, str(home.programs / "rusticl.py"), "2")
    home.cachectl("run", f"--isolated={kept}", "--", *program, RUSTICL_ENABLE="llvmpipe")
    assert sum(path.stat().st_size > 16 for path in kept.rglob("foz_cache.foz")) == 1


@pytest.mark.real
def test_a_program_that_runs_on_meets_a_purge_without_an_error(cold: Home) -> None:
    for variables in STORES.values():
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); import rusticl, pyopencl as cl; d = rusticl.device();"
            "c = cl.Context([d]); q = cl.CommandQueue(c); rusticl.build_and_run(c, q, 0); print('ready', flush=True);"
            "sys.stdin.readline(); print([rusticl.build_and_run(c, q, i)[0] for i in (0, 1)])"
        )
        (cold.path / ".cache").mkdir(exist_ok=True)
        with subprocess.Popen(
            [sys.executable, "-c", program, str(cold.programs)],
            env={
                **cold.variables,
                "RUSTICL_ENABLE": "llvmpipe",
                "POCL_CACHE_DIR": str(cold.path / "pocl"),
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "ready\n"
            assert cold.json("purge", "mesa")["total"]["failed"] == 0
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "[2.0, 103.0]\n"
        assert child.returncode == 0
        assert cold.json("verify", "mesa")["findings"] == []


@pytest.mark.real
@pytest.mark.parametrize("value", ["true", "1", "Yes", "T", "false", "0", "", "on", "2", "abc"])
def test_rusticl_reads_the_switch_as_we_do(value: str, cold: Home) -> None:
    rusticl(cold, 1, MESA_SHADER_CACHE_DISABLE=value)
    layer = MesaShaderCache(cold.environment(MESA_SHADER_CACHE_DISABLE=value))
    assert (layer.state().condition is Condition.DISABLED) == (not listed(layer))


@pytest.mark.real
@pytest.mark.parametrize(
    ("variables", "gone"),
    [
        ({"MESA_SHADER_CACHE_DIR": "{home}/one"}, ()),
        ({"MESA_SHADER_CACHE_DIR": "relative"}, ()),
        ({"MESA_GLSL_CACHE_DIR": "{home}/old"}, ("MESA_SHADER_CACHE_DIR",)),
        ({"XDG_CACHE_HOME": "{home}/xdg"}, ("MESA_SHADER_CACHE_DIR",)),
        ({"XDG_CACHE_HOME": ""}, ("MESA_SHADER_CACHE_DIR",)),
        ({"MESA_SHADER_CACHE_DIR": "", "XDG_CACHE_HOME": "{home}/xdg"}, ()),
    ],
)
def test_rusticl_keeps_its_cache_where_we_say(variables: dict[str, str], gone: Iterable[str], cold: Home) -> None:
    changes = {name: value.format(home=cold.path) for name, value in variables.items()}
    kept = {name: value for name, value in cold.variables.items() if name not in gone}
    home = replace(cold, variables=kept)
    rusticl(home, 1, **changes)
    layer = MesaShaderCache(home.environment(**changes))
    filled = {path.parent.parent for path in cold.path.glob("**/mesa_shader_cache/??/*")}
    assert filled == {root.path for root in layer.roots() if root.role == "multi-file"}
    assert (layer.state().condition is Condition.DISABLED) == (not filled)


@pytest.mark.real
def test_a_home_that_is_not_the_account_s_is_one_of_two_places(cold: Home, tmp_path: Path) -> None:
    """Whichever of the two this Mesa goes by; under another password file, for the tester's own home is no place."""
    account = tmp_path / "account"
    for folder in (account, cold.path):
        (folder / ".cache").mkdir(parents=True)
    own = pwd.getpwuid(os.getuid())
    listed_as = ":".join(("somebody", "x", str(own.pw_uid), str(own.pw_gid), "", str(account), "/bin/sh"))
    (tmp_path / "passwd").write_text(listed_as + "\n")
    inside = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/passwd && exec "$@"', str(tmp_path / "passwd"))
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot put another password file in the place of the system's")
    home = replace(
        cold, variables={name: value for name, value in cold.variables.items() if name != "MESA_SHADER_CACHE_DIR"}
    )
    program = (sys.executable, str(cold.programs / "rusticl.py"), "1")
    home.run(*inside, *program, RUSTICL_ENABLE="llvmpipe", POCL_CACHE_DIR=str(tmp_path / "pocl"))
    filled = {path.parent.parent for path in tmp_path.glob("*/.cache/mesa_shader_cache/??/*")}
    assert len(filled) == 1
    said = json.loads(home.run(*inside, sys.executable, "-m", "cachectl", "report", "mesa", "--json").stdout)
    roots = {Path(root["path"]): root["entries"] for root in said["layers"][0]["roots"]}
    assert {path for path, entries in roots.items() if entries == 2} == filled
    assert {folder / ".cache" / "mesa_shader_cache" for folder in (account, cold.path)} <= roots.keys()


@pytest.mark.real
def test_isolated_and_off_hold_for_rusticl(cold: Home) -> None:
    program = (sys.executable, str(cold.programs / "rusticl.py"), "1")
    (cold.path / ".cache").mkdir()
    for how in ("--isolated", "--no-cache"):
        done = cold.cachectl("run", how, "--", *program, RUSTICL_ENABLE="llvmpipe")
        assert json.loads(done.stdout.splitlines()[-1])["results"] == [2.0]
        assert cold.json("ls", "mesa")["entries"] == []
    kept = cold.path / "kept"
    cold.cachectl("run", f"--isolated={kept}", "--", *program, RUSTICL_ENABLE="llvmpipe")
    assert len(list(kept.glob("mesa_shader_cache/??/*"))) == 2


@pytest.mark.real
def test_a_block_tells_whether_it_comes_too_late_for_rusticl(cold: Home) -> None:
    """Loaded it may be, as it is in every program; only once a device is asked for has it read its variables."""
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
    aside = {"RUSTICL_ENABLE": "llvmpipe", "POCL_CACHE_DIR": str(cold.path / "pocl")}
    home = replace(cold, variables={**cold.variables, **aside})
    early = home.run(sys.executable, "-c", program, str(cold.programs), "early")
    assert early.stdout.split() == ["off", "2.0"]
    assert cold.json("ls", "mesa")["entries"] == []
    late = home.run(sys.executable, "-c", program, str(cold.programs), "late")
    assert late.stdout.split() == ["2.0", "['mesa']"]
    assert len(cold.json("ls", "mesa")["entries"]) == 2


@pytest.mark.real
def test_purge_of_everything_leaves_what_gl_itself_has_stored(cold: Home) -> None:
    (cold.path / ".cache").mkdir()
    renderer = cold.python("gl_drawing.py", LIBGL_ALWAYS_SOFTWARE="1")["renderer"]
    if renderer is None:
        pytest.skip("GL without a screen is not to be had: apt-get install libegl1 libgl1-mesa-dri")
    desktop = {path: path.read_bytes() for path in (cold.path / ".cache").glob("mesa_shader_cache/??/*")}
    assert desktop
    rusticl(cold, 1)
    assert cold.json("report", "mesa")["layers"][0]["entries"] == 2
    assert len(cold.json("ls", "mesa")["entries"]) == 2 + len(desktop)
    purged = cold.json("purge", "--all")
    (mesa,) = (layer for layer in purged["layers"] if layer["layer"] == "mesa")
    assert (mesa["removed"], len(mesa["skipped"])) == (2, 1)
    assert {path: path.read_bytes() for path in (cold.path / ".cache").glob("mesa_shader_cache/??/*")} == desktop
    name = "/".join(next(iter(desktop)).parts[-2:])
    assert cold.json("purge", "mesa", "--key", name)["total"]["removed"] == 1
