"""Registered OpenCL drivers: in prefixes, under their makers' names, and in reports."""

import sys
from pathlib import Path
from typing import Any

import pytest
from homes import Driver, Home, wheel
from support.layers import register_driver, write
from tiers import real, thorough_only

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.drivers import driver_libraries, find_drivers, opencl_drivers
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries


def driver_files(environment: Environment, maker: str) -> tuple[str, ...]:
    """Return the files that register the drivers of a maker."""
    return tuple(file for by, _, file in find_drivers(environment) if by == maker)


@pytest.mark.parametrize("of_this_python", [True, False])
def test_the_activated_prefix_counts_in_addition_to_the_systems_folder(tmp_path: Path, *, of_this_python: bool) -> None:
    """Neither loader's drivers may hide the other's."""
    plain = opencl_drivers(Environment({}, home=tmp_path))
    vendors = tmp_path / "conda/etc/OpenCL/vendors"
    file = register_driver(vendors, "libnvidia-opencl.so.1")
    (vendors / "linked.icd").symlink_to(file)
    # Files that the package ``ocl-icd-system`` links count too; circular links end.
    folder = register_driver(tmp_path / "system", "libintelocl.so")
    (vendors / "ocl-icd-system").symlink_to(tmp_path / "system")
    (tmp_path / "system/again").symlink_to(tmp_path / "system")
    prefix = tmp_path / "conda" if of_this_python else None
    conda = Environment({"CONDA_PREFIX": str(tmp_path / "conda")}, home=tmp_path, prefix=prefix)
    # If this Python's loader is unknown, the system's counts too.
    assert set(opencl_drivers(conda)) == {*plain, "NVIDIA", "Intel CPU"}
    assert driver_libraries(conda, "NVIDIA") == (str(vendors / "libnvidia-opencl.so.1"),)
    assert driver_files(conda, "NVIDIA") == (file, str(vendors / "linked.icd"))
    assert driver_files(conda, "Intel CPU") == (f"{vendors}/ocl-icd-system/{Path(folder).name}",)
    for named in ("", "/nowhere"):
        assert opencl_drivers(Environment({"CONDA_PREFIX": named}, home=tmp_path)) == plain


def test_makers_are_named_only_by_the_library(tmp_path: Path) -> None:
    """Not by its folder, and on another platform without reading the library."""
    vendors = tmp_path / "envs/pocl"
    icd = register_driver(vendors, "libintelocl.so")
    assert opencl_drivers(Environment({"OCL_ICD_VENDORS": icd}, home=tmp_path)) == ("Intel CPU",)
    (tmp_path / "nvidia.icd").write_text("nvopencl64.dll\n")
    windows = Environment({"OCL_ICD_VENDORS": str(tmp_path)}, home=tmp_path, platform="win32")
    assert opencl_drivers(windows) == ("nvopencl64.dll",)


@real
@pytest.mark.parametrize("how", ["VIRTUAL_ENV", "CONDA_PREFIX", "--python"])
def test_pyopencl_of_another_python_counts(tmp_path: Path, how: str) -> None:
    """For example if cachectl has an environment of its own."""
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "pyopencl").symlink_to(wheel())
    variables = {} if how == "--python" else {how: str(tmp_path)}
    named = (tmp_path / "bin/python",) if how == "--python" else ()
    # The folder of the variable replaces the system's, not the one in PyOpenCL's wheel.
    environment = Environment({"OCL_ICD_VENDORS": str(tmp_path), **variables}, home=tmp_path, python_paths=named)
    assert driver_files(environment, "PoCL") == (str(packages / "pyopencl/.libs/pocl.icd"),)


