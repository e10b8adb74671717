"""Deterministic tars: what is made quickly is what tarfile makes, and what is read quickly is what tarfile reads."""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.layers.stores.archive import pack, tar_header, unpack

PARTS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/"), min_size=1, max_size=40)
PLAIN = st.lists(PARTS.filter(lambda part: part not in {".", ".."}), min_size=1, max_size=3).map("/".join)
ANY = st.one_of(PLAIN, st.text(st.characters(exclude_characters="\0/.", exclude_categories=["Cs"]), min_size=1))
MEMBERS = st.dictionaries(ANY, st.binary(max_size=1500), max_size=5)


def by_tarfile(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    plain = name.isascii() and len(name) < tarfile.LENGTH_NAME
    return info.tobuf(tarfile.USTAR_FORMAT if plain else tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@given(ANY, st.integers(0, 8**11 - 1))
def test_a_header_is_tarfiles(name: str, size: int) -> None:
    assert tar_header(name, size) == by_tarfile(name, size)


def test_a_name_or_size_beyond_a_plain_header_is_written_as_by_tarfile() -> None:
    for name, size in (("x" * 200, 1), ("café", 7), ("big", 8**11)):
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        assert tar_header(name, size) == info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@given(MEMBERS)
def test_packed_members_are_read_back_by_us_and_by_tarfile(members: dict[str, bytes]) -> None:
    packed = pack(members)
    assert unpack(packed) == members
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert {info.name: _content(tar, info) for info in tar} == members


@given(st.dictionaries(PLAIN, st.binary(max_size=1500), max_size=4))
def test_members_written_by_tarfile_are_read(members: dict[str, bytes]) -> None:
    assert unpack(_foreign(members)) == members


@given(MEMBERS, st.data())
def test_one_byte_changed_gives_members_or_a_refusal(members: dict[str, bytes], data: st.DataObject) -> None:
    packed = bytearray(pack(members))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        for name in unpack(bytes(packed)):
            assert not name.startswith("/")
            assert ".." not in name.split("/")


@pytest.mark.parametrize("members", [{"a": b"1"}, {"a": b"1", "b": b"2"}, {"a": b"1", "b": b""}])
@pytest.mark.parametrize("by", ["us", "tarfile"])
def test_a_tar_that_is_cut_short_is_refused(members: dict[str, bytes], by: str) -> None:
    """Anywhere before its end, also between two members, where tarfile would give the first alone."""
    whole = pack(members) if by == "us" else _foreign(members)
    end = len(members) * 512 + sum(512 for data in members.values() if data)
    assert unpack(whole) == members
    for length in (*range(0, end, 37), end - 512, end, end + 511):
        with pytest.raises(ValueError, match="not a tar"):
            unpack(whole[:length])
    assert unpack(whole[: end + 512]) == members


def test_a_damaged_header_does_not_hide_the_members_after_it() -> None:
    packed = bytearray(pack({"a": b"1", "b": b"2"}))
    packed[1024 + 150] ^= 1
    with pytest.raises(ValueError, match="not a tar"):
        unpack(bytes(packed))


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "", ".", "a/.."])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="unsafe member"):
        unpack(written.getvalue())
    with pytest.raises(ValueError, match="unsafe member"):
        unpack(pack({name: b"x"}))


def _foreign(members: dict[str, bytes]) -> bytes:
    """Have tarfile write members in another format than ours."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(data), 1_700_000_000, "somebody"
            tar.addfile(info, io.BytesIO(data))
    return written.getvalue()


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(info)
    return b"" if content is None else content.read()
