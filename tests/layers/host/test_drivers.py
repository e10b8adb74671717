"""Registered OpenCL drivers: in prefixes, under their makers' names, and in reports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.drivers import register_driver

import cachectl
from cachectl.layers.base.environment import Environment
from cachectl.layers.host.drivers import driver_files, driver_libraries, only_library, opencl_drivers
from cachectl.layers.host.listings import names_in
from cachectl.layers.pyopencl import BinaryPortability

if TYPE_CHECKING:
    from conftest import Driver
    from homes import Home


def lay_out(prefix: Path, driver: Driver) -> Path:
    """Register a driver in a prefix as conda packages do, its library a file of the prefix; return the folder."""
    library = Path(Path(driver.variables["OCL_ICD_VENDORS"]).read_text().strip()).resolve()
    placed = prefix / "lib" / "libpocl.so.2"
    placed.parent.mkdir(parents=True, exist_ok=True)
    placed.symlink_to(library)
    # PoCL loads its devices from a folder beside its library.
    (placed.parent / "pocl").symlink_to(library.with_name("pocl"))
    vendors = prefix / "etc" / "OpenCL" / "vendors"
    vendors.mkdir(parents=True, exist_ok=True)
    (vendors / "pocl.icd").write_text(f"{placed}\n")
    return vendors


def wheel() -> Path:
    """Return the folder of PyOpenCL from its wheel."""
    package = find_spec("pyopencl")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


@pytest.mark.real
def test_report_names_the_file_by_which_a_driver_in_a_conda_prefix_is_found(home: Home) -> None:
    prefix = str(home.path / "envs" / "of mine")
    vendors = home.path / "envs" / "of mine" / "etc" / "OpenCL" / "vendors"
    file = register_driver(vendors, "libpocl.so")
    # An empty variable names no driver, and the loader searches its folders.
    variables: dict[str, Any] = {"CONDA_PREFIX": prefix, "OCL_ICD_VENDORS": ""}
    (layer,) = json.loads(home.cachectl("report", "pocl", "--json", **variables).stdout)["layers"]
    assert layer["state"] == "enabled"
    assert layer["drivers"][-1] == file
    shown = home.cachectl("report", "pocl", COLUMNS="80", **variables).stdout.splitlines()
    assert f"  driver: ~/envs/of mine/etc/OpenCL/vendors/{Path(file).name}" in shown
    assert max(map(len, (line for line in shown if "site-packages" not in line))) <= 80


@pytest.mark.real
def test_report_sees_a_driver_in_the_prefix_of_the_python_it_runs_on(home: Home, debian_pocl: Driver) -> None:
    prefix = home.path / "prefix"
    home.run(sys.executable, "-m", "venv", "--without-pip", str(prefix))
    modules = home.path / "modules"
    modules.mkdir()
    (modules / "cachectl").symlink_to(Path(cachectl.__file__).parent)

    def state() -> str:
        python = str(prefix / "bin" / "python")
        environment = {"PYTHONPATH": str(modules), "OCL_ICD_VENDORS": ""}
        done = home.run(python, "-m", "cachectl", "report", "pocl", "--json", check=True, **environment)
        (layer,) = json.loads(done.stdout)["layers"]
        return str(layer["state"])

    if state() != "absent":
        pytest.skip("a PoCL is registered for the whole system")
    lay_out(prefix, debian_pocl)
    assert state() == "enabled"


def test_the_activated_prefix_counts_beside_the_systems_folder(tmp_path: Path) -> None:
    """Neither loader's drivers may hide the other's."""
    plain = Environment({}, home=tmp_path)
    vendors = tmp_path / "conda" / "etc" / "OpenCL" / "vendors"
    file = register_driver(vendors, "libnvidia-opencl.so.1")
    conda = Environment({"CONDA_PREFIX": str(tmp_path / "conda")}, home=tmp_path, prefix=tmp_path / "conda")
    assert set(opencl_drivers(conda)) == {*opencl_drivers(plain), "NVIDIA"}
    for prefix in ("", "/nowhere"):
        nothing = Environment({"CONDA_PREFIX": prefix}, home=tmp_path)
        assert opencl_drivers(nothing) == opencl_drivers(plain)
    (vendors / "linked.icd").symlink_to(file)
    assert driver_libraries(conda, "NVIDIA") == (str(vendors / "libnvidia-opencl.so.1"),)
    assert driver_files(conda, ("NVIDIA",)) == (file, str(vendors / "linked.icd"))
    # So does the package ``ocl-icd-system``; links in a circle end.
    folder = register_driver(tmp_path / "system", "libintelocl.so")
    (vendors / "ocl-icd-system").symlink_to(tmp_path / "system")
    (tmp_path / "system" / "again").symlink_to(tmp_path / "system")
    linked = Environment({"CONDA_PREFIX": str(tmp_path / "conda")}, home=tmp_path)
    assert driver_files(linked, ("Intel CPU",)) == (f"{vendors}/ocl-icd-system/{Path(folder).name}",)


def test_a_folder_above_a_linked_one_is_where_the_link_leads(tmp_path: Path) -> None:
    """The folder of drivers is named as the loader follows it, whether or not it changed a moment ago."""
    vendors = tmp_path / "there" / "vendors"
    (tmp_path / "there" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "below")
    vendors.mkdir()
    register_driver(vendors, "libintelocl.so")
    os.utime(vendors, (1, 1))
    assert names_in(f"{tmp_path}/link/../vendors") == names_in(str(vendors)) != ()


def test_makers_are_named_by_the_library_alone(tmp_path: Path) -> None:
    """Not by its folder; on another platform without a look at the library."""
    icd = register_driver(tmp_path / "envs" / "pocl", "libintelocl.so")
    assert opencl_drivers(Environment({"OCL_ICD_VENDORS": icd}, home=tmp_path)) == ("Intel CPU",)
    (tmp_path / "nvidia.icd").write_text("nvopencl64.dll\n")
    windows = Environment({"OCL_ICD_VENDORS": str(tmp_path)}, home=tmp_path, platform="win32")
    assert opencl_drivers(windows) == ("nvopencl64.dll",)


@pytest.mark.real
@pytest.mark.parametrize("how", ["VIRTUAL_ENV", "CONDA_PREFIX", "--python"])
def test_pyopencl_of_another_python_counts(tmp_path: Path, how: str) -> None:
    """As when cachectl has an environment of its own."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "pyopencl").symlink_to(wheel())
    variables = {} if how == "--python" else {how: str(tmp_path)}
    named = (tmp_path / "bin" / "python",) if how == "--python" else ()
    # The folder of the variable replaces the system's, not the one in PyOpenCL's wheel.
    environment = Environment({"OCL_ICD_VENDORS": str(tmp_path), **variables}, home=tmp_path, python_paths=named)
    assert driver_files(environment, ("PoCL",)) == (str(packages / "pyopencl" / ".libs" / "pocl.icd"),)