@real
@pytest.mark.environment
@pytest.mark.usefixtures("wheel_pocl")
def test_labels_of_several_drivers(home: Home, debian_pocl: Driver, tmp_path: Path, other: Home) -> None:
    """Versions come from the bytes of each library; an entry's LLVM identifies the library that built it."""
    home.python("kernels.py 2", **debian_pocl)
    library = Path(Path(debian_pocl["OCL_ICD_VENDORS"]).read_text().strip()).resolve()
    # With this, the wheel's loader finds Debian's PoCL in addition to its own.
    both: dict[str, Any] = {"OCL_ICD_VENDORS": str(tmp_path / "vendors")}
    write(tmp_path / "vendors/pocl.icd", f"{library}\n")
    for name, variables in (("one", debian_pocl), ("several", both)):
        store = str(tmp_path / name)
        home.cachectl("push", store, "pocl", **variables)
        (key,) = home.json("store ls", store)["keys"]
        label = {fact: key["fingerprint"][fact] for fact in ("PoCL", "PoCL library")}
        only = {"PoCL": "3.1+debian with LLVM 15.0.6", "PoCL library": library.name}
        assert label == only or name == "several"
        # The name of the wheel's library contains a digest.
        assert all({only[fact]} < {*label[fact].split("; ")} for fact in label) == (name == "several")
        # Entries that cannot be hit are not pulled.
        for here, outlook in (({}, [] if name == "one" else [False]), (both, [True])):
            pulled = other.json("pull", store, "pocl", "--trust", "--dry-run", **here)["layers"]
            assert [one["hits"] for layer in pulled for one in layer["outlook"]] == outlook
    # The same driver alone hits, and the wheel's does not.
    (pulled,) = other.json("pull", str(tmp_path / "one"), "pocl", "--trust", **debian_pocl)["layers"]
    assert [one["hits"] for one in pulled["outlook"]] == [True]
    programs = {path: path.stat().st_mtime_ns for path in other.path.rglob("program.bc")}
    for variables, built in ((debian_pocl, 0), ({}, 2)):
        other.python("kernels.py 2", **variables)
        assert len(set(other.path.rglob("program.bc"))) == len(programs) + built
    assert {path: path.stat().st_mtime_ns for path in programs} == programs


@pytest.mark.parametrize(
    ("llvm", "driver"), [("15.0.7", ("3.1 with LLVM 15.0.6", "b")), ("9.0.1", (None, None)), (None, ("both", "a; b"))]
)
def test_an_entry_is_of_the_pocl_with_its_llvm(llvm: str | None, driver: tuple[str | None, str | None]) -> None:
    portability = PoclKernels.about.portability
    assert portability is not None
    both = "3.0 with LLVM 14.0.6; 3.1 with LLVM 15.0.6"
    facts = portability.of_entry({} if llvm is None else {"llvm": llvm}, {"PoCL": both, "PoCL library": "a; b"})
    assert (facts["PoCL"], facts["PoCL library"]) == (both if driver[0] == "both" else driver[0], driver[1])


@pytest.mark.parametrize(("name", "maker"), [("libpocl.so.2", "PoCL"), ("libamdocl64.so", "AMD")])
def test_several_drivers_of_one_maker_are_told_from_copies_and_links(tmp_path: Path, name: str, maker: str) -> None:
    """Two environments with the same wheel have one driver. PyOpenCL keeps no binaries of PoCL."""
    vendors = tmp_path / "vendors"
    for folder, size in (("one", 0), ("copy", 0), ("another", 1)):
        file = write(tmp_path / folder / f"{name}.1.0", Path(sys.executable).read_bytes() + bytes(size))
        file.with_name(name).symlink_to(file)
        write(vendors / f"{folder}.icd", f"{file.with_name(name)}\n")
        write(vendors / f"{folder}-2.icd", f"{file}\n")
        environment = Environment({"OCL_ICD_VENDORS": str(vendors)}, home=tmp_path)
        libraries = driver_libraries(environment, maker)
        several = folder == "another"
        assert len(libraries) == 1 + several
        portability = PyOpenCLBinaries.about.portability
        assert portability is not None
        assert (portability.facts(environment)["OpenCL drivers"] is None) is (several and maker == "AMD")
        findings = [finding for finding in PoclKernels(environment).diagnose() if finding.code == "drivers"]
        assert len(findings) == (several and maker == "PoCL")
        assert all(library in finding.message for finding in findings for library in libraries)


@real
@thorough_only
def test_a_libopencl_that_is_a_driver_is_the_only_one(tmp_path: Path) -> None:
    """A PoCL of environment modules may be built without a loader; here the wheel's replaces such a one."""
    pocl = next(wheel().glob(".libs/libpocl*"))
    loader = tmp_path / "prefix/lib/libOpenCL.so.1"
    loader.parent.mkdir(parents=True)
    loader.symlink_to(pocl)
    variables = {"CONDA_PREFIX": f"{tmp_path}/prefix", "OCL_ICD_VENDORS": f"{tmp_path}/none"}
    assert driver_files(Environment(variables, home=tmp_path), "PoCL") == (str(loader),)
