"""What each libMIOpen looks for, what exists of it, and the command that helps if it is missing."""

import os
from pathlib import Path

import pytest
from support.doctor import examine, shell
from support.layers import environment_of, write
from support.miopen_kernels import ARGS, CODE, FIND, NAME, library_bytes, packed, store, stored, user_file

from cachectl.layers import miopen
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.finding import HEALS, Finding
from cachectl.layers.host.hardware import amd_gpus
from cachectl.layers.miopen import MIOpenSystemKernels, MIOpenSystemTuning, by_library, libraries
from cachectl.stack import Stack

pytestmark = pytest.mark.skipif(
    bool(libraries(Environment({}, home=Path("/home/u")))), reason="a MIOpen is installed here"
)
ROWS = {(NAME, ARGS): packed(CODE)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 333916279\n"
GFX900, GFX90A, GFX1030, GFX1100 = (90000, 256, 4), (90010, 416, 4), (100300, 144, 2), (110000, 192, 2)


class Machine:
    """A machine with GPUs (target version, SIMD units, those of each compute unit), and places for libraries."""

    def __init__(self, home: Path, *gpus: tuple[int, int, int]) -> None:
        self.home, self.site = home, home / "venv/lib/python3.11/site-packages"
        for number, (version, simds, each) in enumerate(gpus):
            text = (
                f"gfx_target_version {version}\nsimd_count {simds}\nsimd_per_cu {each}\nunique_id {number + 10**18}\n"
            )
            write(home / f"nodes/{number}/properties", text)

    def library(self, prefix: Path) -> Path:
        """Install a library with an empty folder of databases, and return that folder."""
        write(prefix / "lib/libMIOpen.so.1", library_bytes("3.3.0.a85ca8a54"))
        folder = prefix / "share/miopen/db"
        folder.mkdir(parents=True)
        return folder

    def environment(self, **variables: str) -> Environment:
        variables = {"ROCM_PATH": str(self.home / "rocm"), **variables}
        environment = environment_of(self.home, **variables)
        return environment._replace(site=(self.site,), topology=self.home / "nodes")

    def findings(self, **variables: str) -> list[Finding]:
        return [
            found for found in examine(self.environment(**variables), "miopen-system") if found.code == "no-database"
        ]


def test_kernels_of_rocm_are_none_of_a_wheel_that_does_not_read_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, GFX1030)
    wheel, rocm = machine.library(machine.site / "torch"), machine.library(tmp_path / "rocm")
    store(rocm / "gfx1030_36.kdb", ROWS)
    (found,) = machine.findings()
    looked_for = "gfx1030_36.kdb or gfx103048.kdb or gfx1030.kdb"
    assert (found.root, found.severity) == (wheel, HEALS)
    assert f"{machine.site}/torch/lib/libMIOpen.so.1 looks for {looked_for} in {wheel}: not there" in found.message
    assert found.fix == f"export MIOPEN_SYSTEM_DB_PATH={rocm}"
    variable = shell(tmp_path, f'{found.fix}; printf %s "$MIOPEN_SYSTEM_DB_PATH"').stdout
    assert machine.findings(MIOPEN_SYSTEM_DB_PATH=variable) == []
    # The reverse too, with a verdict for each.
    (wheel / "gfx1030.kdb").symlink_to(rocm / "gfx1030_36.kdb")
    assert machine.findings() == []
    os.remove(rocm / "gfx1030_36.kdb")
    assert [found.root for found in machine.findings()] == [wheel, rocm]


def test_the_states_are_a_table_of_libraries_and_what_they_look_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, GFX90A)
    wheel, rocm = machine.library(machine.site / "torch"), machine.library(tmp_path / "rocm")
    store(rocm / "gfx90a.kdb", ROWS)
    write(wheel / "gfx90a68.HIP.fdb.txt", "k=S:1,2,3\n")
    environment = machine.environment()
    kernels, tuning = (
        made(environment).state().why.split("; ")[1:] for made in (MIOpenSystemKernels, MIOpenSystemTuning)
    )
    assert [line.rpartition(" looks for ")[2] for line in kernels] == [
        f"gfx90a68.kdb or gfx90a.kdb in {wheel}: not there",
        f"gfx90a68.kdb or gfx90a.kdb in {rocm}: gfx90a.kdb is there",
    ]
    assert [line.rpartition(" looks for ")[2] for line in tuning] == [
        f"gfx90a68.HIP.fdb.txt in {wheel}: gfx90a68.HIP.fdb.txt is there",
        f"gfx90a68.db.txt or gfx90a68.db in {wheel}: not there",
        f"gfx90a68.HIP.fdb.txt in {rocm}: not there",
        f"gfx90a68.db.txt or gfx90a68.db in {rocm}: not there",
    ]


@pytest.mark.parametrize(
    ("content", "is_hit"), [(POINTER, False), (b"", False), (bytes(511), False), (bytes(512), True)]
)
def test_a_small_file_is_no_database_and_hides_one_for_all_units(tmp_path: Path, content: bytes, is_hit: bool) -> None:
    machine = Machine(tmp_path, GFX900)
    folder = machine.library(tmp_path / "rocm")
    write(folder / "gfx900_64.kdb", content)
    store(folder / "gfx900.kdb", ROWS)
    assert [found.message.rpartition(": ")[2] for found in machine.findings()] == (
        [] if is_hit else ["gfx900_64.kdb counts as missing, as it has less than 512 bytes"]
    )


