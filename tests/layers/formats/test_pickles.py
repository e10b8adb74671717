"""Pickles are walked, not loaded: every protocol, every kind of value, and damage."""

import pickle
import pickletools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.layers.formats import opencl_source, pdict, pickles
from cachectl.layers.formats.pickles import Thing, is_framed, things, walk

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=20,
) | st.frozensets(st.text()) | st.sets(st.integers())  # fmt: skip


@given(value=VALUES, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_every_pickle_is_walked_to_its_end(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    top, length = walk(data + b"trailing")
    assert length == len(data)
    kinds = (list, dict, tuple, set, frozenset, *((bytearray,) if protocol < 5 else ()))
    # Before protocol 3, bytes are written as a call; before protocol 4, so are sets.
    assert isinstance(top, Thing) >= isinstance(value, kinds)


@given(value=VALUES, cut=st.integers(0, 200))
def test_a_pickle_cut_short_is_a_value_error(value: object, cut: int) -> None:
    data = pickle.dumps(value)
    with pytest.raises(ValueError, match="broken pickle"):
        walk(data[: min(cut, len(data) - 1)])


@pytest.mark.parametrize("protocol", [4, 5])
@given(value=VALUES, cut=st.integers(1, 40))
def test_a_framed_pickle_is_complete(protocol: int, value: object, cut: int) -> None:
    """A framed pickle can be walked to its end; truncated or extended, it is not framed."""
    data = pickle.dumps(value, protocol)
    if is_framed(data):
        assert walk(data)[1] == len(data)
        assert not is_framed(data[:-cut])
        assert not is_framed(data + b"x" * cut)


def test_the_rows_of_loopy_are_framed() -> None:
    """Rows of pytools, small or large, are recognised quickly; a large value between frames is not."""
    for protocol in (4, 5):
        assert is_framed(pickle.dumps(("key", {"value": ["x" * 100] * 1000 + list(range(9999))}), protocol))
        assert not is_framed(pickle.dumps(b"x" * 100_000, protocol))
    for data in (pickle.dumps("value", 2), b"\x80\xfe\x95" + bytes(8) + b".", b"\x80\x04.", b"\x80", b""):
        assert not is_framed(data) or walk(data)


def test_an_object_that_refers_to_itself_is_listed_once() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    top, _ = walk(pickle.dumps(loop))
    assert len(list(things(top))) == 1


def test_every_opcode_that_python_knows_is_walked() -> None:
    # For any opcode, the result is a value or an error about the stack.
    for opcode in pickletools.opcodes:
        try:
            walk(b"(" + opcode.code.encode("latin-1") + b"0\n0\n.")
        except ValueError as error:
            assert str(error).startswith("broken pickle")


@pytest.mark.parametrize(
    "data",
    [
        b"c\n\n.",  # a global without a name
        b"\x80\x04N" + b"2\x86" * 60 + b".",  # parts shared sixty times over
        b"]" * 200_000 + b".",
        b"(" * 100_000 + b".",
        b"\x80\x04" + b"\x8c\x01a" + b"\x85" * 50_000 + b".",
        b"__kernel " + b"__attribute__((a)) " * 5000,
        b"kernel" + b" " * 100_000,
    ],
)
def test_bytes_built_to_hurt_cost_little(data: bytes) -> None:
    for read in (pdict.kernel_names, opencl_source.source_info, opencl_source.kernel_names):
        started = time.process_time()
        read(b"loopy" + data)
        read(data)
        assert time.process_time() - started < 5


def test_kernels_are_found_whatever_is_said_about_them() -> None:
    source = b"""
    __kernel void plain(int a) {}
    kernel __attribute__((reqd_work_group_size(8, 1, 1))) void sized (int a) {}
    KERNEL\nREQD_WG_SIZE(WG_SIZE, 1, 1)\nvoid scanned(\n    int a) {}
    __kernel __attribute__((vec_type_hint(float4))) __attribute__((work_group_size_hint(8,1,1)))\nvoid\nhinted(int a) {}
    void not_a_kernel(int a) {}
    """
    assert opencl_source.kernel_names(source) == ("hinted", "plain", "scanned", "sized")


def test_what_python_unpickles_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what follows the end; a pickle that is too long to be walked is not damaged either."""
    for data in (b"\x80\x04N.trailing", b"\x80\x04N." + bytes(300)):
        assert pickle.loads(data) is None  # noqa: S301 - made here
        assert pickles.complaint(data) is None
    monkeypatch.setattr(pickles, "_MOST", 100)
    long = pickle.dumps([bytes(300), *map(str, range(100))])
    assert pickles.complaint(long) is None
    assert pickles.walk(long) == (None, None)