@pytest.fixture
def both(debian_pocl: Driver, tmp_path: Path) -> dict[str, str]:
    """Return the variables with which the wheel's loader finds Debian's PoCL beside its own."""
    library = Path(debian_pocl.variables["OCL_ICD_VENDORS"]).read_text()
    (tmp_path / "vendors").mkdir()
    (tmp_path / "vendors" / "pocl.icd").write_text(library)
    return {"OCL_ICD_VENDORS": str(tmp_path / "vendors")}


@pytest.mark.real
@pytest.mark.environment
def test_entries_are_not_labelled_with_one_of_several_drivers(
    home: Home, debian_pocl: Driver, both: dict[str, Any], tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    """Nor with the version of the wheel, which is installed, if another driver is the only one that is registered."""
    home.python("kernels.py", "2", **debian_pocl.variables)
    there: dict[str, dict[str, Any]] = {"one": dict(debian_pocl.variables), "several": both}
    other = new_home(tmp_path / "other")
    for name, variables in there.items():
        store = str(tmp_path / name)
        home.cachectl("push", store, "pocl", **variables)
        (key,) = home.json("store", "ls", store)["keys"]
        label = {fact: key["fingerprint"][fact] for fact in ("PoCL", "PoCL library")}
        library = Path(Path(debian_pocl.variables["OCL_ICD_VENDORS"]).read_text().strip()).resolve()
        assert label == {"PoCL": None, "PoCL library": library.name if name == "one" else None}
        for here in ({}, both):
            (pulled,) = other.json("pull", store, "pocl", "--trust", "--dry-run", **here)["layers"]
            assert [one["hits"] for one in pulled["outlook"]] == [None]
    # The same driver alone hits, and the wheel's does not.
    (pulled,) = other.json("pull", str(tmp_path / "one"), "pocl", "--trust", **debian_pocl.variables)["layers"]
    assert [one["hits"] for one in pulled["outlook"]] == [True]
    programs = {path: path.stat().st_mtime_ns for path in other.path.rglob("program.bc")}
    for variables, built in ((dict(debian_pocl.variables), 0), ({}, 2)):
        other.python("kernels.py", "2", **variables)
        assert len(set(other.path.rglob("program.bc"))) == len(programs) + built
    assert {path: path.stat().st_mtime_ns for path in programs} == programs


@pytest.mark.real
@pytest.mark.environment
def test_doctor_names_several_drivers_of_one_maker(home: Home, both: dict[str, Any]) -> None:
    done = home.json("doctor", "pocl", **both)
    (finding,) = [one for one in done["findings"] if one["code"] == "drivers"]
    own = next(wheel().glob(".libs/libpocl*"))
    assert finding["severity"] == "harmless"
    assert finding["message"].startswith("2 drivers of PoCL are registered (")
    assert str(own) in finding["message"]
    assert Path(both["OCL_ICD_VENDORS"], "pocl.icd").read_text().strip() in finding["message"]
    assert "drivers" not in {one["code"] for one in home.json("doctor", "pocl", OCL_ICD_VENDORS=str(own))["findings"]}


def test_copies_and_links_of_a_library_are_one_driver(tmp_path: Path) -> None:
    """So are the drivers of two environments with the same wheel."""
    content = Path(sys.executable).read_bytes()
    for name, size in (("one", 0), ("copy", 0), ("another", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "libpocl.so.2.10.0").write_bytes(content + bytes(size))
        (folder / "libpocl.so.2").symlink_to("libpocl.so.2.10.0")
        vendors = tmp_path / "vendors"
        vendors.mkdir(exist_ok=True)
        (vendors / f"{name}.icd").write_text(f"{folder}/libpocl.so.2\n")
        (vendors / f"{name}-2.icd").write_text(f"{folder}/libpocl.so.2.10.0\n")
        environment = Environment({"OCL_ICD_VENDORS": str(vendors)}, home=tmp_path)
        libraries = driver_libraries(environment, "PoCL")
        assert len(libraries) == (2 if name == "another" else 1)
        assert only_library(environment, "PoCL") == (None if name == "another" else libraries[0])


@pytest.mark.parametrize(("library", "known"), [("libpocl.so", True), ("libamdocl64.so", False)])
def test_drivers_that_pyopencl_keeps_no_binaries_of_do_not_hide_the_others(
    tmp_path: Path, library: str, *, known: bool
) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / library).write_bytes(Path(sys.executable).read_bytes() + bytes(number))
        (tmp_path / f"{number}.icd").write_text(f"{tmp_path / str(number) / library}\n")
    environment = Environment({"OCL_ICD_VENDORS": str(tmp_path)}, home=tmp_path)
    assert (BinaryPortability().facts(environment)["OpenCL drivers"] is not None) is known


@pytest.mark.real
def test_a_libopencl_that_is_a_driver_is_the_only_one(tmp_path: Path) -> None:
    """A module's PoCL may be built without a loader; the wheel's stands in the place of such a one."""
    pocl = next(wheel().glob(".libs/libpocl*"))
    loader = tmp_path / "prefix" / "lib" / "libOpenCL.so.1"
    loader.parent.mkdir(parents=True)
    loader.symlink_to(pocl)
    variables = {"CONDA_PREFIX": str(tmp_path / "prefix"), "OCL_ICD_VENDORS": str(tmp_path / "none")}
    module = Environment(variables, home=tmp_path)
    assert driver_files(module, ("PoCL",)) == (str(loader),)
