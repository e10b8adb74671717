"""Mesa's shader cache: places, whose entries, its three stores, damage, locks and interrupted changes."""

from __future__ import annotations

import io
import shutil
import struct
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from injector import Injector
from support.layers import clear, environment_of, got, usage_of, verified
from support.mesa import OPENCL, STORES, contents, crc, entry, fill, graphics, key, layer_of, listed
from tiers import amount, thorough

from cachectl.config import Limits
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.errors import Damaged, EntryExists
from cachectl.layers.core.facts import Artifact, Severity
from cachectl.layers.formats import zstd
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa.cache import MesaShaderCache, read_limit
from cachectl.verbs.prune import plan_prune


def filled(home: Path, store: str, entries: dict[str, bytes]) -> tuple[MesaShaderCache, Path]:
    """Fill a store; return the layer and the root."""
    return layer_of(home, store), fill(home / ".cache", store, entries)


# ---------------------------------------------------------------------- places and switches


@pytest.mark.parametrize("store", STORES)
def test_the_store_in_use_comes_first(store: str, tmp_path: Path) -> None:
    assert layer_of(tmp_path / "home", store).roots()[0].role == store


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


def test_a_cache_that_is_nearly_full_is_reported(tmp_path: Path) -> None:
    root = fill(tmp_path / "home/.cache", "multi-file", contents())
    (root / "index").write_bytes(struct.pack("<Q", 1000 << 20) + bytes(65536 * 20))
    assert [finding.code for finding in MesaShaderCache(environment_of(tmp_path / "home")).diagnose()] == ["cap"]


# ---------------------------------------------------------------------- whose entries


