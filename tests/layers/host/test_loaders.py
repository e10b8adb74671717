"""What each OpenCL loader finds: cachectl beside the loader itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.opencl_loaders import Case, RealLoader, differences, lay_out, make_cases, make_few_cases
from tiers import absent, needing

from cachectl.layers.base.environment import Environment
from cachectl.layers.formats.elf import RPATH, read_elf
from cachectl.layers.host.drivers import find_drivers, find_library, find_loaders, read_linked

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
    environment = Environment({}, home=Path("/"))
    assert find_library(bundled.name, environment) is None
    assert find_library(bundled.name, environment, read_linked(str(extension))) == str(bundled)


def linked_by_the_linker(library: Path, name: str, variables: Mapping[str, str]) -> str:
    """Return the path that the dynamic linker finds for a library which another one needs."""
    done = subprocess.run(["ldd", library], env=variables, capture_output=True, text=True, check=True)
    found = re.search(rf"{re.escape(name)} => (\S+) ", done.stdout)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("tag", [15, 29])
def test_folders_of_either_tag_are_read_in_the_linkers_order(
    wheel_loader: RealLoader, tmp_path: Path, tag: int
) -> None:
    """``LD_LIBRARY_PATH`` counts more than ``DT_RUNPATH``, and less than ``DT_RPATH``."""
    extension, bundled = wheel_loader.libraries
    elf = read_elf(extension.read_bytes())
    assert elf is not None
    (dynamic,) = (section for section in elf.sections if section.name == ".dynamic")
    content = elf.content(dynamic)
    (at,) = (at for at in range(0, len(content), 16) if content[at : at + 8] == RPATH.to_bytes(8, "little"))
    begin = dynamic.offset + at
    moved, listed = tmp_path / "_cl.so", tmp_path / "listed"
    moved.write_bytes(elf.data[:begin] + tag.to_bytes(8, "little") + elf.data[begin + 8 :])
    for folder in (tmp_path / ".libs", listed):
        folder.mkdir()
        (folder / bundled.name).symlink_to(bundled)
    variables = {"LD_LIBRARY_PATH": str(listed)}
    found = find_library(bundled.name, Environment(variables, home=tmp_path), read_linked(str(moved)))
    assert found == linked_by_the_linker(moved, bundled.name, variables)


#: Prints the path of each library that the dynamic linker opens by one of the names, or nothing. Each has a child of
#: its own, because the linker also knows what it has opened by the name in the library.
OPENED = """
import ctypes, os, sys

class Place(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("name", ctypes.c_char_p)]

for name in sys.argv[1:]:
    if not os.fork():
        place, path = ctypes.POINTER(Place)(), b""
        try:
            opened = ctypes.CDLL(name)
            assert ctypes.CDLL(None).dlinfo(ctypes.c_void_p(opened._handle), 2, ctypes.byref(place)) == 0
            path = place.contents.name
        except OSError:
            pass
        os.write(1, path + b"\\n")
        os._exit(0)
    os.wait()
"""


def test_a_library_is_found_by_its_name_as_dlopen_finds_it(tmp_path: Path) -> None:
    """Names that the linker's list has, that lie only in its folders, that lie elsewhere, and of another machine."""
    folders = map(Path, (f"/usr/lib/{sys.implementation._multiarch}", "/usr/lib64", "/usr/lib32", "/usr/lib"))
    inside = [path for folder in folders for stem in ("libz", "libcrypt") for path in folder.glob(f"{stem}.so.*")]
    # The list has only the links, by the names that programs ask for.
    assert any(path.is_symlink() for path in inside)
    names = {path.name for path in inside} | {"libnobody.so.1", "ld-linux-x86-64.so.2", "ld-linux.so.2"}
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = bytearray(inside[0].read_bytes())
        # The first folder has a library of another machine, which the linker passes over.
        content[18:20] = content[18:20] if number == 2 else b"\xf7\0"
        (folder / "libforeign.so.1").write_bytes(content)
    (tmp_path / "1" / "libalone.so.1").write_bytes((tmp_path / "1" / "libforeign.so.1").read_bytes())
    asked = sorted({*names, "libforeign.so.1", "libalone.so.1"})
    variables = {"LD_LIBRARY_PATH": f"{tmp_path / '1'}:{tmp_path / '2'}"}
    command = [sys.executable, "-c", OPENED, *asked]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    opened = {name: path and os.path.realpath(path) for name, path in zip(asked, done.stdout.split("\n"), strict=False)}
    environment = Environment(variables, home=tmp_path)
    found = {name: os.path.realpath(path) if (path := find_library(name, environment)) else "" for name in asked}
    assert found == opened


def test_a_driver_that_debian_registers_by_name_is_found(debian_pocl: Driver, tmp_path: Path) -> None:
    """``pocl.icd`` of ``pocl-opencl-icd`` names a file of the linker's folders, which is not in the linker's list."""
    library = Path(debian_pocl.variables["OCL_ICD_VENDORS"]).read_text().strip()
    name = Path(library).resolve().name
    (tmp_path / "pocl.icd").write_text(name)
    done = subprocess.run([sys.executable, "-c", OPENED, name], capture_output=True, text=True, check=True)
    environment = Environment({"OCL_ICD_VENDORS": str(tmp_path / "pocl.icd")}, home=tmp_path)
    (driver,) = find_drivers(environment)
    assert (driver.maker, os.path.realpath(driver.library)) == ("PoCL", os.path.realpath(done.stdout.strip()))


def test_pyopencl_of_a_package_uses_the_loader_that_the_linker_finds(
    debian_pyopencl: Path, debian_loader: RealLoader, khronos_loader: RealLoader
) -> None:
    extension = next(debian_pyopencl.glob("pyopencl/_cl*.so"))
    for expected in (debian_loader, khronos_loader):
        environment = Environment(expected.variables, home=Path("/"), site=(debian_pyopencl,), prefix=Path("/usr"))
        (loader,) = find_loaders(environment)
        assert loader.file is not None
        assert loader.file == linked_by_the_linker(extension, "libOpenCL.so.1", expected.variables)
        assert os.path.samefile(loader.file, expected.libraries[0])
        assert loader.is_ocl_icd is (expected is debian_loader)
