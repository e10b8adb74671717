"""Mesa's shader cache: places, owners of entries, three stores, damage, locks and interrupted changes."""

import errno
import os
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.layers import clear, clear_damaged, environment_of, got, listed, on_disk, usage_of, verified
from support.mesa import OPENCL, STORES, artifact, contents, crc, entry, fill, graphics, key, key_in, layer_of

from cachectl.config import Limits
from cachectl.layers.base.errors import Damaged, EntryExists
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import put_many
from cachectl.layers.formats import zstd
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa import pairs
from cachectl.layers.mesa.cache import MesaShaderCache, read_limit
from cachectl.stack import Stack
from cachectl.verbs.prune import plan_prune
from cachectl.verbs.verify import verify

CONTENTS = contents()
EVERYTHING = {**CONTENTS, **graphics()}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def filled(folder: Path, store: str, entries: dict[str, bytes] = CONTENTS) -> tuple[MesaShaderCache, Path]:
    """Fill a store; return the layer and the root."""
    return layer_of(folder / "home", store), fill(folder / "home/.cache", store, entries)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10", (10 << 30, False)),
        ("500M", (500 << 20, True)),
        ("64k", (64 << 10, True)),
        ("2T", (2 << 30, False)),
        ("0", (1 << 30, False)),
        ("many", (1 << 30, False)),
    ],
)
def test_a_size_without_unit_is_gigabytes(value: str, expected: tuple[int, bool]) -> None:
    assert read_limit(value) == expected


def test_a_cache_that_is_nearly_full_is_reported(tmp_path: Path) -> None:
    root = fill(tmp_path / "home/.cache", "multi-file", CONTENTS)
    (root / "index").write_bytes(struct.pack("<Q", 1000 << 20) + bytes(65536 * 20))
    assert [finding.code for finding in MesaShaderCache(environment_of(tmp_path / "home")).diagnose()] == ["cap"]


def test_two_paths_to_one_folder_are_one_place(tmp_path: Path) -> None:
    """``HOME`` is a link to the account's home, where releases before 2025 look."""
    root = fill(tmp_path / "home/.cache", "multi-file", CONTENTS)
    (tmp_path / "link").symlink_to("home")
    environment = environment_of(tmp_path / "home")
    layer = MesaShaderCache(environment.with_variables({"HOME": str(tmp_path / "link")}))
    assert len(listed(layer)) == len([*layer.entries()]) == 4
    usage = Stack(layer.environment).report(["mesa"]).total
    assert (usage.entries, usage.bytes) == (4, on_disk(*root.rglob("*")))
    held = usage.bytes
    assert plan_prune([layer], Limits(max_size=held)).layers[0].entries == ()


def test_entries_of_gl_are_neither_counted_nor_cleared_unless_named(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path, store, EVERYTHING)
    entries = listed(layer)
    graphic = {key_in(store, text) for text in "gh"}
    assert {name for name, found in entries.items() if found.is_foreign} == graphic
    assert {found.details.detail["of"] for found in entries.values()} == {"OpenCL", "GL or Vulkan"}
    assert usage_of(layer).entries == 4
    plan = layer.plan_clear()
    assert len(plan.entries) == 4
    (note,) = plan.skipped
    assert note.because.startswith(f"2 in {root} left")
    assert layer.clear(plan).removed == 4
    assert set(listed(layer)) == graphic
    assert clear(layer, key=key_in(store, "g")).removed == 1
    assert set(listed(layer)) == {key_in(store, "h")}


def test_rusticls_own_entries_are_known_by_name_and_of_others_without_a_kernel_the_driver_is_not(
    tmp_path: Path,
) -> None:
    words = struct.pack("<8I", 0x07230203, 0x10000, 0, 9, 0, (5 << 16) | 15, 6, 1)
    own, other = entry(words + b"spirv_k\0", "rusticl", "rusticl"), entry(b"\x7fELF" + bytes(9), "a" * 40)
    layer, _ = filled(tmp_path, "multi-file", {key("x"): own, key("y"): other})
    entries = listed(layer)
    assert (entries[key("x")].details.kernels, entries[key("y")].details.detail["of"]) == (("spirv_k",), "unknown")
    assert [planned.key for planned in layer.plan_clear().entries] == [key("x")]


