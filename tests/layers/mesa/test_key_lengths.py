"""Keys of 20 bytes, of 32 (since Mesa 26), both in one store, and of an unknown length.

A real Mesa 26 is not installed here: files are packed by the format. Mesa's own ``mesa_cache_db.c``, compiled for each
length of keys, reads what is left of them (see docs/layers/mesa.md).
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from support.layers import clear, clear_damaged, got, listed, usage_of, verified
from support.mesa import DB_FILES, OPENCL, artifact, contents, crc, entry, fill, graphics, kernel, key, key_in, layer_of

from cachectl.config import Limits
from cachectl.layers.base.errors import LayerError, Refused
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import put_many
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa.cache import MesaShaderCache
from cachectl.listing import Findings
from cachectl.verbs.prune import plan_prune

DATABASE = "database"
WIDTHS = {"old": (20,), "new": (32,), "both": (20, 32)}
Contents = Mapping[str, bytes]


@pytest.fixture(params=WIDTHS)
def widths(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return WIDTHS[str(request.param)]


def filled(folder: Path, store: str, widths: Iterable[int]) -> tuple[MesaShaderCache, Path, dict[str, bytes]]:
    """Fill a store like one Mesa after the other; return the layer, the root, and all entries by their keys."""
    entries: dict[str, bytes] = {}
    for width in widths:
        new = {**contents(width), **graphics(width)}
        root = fill(folder / "home/.cache", store, new)
        entries |= {key_in(store, text, width): new[key(text, width)] for text in "abcdgh"}
    return layer_of(folder / "home", store), root, entries


def require_placed(root: Path, entries: Contents) -> None:
    """Require that Mesa finds exactly these entries of a database where the index says."""
    data, index = ((root / name).read_bytes() for name in DB_FILES)
    assert data[:20] == index[:20]
    assert struct.unpack_from("<8sI", data) == (b"MESA_DB\0", 1)
    places = {start: (size, place) for start, size, _, place in struct.iter_unpack("<8sIQQ", index[20:])}
    assert len(index) == 20 + 28 * len(places)
    digests = {bytes.fromhex(name.rpartition("::")[2]): content for name, content in entries.items()}
    assert {digest[:8] for digest in digests} == places.keys()
    for digest, content in digests.items():
        size, place = places[digest[:8]]
        frame = digest + struct.pack("<II", crc(content), len(content))
        assert data[place : place + len(frame) + size] == frame + content


def without(entries: Contents, *keys: str) -> dict[str, bytes]:
    return {name: content for name, content in entries.items() if name not in keys}


def size_of(entries: Contents) -> int:
    """Return the length of a data file with only these entries."""
    return 20 + sum(len(name.rpartition("::")[2]) // 2 + 8 + len(content) for name, content in entries.items())


@pytest.mark.parametrize("store", ["multi-file", DATABASE])
def test_every_length_is_listed_read_and_sound(store: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, root, entries = filled(tmp_path, store, widths)
    before = snapshot(root)
    assert {name: got(layer, name).data for name in listed(layer)} == entries
    kernels = [found.details.kernels for found in listed(layer).values() if found.details.kernels]
    assert sorted(kernels) == sorted([("rk0",), ("rk1",)] * len(widths))
    usage = usage_of(layer)
    assert (usage.entries, usage.problems, verified(layer)) == (4 * len(widths), (), [])
    outcome = clear_damaged(layer)
    assert (outcome.removed, outcome.failed, snapshot(root)) == (0, (), before)


def test_a_purge_of_a_database_leaves_every_other_byte(widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, root, entries = filled(tmp_path, DATABASE, widths)
    for width in widths:
        gone = key_in(DATABASE, "b", width)
        assert clear(layer, key=gone).removed == 1
        entries = without(entries, gone)
        require_placed(root, entries)
    assert clear(layer, kernel="rk1").removed == len(widths)
    require_placed(root, without(entries, *(key_in(DATABASE, "c", width) for width in widths)))
    outcome = clear(layer)
    assert (outcome.removed, outcome.failed) == (2 * len(widths), ())
    require_placed(
        root, {key_in(DATABASE, text, width): graphics(width)[key(text, width)] for text in "gh" for width in widths}
    )
    assert verified(layer) == []


@pytest.mark.parametrize("store", ["multi-file", DATABASE])
def test_a_prune_removes_what_it_counts(store: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, _, entries = filled(tmp_path, store, widths)
    (plan,) = plan_prune([layer], Limits(max_size=0)).layers
    # Another program's entry is not a failure.
    assert (len(plan.entries), plan.failed) == (4 * len(widths), ())
    assert layer.clear(plan).removed == 4 * len(widths)
    assert listed(layer).keys() == {name for name in entries if name in listed(layer)}
    assert len(listed(layer)) == 2 * len(widths)


def test_the_size_is_counted_in_an_index_for_any_length(widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, root, _ = filled(tmp_path, "multi-file", widths)
    # The index also counts what a later Mesa may have stored.
    (root / "ab").mkdir(exist_ok=True)
    (root / "ab" / ("c" * 78)).write_bytes(bytes(5000))
    clear(layer, key=key("a", widths[-1]))
    (size,) = struct.unpack_from("<Q", (root / "index").read_bytes())
    assert size == sum(path.stat().st_blocks * 512 for path in root.glob("??/*"))
    assert (root / "index").stat().st_size == 8 + 65536 * widths[-1]


def test_entries_are_put_into_a_database_with_such_keys(widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, root, entries = filled(tmp_path, DATABASE, widths)
    for width in widths:
        name = key_in(DATABASE, "new", width)
        entries[name] = entry(kernel("new"))
        layer.put(name, artifact(name, entries[name]))
        require_placed(root, entries)
    for width in widths:
        name = key_in(DATABASE, "b", width)
        entries[name] = entry(kernel("longer " * 9))
        layer.put(name, artifact(name, entries[name]), replace=True)
        # Nothing is listed twice: otherwise Mesa drops the whole file when it next makes room.
        require_placed(root, entries)
    assert (root / DB_FILES[0]).stat().st_size == size_of(entries)
    assert verified(layer) == []
    # Also into an empty store, like a pull of both.
    empty = layer_of(tmp_path / "empty", DATABASE)
    artifacts = [artifact(name, content) for name, content in entries.items()]
    assert put_many(empty, artifacts) == [True for _ in artifacts]
    require_placed(tmp_path / "empty/.cache/mesa_shader_cache_db", entries)


@pytest.mark.parametrize(("present", "other"), [(20, 32), (32, 20)])
def test_a_key_of_another_length_is_not_put_into_a_database(present: int, other: int, tmp_path: Path) -> None:
    """Mesa would drop all entries when it next makes room: it expects contiguous frames."""
    layer, root, _ = filled(tmp_path, DATABASE, (present,))
    before = snapshot(root)
    name = key_in(DATABASE, "a", other)
    with pytest.raises(Refused, match="another length"):
        layer.put(name, artifact(name, entry(kernel("rk0"))))
    assert snapshot(root) == before


def test_bytes_that_the_index_does_not_list_stay(tmp_path: Path) -> None:
    layer, root, entries = filled(tmp_path, DATABASE, (20, 32))
    path = root / DB_FILES[0]
    between, behind = b"whatever this is", b"written by a program that was killed"
    path.write_bytes(path.read_bytes() + between)
    more = {key("last", 32): entry(kernel("last"))}
    fill(tmp_path / "home/.cache", DATABASE, more)
    path.write_bytes(path.read_bytes() + behind)
    entries[key_in(DATABASE, "last", 32)] = more[key("last", 32)]
    gone = [key_in(DATABASE, "a"), key_in(DATABASE, "d", 32)]
    for name in gone:
        assert clear(layer, key=name).removed == 1
    require_placed(root, without(entries, *gone))
    data = path.read_bytes()
    assert data.endswith(behind)
    assert between in data
    assert len(data) == size_of(without(entries, *gone)) + len(between) + len(behind)


#: The lengths of the keys in a database, and a change of its index.
STRANGE: dict[str, tuple[tuple[int, ...], Callable[[bytes], bytes]]] = {
    "another length": ((24,), bytes),
    "another length between known ones": ((20, 24, 32), bytes),
    "an entry out of place": ((20,), lambda index: index[:68] + bytes([index[68] ^ 1]) + index[69:]),
    "longer records": (
        (20,),
        lambda index: b"more".join((index[:48], *(index[at : at + 28] for at in range(48, len(index), 28)), b"")),
    ),
    "half a record": ((20,), lambda index: index + b"half a record"),
    "an entry listed twice": ((20,), lambda index: index + index[20:48]),
}


@pytest.mark.parametrize(("lengths", "change"), STRANGE.values(), ids=STRANGE)
def test_a_database_that_is_not_understood_is_left_alone(
    tmp_path: Path, lengths: tuple[int, ...], change: Callable[[bytes], bytes]
) -> None:
    for length in lengths:
        index = fill(tmp_path / "home/.cache", DATABASE, contents(length)) / DB_FILES[1]
    index.write_bytes(change(index.read_bytes()))
    require_refused(layer_of(tmp_path / "home", DATABASE), tmp_path / "home/.cache", key_in(DATABASE, "new"))


def test_a_single_file_with_other_names_is_left_alone(tmp_path: Path) -> None:
    """Mesa 26 writes the first 40 digits of a key there."""
    root = fill(tmp_path / "home/.cache", "single-file", contents())
    layer = layer_of(tmp_path / "home", "single-file")
    for path in root.rglob("foz*.foz"):
        data = path.read_bytes()
        for name in map(key, "abcd"):
            digits = name.replace("/", "").encode()
            data = data.replace(digits, digits + b"0123456789abcdef01234567")
        path.write_bytes(data)
    require_refused(layer, tmp_path / "home/.cache", key_in("single-file", "new"))
    fill(tmp_path / "other/.cache", "single-file", {key("b", 32)[:41]: contents()[key("b")]})
    assert len(listed(layer_of(tmp_path / "other", "single-file"))) == 1


def require_refused(layer: MesaShaderCache, folder: Path, new: str) -> None:
    """Require that a file is reported as unknown, not as damaged, and is not changed."""
    before = snapshot(folder)
    assert (usage_of(layer).unknown_files, usage_of(layer).problems) == (1, ())
    findings = verified(layer)
    assert [(found.code, found.severity, found.thing) for found in findings] == [("unknown", Severity.HARMLESS, None)]
    assert Findings(tuple(findings)).failed, "verify ends with 1"
    assert findings[0].fix.startswith("nothing: ")
    with pytest.raises(Refused, match="does not know"):
        layer.put(new, artifact(new, entry(kernel("new"))))
    known = listed(layer)
    for outcome in (clear(layer), clear_damaged(layer), *(clear(layer, key=name) for name in known)):
        assert outcome.removed == 0
    assert {note.because for note in (*clear(layer).failed, *clear(layer).skipped)} == {findings[0].message}
    for limits, reasons in ((Limits(max_size=0), [findings[0].message]), (Limits(stale=True), [])):
        (plan,) = plan_prune([layer], limits, lambda _: None).layers
        assert [note.because for note in plan.skipped] == reasons
    assert snapshot(folder) == before


def test_a_database_without_its_index_is_damaged(tmp_path: Path) -> None:
    """Mesa numbers its parts, and drops the entries of one without an index."""
    layer, root, _ = filled(tmp_path, DATABASE, (20,))
    (root / "part1234").mkdir()
    (root / DB_FILES[0]).rename(root / "part1234" / DB_FILES[0])
    (finding,) = verified(layer)
    assert (finding.code, finding.message) == ("damaged", "its index is missing, so Mesa finds none of its entries")
    clear_damaged(layer)
    assert [path.name for path in root.rglob("*.db")] == []


def test_a_database_that_was_cut_or_ends_with_zeros_is_damaged(widths: tuple[int, ...], tmp_path: Path) -> None:
    layer, root, entries = filled(tmp_path, DATABASE, widths)
    path = root / DB_FILES[0]
    whole, last = path.read_bytes(), len(entries[key_in(DATABASE, "h", widths[-1])])
    frame = last + widths[-1] + 8
    for content in (whole[:-1], whole[: -last - 1], whole[:-frame] + bytes(frame), whole[:20]):
        path.write_bytes(content)
        (finding,) = verified(layer)
        assert (finding.code, finding.severity) == ("damaged", Severity.RECOMPILES)
        assert [problem.code for problem in usage_of(layer).problems] == ["damaged"]
    clear_damaged(layer)
    assert list(root.iterdir()) == []


def test_the_checksum_decides_where_both_lengths_fit(tmp_path: Path) -> None:
    """Here the bytes of an entry look like the end of a longer frame."""
    content = entry(kernel("rk0"), driver="d" * 40)
    content = content[:8] + struct.pack("<I", len(content)) + content[12:]
    name = "12" + "/" + "ab" * 19
    root = fill(tmp_path / "home/.cache", DATABASE, {name: content, **contents(32)})
    layer = layer_of(tmp_path / "home", DATABASE)
    assert name.replace("/", "") in {one.partition("::")[2] for one in listed(layer)}
    assert clear(layer, key=key_in(DATABASE, "a", 32)).removed == 1
    left = {f"::{name.replace('/', '')}": content}
    left |= {key_in(DATABASE, text, 32): contents(32)[key(text, 32)] for text in "bcd"}
    require_placed(root, left)


@pytest.mark.parametrize("width", [20, 32])
def test_gl_s_own_keys_may_have_either_length(width: int) -> None:
    data = graphics(width)[key("g", width)]
    assert mesa_entries.complaint(data) is None
    assert len(mesa_entries.inflate(data)) > 1000
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data[:70]):
        assert mesa_entries.complaint(damaged)
        assert not mesa_entries.is_foreign(damaged)
    none = b"\1" + OPENCL.encode() + b"\0llvmpipe\0" + struct.pack("<BQIIII", 8, 0, 1, 0, crc(b"x\x9c"), 9) + b"x\x9c"
    assert mesa_entries.complaint(none) is None


@pytest.mark.parametrize("store", ["multi-file", DATABASE])
def test_gl_s_keys_of_an_unknown_length_are_not_damage(store: str, tmp_path: Path) -> None:
    name = key("g", 32)
    root = fill(tmp_path / "home/.cache", store, {name: graphics(24)[key("g", 24)]})
    layer, before = layer_of(tmp_path / "home", store), snapshot(root)
    assert [(found.code, found.thing) for found in verified(layer)] == [("unknown", None)]
    clear_damaged(layer)
    assert snapshot(root) == before
    with pytest.raises(LayerError, match="does not know"):
        layer.get(key_in(store, "g", 32))