@pytest.mark.parametrize("store", STORES)
def test_entries_of_gl_are_neither_counted_nor_cleared_unless_named(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", store, {**contents(), **graphics()})
    entries = listed(layer)
    assert {name for name, found in entries.items() if found.guest} == set(graphics())
    assert {found.detail["of"] for found in entries.values()} == {"OpenCL", "GL or Vulkan"}
    assert usage_of(layer).entries == 4
    plan = layer.plan_clear()
    assert len(plan.entries) == 4
    (note,) = plan.skipped
    assert note.because.startswith(f"2 in {root} left")
    assert layer.clear(plan).removed == 4
    assert set(listed(layer)) == set(graphics())
    assert clear(layer, key=key("g")).removed == 1
    assert set(listed(layer)) == {key("h")}


def test_the_driver_of_entries_is_unknown_without_a_kernel(tmp_path: Path) -> None:
    layer, _ = filled(tmp_path / "home", "multi-file", {key("x"): entry(b"\x7fELF" + bytes(9), "a" * 40)})
    assert listed(layer)[key("x")].detail["of"] == "unknown"
    assert layer.plan_clear().entries == ()


def test_rusticls_own_entries_are_recognised_by_name(tmp_path: Path) -> None:
    words = [0x07230203, 0x10000, 0, 9, 0, (5 << 16) | 15, 6, 1, *struct.unpack("<2I", b"spirv_k\0")]
    module = struct.pack(f"<{len(words)}I", *words)
    layer, _ = filled(tmp_path / "home", "multi-file", {key("x"): entry(module, "rusticl", "rusticl")})
    assert listed(layer)[key("x")].kernels == ("spirv_k",)
    assert len(layer.plan_clear().entries) == 1


def test_without_zstd_entries_are_listed_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b"\x28\xb5\x2f\xfd" + bytes(20)
    data = b"\1" + OPENCL.encode() + b"\0llvmpipe\0" + struct.pack("<BQIII", 8, 0, 0, crc(packed), 40) + packed
    layer, _ = filled(tmp_path / "home", "multi-file", {key("x"): data})
    # A Python may be built without it.
    monkeypatch.setitem(sys.modules, "cachectl.layers.formats.zstd", None)
    monkeypatch.delattr("cachectl.layers.formats.zstd", raising=False)
    found = listed(layer)[key("x")]
    assert (found.device, found.kernels) == ("llvmpipe", None)
    assert "cannot be distinguished" in str(found.guest)
    assert layer.plan_clear().entries == ()
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
    source, _ = filled(tmp_path / "one", "multi-file", contents())
    target = layer_of(tmp_path / "two", store)
    for name in contents():
        artifact = got(source, name)
        target.put(name, artifact)
    assert {name: found.kernels for name, found in listed(target).items()} == {
        name: found.kernels for name, found in listed(source).items()
    }
    expected = tmp_path / "three"
    fill(expected, store, contents())
    for path in sorted(expected.rglob("*")):
        if path.suffix in (".foz", ".db") or path.parent.name == key("a")[:2]:
            written = tmp_path / "two/.cache" / path.relative_to(expected)
            assert written.read_bytes()[20:] == path.read_bytes()[20:]


@pytest.mark.parametrize("store", STORES)
def test_a_different_entry_is_replaced_only_when_asked(store: str, tmp_path: Path) -> None:
    layer, _ = filled(tmp_path / "home", store, contents())
    artifact = Artifact("mesa", key("b"), "mesa-entry/1", entry(b"\x7fELF, another"))
    with pytest.raises(EntryExists):
        layer.put(key("b"), artifact)
    assert layer.get(key("b")) == replace(got(layer, key("b")), data=contents()[key("b")])
    layer.put(key("b"), artifact, replace=True)
    assert got(layer, key("b")).data == artifact.data
    assert all(got(layer, name).data == contents()[name] for name in contents().keys() - {key("b")})
    assert verified(layer) == []


@pytest.mark.parametrize("store", STORES)
def test_a_flipped_byte_is_found_and_the_entry_removed(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", store, {**contents(), **graphics()})
    bad = {key("c"): contents()[key("c")], key("h"): graphics()[key("h")]}
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for whole in bad.values():
                data = data.replace(whole, whole[:-3] + b"\0\0\0")
            path.write_bytes(data)
    found = verified(layer)
    assert {(finding.key, finding.severity) for finding in found} == {(name, Severity.RECOMPILES) for name in bad}
    with pytest.raises(Damaged):
        layer.get(key("c"))
    outcome = layer.clear(layer.plan_clear(damaged=True))
    assert (outcome.removed, outcome.failed, outcome.skipped) == (2, (), ())
    assert verified(layer) == []
    assert listed(layer).keys() == {**contents(), **graphics()}.keys() - bad.keys()


@pytest.mark.parametrize("store", STORES)
def test_an_unknown_version_is_not_removed_as_damaged(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", store, contents())
    for path in root.glob("[0-9a-f]*/*") if store == "multi-file" else (*root.rglob("foz*"), *root.glob("mesa_cache*")):
        if path.is_file():
            place = {"multi-file": 0, "single-file": 15, "database": 8}[store]
            data = path.read_bytes()
            path.write_bytes(data[:place] + b"\x09" + data[place + 1 :])
    before = snapshot(root)
    found = verified(layer)
    assert {(finding.code, finding.severity, finding.thing) for finding in found} == {
        ("foreign", Severity.HARMLESS, None)
    }
    layer.clear(layer.plan_clear(damaged=True))
    assert snapshot(root) == before


@pytest.mark.parametrize("name", ["foz_cache.foz", "foz_cache_idx.foz"])
def test_a_single_file_that_mesa_cannot_use_is_removed_with_its_other_half(name: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", "single-file", contents())
    (path,) = root.rglob(name)
    path.write_bytes(b"what is none of Mesa's")
    found = verified(layer)
    assert {Path(str(finding.key)).name for finding in found} == {"foz_cache.foz", "foz_cache_idx.foz"}
    # Who has it open is not known.
    busy = MesaShaderCache(replace(layer.environment, processes=Path("/no such folder"))).plan_clear(damaged=True)
    assert busy.entries == ()
    assert {note.because.partition(" in ")[0] for note in busy.skipped} == {"may be open"}
    layer.clear(layer.plan_clear(damaged=True))
    assert [path.name for path in root.glob("*/*/*")] == ["index"]
    layer.put(key("a"), Artifact("mesa", key("a"), "mesa-entry/1", contents()[key("a")]))
    assert set(listed(layer)) == {key("a")}


def test_a_program_that_has_a_single_file_open_goes_on_using_its_own(tmp_path: Path) -> None:
    """Mesa keeps places in memory: under an open file nothing may move."""
    layer, root = filled(tmp_path / "home", "single-file", contents())
    (path,) = root.rglob("foz_cache.foz")
    before = path.read_bytes()
    with path.open("rb") as program:
        clear(layer, key=key("a"))
        assert program.read() == before
    assert path.read_bytes() != before


def test_a_database_gets_another_number_so_that_programs_read_it_again(tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", "database", contents())
    inode, before = (root / "mesa_cache.db").stat().st_ino, (root / "mesa_cache.db").read_bytes()[:20]
    clear(layer, key=key("a"))
    heads = {(root / f"mesa_cache.{ending}").read_bytes()[:20] for ending in ("db", "idx")}
    assert len(heads) == 1
    assert before not in heads
    assert (root / "mesa_cache.db").stat().st_ino == inode


def test_the_index_counts_what_is_there_after_every_change(tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", "multi-file", {**contents(), **graphics()})

    def counted() -> int:
        return int(struct.unpack("<Q", (root / "index").read_bytes()[:8])[0])

    def held() -> int:
        return sum(path.stat().st_blocks * 512 for path in root.glob("??/*"))

    (root / "index").write_bytes(struct.pack("<Q", 1 << 28) + bytes(65536 * 20))
    artifact = got(layer, key("a"))
    clear(layer)
    assert counted() == held() > 0
    layer.put(key("a"), artifact)
    assert counted() == held()
    assert verified(layer) == []


@pytest.mark.parametrize("store", ["multi-file", "single-file"])
def test_an_index_of_one_length_is_no_ground_for_removing_entries(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path / "home", store, contents())
    held = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "index")
    assert plan_prune([layer], Limits(bytes=held)).plans[0].entries == ()
    assert len(plan_prune([layer], Limits(bytes=held - 1)).plans[0].entries) == 1
    assert usage_of(layer).bytes == held + 1310728


@pytest.mark.parametrize(("store", "arguments"), [("single-file", ("--kernel", "rk0")), *thorough(("multi-file", ()))])
def test_the_next_purge_completes_a_killed_one(
    store: str, arguments: tuple[str, ...], tmp_path: Path, injector: Injector
) -> None:
    from injector import KILL, WRITES, Fault

    home = tmp_path / "home"
    command = ("purge", "mesa", *arguments)
    orphans = 0
    for nth in range(1, 100, amount(3, 1)):
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
