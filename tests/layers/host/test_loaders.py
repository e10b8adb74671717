"""What each OpenCL loader finds: cachectl beside the loader itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.opencl_loaders import Case, RealLoader, differences, lay_out, make_cases, make_few_cases
from tiers import absent, needing

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.drivers import find_drivers
from cachectl.layers.host.loaders import find_library, find_loaders, run_path

if TYPE_CHECKING:
    from conftest import Driver

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def wheel_loader() -> RealLoader:
    """Return the loader in PyOpenCL's wheel, which PyOpenCL's extension loads."""
    spec = importlib.util.find_spec("pyopencl")
    package = Path(str(spec.origin if spec else None)).parent
    bundled = next(package.glob(".libs/libOpenCL*"), None)
    if bundled is None:
        absent("needs PyOpenCL's wheel: pip install pyopencl[pocl]")
    extension = next(package.glob("_cl*.so"))
    # PyOpenCL sets the variable when it is imported.
    return RealLoader((extension, bundled), (package.parent,), variables={"PYOPENCL_HOME": str(package)})


@pytest.fixture(scope="module")
def pocl(wheel_loader: RealLoader) -> Path:
    """Return PoCL of the wheel, which lies beside the loader: a second PoCL would crash the program."""
    return next(wheel_loader.libraries[-1].parent.glob("libpocl*"))


@pytest.fixture(scope="module")
def rusticl_library() -> Path:
    """Return another driver, that of Debian's ``mesa-opencl-icd``, which the linker finds by its name."""
    library = next(Path("/usr/lib").glob("*/libRusticlOpenCL.so.1"), None)
    return library or absent("needs another driver: apt-get install mesa-opencl-icd")


@pytest.fixture(scope="module")
def debian_loader() -> RealLoader:
    """Return ocl-icd of Debian's package ``ocl-icd-libopencl1``."""
    library = next(Path("/usr/lib").glob("*/libOpenCL.so.1"), None)
    return RealLoader((library or absent("needs ocl-icd: apt-get install ocl-icd-libopencl1"),))


@pytest.fixture(scope="module")
def khronos_loader(intel_driver: Driver) -> RealLoader:
    """Return the Khronos loader, which Intel's wheel contains; programs find it by ``LD_LIBRARY_PATH``."""
    folders = intel_driver.variables["LD_LIBRARY_PATH"]
    return RealLoader((Path(folders.split(":")[0], "libOpenCL.so.1"),), variables={"LD_LIBRARY_PATH": folders})


@pytest.fixture(scope="module")
def debian_pyopencl() -> Path:
    """Return the modules of Debian's ``python3-pyopencl``, in which PyOpenCL is linked with the system's loader.

    ``CACHECTL_TEST_DEBIAN`` names the folder into which the package is unpacked, if it is not installed.
    """
    modules = Path(os.environ.get("CACHECTL_TEST_DEBIAN") or "/", "usr/lib/python3/dist-packages")
    return modules if (modules / "pyopencl").is_dir() else absent("needs python3-pyopencl, unpacked or installed")


@pytest.fixture
def prefix_loader(debian_loader: RealLoader, tmp_path: Path, layout: Path) -> Iterator[RealLoader]:
    """Return ocl-icd of a prefix, as Spack and modules have it, with a folder there built into it."""
    # Debian's has room for 19 characters, which the path of an open folder needs.
    folder = os.open(layout, os.O_RDONLY)
    os.dup2(folder, 77, inheritable=True)
    os.close(folder)
    library = relocate(debian_loader.libraries[0], b"/etc/OpenCL/vendors", b"/dev/fd/77/vendors", tmp_path / "prefix")
    yield RealLoader((library,), prefix=tmp_path / "prefix", handles=(77,))
    os.close(77)


@pytest.fixture
def conda_loader(tmp_path: Path, layout: Path) -> RealLoader:
    """Return conda-forge's ocl-icd in a prefix, in which the package ``ocl-icd-system`` has linked a folder.

    ``CACHECTL_TEST_CONDA`` names its ``libOpenCL.so.1`` as it is in the package, with a placeholder for the prefix.
    """
    packed, prefix = os.environ.get("CACHECTL_TEST_CONDA"), tmp_path / "prefix"
    if not packed:
        pytest.skip("needs conda-forge's ocl-icd: CACHECTL_TEST_CONDA names its libOpenCL.so.1")
    vendors = prefix / "etc" / "OpenCL" / "vendors"
    library = relocate(Path(packed), rb"/[^\0]*placehold[^\0]*/OpenCL/vendors", os.fsencode(vendors), prefix)
    (prefix / "conda-meta").mkdir()
    vendors.mkdir(parents=True)
    (vendors / "pocl.icd").symlink_to(layout / "pocl" / "pocl.icd")
    (vendors / "ocl-icd-system").symlink_to(layout / "other")
    return RealLoader((library,), prefix=prefix)


