"""Where MIOpen looks and how it reads its variables, as functions of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Condition, Scope
from cachectl.layers.base.layer import Layer
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.names import newest, parse_name, program_names
from cachectl.layers.miopen.places import libraries, read_flag
from cachectl.layers.miopen.system import MIOpenSystemKernels, MIOpenSystemTuning
from cachectl.layers.miopen.tuning import MIOpenTuning

HOME = Path("/home/u")
INSTALLED = bool(libraries(Environment({}, home=HOME)))
no_miopen = pytest.mark.skipif(INSTALLED, reason="a MIOpen is installed here")


def environment_of(platform: str = "linux", **variables: str) -> Environment:
    return Environment(variables, home=HOME, platform=platform, cwd=Path("/here"), temporary=Path("/spare"))


def places(layer: Layer) -> list[str]:
    return [str(root.path) for root in layer.roots()]


@pytest.mark.parametrize(
    ("variables", "cache", "database"),
    [
        (
            {"HOME": "/home/u"},
            ["/home/u/.cache/miopen", "/spare/.cache/miopen", "/spare"],
            ["/home/u/.config/miopen", "/spare/.config/miopen", "/spare"],
        ),
        (
            {"HOME": "/home/u", "TMPDIR": "/scratch", "XDG_CACHE_HOME": "/elsewhere"},
            ["/home/u/.cache/miopen", "/scratch/.cache/miopen", "/scratch"],
            ["/home/u/.config/miopen", "/scratch/.config/miopen", "/scratch"],
        ),
        ({}, ["/spare/.cache/miopen", "/spare"], ["/spare/.config/miopen", "/spare"]),
        ({"HOME": ""}, ["/spare/.cache/miopen", "/spare"], ["/spare/.config/miopen", "/spare"]),
        ({"HOME": "/"}, ["/spare/.cache/miopen", "/spare"], ["/spare/.config/miopen", "/spare"]),
        ({"HOME": "/spare"}, ["/spare/.cache/miopen", "/spare"], ["/spare/.config/miopen", "/spare"]),
        (
            {"HOME": "/home/u", "MIOPEN_CUSTOM_CACHE_DIR": "~/c", "MIOPEN_USER_DB_PATH": "relative"},
            ["/home/u/c"],
            ["/here/relative"],
        ),
        ({"MIOPEN_CUSTOM_CACHE_DIR": "~/c", "MIOPEN_USER_DB_PATH": "/d/~"}, ["/spare/c"], ["/d//spare"]),
        (
            {"HOME": "/home/u", "MIOPEN_CUSTOM_CACHE_DIR": "", "MIOPEN_USER_DB_PATH": ""},
            ["/home/u/.cache/miopen", "/spare/.cache/miopen", "/spare"],
            ["/home/u/.config/miopen", "/spare/.config/miopen", "/spare"],
        ),
    ],
)
def test_user_places(variables: dict[str, str], cache: list[str], database: list[str]) -> None:
    environment = environment_of(**variables)
    assert places(MIOpenKernels(environment)) == [str(Path(path)) for path in cache]
    assert places(MIOpenTuning(environment)) == [str(Path(path)) for path in database]
    for root in (*MIOpenKernels(environment).roots(), *MIOpenTuning(environment).roots()):
        assert root.scope is Scope.USER
        assert root.source


def test_sources_name_the_variable_or_the_rule() -> None:
    named = environment_of(MIOPEN_CUSTOM_CACHE_DIR="/c", MIOPEN_USER_DB_PATH="/d", MIOPEN_SYSTEM_DB_PATH="/s")
    sources = [made(named).roots()[0].source for made in (MIOpenKernels, MIOpenTuning, MIOpenSystemKernels)]
    assert sources == ["MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_SYSTEM_DB_PATH"]
    assert MIOpenKernels(environment_of(HOME="/home/u")).roots()[0].source == "default"
    assert "HOME" in MIOpenKernels(environment_of()).roots()[0].source


def test_windows_places() -> None:
    environment = environment_of("win32", USERPROFILE="/profile")
    assert places(MIOpenKernels(environment)) == ["/profile/.miopen/cache"]
    assert places(MIOpenTuning(environment)) == ["/profile/.miopen/db"]


def test_the_tilde_of_the_system_folder_is_half_expanded() -> None:
    environment = environment_of(HOME="/home/u", MIOPEN_SYSTEM_DB_PATH="~/db")
    assert places(MIOpenSystemKernels(environment)) == ["/home/u/db"]
    (root,) = MIOpenSystemTuning(environment).roots()
    assert str(root.path) == "/here/~/db"
    assert "as it stands" in root.source


def library(prefix: Path, name: str = "libMIOpen.so.1.0") -> Path:
    path = prefix / "lib" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@no_miopen
def test_system_folders_are_found_beside_every_library(tmp_path: Path) -> None:
    rocm = library(tmp_path / "rocm-6.2")
    (rocm.parent / "libMIOpen.so").symlink_to(rocm.name)
    (tmp_path / "rocm").symlink_to("rocm-6.2")
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "libMIOpen.so.1").symlink_to(rocm)
    site = tmp_path / "site-packages"
    library(site / "torch", "libMIOpen.so")
    without = site / "_rocm_sdk_libraries" / "share" / "miopen" / "db"
    without.mkdir(parents=True)
    environment = Environment(
        {"ROCM_PATH": str(tmp_path / "rocm"), "LD_LIBRARY_PATH": f":{tmp_path / 'view'}"}, home=HOME, site=(site,)
    )
    for made in (MIOpenSystemKernels, MIOpenSystemTuning):
        roots = made(environment).roots()
        assert [root.path for root in roots] == [
            tmp_path / "rocm-6.2" / "share" / "miopen" / "db",
            site / "torch" / "share" / "miopen" / "db",
            without,
        ]
        assert [root.scope for root in roots] == [Scope.SYSTEM] * 3
        assert roots[0].source == f"beside {rocm}"


def test_old_versions_are_not_stale_where_several_miopens_are_installed(tmp_path: Path) -> None:
    library(tmp_path / "rocm")
    library(tmp_path / "site" / "torch")
    for version in ("2.2.1", "3.3.0.x"):
        path = tmp_path / ".cache" / "miopen" / version / ("a" * 32) / "k.s.o"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x7fELF code")
    variables = {"HOME": str(tmp_path), "ROCM_PATH": str(tmp_path / "rocm")}
    environment = Environment(variables, home=tmp_path, site=(tmp_path / "site",), temporary=tmp_path / "tmp")
    assert [entry.stale for entry in MIOpenKernels(environment).entries()] == [None, None]


@pytest.mark.parametrize("value", ["1", "enable", "Enabled", "YES", "on", "TRUE"])
def test_true_values(value: str) -> None:
    assert read_flag(value) is True
    state = MIOpenKernels(environment_of(MIOPEN_DISABLE_CACHE=value)).state()
    assert state.condition is Condition.DISABLED
    assert ("before ROCm 6.1" in state.why) == (value in {"Enabled", "YES", "on", "TRUE"})


@pytest.mark.parametrize("value", ["0", "Disable", "disabled", "no", "off", "FALSE"])
def test_false_values(value: str) -> None:
    assert read_flag(value) is False
    assert MIOpenKernels(environment_of(MIOPEN_DISABLE_CACHE=value)).state().condition is not Condition.DISABLED


@pytest.mark.parametrize("value", ["", "2", "y", "true "])
def test_values_that_are_none(value: str) -> None:
    assert read_flag(value) is None
    state = MIOpenSystemKernels(environment_of(MIOPEN_DISABLE_CACHE=value)).state()
    assert state.condition is Condition.DISABLED
    assert "is not a boolean" in state.why


@no_miopen
def test_the_state_is_absent_until_a_library_or_a_file_is_here(tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path)}
    (tmp_path / "tmp").mkdir()
    environment = Environment(variables, home=tmp_path, temporary=tmp_path / "tmp")
    classes = (MIOpenKernels, MIOpenSystemKernels, MIOpenTuning, MIOpenSystemTuning)
    assert {made(environment).state().condition for made in classes} == {Condition.ABSENT}
    (tmp_path / "tmp" / "gfx906_60.ukdb").touch()
    assert MIOpenKernels(environment).state().condition is Condition.ENABLED
    assert MIOpenTuning(environment).state().condition is Condition.ABSENT
    library(tmp_path / "rocm")
    found = environment.with_variables({"ROCM_PATH": str(tmp_path / "rocm")})
    assert {made(found).state().condition for made in classes} == {Condition.ENABLED}


def test_switches_set_one_and_never_an_empty_value() -> None:
    for made in (MIOpenKernels, MIOpenSystemKernels):
        layer = made(environment_of())
        assert layer.disable().set == {"MIOPEN_DISABLE_CACHE": "1"}
        assert layer.enable().set == {}
        assert layer.enable().unset == {"MIOPEN_DISABLE_CACHE"}
        assert layer.disable().read_at_load == ("libMIOpen",)


def test_relocation_gives_each_layer_its_variable() -> None:
    environment = environment_of(HOME="/home/u")
    folder = Path("/scratch")
    assert MIOpenKernels(environment).relocate(folder).set == {"MIOPEN_CUSTOM_CACHE_DIR": "/scratch/miopen"}
    assert MIOpenTuning(environment).relocate(folder).set == {"MIOPEN_USER_DB_PATH": "/scratch/miopen-db"}


@pytest.mark.parametrize(
    ("raw", "arch", "device", "units"),
    [
        ("gfx906_60", "gfx906", "gfx906", 60),
        ("gfx90878", "gfx908", "gfx908", 120),
        ("gfx90a6e", "gfx90a", "gfx90a", 110),
        ("gfx90a68", "gfx90a", "gfx90a", 104),
        ("gfx942130", "gfx942", "gfx942", 304),
        ("gfx942e4", "gfx942", "gfx942", 228),
        ("gfx110136", "gfx1101", "gfx1101", 54),
        ("gfx115128", "gfx1151", "gfx1151", 40),
        ("gfx120020", "gfx1200", "gfx1200", 32),
        ("gfx950100", "gfx950", "gfx950", 256),
        ("gfx1030_36", "gfx1030", "gfx1030", 36),
        ("gfx906_nosramecc_60", "gfx906", "gfx906_nosramecc", 60),
        ("gfx90a_xnack6e", "gfx90a", "gfx90a_xnack", 110),
        ("gfx90a", "gfx90a", "gfx90a", None),
        ("gfx7777", None, None, None),
    ],
)
def test_base_names(raw: str, arch: str | None, device: str | None, units: int | None) -> None:
    name = parse_name(f"{raw}.ukdb")
    assert name is not None
    assert (name.base, name.arch, name.device, name.units) == (raw, arch, device, units)


@pytest.mark.parametrize(
    ("file", "kind", "base", "backend", "version"),
    [
        ("gfx90a6e.ukdb", "ukdb", "gfx90a6e", None, None),
        ("gfx90a.kdb", "kdb", "gfx90a", None, None),
        ("gfx906_60_1.1.0.udb", "udb", "gfx906_60", None, None),
        ("gfx906_60.db", "db", "gfx906_60", None, None),
        ("gfx906_60.db.txt", "db.txt", "gfx906_60", None, None),
        ("gfx900_56.OpenCL.fdb.txt", "fdb.txt", "gfx900_56", "OpenCL", None),
        ("gfx906_60.HIP.2_11_0_993628deb.ufdb.txt", "ufdb.txt", "gfx906_60", "HIP", "2.11.0.993628deb"),
        ("gfx906_60.HIP.2_9_0_8252-64506314e.udb.txt", "udb.txt", "gfx906_60", "HIP", "2.9.0.8252-64506314e"),
        ("gfx90a6e.HIP.3_5_2_.fusion.ufdb.txt", "ufdb.txt", "gfx90a6e", "HIP", "3.5.2."),
        ("gfx803_36.cd.updb.txt", "cd.updb.txt", "gfx803_36", None, None),
        ("batchnorm_gfx906_60.cd.pdb.txt", "cd.pdb.txt", "gfx906_60", None, None),
    ],
)
def test_file_names(file: str, kind: str, base: str, backend: str | None, version: str | None) -> None:
    name = parse_name(file)
    assert name is not None
    assert (name.kind, name.base, name.backend, name.version) == (kind, base, backend, version)


@pytest.mark.parametrize(
    "file", ["notes.ukdb", "gfx90a6e.ukdb-wal", "gfx90a6e.txt", "gfx90a.kdb.bz2", "gfx942.tn.model", "GFX90A.kdb"]
)
def test_other_files_are_none_of_miopens(file: str) -> None:
    assert parse_name(file) is None


def test_versions_are_ordered_by_number() -> None:
    assert newest(["2.20.0.x", "2.9.0", "3.0.0."]) == "3.0.0."
    assert newest([]) is None


def test_program_names() -> None:
    assert program_names("Conv_Winograd_v21_1_3.s.o") == ("Conv_Winograd_v21_1_3.s", "Conv_Winograd_v21_1_3")
    assert program_names("X.mlir.obj") == ("X.mlir", "X")
    assert program_names("d41d8cd98f00b204e9800998ecf8427e.o") == ("d41d8cd98f00b204e9800998ecf8427e",)
