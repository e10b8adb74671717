"""MIOpen's libraries, the state of its layers without one, and what the names of its files say."""

import os
from pathlib import Path

import pytest
from support.layers import write
from support.miopen_kernels import library_bytes

from cachectl.layers import miopen
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.root import Condition, Scope
from cachectl.layers.disk import distributions
from cachectl.layers.miopen import (
    MIOpenKernels,
    MIOpenSystemKernels,
    MIOpenSystemTuning,
    MIOpenTuning,
    libraries,
    releases,
)
from cachectl.layers.miopen.databases import parse_name, program_names, version_numbers

LAYERS = (MIOpenKernels, MIOpenSystemKernels, MIOpenTuning, MIOpenSystemTuning)
HOME = Path("/home/u")
no_miopen = pytest.mark.skipif(bool(libraries(Environment({}, home=HOME))), reason="a MIOpen is installed here")


def library(prefix: Path, name: str = "libMIOpen.so.1.0") -> Path:
    return write(prefix / "lib" / name, "")


@no_miopen
def test_system_folders_are_found_beside_every_library(tmp_path: Path) -> None:
    rocm = library(tmp_path / "rocm-6.2")
    (rocm.parent / "libMIOpen.so").symlink_to(rocm.name)
    (tmp_path / "rocm").symlink_to("rocm-6.2")
    (tmp_path / "view").mkdir()
    (tmp_path / "view/libMIOpen.so.1").symlink_to(rocm)
    site = tmp_path / "site-packages"
    library(site / "torch", "libMIOpen.so")
    without = site / "_rocm_sdk_libraries/share/miopen/db"
    without.mkdir(parents=True)
    variables = {"ROCM_PATH": str(tmp_path / "rocm"), "LD_LIBRARY_PATH": f":{tmp_path / 'view'}"}
    for made in (MIOpenSystemKernels, MIOpenSystemTuning):
        roots = made(Environment(variables, home=HOME, site=(site,))).roots()
        beside = [prefix / "share/miopen/db" for prefix in (tmp_path / "rocm-6.2", site / "torch")]
        assert [(root.path, root.scope) for root in roots] == [(path, Scope.SYSTEM) for path in (*beside, without)]
        assert roots[0].source == f"next to {rocm}"


@no_miopen
def test_every_version_of_the_core_sdk_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/opt": ("rocm-6.2",), "/opt/rocm": ("core-7.13", "core-7.14")}
    monkeypatch.setattr(distributions, "names_in", lambda folder, *_: names.get(folder, ()))
    prefixes = [prefix for prefix in miopen._prefixes(Environment({}, home=HOME)) if prefix.startswith("/opt")]
    assert prefixes == ["/opt/rocm", "/opt/rocm-6.2", "/opt/rocm/core-7.13", "/opt/rocm/core-7.14"]


def with_rocm(home: Path, *site: Path) -> MIOpenKernels:
    """Return the layer of a home with old kernels of two versions, and perhaps a library of the first."""
    for version in ("3.1.0.b", "3.3.0.a"):
        kernel = write(home / ".cache/miopen" / version / ("a" * 32) / "k.s.o", b"\x7fELF code")
        os.utime(kernel, (1e9, 1e9))
    variables = {"HOME": str(home), "ROCM_PATH": str(home / "rocm")}
    return MIOpenKernels(Environment(variables, home=home, site=site, temporary=home / "tmp", searches_pythons=True))


@no_miopen
def test_no_entry_of_a_miopen_is_known_to_be_stale(tmp_path: Path) -> None:
    """A hit leaves no trace, and an unknown environment may still have the removed version."""
    rocm = write(tmp_path / "rocm/lib/libMIOpen.so.1.0", library_bytes("3.1.0.b"))

    def why(*others: Path) -> dict[str, str | None]:
        entries = list(with_rocm(tmp_path, *others).entries())
        assert {entry.stale for entry in entries} == {None}
        return {entry.details.versions["miopen"]: entry.stale_because for entry in entries}

    assert why() == {"3.1.0.b": None, "3.3.0.a": None}
    rocm.unlink()
    write(rocm, library_bytes("3.3.0.a"))
    has_gone = why()
    assert has_gone["3.3.0.a"] is None
    assert f"stored by MIOpen 3.1.0.b; {rocm} had MIOpen 3.1.0.b until 20" in str(has_gone["3.1.0.b"])
    write(tmp_path / "site/torch/lib/libMIOpen.so", library_bytes("3.1.0.c"))
    assert why(tmp_path / "site") == {"3.1.0.b": None, "3.3.0.a": None}, "another build of the release"
    write(tmp_path / "site/torch/lib/libMIOpen.so", b"cannot be read")
    assert "not every MIOpen here can be read" in str(why(tmp_path / "site")["3.1.0.b"])
    (tmp_path / "site/torch/lib/libMIOpen.so").unlink()
    assert why() == has_gone


def test_a_report_reads_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rocm/lib/libMIOpen.so.1.0", library_bytes("3.1.0.b"))
    layer = with_rocm(tmp_path)
    read: list[str] = []
    monkeypatch.setattr(releases, "read_version", read.append)
    for root in layer.roots():
        layer.store.usage(root)
    assert read == []
    assert [entry.stale for entry in layer.entries()] == [None, None]
    assert [Path(path).name for path in read] == ["libMIOpen.so.1.0"]


