"""What each OpenCL loader finds: cachectl compared with the loader itself, and with the dynamic linker."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from homes import Driver, wheel
from support.layers import python, write
from tiers import absent, needing, thorough_only

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.root import Condition
from cachectl.layers.formats.elf import RPATH, read_elf
from cachectl.layers.host.drivers import find_drivers, find_library, find_loaders, read_linked
from cachectl.layers.pocl import PoclKernels

pytestmark = pytest.mark.real

#: Variables and the working directory of a program.
Case = tuple[Mapping[str, str], Path]

#: Prints, as a line of JSON for each environment on standard input, the libraries of the drivers whose platforms the
#: loader finds. Each runs in a child process, because a loader searches only once.
PROBE = """
import ctypes, json, os, sys

class Place(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "name", "at"))]

def find_platforms():
    for library in sys.argv[1:]:
        loader = ctypes.CDLL(library)
    count = ctypes.c_uint()
    loader.clGetPlatformIDs(0, None, ctypes.byref(count))
    platforms = (ctypes.c_void_p * count.value)()
    loader.clGetPlatformIDs(count, platforms, None)
    for platform in platforms:
        # A platform begins with the address of its driver's functions, of which clGetPlatformIDs is the first.
        functions = ctypes.cast(platform, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        place = Place()
        ctypes.CDLL(None).dladdr(ctypes.c_void_p(functions[0]), ctypes.byref(place))
        yield os.path.realpath(os.fsdecode(place.file))

for number, (variables, folder) in enumerate(json.load(sys.stdin)):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.environ.update(variables)
        os.chdir(folder)
        os.write(1, f"{json.dumps([number, sorted(set(find_platforms()))])}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


@dataclass(frozen=True)
class RealLoader:
    """A loader's library after those to load first, the Python that has it, and what its programs need."""

    libraries: tuple[Path, ...]
    site: tuple[Path, ...] = ()
    prefix: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    handles: tuple[int, ...] = ()

    def check(self, cases: list[Case], known: tuple[Path, ...], home: Path) -> None:
        """Compare the drivers that cachectl finds in each case with the platforms that the loader finds.

        Drivers other than the known ones, such as the system's, may have no platform on this machine.
        """
        printed = subprocess.check_output(
            python(PROBE, *self.libraries),
            env={**self.variables, "HOME": str(home), "PATH": os.environ["PATH"]},
            input=json.dumps(cases, default=str),
            text=True,
            pass_fds=self.handles,
        )
        answers = dict(json.loads(line) for line in printed.splitlines() if line.startswith("["))
        expected, differing = {os.path.realpath(library) for library in known}, []
        for number, (named, cwd) in enumerate(cases):
            # The home has no caches.
            variables = {**self.variables, "HOME": str(home / "new"), **named}
            environment = Environment(variables, home=home / "new", cwd=cwd, site=self.site, prefix=self.prefix)
            drivers = {os.path.realpath(library) for _, library, _ in find_drivers(environment)}
            real = answers.get(number)
            state = PoclKernels(environment).state()
            has_pocl = any(os.path.basename(library).startswith("libpocl") for library in real or ())
            # It must say whether PoCL was found, and by which file.
            told = (Condition.ENABLED if has_pocl else Condition.ABSENT, has_pocl)
            is_right = real is not None and set(real) <= drivers and not drivers & expected - set(real)
            if not is_right or (state.condition, bool(state.drivers)) != told:
                differing.append((named, cwd, real, drivers, state))
        assert differing == []


def lay_out(folder: Path, pocl: Path, other: Path) -> None:
    """Write ICD files of two drivers in many forms, each in its own folder."""
    forms = {
        "pocl/pocl.icd": f"{pocl}\n",
        "other/other.icd": f"{other}\n",
        "both/pocl.icd": f"{pocl}\n",
        "both/other.icd": f"{other}\n",
        "no line end/pocl.icd": str(pocl),
        "two lines/pocl.icd": f"{pocl}\n{other}\n",
        "empty line first/pocl.icd": f"\n{pocl}\n",
        "two line ends/pocl.icd": f"{pocl}\n\n",
        "windows line end/pocl.icd": f"{pocl}\r\n",
        "blank behind/pocl.icd": f"{pocl} \n",
        "zero byte/pocl.icd": f"{pocl}\0{other}\n",
        "empty file/pocl.icd": "",
        "not there/pocl.icd": "/nowhere/libpocl.so\nlibpocl-of-nobody.so\n",
        "by name/other.icd": f"{other.name}\n",
        "by unknown name/pocl.icd": "libpocl-of-nobody.so.2\n",
        "relative/pocl.icd": f"./libraries/{pocl.name}\n",
        "upper case/POCL.ICD": f"{pocl}\n",
        "no stem/.icd": f"{pocl}\n",
        "hidden/.pocl.icd": f"{pocl}\n",
        "other suffix/pocl.icd.off": f"{pocl}\n",
        "within/folder/pocl.icd": f"{pocl}\n",
    }
    for name, content in forms.items():
        write(folder / name, content)
    (folder / "a folder/pocl.icd").mkdir(parents=True)
    for name, target in (("linked/pocl.icd", "pocl/pocl.icd"), ("linked folder/system", "both")):
        (folder / name).parent.mkdir()
        (folder / name).symlink_to(folder / target)
    (folder / "libraries").symlink_to(pocl.parent)
    (folder / "vendors").symlink_to("both")
    (folder / "void").mkdir()


#: Ways to name drivers: values of OCL_ICD_VENDORS (V), OPENCL_VENDOR_PATH (P) and OCL_ICD_FILENAMES (F), and the
#: working directory (in). "@" stands for the folder of :func:`lay_out`, POCL and OTHER for the libraries.
WAYS = """
V= | V=@pocl | V=@void | V=@nowhere | V=@nowhere.icd | V=@pocl/pocl.icd | V=@two lines/pocl.icd
V=@other suffix/pocl.icd.off | V=@pocl:@other | V=both | V=.;in=both | V=pocl/pocl.icd | V=pocl.icd;in=pocl | V=pocl.icd
V=pocl.icd;P=@pocl | V=pocl.icd;P=@not there;in=pocl | V=.icd;in=no stem | V=POCL | V=OTHER.name
V=POCL.name;in=libraries | P= | P=@pocl | P=both | P=@pocl/pocl.icd | V=@other;P=@pocl | V=;P=@pocl | V=@nowhere;P=@pocl
F=POCL | V=@void;F=POCL:OTHER | V=@void;F=::POCL::OTHER.name: | V=@void;F=@pocl/pocl.icd | V=;F=libraries/POCL.name
V=@other;F=POCL | P=@other;F=POCL | V=@other;P=@both;F=POCL
"""
_SHORT = {"V": "OCL_ICD_VENDORS", "P": "OPENCL_VENDOR_PATH", "F": "OCL_ICD_FILENAMES"}


def make_cases(folder: Path, pocl: Path, other: Path) -> list[Case]:
    """Return environments that name what :func:`lay_out` wrote in every way that loaders know."""
    libraries = {"POCL.name": pocl.name, "OTHER.name": other.name, "POCL": f"{pocl}", "OTHER": f"{other}"}
    places = {**libraries, "@": f"{folder}/"}
    forms = sorted(item.name for item in folder.iterdir() if any(item.iterdir()) and item.name != "libraries")
    cases: list[Case] = []
    # The first names nothing.
    for way in (*map(str.strip, WAYS.replace("\n", "|").split("|")), *(f"V=@{form}" for form in forms)):
        filled = re.sub("|".join(places), lambda match: places[match[0]], way)
        parts = dict(part.split("=", 1) for part in filled.split(";") if part)
        cwd = folder / parts.pop("in", "")
        cases.append(({_SHORT[name]: value for name, value in parts.items()}, cwd))
    return cases


@pytest.fixture(scope="module")
def wheel_loader() -> RealLoader:
    """Return the loader in PyOpenCL's wheel, which PyOpenCL's extension loads."""
    package = wheel()
    bundled = next(package.glob(".libs/libOpenCL*"), None)
    if bundled is None:
        absent("needs PyOpenCL's wheel: pip install pyopencl[pocl]")
    extension = next(package.glob("_cl*.so"))
    # PyOpenCL sets the variable when it is imported.
    return RealLoader((extension, bundled), (package.parent,), variables={"PYOPENCL_HOME": str(package)})


@pytest.fixture(scope="module")
def pocl(wheel_loader: RealLoader) -> Path:
    """Return the wheel's PoCL, which is next to the loader: a second PoCL would crash the program."""
    return next(wheel_loader.libraries[-1].parent.glob("libpocl*"))


@pytest.fixture(scope="module")
def rusticl_library() -> Path:
    """Return another driver, from Debian's ``mesa-opencl-icd``, which the linker finds by its name."""
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
    folders = intel_driver["LD_LIBRARY_PATH"]
    return RealLoader((Path(folders.split(":")[0], "libOpenCL.so.1"),), variables={"LD_LIBRARY_PATH": folders})


@pytest.fixture(scope="module")
def debian_pyopencl() -> Path:
    """Return the modules of Debian's ``python3-pyopencl``, in which PyOpenCL is linked to the system's loader.

    ``CACHECTL_TEST_DEBIAN`` names the folder into which the package is unpacked, if it is not installed.
    """
    modules = Path(os.environ.get("CACHECTL_TEST_DEBIAN") or "/", "usr/lib/python3/dist-packages")
    return modules if (modules / "pyopencl").is_dir() else absent("needs python3-pyopencl, unpacked or installed")


@pytest.fixture
def prefix_loader(debian_loader: RealLoader, tmp_path: Path, layout: Path) -> Iterator[RealLoader]:
    """Return an ocl-icd in a prefix, as Spack and modules install it, whose built-in folder is there too."""
    # Debian's has room for 19 characters, enough for the path of an open folder.
    folder = os.open(layout, os.O_RDONLY)
    os.dup2(folder, 77, inheritable=True)
    os.close(folder)
    before, built_in, after = debian_loader.libraries[0].read_bytes().partition(b"/etc/OpenCL/vendors\0")
    assert built_in
    library = write(tmp_path / "prefix/lib/libOpenCL.so.1", before + b"/dev/fd/77/vendors\0\0" + after)
    yield RealLoader((library,), prefix=tmp_path / "prefix", handles=(77,))
    os.close(77)


@pytest.fixture
def layout(pocl: Path, rusticl_library: Path, tmp_path: Path) -> Path:
    lay_out(tmp_path / "layout", pocl, rusticl_library)
    return tmp_path / "layout"


@thorough_only
def test_the_drivers_of_the_wheels_loader(wheel_loader: RealLoader, pocl: Path, tmp_path: Path) -> None:
    """With a single driver, also by a link to it."""
    lay_out(tmp_path / "layout", pocl, pocl)
    wheel_loader.check(make_cases(tmp_path / "layout", pocl, pocl), (pocl,), tmp_path)


@pytest.mark.parametrize("name", needing("wheel_loader", "debian_loader", "khronos_loader", "prefix_loader"))
def test_every_loader(
    request: pytest.FixtureRequest, name: str, layout: Path, pocl: Path, rusticl_library: Path
) -> None:
    loader: RealLoader = request.getfixturevalue(name)
    loader.check(make_cases(layout, pocl, rusticl_library), (pocl, rusticl_library), layout.parent)


def linked_by_the_linker(library: Path, name: str, variables: Mapping[str, str]) -> str:
    """Return the path that the dynamic linker finds for a library that another one needs."""
    linked = subprocess.check_output(["ldd", library], env=variables, text=True)
    (path,) = re.findall(rf"{re.escape(name)} => (\S+) ", linked)
    return str(path)


@pytest.mark.parametrize("tag", [15, 29])
def test_folders_of_either_tag_are_in_the_linkers_order(wheel_loader: RealLoader, tmp_path: Path, tag: int) -> None:
    """``LD_LIBRARY_PATH`` takes precedence over ``DT_RUNPATH``, but not over ``DT_RPATH``."""
    extension, bundled = wheel_loader.libraries
    elf = read_elf(extension.read_bytes())
    assert elf is not None
    (dynamic,) = (section for section in elf.sections if section.name == ".dynamic")
    content = elf.content(dynamic)
    (at,) = (at for at in range(0, len(content), 16) if content[at : at + 8] == RPATH.to_bytes(8, "little"))
    begin = dynamic.offset + at
    listed = tmp_path / "listed"
    moved = write(tmp_path / "_cl.so", elf.data[:begin] + tag.to_bytes(8, "little") + elf.data[begin + 8 :])
    for folder in (tmp_path / ".libs", listed):
        folder.mkdir()
        (folder / bundled.name).symlink_to(bundled)
    variables = {"LD_LIBRARY_PATH": str(listed)}
    found = find_library(bundled.name, Environment(variables, home=tmp_path), read_linked(str(moved))[1])
    assert found == linked_by_the_linker(moved, bundled.name, variables)


#: Prints the path of the library that the dynamic linker opens for each name, or an empty line. Each is opened in a
#: child process, because the linker also finds open libraries by the names in them.
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
    """Names in the linker's list, only in its folders, elsewhere, and of libraries for another architecture."""
    folders = map(Path, (f"/usr/lib/{sys.implementation._multiarch}", "/usr/lib64", "/usr/lib32", "/usr/lib"))
    inside = [path for folder in folders for stem in ("libz", "libcrypt") for path in folder.glob(f"{stem}.so.*")]
    # The list only has the links, whose names programs use.
    assert any(path.is_symlink() for path in inside)
    names = {path.name for path in inside} | {"libnobody.so.1", "ld-linux-x86-64.so.2", "ld-linux.so.2"}
    content = inside[0].read_bytes()
    # The linker ignores a library for another architecture.
    foreign = content[:18] + b"\xf7\0" + content[20:]
    for name, data in (("1/libforeign.so.1", foreign), ("1/libalone.so.1", foreign), ("2/libforeign.so.1", content)):
        write(tmp_path / name, data)
    asked = sorted({*names, "libforeign.so.1", "libalone.so.1"})
    variables = {"LD_LIBRARY_PATH": f"{tmp_path}/1:{tmp_path}/2"}
    opened = subprocess.check_output(python(OPENED, *asked), env=variables, text=True).splitlines()
    environment = Environment(variables, home=tmp_path)
    found = [find_library(name, environment) or "" for name in asked]
    assert [path and os.path.realpath(path) for path in found] == [path and os.path.realpath(path) for path in opened]


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