def test_a_package_is_named_where_there_is_one_that_the_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, GFX900, GFX1100)
    folders = [machine.library(tmp_path / name) for name in ("rocm", "opt/rocm-6.3.4", "opt/rocm/core-7.13")]
    monkeypatch.setattr(by_library, "_PACKAGED_INTO", regex(rf"{tmp_path}/opt/rocm-[^/]+/share/miopen/db"))
    paths = ":".join(str(folder.parents[2] / "lib") for folder in folders)
    fixes = {
        (found.root, found.message.split()[6].strip(":")): found.fix
        for found in machine.findings(LD_LIBRARY_PATH=paths)
    }
    package = "miopen-hip-gfx900kdb"
    own = {
        (folder, arch): f"cachectl push {arch}.kdb miopen && install -D -m 644 -t {folder} {arch}.kdb"
        for folder in folders
        for arch in ("gfx900", "gfx1100")
    }
    own[folders[1], "gfx900"] = f"sudo apt-get install --reinstall {package} || sudo dnf install {package}"
    assert fixes == own


def test_a_variable_decides_for_every_library(tmp_path: Path) -> None:
    machine = Machine(tmp_path, GFX1100)
    for prefix in (machine.site / "torch", tmp_path / "rocm"):
        machine.library(prefix)
    (tmp_path / "named").mkdir()
    named = {"MIOPEN_SYSTEM_DB_PATH": str(tmp_path / "named")}
    (found,) = machine.findings(**named)
    assert "MIOPEN_SYSTEM_DB_PATH looks for gfx1100_48.kdb" in found.message
    store(tmp_path / "rocm/share/miopen/db/gfx1100.kdb", ROWS)
    assert [found.fix for found in machine.findings(**named)] == ["unset MIOPEN_SYSTEM_DB_PATH"]
    store(tmp_path / "named/gfx1100_48.kdb", ROWS)
    assert machine.findings(**named) == []
    # A variable that names nothing has one finding.
    missing = examine(machine.environment(MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "none")), "miopen-system")
    assert [(found.code, found.fix) for found in missing] == [("variable", "unset MIOPEN_SYSTEM_DB_PATH")]


def test_the_users_own_kernels_are_pushed_to_where_the_library_looks(tmp_path: Path) -> None:
    """Even for a device known only by the name of the user's database."""
    machine = Machine(tmp_path)
    folder = machine.library(machine.site / "torch")
    store(user_file(tmp_path, "gfx1030_36"), ROWS)
    (found,) = machine.findings()
    assert found.message.startswith("no system kernels for the GPU gfx1030: ")
    shell(tmp_path, found.fix)
    assert stored(folder / "gfx1030.kdb") == [(NAME, ARGS, *packed(CODE))]
    assert machine.findings() == []
    # Without a database of the user nothing is known.
    os.remove(user_file(tmp_path, "gfx1030_36"))
    layer = MIOpenSystemKernels(machine.environment())
    assert ["no AMD GPU is visible here" in reason for reason in layer.unexamined()] == [True]
    write(tmp_path / ".config/miopen" / FIND, "k=S:1,2,3\n")
    assert [device for device, _ in by_library.find_devices(layer.environment)] == ["gfx90a"]
    assert list(MIOpenSystemKernels(machine.environment()).unexamined()) == []


def test_the_linkers_library_is_judged_next_to_those_of_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    named, system = (machine.library(tmp_path / name) for name in ("named", "system"))

    def find(name: str, environment: Environment) -> str:
        return str((system if environment.get("LD_LIBRARY_PATH") is None else named).parents[2] / "lib" / name)

    monkeypatch.setattr(miopen, "find_library", find)
    layer = MIOpenSystemKernels(machine.environment(LD_LIBRARY_PATH=str(tmp_path / "named/lib")))
    assert [root.path for root in layer.roots()] == [named, system]


#: Variables that hide GPUs from a program, and those of gfx900, gfx90a and gfx1030 that are left.
VISIBLE: list[tuple[dict[str, str], str]] = [
    ({}, "gfx900 gfx90a gfx1030"),
    ({"ROCR_VISIBLE_DEVICES": ""}, ""),
    ({"ROCR_VISIBLE_DEVICES": "2,0"}, "gfx1030 gfx900"),
    ({"ROCR_VISIBLE_DEVICES": "1, 7, 0"}, "gfx90a"),
    ({"ROCR_VISIBLE_DEVICES": f"GPU-{10**18 + 2:016x}"}, "gfx1030"),
    ({"HIP_VISIBLE_DEVICES": ""}, "gfx900 gfx90a gfx1030"),
    ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "gfx1030"),
    ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, "gfx90a"),
]


@pytest.mark.parametrize(("variables", "seen"), VISIBLE)
def test_hidden_gpus_do_not_count(tmp_path: Path, variables: dict[str, str], seen: str) -> None:
    environment = Machine(tmp_path, GFX900, GFX90A, GFX1030).environment(**variables)
    assert [arch for arch, _ in amd_gpus(environment)] == seen.split()


def test_libraries_of_other_known_pythons_are_judged_after_this_ones(tmp_path: Path) -> None:
    machine = Machine(tmp_path, GFX900)
    other, named = (tmp_path / name / "lib/python3.12/site-packages" for name in ("active", "named"))
    for site in (other, machine.site, named):
        machine.library(site / "torch")
    environment = machine.environment(VIRTUAL_ENV=str(tmp_path / "active"))
    environment = environment._replace(python_paths=(tmp_path / "named/bin/python",))
    found = Stack(environment)["miopen-system"].roots()
    assert [root.path.parents[3] for root in found] == [machine.site, other, named]
