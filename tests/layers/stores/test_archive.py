"""Deterministic tars: tarfile reads what is made, and what tarfile makes is read, or refused."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachectl.layers.base.errors import CachectlError
from cachectl.layers.core.entry import Artifact
from cachectl.layers.stores.archive import artifact_from_bytes, artifact_to_bytes, is_artifact_file, pack, unpack

PARTS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/"), min_size=1, max_size=40)
PLAIN = st.lists(PARTS.filter(lambda part: part not in {".", ".."}), min_size=1, max_size=3).map("/".join)
ANY = st.one_of(PLAIN, st.text(st.characters(exclude_characters="\0/.", exclude_categories=["Cs"]), min_size=1))
MEMBERS = st.dictionaries(ANY, st.binary(max_size=1500), max_size=5)


@given(MEMBERS)
@example({"x" * 200: b"1", "café": b"2", "x" * 100: b"", "plain": b"3" * 513})
def test_packed_members_are_read_back_by_us_and_by_tarfile(members: dict[str, bytes]) -> None:
    packed = pack(members)
    assert packed == pack(dict(reversed(members.items())))
    assert unpack(packed) == members
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        read = {info.name: tar.extractfile(info) for info in tar}
        assert {name: file.read() for name, file in read.items() if file is not None} == members


def test_a_tar_is_read_in_the_same_way_in_any_locale() -> None:
    """A name need not be text: the PAX header has its bytes verbatim."""
    lines = ("from cachectl.layers.stores.archive import pack, unpack", "members = {'\\udcff\\xe9': b'1'}")
    program = "\n".join((*lines, "print(unpack(pack(members)) == members)"))
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run((sys.executable, "-c", program), env=variables, check=True, capture_output=True)
    assert done.stdout == b"True\n"


@pytest.mark.parametrize("members", [{"a": b"1"}, {"a": b"1", "b": b"2"}, {"a": b"1", "b": b""}])
@pytest.mark.parametrize("by", ["us", "tarfile"])
def test_a_tar_that_is_cut_short_is_refused(members: dict[str, bytes], by: str) -> None:
    """Anywhere before its end, even between two members, where tarfile would return only the first."""
    whole = pack(members) if by == "us" else _foreign(members)
    end = len(members) * 512 + sum(512 for data in members.values() if data)
    assert unpack(whole) == members
    for length in (*range(0, end, 37), end - 512, end, end + 511):
        with pytest.raises(ValueError, match="not a tar"):
            unpack(whole[:length])
    assert unpack(whole[: end + 512]) == members


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "", ".", "a/.."])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    for tar in (_foreign({name: b"x"}), pack({name: b"x"})):
        with pytest.raises(ValueError, match="unsafe member"):
            unpack(tar)


def test_a_hostile_tar_is_refused_at_once() -> None:
    """A link, a sparse file, and an endless name."""
    link, sparse, chained = map(tarfile.TarInfo, ("link", "sparse", "././@LongLink"))
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    sizes = {"major": "0", "minor": "1", "size": str(1 << 40), "map": f"0,0,{1 << 40},0", "name": "sparse"}
    sparse.pax_headers = {f"GNU.sparse.{name}": value for name, value in sizes.items()}
    chained.type = tarfile.GNUTYPE_LONGNAME
    headers = [info.tobuf(tarfile.PAX_FORMAT) + bytes(tarfile.RECORDSIZE) for info in (link, sparse)]
    for tar in (*headers, chained.tobuf(tarfile.GNU_FORMAT) * 3000, b"no tar at all"):
        with pytest.raises(ValueError, match=r"unsafe member|not a tar"):
            unpack(tar)


def test_an_artifact_file_names_its_own_damage() -> None:
    artifact = Artifact("pocl", "key", "pocl-entry/1", b"data", {"kernels": "k"})
    file = artifact_to_bytes(artifact)
    assert artifact_from_bytes(file) == artifact
    assert artifact_to_bytes(artifact) == file
    others = (pack({"data": b"x"}), pack({"artifact.json": b"[]", "data": b""}))
    for broken in (b"", file[:700], file.replace(b"data", b"date"), *others):
        with pytest.raises(CachectlError):
            artifact_from_bytes(broken)
    # Neither another tar that begins so, nor a text that quotes one, may be replaced.
    assert [is_artifact_file(head) for head in (file[:700], others[1], b"quoted: " + file)] == [True, False, False]


def test_the_bytes_of_an_artifact_file_are_those_of_every_release() -> None:
    """Stores name a file by its digest, which signatures cover."""
    artifact = Artifact("pocl", "AB/key", "pocl-entry/1", pack({"sub/program": b"data"}), {"kernels": "k"})
    digest = hashlib.sha256(artifact_to_bytes(artifact)).hexdigest()
    assert digest == "746bad4590c88f5cdd0e3d8a5a4f9c6a32a5631071c1fc7cb95d7f9b4dd619a6"


def _foreign(members: dict[str, bytes]) -> bytes:
    """Have tarfile write members in another format than ours."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(data), 1_700_000_000, "somebody"
            tar.addfile(info, io.BytesIO(data))
    return written.getvalue()