def relocate(library: Path, pattern: bytes, place: bytes, prefix: Path) -> Path:
    """Copy a loader into a prefix, with the folder that is built into it replaced as conda does."""
    content, count = re.subn(pattern, lambda found: place.ljust(len(found[0]), b"\0"), library.read_bytes())
    assert count == 1
    assert len(content) == library.stat().st_size
    moved = prefix / "lib" / "libOpenCL.so.1"
    moved.parent.mkdir(parents=True)
    moved.write_bytes(content)
    return moved


@pytest.fixture
def layout(pocl: Path, rusticl_library: Path, tmp_path: Path) -> Path:
    lay_out(tmp_path / "layout", pocl, rusticl_library)
    (tmp_path / "layout" / "vendors").symlink_to("both")
    return tmp_path / "layout"


def test_the_drivers_of_the_wheels_loader(wheel_loader: RealLoader, pocl: Path, tmp_path: Path) -> None:
    cases = make_few_cases(tmp_path, pocl)
    assert differences(wheel_loader, cases, (pocl,), tmp_path) == {}


@pytest.mark.parametrize(
    "name", needing("wheel_loader", "debian_loader", "khronos_loader", "prefix_loader", "conda_loader")
)
def test_the_drivers_of_every_loader(
    request: pytest.FixtureRequest, name: str, layout: Path, pocl: Path, rusticl_library: Path
) -> None:
    loader: RealLoader = request.getfixturevalue(name)
    cases = make_cases(layout, pocl, rusticl_library)
    assert differences(loader, cases, (pocl, rusticl_library), layout.parent) == {}


def test_the_wheels_loader_does_not_read_the_prefix_of_conda(
    wheel_loader: RealLoader, pocl: Path, layout: Path, tmp_path: Path
) -> None:
    """So PyOpenCL installed with pip finds conda's drivers only if a variable names their folder."""
    vendors = tmp_path / "prefix" / "etc" / "OpenCL" / "vendors"
    vendors.parent.mkdir(parents=True)
    vendors.symlink_to(layout / "other")
    loader, activated = replace(wheel_loader, prefix=tmp_path / "prefix"), {"CONDA_PREFIX": str(tmp_path / "prefix")}
    cases = [
        Case("activated", activated, tmp_path),
        Case("named", {**activated, "OCL_ICD_VENDORS": str(vendors)}, tmp_path),
    ]
    assert differences(loader, cases, (pocl,), tmp_path) == {}
    found = [[one.file for one in find_drivers(loader.environment(case, tmp_path))] for case in cases]
    assert [str(vendors / "other.icd") in files for files in found] == [False, True]


def test_the_folders_that_a_library_names_are_read(wheel_loader: RealLoader) -> None:
    extension, bundled = wheel_loader.libraries
    assert run_path(str(extension)) == (str(bundled.parent),)
    assert find_library(bundled.name, Environment({}, home=Path("/")), run_path(str(extension))) == str(bundled)


def test_pyopencl_of_a_package_uses_the_loader_that_the_linker_finds(
    debian_pyopencl: Path, debian_loader: RealLoader, khronos_loader: RealLoader
) -> None:
    extension = next(debian_pyopencl.glob("pyopencl/_cl*.so"))
    for expected in (debian_loader, khronos_loader):
        environment = Environment(expected.variables, home=Path("/"), site=(debian_pyopencl,), prefix=Path("/usr"))
        (loader,) = find_loaders(environment)
        linked = subprocess.run(["ldd", extension], env=expected.variables, capture_output=True, text=True, check=True)
        assert loader.file is not None
        assert re.search(rf"libOpenCL\.so\.1 => {re.escape(loader.file)} ", linked.stdout)
        assert os.path.samefile(loader.file, expected.libraries[0])
        assert loader.is_ocl_icd is (expected is debian_loader)
