"""Registered OpenCL drivers: the system's, those of a conda prefix, and those of PyOpenCL's wheel."""

from __future__ import annotations

import ctypes.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cachectl
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Condition
from cachectl.layers.host.drivers import driver_libraries, opencl_drivers
from cachectl.layers.pocl import PoclKernels

if TYPE_CHECKING:
    from conftest import Driver
    from homes import Home

#: What the OpenCL loader finds: the names of the platforms and how many devices each has, as JSON.
LOADER = """
import ctypes, json, sys
opencl = ctypes.CDLL(sys.argv[1])
count = ctypes.c_uint()
opencl.clGetPlatformIDs(0, None, ctypes.byref(count))
platforms = (ctypes.c_void_p * count.value)()
opencl.clGetPlatformIDs(count, platforms, None)
found = {}
for platform in platforms:
    name, devices = ctypes.create_string_buffer(256), ctypes.c_uint()
    opencl.clGetPlatformInfo(ctypes.c_void_p(platform), 0x0902, ctypes.c_size_t(256), name, None)
    opencl.clGetDeviceIDs(ctypes.c_void_p(platform), ctypes.c_uint64(0xFFFFFFFF), 0, None, ctypes.byref(devices))
    found[name.value.decode()] = devices.value
print(json.dumps(found))
"""


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


@pytest.mark.real
def test_a_driver_that_the_loader_finds_in_a_conda_prefix_is_registered(home: Home, debian_pocl: Driver) -> None:
    loader = ctypes.util.find_library("OpenCL")
    if loader is None:
        pytest.skip("needs an OpenCL loader: apt-get install ocl-icd-libopencl1")
    prefix = home.path / "envs" / "of mine"
    vendors = lay_out(prefix, debian_pocl)
    # Conda-forge's loader is the same program, built to read the folder of its prefix.
    done = home.run(sys.executable, "-c", LOADER, loader, OCL_ICD_VENDORS=f"{vendors}/")
    assert json.loads(done.stdout.splitlines()[-1]) == {"Portable Computing Language": 1}
    variables = {"HOME": str(home.path / "new")}
    for environment in (
        Environment({**variables, "CONDA_PREFIX": str(prefix)}, home=home.path),
        Environment(variables, home=home.path, prefix=prefix),
    ):
        assert driver_libraries(environment, "PoCL")[-1] == str(prefix / "lib" / "libpocl.so.2")
        assert PoclKernels(environment).state().condition is Condition.ENABLED


@pytest.mark.real
def test_report_sees_a_driver_in_the_prefix_of_the_python_it_runs_on(home: Home, debian_pocl: Driver) -> None:
    prefix = home.path / "prefix"
    home.run(sys.executable, "-m", "venv", "--without-pip", str(prefix))
    modules = home.path / "modules"
    modules.mkdir()
    (modules / "cachectl").symlink_to(Path(cachectl.__file__).parent)

    def state() -> str:
        python = str(prefix / "bin" / "python")
        done = home.run(python, "-m", "cachectl", "report", "pocl", "--json", PYTHONPATH=str(modules))
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
    vendors.mkdir(parents=True)
    (vendors / "nvidia.icd").write_text("libnvidia-opencl.so.1\n")
    conda = Environment({"CONDA_PREFIX": str(tmp_path / "conda")}, home=tmp_path, prefix=tmp_path / "conda")
    assert set(opencl_drivers(conda)) == {*opencl_drivers(plain), "NVIDIA"}
    assert driver_libraries(conda, "NVIDIA").count("libnvidia-opencl.so.1") == 1
    (vendors / "linked.icd").symlink_to(vendors / "nvidia.icd")
    assert driver_libraries(conda, "NVIDIA").count("libnvidia-opencl.so.1") == 1


@pytest.mark.parametrize("variable", ["OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"])
def test_a_folder_that_the_loader_is_pointed_at_replaces_the_prefixs(tmp_path: Path, variable: str) -> None:
    vendors = tmp_path / "conda" / "etc" / "OpenCL" / "vendors"
    vendors.mkdir(parents=True)
    (vendors / "pocl.icd").write_text("libpocl.so.2\n")
    (tmp_path / "named").mkdir()
    variables = {"CONDA_PREFIX": str(tmp_path / "conda"), variable: str(tmp_path / "named")}
    assert opencl_drivers(Environment(variables, home=tmp_path)) == ()


@pytest.mark.parametrize("prefix", ["", "/nowhere"])
def test_a_prefix_that_is_not_there_registers_nothing(tmp_path: Path, prefix: str) -> None:
    plain = opencl_drivers(Environment({}, home=tmp_path))
    assert opencl_drivers(Environment({"CONDA_PREFIX": prefix}, home=tmp_path)) == plain


def test_the_folder_of_a_library_does_not_name_its_maker(tmp_path: Path) -> None:
    icd = tmp_path / "intel.icd"
    icd.write_text("/opt/conda/envs/pocl/lib/libintelocl.so\n")
    assert opencl_drivers(Environment({"OCL_ICD_VENDORS": str(icd)}, home=tmp_path)) == ("Intel CPU",)


def test_here_gives_the_prefix_of_the_running_python() -> None:
    assert Environment.here().prefix == Path(sys.prefix)
