"""The OpenCL loaders that programs use, the drivers that they find, and the layers of drivers' caches.

Nothing is loaded and no OpenCL function is called: that would start every driver, and PoCL then creates folders and
leaks a file. A loader is a library ``libOpenCL``, whose bytes contain the names of the variables that it reads, and its
built-in folder of drivers. Sources: ``ocl_icd_loader.c`` of ocl-icd 2.3; ``loader/linux/icd_linux.c`` and
``loader/icd.c`` of the Khronos loader; ``recipe/`` of conda-forge's ``ocl-icd`` and ``ocl-icd-system``;
``scripts/build-ocl.sh`` of PyOpenCL.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from cachectl.layers.base.environment import Environment, answered_once
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import CAP, VARIABLE
from cachectl.layers.core.declarations import HERE, NOWHERE, EnvSwitch, Places
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.finding import RECOMPILES, WASTES, Finding, Hazard
from cachectl.layers.core.layer import Fault, Layer, faults_of, first_place, misread, off
from cachectl.layers.core.root import ABSENT, DISABLED, ENABLED, State
from cachectl.layers.disk.distributions import names_in
from cachectl.layers.disk.plain import read_installed, read_plain
from cachectl.layers.formats.elf import NEEDED, RPATH, RUN_PATH, machine_of, read_elf

#: Parts of the file names of driver libraries, and their makers.
_MAKERS = (
    ("pocl", "PoCL"),
    ("nvidia-opencl", "NVIDIA"),
    ("igdrcl", "Intel NEO"),
    ("intelocl", "Intel CPU"),
    ("rusticl", "Rusticl"),
    ("mesaopencl", "Mesa Clover"),
    ("amdocl", "AMD"),
)
_SUFFIX = ".icd"
_LOADER = "libOpenCL.so.1"
#: The folder of drivers that is built into loaders.
_SYSTEM = "/etc/OpenCL/vendors"
#: Variables that loaders may read, the last one only the loader of Khronos.
VARIABLES = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES")
#: The dynamic linker's list of libraries.
_LINKER_CACHE = "/etc/ld.so.cache"
#: The folders that dynamic linkers search last; on Debian those of the architecture come first.
_ARCHITECTURE = getattr(sys.implementation, "_multiarch", "")
_LIBRARIES = (*((f"lib/{_ARCHITECTURE}",) if _ARCHITECTURE else ()), "lib64", "lib")
_LINKER_FOLDERS = tuple(f"{top}/{name}" for name in _LIBRARIES for top in ("", "/usr"))
#: A number that ``atoll`` reads.
_NUMBER = regex(r"\s*[+-]?\d{1,18}", re.ASCII)
_PLAIN_NUMBER = regex(r"\s*[+-]?\d+\s*", re.ASCII)
#: The default limit in bytes, above which drivers drop entries; the part of a limit that counts as nearly full.
_LIMIT, _NEARLY = 1 << 30, 0.9

#: A driver: its maker, its library, and the ICD file that names it, or the library again if a variable names that.
Driver = tuple[str, str, str]
#: The folders in which a library searches the libraries that it needs: ``DT_RPATH``, which is also for those that these
#: need in turn, and ``DT_RUNPATH``, which makes the linker ignore the former.
Folders = tuple[tuple[str, ...], tuple[str, ...]]


class Loader(NamedTuple):
    """A loader: its library, ``None`` if it is only assumed, and what decides which drivers it finds.

    It reads the folder ``vendors`` unless one of ``variables`` names another place, by the rules of ocl-icd if
    ``is_ocl_icd``, else by those of Khronos. It always reads the folder ``also``; ``nested`` says whether it reads
    subfolders. A loader without ``vendors`` is itself a driver by the maker ``driver``.
    """

    file: str | None
    vendors: str | None = _SYSTEM
    variables: tuple[str, ...] = VARIABLES
    is_ocl_icd: bool = True
    linked: Folders = ((), ())
    also: str | None = None
    nested: bool = False
    driver: str | None = None


@answered_once
def find_drivers(environment: Environment) -> tuple[Driver, ...]:
    """Return the drivers that the loaders of this environment find, each once per file that registers it."""
    drivers: list[Driver] = []
    for loader in find_loaders(environment):
        if loader.driver is not None:
            drivers.append((loader.driver, str(loader.file), str(loader.file)))
            continue
        for name, file in _registered(loader, environment):
            if (library := find_library(name, environment, loader.linked)) is not None:
                # Only by the file name: a folder such as a conda environment may be called "pocl".
                base = os.path.basename(library)
                maker = next((maker for part, maker in _MAKERS if part in base.lower()), base)
                drivers.append((maker, library, file or library))
    return tuple({driver[1:]: driver for driver in drivers}.values())


def opencl_drivers(environment: Environment) -> tuple[str, ...]:
    """Return the makers of the drivers, each once."""
    return tuple(dict.fromkeys(maker for maker, *_ in find_drivers(environment)))


def driver_libraries(environment: Environment, maker: str) -> tuple[str, ...]:
    """Return the libraries of one maker's drivers without duplicates: a link or a copy counts as the same library."""
    libraries: dict[tuple[str, int | None], str] = {}
    for made_by, library, _ in find_drivers(environment):
        if made_by == maker:
            real = os.path.realpath(library)
            # Copies share the size, and the name, which contains a version or a digest.
            size = os.path.getsize(real) if os.path.exists(real) else None
            libraries.setdefault((os.path.basename(real), size), library)
    return tuple(libraries.values())


