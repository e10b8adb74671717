"""Text records: the reader's rules, and rewrites that keep every other line."""

import os
import stat
import tempfile
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused, Unreachable
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.stores.records import RecordFile
from cachectl.layers.stores.table import Row

PART = st.text(st.characters(blacklist_characters="=:;\n", blacklist_categories=["Cs"]), min_size=1, max_size=12)
CONTENTS = st.dictionaries(PART, PART, min_size=1, max_size=4)
DATABASES = st.dictionaries(PART, CONTENTS, max_size=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.txt"


def store(path: Path) -> RecordFile:
    return RecordFile("test", path, nullcontext)


def put(path: Path, line: bytes, *, replace: bool = False) -> None:
    (result,) = store(path).insert([("key", line)], replace=replace)
    if isinstance(result, LayerError):
        raise result


def line_of(key: str, items: dict[str, str]) -> bytes:
    return f"{key}={';'.join(f'{name}:{values}' for name, values in items.items())}".encode()


def lines_of(path: Path, *keys: str) -> dict[str, bytes]:
    """Return the first line with each key that has one."""
    lines = zip(keys, store(path).read(keys), strict=True)
    return {key: line for key, line in lines if isinstance(line, bytes)}


def records(path: Path) -> dict[str, bytes]:
    return lines_of(path, *(row.key for row in store(path).rows()))


def faults(path: Path) -> list[tuple[int, str]]:
    return [found[:2] for found in store(path).scan() if not isinstance(found, Row)]


def row_of(key: str, line: bytes) -> Row:
    return Row(zlib.crc32(line), key, len(line) + 1)


@given(DATABASES, st.data())
def test_put_is_read_back_and_a_delete_spares_others(database: dict[str, dict[str, str]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.txt")
        lines = {key: line_of(key, items) for key, items in database.items()}
        for line in lines.values():
            put(path, line)
        assert (records(path), faults(path)) == (lines, [])
        junk = data.draw(st.lists(st.sampled_from([b"", b"no equals", b"=nothing before", b"\xff\xfe"]), max_size=3))
        with path.open("ab") as file:
            file.writelines(line + b"\n" for line in junk)
        gone = data.draw(st.sets(st.sampled_from(sorted(lines)))) if lines else set()
        planned = {row_of(key, lines[key]) for key in gone}
        assert store(path).delete(planned) == planned
        kept = b"".join(line + b"\n" for line in [*(lines[key] for key in lines if key not in gone), *junk])
        if gone and not kept.strip(b"\n"):
            assert not path.exists()
        else:
            assert path.read_bytes() == kept


def test_the_readers_rules(path: Path) -> None:
    path.write_bytes(b"a=S:1\n\nno equals\n=S:1\nb=\nc=S\nd=S:1;T\na=S:2\ne=S:1;S:2\nc=S:3\nnor here\nf=S:1,x:y")
    assert set(records(path)) == {"a", "d", "e", "f"}
    assert records(path)["a"] == b"a=S:1"
    assert faults(path) == [
        *((3, "malformed"), (4, "malformed"), (5, "malformed"), (6, "malformed"), (7, "item")),
        *((8, "duplicate"), (9, "duplicate-id"), (10, "hidden"), (11, "malformed"), (12, "newline")),
    ]
    # The first line with a key decides, even if it cannot be used.
    assert store(path).read(["c", "g"]) == [b"c=S", None]


# What MIOpen 3.3's own RamDb and ReadonlyRamDb read of each line, compiled as a program.
@pytest.mark.parametrize(
    ("contents", "codes"),
    [
        (b"A:1,2,3;junk;B:4,5,6", ["item"]),
        (b"A:1,2,3;", []),
        (b";;A:1;;B:2;;", ["item"]),
        (b":no id", []),
        (b"A:", []),
        (b"A:x:y=z", []),
        (b"A:1\0;B:2", []),
        (b"A:1:x;junk;A:2", ["item", "duplicate-id"]),
        (b"A:1\r", []),
        (b"junk", ["malformed"]),
        (b";", ["malformed"]),
        (b"", ["malformed"]),
    ],
)
def test_records_as_miopen_reads_them(path: Path, contents: bytes, codes: list[str]) -> None:
    copy = path.with_name("copy.txt")
    path.write_bytes(b"k=" + contents + b"\n")
    assert [code for _, code in faults(path)] == codes
    line = lines_of(path, "k")["k"]
    if codes == ["malformed"]:
        assert records(path) == {}
        with pytest.raises(Damaged):
            put(copy, line)
        return
    assert records(path) == {"k": line}
    put(copy, line)
    assert copy.read_bytes() == path.read_bytes()


def test_another_record_is_replaced_only_on_request_and_in_its_place(path: Path) -> None:
    path.write_bytes(b"a=S:1")
    # It does not join an unfinished line.
    put(path, b"b=S:1")
    assert path.read_bytes() == b"a=S:1\nb=S:1\n"
    path.chmod(0o640)
    inode = path.stat().st_ino
    put(path, b"a=S:1")
    assert path.stat().st_ino == inode
    with pytest.raises(EntryExists):
        put(path, b"a=S:2")
    assert path.read_bytes() == b"a=S:1\nb=S:1\n"
    put(path, b"a=S:2", replace=True)
    assert path.read_bytes() == b"a=S:2\nb=S:1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == [path.name]


def test_a_record_is_deleted_as_it_was_planned(path: Path) -> None:
    path.write_bytes(b"a=S:1\nb=S:1\na=S:2\nc=S:2\n")
    # A line that the record hid does not reappear; another has changed.
    planned = [row_of(line[:1].decode(), line) for line in (b"a=S:1", b"c=S:1", b"d=S:1")]
    assert store(path).delete(planned) == {planned[0]}
    assert path.read_bytes() == b"b=S:1\nc=S:2\n"


STRANGE = b"\xff\xfe=S:1;\x80\r\n\r\n# a comment\n=nothing before\nb=S:1\r\nb=S:2\n\0\n\x0b\x0c\x85\nlast=S:1;T:2"


def test_every_other_line_stays_byte_for_byte(path: Path) -> None:
    for end in (b"", b"\n", b"\r\n", b"\n\n"):
        path.write_bytes(b"a=S:1\n" + STRANGE + end)
        assert store(path).delete([row_of("a", b"a=S:1")])
        assert path.read_bytes() == STRANGE + end
        path.write_bytes(STRANGE + b"\na=S:1" + end)
        planned = [row for row in store(path).rows() if row.key == "a"]
        assert store(path).delete(planned) == set(planned)
        assert path.read_bytes() == STRANGE + b"\n" + end.removeprefix(b"\r").removeprefix(b"\n")
        path.write_bytes(b"a=S:1\n" + STRANGE + end)
        put(path, b"a=S:9", replace=True)
        assert path.read_bytes() == b"a=S:9\n" + STRANGE + end
        put(path, b"c=S:1")
        assert path.read_bytes() == b"a=S:9\n" + STRANGE + (end or b"\n") + b"c=S:1\n"


def test_a_link_is_neither_read_nor_written_through(path: Path) -> None:
    target = path.with_name("elsewhere.txt")
    target.write_bytes(b"a=S:1\n")
    path.symlink_to(target)
    planned = [row_of("a", b"a=S:1")]
    for use in (lambda: records(path), lambda: put(path, b"b=S:1", replace=True), lambda: store(path).delete(planned)):
        with pytest.raises(Refused, match="link"):
            use()
    assert (path.is_symlink(), target.read_bytes()) == (True, b"a=S:1\n")


def test_a_failed_rewrite_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", [b"x"])
    assert os.listdir(tmp_path) == ["folder"]
    with pytest.raises(Unreachable, match=r": cannot write: No such file or directory \("):
        put(tmp_path / "no folder/records.txt", b"a=S:1")
