"""Mesa's shader cache: places, switches, whose entries, and the conformance suite."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from support.mesa import OPENCL, STORES, contents, crc, entry, environment, fill, graphics, key, layer_of, listed

from cachectl.layers.base.conformance import LayerConformance
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Artifact
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import zstd
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa.cache import MesaShaderCache, read_limit

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
    root = fill(tmp_path / "home" / ".cache", "multi-file", contents())
    (root / "index").write_bytes(struct.pack("<Q", 1000 << 20) + bytes(65536 * 20))
    assert [finding.code for finding in MesaShaderCache(environment(tmp_path / "home")).diagnose()] == ["cap"]


# ---------------------------------------------------------------------- whose entries


@pytest.mark.parametrize("store", STORES)
def test_entries_of_gl_are_neither_counted_nor_cleared_unless_named(store: str, tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", store)
    root = fill(tmp_path / "home" / ".cache", store, {**contents(), **graphics()})
    entries = listed(layer)
    assert {name for name, found in entries.items() if found.guest} == set(graphics())
    assert {found.detail["of"] for found in entries.values()} == {"OpenCL", "GL or Vulkan"}
    assert layer.store.usage(layer.roots()[0]).entries == 4
    plan = layer.plan_clear()
    assert len(plan.entries) == 4
    (note,) = plan.skipped
    assert note.because.startswith(f"2 in {root} left")
    assert layer.clear(plan).removed == 4
    assert set(listed(layer)) == set(graphics())
    assert layer.clear(layer.plan_clear(Selection(key=key("g")))).removed == 1
    assert set(listed(layer)) == {key("h")}


def test_the_driver_of_entries_is_unknown_without_a_kernel(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "home", "multi-file")
    fill(tmp_path / "home" / ".cache", "multi-file", {key("x"): entry(b"\x7fELF" + bytes(9), "a" * 40)})
    assert listed(layer)[key("x")].detail["of"] == "unknown"
    assert layer.plan_clear().entries == ()


def test_rusticls_own_entries_are_recognised_by_name(tmp_path: Path) -> None:
    words = [0x07230203, 0x10000, 0, 9, 0, (5 << 16) | 15, 6, 1, *struct.unpack("<2I", b"spirv_k\0")]
    module = struct.pack(f"<{len(words)}I", *words)
    layer = layer_of(tmp_path / "home", "multi-file")
    fill(tmp_path / "home" / ".cache", "multi-file", {key("x"): entry(module, "rusticl", "rusticl")})
    assert listed(layer)[key("x")].kernels == ("spirv_k",)
    assert len(layer.plan_clear().entries) == 1


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