def names_missing(environment: Environment) -> bool:
    """Return whether an ICD file names a missing library, such as one on a file system that is not mounted."""
    named = ((name, loader) for loader in find_loaders(environment) for name, _ in _registered(loader, environment))
    return any(name and find_library(name, environment, loader.linked) is None for name, loader in named)


def _registered(loader: Loader, environment: Environment) -> Iterator[tuple[str, str | None]]:
    """Yield the libraries that variables name, then those of the ICD files in a folder, each with its ICD file.

    ocl-icd ignores empty values; an ``OCL_ICD_VENDORS`` that is not a folder names an ICD file or a library, which is
    then the only driver. For the loader of Khronos, an empty value means no folder.
    """
    named, path, listed = (environment.get(name) if name in loader.variables else None for name in VARIABLES)
    vendors = str(loader.vendors)
    if not loader.is_ocl_icd:
        for name in (listed or "").split(";" if environment.platform == "win32" else ":"):
            yield name, None
        if named == "":
            return
    elif path:
        vendors = str(environment.absolute(path))
    if named:
        place = str(environment.absolute(named))
        if loader.is_ocl_icd and not os.path.isdir(place):
            if not named.endswith(_SUFFIX) or named == _SUFFIX:
                yield named, None
                return
            files = (place,) if "/" in named else (f"{vendors}/{named}", place)
            drivers = (driver for file in files for driver in _in_file(loader, file))
            usable = [driver for driver in drivers if find_library(driver[0], environment, loader.linked)]
            yield from usable[:1]
            return
        vendors = place
    for folder in filter(None, (vendors, loader.also)):
        yield from _in_folder(loader, folder)