@pytest.mark.parametrize("value", ["Enabled", "YES", "on", "TRUE"])
def test_values_that_older_releases_do_not_know(value: str) -> None:
    layer = MIOpenKernels(Environment({"MIOPEN_DISABLE_CACHE": value}, HOME))
    assert layer.state().condition is Condition.DISABLED
    assert any("MIOpen before ROCm 6.1" in found.message for found in layer.diagnose())


@no_miopen
def test_the_state_is_absent_until_a_library_or_a_file_is_here(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environment = Environment({"HOME": str(tmp_path)}, home=tmp_path, temporary=tmp_path / "tmp")
    assert {made(environment).state().condition for made in LAYERS} == {Condition.ABSENT}
    (tmp_path / "tmp/gfx906_60.ukdb").touch()
    assert MIOpenKernels(environment).state().condition is Condition.ENABLED
    assert MIOpenTuning(environment).state().condition is Condition.ABSENT
    library(tmp_path / "rocm")
    found = environment.with_variables({"ROCM_PATH": str(tmp_path / "rocm")})
    assert {made(found).state().condition for made in LAYERS} == {Condition.ENABLED}


#: The base in a name; device, which begins with the architecture, and compute units.
BASES: dict[str, tuple[str | None, int | None]] = {
    "gfx906_60": ("gfx906", 60),
    "gfx90878": ("gfx908", 120),
    "gfx90a6e": ("gfx90a", 110),
    "gfx942130": ("gfx942", 304),
    "gfx942e4": ("gfx942", 228),
    "gfx110136": ("gfx1101", 54),
    "gfx115128": ("gfx1151", 40),
    "gfx120020": ("gfx1200", 32),
    "gfx950100": ("gfx950", 256),
    "gfx1030_36": ("gfx1030", 36),
    "gfx906_nosramecc_60": ("gfx906_nosramecc", 60),
    "gfx90a_xnack6e": ("gfx90a_xnack", 110),
    "gfx90a": ("gfx90a", None),
    "gfx1030_": ("gfx1030", None),
    "gfx1250_64": ("gfx1250", 64),
    "gfx1250100": ("gfx1250", 256),
    "GeForce GTX 1070_15": (None, None),
    "gfx7777": (None, None),
}
#: A file; its kind, base, backend and version.
NAMES: dict[str, tuple[str, str, str | None, str | None]] = {
    **{f"{base}.ukdb": ("ukdb", base, None, None) for base in BASES},
    "gfx90a.kdb": ("kdb", "gfx90a", None, None),
    "gfx906_60_1.1.0.udb": ("udb", "gfx906_60", None, None),
    "gfx906_60.db": ("db", "gfx906_60", None, None),
    "gfx906_60.db.txt": ("db.txt", "gfx906_60", None, None),
    "gfx900_56.OpenCL.fdb.txt": ("fdb.txt", "gfx900_56", "OpenCL", None),
    "gfx906_60.HIP.2_11_0_993628deb.ufdb.txt": ("ufdb.txt", "gfx906_60", "HIP", "2.11.0.993628deb"),
    "gfx906_60.HIP.2_9_0_8252-64506314e.udb.txt": ("udb.txt", "gfx906_60", "HIP", "2.9.0.8252-64506314e"),
    "gfx90a6e.HIP.3_5_2_.fusion.ufdb.txt": ("ufdb.txt", "gfx90a6e", "HIP", "3.5.2."),
    "gfx803_36.cd.updb.txt": ("cd.updb.txt", "gfx803_36", None, None),
    "batchnorm_gfx906_60.cd.pdb.txt": ("cd.pdb.txt", "gfx906_60", None, None),
    "gfx1030_.HIP.3_4_0_.ufdb.txt": ("ufdb.txt", "gfx1030_", "HIP", "3.4.0."),
    "GeForce GTX 1070_15.OpenCL.2_0_1.ufdb.txt": ("ufdb.txt", "GeForce GTX 1070_15", "OpenCL", "2.0.1"),
}
OTHERS = (
    "notes.ukdb",
    "thesis_2.txt",
    "GeForce GTX 1070.OpenCL.2_0_1.ufdb.txt",
    "gfx90a6e.ukdb-wal",
    "gfx90a6e.txt",
    "gfx90a.kdb.bz2",
    "gfx942.tn.model",
    "GFX90A.kdb",
)


def test_names_of_files() -> None:
    named = {file: name for file in NAMES if (name := parse_name(file)) is not None}
    assert {file: (name.kind, name.base, name.backend, name.version) for file, name in named.items()} == NAMES
    of_base = {name.base: (name.device, name.units) for name in named.values() if name.kind == "ukdb"}
    assert of_base == BASES
    assert all(name.arch == (name.device and name.device.split("_")[0]) for name in named.values())
    assert [parse_name(file) for file in OTHERS] == [None] * len(OTHERS)
    assert max(["2.20.0.x", "2.9.0", "3.0.0."], key=version_numbers) == "3.0.0."
    assert program_names("Conv_Winograd_v21_1_3.s.o") == ("Conv_Winograd_v21_1_3.s", "Conv_Winograd_v21_1_3")
    assert program_names("d41d8cd98f00b204e9800998ecf8427e.o") == ("d41d8cd98f00b204e9800998ecf8427e",)