def test_without_zstd_entries_are_listed_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b"\x28\xb5\x2f\xfd" + bytes(20)
    data = b"\1" + OPENCL.encode() + b"\0llvmpipe\0" + struct.pack("<BQIII", 8, 0, 0, crc(packed), 40) + packed
    layer, _ = filled(tmp_path, "multi-file", {key("x"): data})
    # A Python may be built without it.
    monkeypatch.setitem(sys.modules, "cachectl.layers.formats.zstd", None)
    monkeypatch.delattr("cachectl.layers.formats.zstd", raising=False)
    found = listed(layer)[key("x")]
    assert (found.details.device, found.details.kernels) == ("llvmpipe", None)
    assert "cannot be distinguished" in str(found.because)
    assert layer.plan_clear().entries == ()
    assert got(layer, key("x")).data == data


@pytest.mark.parametrize(("announced", "most"), [(0, 1 << 22), (40, 1 << 22), (1 << 25, 3 << 25), (1 << 31, 1 << 22)])
def test_a_payload_is_unpacked_no_further_than_its_header_says(announced: int, most: int) -> None:
    packed = zstd.compress(bytes(128 << 20))
    data = b"\1driver\0llvmpipe\0" + struct.pack("<BQIII", 8, 0, 0, crc(packed), announced) + packed
    tracemalloc.start()
    with pytest.raises(ValueError, match="header"):
        mesa_entries.inflate(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most


def test_a_different_entry_is_replaced_only_when_asked(store: str, tmp_path: Path) -> None:
    layer, _ = filled(tmp_path, store)
    name = key_in(store, "b")
    other = artifact(name, entry(b"\x7fELF, another"))
    with pytest.raises(EntryExists):
        layer.put(name, other)
    assert got(layer, name).data == CONTENTS[key("b")]
    layer.put(name, other, replace=True)
    expected = {key_in(store, text): CONTENTS[key(text)] for text in "abcd"} | {name: other.data}
    assert {one: got(layer, one).data for one in expected} == expected
    empty = layer_of(tmp_path / "empty", store)
    empty.put(name, other)
    assert got(empty, name).data == other.data
    assert verified(layer) == verified(empty) == []


@pytest.mark.parametrize("larger", ["single-file", "database"])
def test_entries_for_which_a_disk_has_room_are_placed_and_said_to_be(
    larger: str, mount: Callable[..., Path], tmp_path: Path
) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", on=tmp_path / "disk")
    data = {number: random.Random(number).randbytes(9000) for number in range(12)}  # noqa: S311 - repeatable
    entries = [artifact(key_in(larger, str(number)), entry(data[number])) for number in data]
    layer = layer_of(disk / "home", larger)
    results = put_many(layer, entries)
    placed = {one.key for one, result in zip(entries, results, strict=True) if result is True}
    assert 0 < len(placed) < len(entries)
    assert listed(layer).keys() == placed
    assert verified(layer) == []


def test_a_flipped_byte_is_found_and_the_entry_removed(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path, store, EVERYTHING)
    bad = {key_in(store, text): EVERYTHING[key(text)] for text in "ch"}
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for whole in bad.values():
                data = data.replace(whole, whole[:-3] + b"\0\0\0")
            path.write_bytes(data)
    assert {(found.key, found.severity) for found in verified(layer)} == {(name, Severity.RECOMPILES) for name in bad}
    with pytest.raises(Damaged):
        layer.get(key_in(store, "c"))
    outcome = clear_damaged(layer)
    assert (outcome.removed, outcome.failed, outcome.skipped) == (2, (), ())
    assert verified(layer) == []
    assert listed(layer).keys() == {key_in(store, text) for text in "abcdgh"} - bad.keys()


def test_a_header_with_another_kind_is_unknown_and_one_that_was_cut_or_emptied_is_damaged(tmp_path: Path) -> None:
    layer, root = filled(tmp_path, "multi-file")
    whole = (root / key("a")).read_bytes()
    end = whole.index(b"\0", whole.index(b"\0") + 1) + 1
    changes = {
        "a": whole[: end + 9] + b"\2" + whole[end + 10 :],
        "b": whole[: end + 5],
        "c": whole[:end] + bytes(len(whole) - end),
        "d": whole[:end] + b"\x20" + whole[end + 1 :],
    }
    for name, content in changes.items():
        (root / key(name)).write_bytes(content)
    codes = {finding.key: finding.code for finding in verified(layer)}
    assert codes == {key("a"): "unknown", key("b"): "damaged", key("c"): "damaged", key("d"): "unknown"}
    clear_damaged(layer)
    assert [(root / key(name)).exists() for name in "abcd"] == [True, False, False, True]


def test_an_unknown_version_is_not_removed_as_damaged(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path, store)
    for path in root.glob("[0-9a-f]*/*") if store == "multi-file" else (*root.rglob("foz*"), *root.glob("mesa_cache*")):
        if path.is_file():
            place = {"multi-file": 0, "single-file": 15, "database": 8}[store]
            data = path.read_bytes()
            path.write_bytes(data[:place] + b"\x09" + data[place + 1 :])
    before = snapshot(root)
    assert {(found.code, found.severity, found.thing) for found in verified(layer)} == {
        ("unknown", Severity.HARMLESS, None)
    }
    assert (usage_of(layer).entries, bool(usage_of(layer).unknown_files)) == (0, True)
    assert {note.because for note in clear(layer).skipped} == {mesa_entries.FOREIGN}
    clear_damaged(layer)
    assert snapshot(root) == before


@pytest.mark.parametrize("name", ["foz_cache.foz", "foz_cache_idx.foz"])
def test_a_single_file_that_mesa_cannot_use_is_removed_with_its_other_half(name: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path, "single-file")
    (path,) = root.rglob(name)
    path.write_bytes(b"what is none of Mesa's")
    assert [(Path(str(found.key)).name, found.severity) for found in verified(layer)] == [
        ("foz_cache.foz", Severity.RECOMPILES)
    ]
    usage = usage_of(layer)
    assert (usage.entries, [problem.code for problem in usage.problems], clear(layer).failed) == (0, ["damaged"], ())
    # It is unknown who has it open.
    busy = clear_damaged(MesaShaderCache(layer.environment._replace(processes=Path("/no such folder"))))
    assert busy.removed == 0
    assert {note.because.partition(" in ")[0] for note in busy.skipped} == {"is open"}
    clear_damaged(layer)
    assert [path.name for path in root.glob("*/*/*")] == ["index"]


def refuse(*_: object, **__: object) -> int:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_files_that_are_closed_to_this_user_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, root = filled(tmp_path, "database")
    monkeypatch.setattr("cachectl.layers.mesa.pairs.plain.open_plain", refuse)
    found = verify(Stack(layer.environment), ["mesa"]).findings
    assert [(finding.code, finding.severity, finding.fix) for finding in found if finding.root == root] == [
        ("unreadable", Severity.RECOMPILES, f"chmod u+rwX {root / 'mesa_cache.db'}")
    ]


def test_a_program_that_has_a_single_file_open_goes_on_using_its_own(tmp_path: Path) -> None:
    """Mesa keeps places in memory: in an open file nothing may move."""
    layer, root = filled(tmp_path, "single-file")
    (path,) = root.rglob("foz_cache.foz")
    before = path.read_bytes()
    with path.open("rb") as program:
        clear(layer, key=key_in("single-file", "a"))
        assert program.read() == before
    assert path.read_bytes() != before


def test_a_database_gets_another_number_so_that_programs_read_it_again(tmp_path: Path) -> None:
    layer, root = filled(tmp_path, "database")
    inode, before = (root / "mesa_cache.db").stat().st_ino, (root / "mesa_cache.db").read_bytes()[:20]
    clear(layer, key=key_in("database", "a"))
    heads = {(root / f"mesa_cache.{ending}").read_bytes()[:20] for ending in ("db", "idx")}
    assert len(heads) == 1
    assert before not in heads
    assert (root / "mesa_cache.db").stat().st_ino == inode


def test_an_interrupted_removal_in_place_is_counted_if_nothing_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mesa drops all entries of files whose heads were not written the second time."""
    layer, _ = filled(tmp_path, "database")
    write_heads = pairs.Pair._write_heads

    def write(pair: pairs.Pair, head: bytes) -> None:
        write_heads(pair, head)
        monkeypatch.setattr(os, "fstat", refuse)

    monkeypatch.setattr(pairs.Pair, "_write_heads", write)
    outcome = clear(layer, key=key_in("database", "a"))
    monkeypatch.undo()
    assert outcome.removed == len(CONTENTS)


@pytest.mark.parametrize("store", ["multi-file", "single-file"])
def test_a_limit_counts_what_report_counts(store: str, tmp_path: Path) -> None:
    layer, root = filled(tmp_path, store)
    held = on_disk(*root.rglob("*"))
    assert plan_prune([layer], Limits(max_size=held)).layers[0].entries == ()
    assert len(plan_prune([layer], Limits(max_size=held - 1)).layers[0].entries) == 1
    assert usage_of(layer).bytes == on_disk(*root.rglob("*"))