def _in_folder(loader: Loader, folder: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the drivers of a folder, sorted; for some loaders also those of subfolders, which may be links."""
    target = os.path.realpath(folder)
    for name in names_in(folder) if target not in above else ():
        path = f"{folder}/{name}"
        # Only the Khronos loader accepts a file without a name before its suffix.
        if name.endswith(_SUFFIX) and not (loader.is_ocl_icd and name == _SUFFIX):
            yield from _in_file(loader, path)
        elif loader.nested and os.path.isdir(path):
            yield from _in_folder(loader, path, (*above, target))


def _in_file(loader: Loader, file: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        content = read_installed(file)
        # The name is the first line; for the loader of Khronos, the file without one final line end.
        name = content.partition(b"\n")[0] if loader.is_ocl_icd else content.removesuffix(b"\n")
        yield os.fsdecode(name.partition(b"\0")[0]), file


# ---------------------------------------------------------------------- loaders


def find_loaders(environment: Environment) -> tuple[Loader, ...]:
    """Return the loaders of PyOpenCL in this Python, in activated environments, and in Pythons that the user named.

    If the loader of this Python is unknown, all that programs here may use are returned.
    """
    loaders = _of_pyopencl(environment, environment.prefix, environment.site)
    if not loaders:
        loaders = _of_prefix(environment.prefix)
        file = find_library(_LOADER, environment)
        if file is None or file == _LOADER:
            # Either kind is possible.
            loaders += Loader(None), Loader(None, is_ocl_icd=False)
        else:
            loaders += (_read_loader(file, None),)
    for prefix, site in other_pythons(environment):
        loaders += _of_pyopencl(environment, prefix, site) or _of_prefix(prefix)
    return loaders


def other_pythons(environment: Environment) -> Iterator[tuple[Path, list[Path]]]:
    """Yield prefix and folders of packages of the activated environments, and of Pythons that the user named."""
    activated = (environment.get(variable) for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    # The parent of an interpreter's folder is its prefix.
    named = (path.parent.parent for path in environment.python_paths)
    for prefix in dict.fromkeys((*(environment.absolute(prefix) for prefix in activated if prefix), *named)):
        if prefix != environment.prefix:
            # On Debian, the folder is dist-packages.
            yield prefix, sorted(prefix.glob("lib/python3*/*-packages"))


def _of_pyopencl(environment: Environment, prefix: Path | None, site: Iterable[Path]) -> tuple[Loader, ...]:
    """Return the loader that PyOpenCL is linked to; none if PyOpenCL or its loader is not found."""
    package = next((package for folder in site if os.path.isdir(package := f"{folder}/pyopencl")), "")
    if not package:
        return ()
    # PyOpenCL's own wheels contain a patched ocl-icd that also reads its own folder, which PyOpenCL names in a
    # variable. The extension names that folder for the libraries that it needs, and those that they need in turn.
    own = f"{package}/.libs"
    for bundled in names_in(own, "libOpenCL"):
        return (Loader(f"{own}/{bundled}", variables=VARIABLES[:2], linked=((own,), ()), also=own),)
    for extension in names_in(package, "_cl."):
        needed, linked = read_linked(f"{package}/{extension}", _conda_libraries(prefix))
        name = next((name for name in needed if name.startswith("libOpenCL")), "")
        file = find_library(name, environment, linked)
        if file is not None and file != name:
            return (_read_loader(file, prefix, linked[0]),)
    return ()


def _of_prefix(prefix: Path | None) -> tuple[Loader, ...]:
    """Return the loader that conda packages install, or an assumed one if there is only a folder of drivers."""
    libraries, vendors = f"{prefix}/lib", f"{prefix}{_SYSTEM}"
    if prefix is None:
        return ()
    if os.path.isfile(file := f"{libraries}/{_LOADER}"):
        return (_read_loader(file, prefix, _conda_libraries(prefix)),)
    loader = Loader(None, vendors, linked=((libraries,), ()), nested=True)
    return (loader,) if os.path.isdir(vendors) else ()


def _conda_libraries(prefix: Path | None) -> tuple[str, ...]:
    return () if prefix is None or not os.path.isdir(f"{prefix}/conda-meta") else (f"{prefix}/lib",)


def _read_loader(file: str, prefix: Path | None, near: tuple[str, ...] = ()) -> Loader:
    """Return a loader by the names in its bytes; one that cannot be read is assumed to be ocl-icd."""
    _, linked = read_linked(file, near)
    try:
        content = read_installed(file)
    except OSError:
        return Loader(file, linked=linked)
    vendors = next((path for end in ("/vendors", "/vendors/") for path in _ending(content, end)), None)
    variables = tuple(name for name in VARIABLES if f"{name}\0".encode() in content)
    if vendors is None and not variables:
        is_pocl = b"POCL_CACHE_DIR\0" in content
        return Loader(file, None, driver="PoCL" if is_pocl else os.path.basename(file))
    is_ocl_icd = b"OCL_ICD_DEFAULT_PLATFORM\0" in content
    # conda-forge patches it for the package ocl-icd-system, which links the system's folder into the prefix.
    nested = is_ocl_icd and vendors != _SYSTEM and bool(_conda_libraries(prefix))
    return Loader(file, vendors or _SYSTEM, variables, is_ocl_icd, linked, nested=nested)


def _ending(content: bytes, end: str) -> Iterator[str]:
    """Yield the absolute paths in a file's strings that end with ``end``."""
    pattern = rb"(?<=\0)/[^\0]*" + re.escape(os.fsencode(end)) + rb"(?=\0)"
    return map(os.fsdecode, re.findall(pattern, content))


# ---------------------------------------------------------------------- the dynamic linker


def find_library(name: str, environment: Environment, linked: Folders = ((), ())) -> str | None:
    """Return the library that the dynamic linker opens for this name, ``None`` if there is none.

    ``linked`` are the folders of the library that needs it. If the linker's rules are unknown, as on other platforms
    than Linux or without its list, the name itself is returned. Source: ``_dl_map_object`` in glibc's
    ``elf/dl-load.c``.
    """
    if not name:
        return None
    if environment.platform != "linux" or "$" in name:
        return name
    if "/" in name:
        path = str(environment.absolute(name))
        return path if _is_library(path) else None
    listed = (environment.get("LD_LIBRARY_PATH") or "").replace(";", ":")
    # An empty item is the working directory.
    folders = [str(environment.absolute(folder)) for folder in listed.split(":")] if listed else []
    rpath, run_path = linked
    for folder in (*(() if run_path else rpath), *folders, *run_path):
        if _is_library(path := f"{folder}/{name}"):
            return path
    with suppress(OSError):
        paths = [*_ending(read_installed(_LINKER_CACHE), f"/{name}"), *(f"{top}/{name}" for top in _LINKER_FOLDERS)]
        return next(filter(_is_library, paths), None)
    return name


def read_linked(file: str, near: tuple[str, ...] = ()) -> tuple[list[str], Folders]:
    """Return the libraries that a library needs, and the folders in which it searches them.

    ``near`` are the folders that the libraries which load it name for everything below them.
    """
    texts: dict[int, list[str]] = {NEEDED: [], RPATH: [], RUN_PATH: []}
    with suppress(OSError):
        if (elf := read_elf(read_installed(file))) is not None:
            origin = os.path.dirname(file)
            for tag, text in elf.dynamic_strings():
                named = [text] if tag == NEEDED else filter(None, text.split(":"))
                texts[tag] += [part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in named]
    own = () if texts[RUN_PATH] else tuple(texts[RPATH])
    return texts[NEEDED], ((*own, *near), tuple(texts[RUN_PATH]))


def find_missing(code: bytes, needed: Iterable[str], environment: Environment) -> list[str]:
    """Return the libraries that some code needs and that are missing here; none for code of another architecture."""
    answers = environment.answers
    for name in filter(str.isascii, needed):
        if (find_missing, name) not in answers:
            answers[find_missing, name] = find_library(name, environment)
    missing = [name for name in needed if answers.get((find_missing, name), name) is None]
    return missing if missing and machine_of(code) == _kind(sys.executable) else []


def _is_library(path: str) -> bool:
    """Return whether a file is an ELF file of this Python's kind: the linker ignores files of other kinds."""
    return (kind := _kind(path)) is not None and kind == (_kind(sys.executable) or kind)


def _kind(path: str) -> bytes | None:
    with suppress(OSError):
        return machine_of(read_plain(path, limit=20, follow=True))
    return None


class DriverLayer(Layer):
    """The cache of an OpenCL driver, which is present if the driver is registered or has left a cache."""

    #: The makers of the drivers.
    makers: ClassVar[tuple[str, ...]]
    places: ClassVar[Places]
    switch: ClassVar[EnvSwitch]
    #: Further variables whose values have outcomes that few expect.
    others: ClassVar[tuple[EnvSwitch, ...]] = ()
    #: The variable of the limit in bytes, above which the driver drops entries, if there is one; and the largest limit.
    limit_variable: ClassVar[str] = ""
    limit_highest: ClassVar[int | None] = None
    #: Whether a limit of 0 means that the driver stores nothing; otherwise it means no limit.
    zero_limit_is_off: ClassVar[bool] = False
    #: The effect of a variable that leaves the driver without a place.
    placeless = Hazard(RECOMPILES, "is not absolute: the driver stores nothing, and every run compiles")

    def drivers(self) -> tuple[str, ...]:
        """Return the files that register the drivers, each once."""
        registered = find_drivers(self.environment)
        return tuple(dict.fromkeys(file for maker, _, file in registered if maker in self.makers))

    def is_here(self) -> bool:
        """Return whether there is a driver or a cache."""
        return bool(self.drivers()) or any(root.exists for root in self.roots())

    def state(self) -> State:
        """Return the condition of the first problem that has one. Without a driver, only switches count."""
        here, odd = self.is_here(), []
        for condition, fault in self.faults():
            if condition is not None and (here or fault.code == "off"):
                return State(condition, fault.message, self.drivers())
            odd += [fault.message] if fault.code == "variable" else []
        if not here:
            return State(ABSENT, f"no driver of {' or '.join(self.makers)} is here, and none has left a cache")
        variable, value = self.switch.variable, self.environment.get(self.switch.variable)
        named = "on by default" if value is None or odd else f"{variable}={value}"
        return State(ENABLED, "; ".join((named, *odd)), self.drivers())

    def diagnose(self) -> Iterator[Finding]:
        """Yield the problems, and a nearly full cache."""
        here = self.is_here()
        yield from (fault for _, fault in self.faults() if here or fault.code == "off")
        if here and self.limit_variable:
            yield from self._nearly_full()

    def faults(self) -> Iterator[Fault]:
        """Yield the problems with the variables, each with the resulting condition."""
        yield from faults_of(self, (self.switch, *self.others))
        yield from self._place_faults()
        if (value := self.environment.get(self.limit_variable)) is None:
            return
        number = _leading_number(value)
        condition = DISABLED if self.zero_limit_is_off and not number else None
        if not _PLAIN_NUMBER.fullmatch(value):
            outcome = f"is not a number of bytes: the driver reads it as {number}"
            severity = RECOMPILES if number or condition else WASTES
            yield condition, misread(self, self.limit_variable, severity, outcome)
        elif condition is not None:
            yield condition, off(self, self.limit_variable)

    def _place_faults(self) -> Iterator[Fault]:
        environment, decided = self.environment, self.places.deciding(self.environment)
        if decided is None:
            rules = self.places.rules(environment.platform)
            if rules and not self.roots():
                message = f"{rules[-1].variable} is not set: the driver has no place for a cache"
                fix = f"export {rules[-1].variable}={shlex.quote(str(environment.home))}"
                yield DISABLED, VARIABLE.finding(self.name, Path("*"), message, fix, severity=RECOMPILES)
            return
        rule, value, odd = decided
        home = environment.home if rule.variable == "HOME" else environment.absolute(value)
        absolute = f"export {rule.variable}={shlex.quote(str(home))}"
        fixes = absolute if value or rule.variable == "HOME" else None
        if odd == NOWHERE:
            yield DISABLED, misread(self, rule.variable, *self.placeless, fixes)
        elif odd == HERE and environment.platform != "win32":
            outcome = "is not absolute: each working directory gets a cache of its own"
            yield None, misread(self, rule.variable, RECOMPILES, outcome, fixes)

    @property
    def limit(self) -> int | None:
        """The bytes in the variable, or the default."""
        value = self.environment.get(self.limit_variable)
        number = _LIMIT if value is None else _leading_number(value)
        if not self.limit_variable or number <= 0 or not (value is None or _PLAIN_NUMBER.fullmatch(value)):
            return None
        return min(number, self.limit_highest or number)

    def _nearly_full(self) -> Iterator[Finding]:
        most, size = self.limit, 0
        if most is None:
            return
        # Other findings are about a root that cannot be read.
        with suppress(LayerError, OSError):
            items = (item for root in self.roots() for item in self.store.scan(root, contents=False))
            # The driver counts lengths, not blocks.
            size = sum(item.length for item in items if isinstance(item, Entry) and item.is_listed)
        wanted = 2 * max(most, size)
        fix = f"export {self.limit_variable}={wanted}"
        if self.limit_highest is not None and wanted > self.limit_highest:
            fix = f"cachectl prune --max-size {most // 2}B {self.name}"
        set_by = self.limit_variable if self.limit_variable in self.environment.variables else "the default"
        message = f"has {size:,} of at most {most:,} bytes ({set_by}): the driver drops entries to make room"
        yield from self.near_limit(size, most, message, fix, first_place(self))

    def near_limit(self, size: int, limit: int, message: str, fix: str, place: Path) -> Iterator[Finding]:
        """Yield a finding if ``size`` is close to the limit, both in bytes, above which the library drops entries."""
        if size >= _NEARLY * limit:
            yield CAP.finding(self.name, place, message, fix)


def _leading_number(value: str) -> int:
    """Read a number as ``atoll`` does: ``1G`` is 1, and a text without a leading number is 0."""
    return int(match[0]) if (match := _NUMBER.match(value)) else 0
