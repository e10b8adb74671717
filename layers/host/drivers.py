"""The OpenCL drivers that loaders find in an environment: no OpenCL call is made.

An OpenCL call would start every driver, and PoCL's start creates folders and leaks a file.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.switches import first_place
from cachectl.layers.disk.plain import read_installed
from cachectl.layers.host.loaders import Loader, find_library, find_loaders

#: Parts of file names of driver libraries, and their makers.
_MAKERS: Final = (
    ("pocl", "PoCL"),
    ("nvidia-opencl", "NVIDIA"),
    ("igdrcl", "Intel NEO"),
    ("intelocl", "Intel CPU"),
    ("rusticl", "Rusticl"),
    ("mesaopencl", "Mesa Clover"),
    ("amdocl", "AMD"),
)
_SUFFIX: Final = ".icd"


class Driver:
    """A driver: its maker, its library, and the ICD file that names it, or the library if a variable names that."""

    # A plain class, because every report starts with it and making a dataclass takes a millisecond.
    def __init__(self, maker: str, library: str, file: str) -> None:
        self.maker = maker
        self.library = library
        self.file = file


def find_drivers(environment: Environment) -> tuple[Driver, ...]:
    """Return the drivers that the loaders of this environment find, each once for each file that registers it."""
    found = (driver for loader in find_loaders(environment) for driver in found_by(loader, environment))
    return tuple({(driver.library, driver.file): driver for driver in found}.values())


def opencl_drivers(environment: Environment) -> tuple[str, ...]:
    """Return the makers of the drivers, each once."""
    return tuple(dict.fromkeys(driver.maker for driver in find_drivers(environment)))


def driver_files(environment: Environment, makers: Container[str]) -> tuple[str, ...]:
    """Return the files that register the drivers of these makers, each once."""
    return tuple(dict.fromkeys(driver.file for driver in find_drivers(environment) if driver.maker in makers))


def driver_libraries(environment: Environment, maker: str) -> tuple[str, ...]:
    """Return the libraries of one maker's drivers, each once: a link to one of them, or a copy, counts as the same."""
    found: dict[tuple[str, int | None], str] = {}
    for driver in find_drivers(environment):
        if driver.maker == maker:
            found.setdefault(_build(driver.library), driver.library)
    return tuple(found.values())


def _build(library: str) -> tuple[str, int | None]:
    """Return what copies of one library have in common: the name, which bears a version or a digest, and the size."""
    real = os.path.realpath(library)
    try:
        return os.path.basename(real), os.stat(real).st_size
    except OSError:
        # The linker's rules are not known.
        return library, None


def only_library(environment: Environment, maker: str) -> str | None:
    """Return the library of a maker's one driver; ``None`` for several, because any of them may have built an entry."""
    libraries = driver_libraries(environment, maker)
    return libraries[0] if len(libraries) == 1 else None


def several_drivers(layer: Layer, maker: str) -> Iterator[facts.Finding]:
    """Yield a finding if several drivers of one maker are registered."""
    libraries = driver_libraries(layer.environment, maker)
    if len(libraries) > 1:
        registered = f"{len(libraries)} drivers of {maker} are registered ({', '.join(libraries)})"
        message = f"{registered}: which of them built an entry is not known, nor whether one from elsewhere will hit"
        fix = "none needed; to know it, uninstall all but one"
        yield facts.Finding(layer.name, first_place(layer), None, facts.Severity.HARMLESS, "drivers", message, fix)


def found_by(loader: Loader, environment: Environment) -> Iterator[Driver]:
    """Yield the drivers that one loader finds. It skips files that name no library which is there."""
    if loader.vendors is None:
        if loader.driver is not None:
            yield Driver(loader.driver, str(loader.file), str(loader.file))
        return
    search = _Search(loader, environment)
    yield from search.by_ocl_icd(loader.vendors) if loader.is_ocl_icd else search.by_khronos(loader.vendors)


class _Search:
    """A search for drivers by the rules of one loader."""

    def __init__(self, loader: Loader, environment: Environment) -> None:
        self._loader = loader
        self._environment = environment

    def by_khronos(self, vendors: str) -> Iterator[Driver]:
        """Yield the libraries that ``OCL_ICD_FILENAMES`` lists, then those of a folder: ``OCL_ICD_VENDORS`` if set."""
        separator = ";" if self._environment.platform == "win32" else ":"
        for name in (self._get("OCL_ICD_FILENAMES") or "").split(separator):
            if (driver := self._library(name)) is not None:
                yield driver
        named = self._get("OCL_ICD_VENDORS")
        # An empty value names no folder.
        if named != "":
            yield from self._folder(vendors if named is None else str(self._environment.absolute(named)))

    def by_ocl_icd(self, vendors: str) -> Iterator[Driver]:
        """Yield the drivers of a folder: ``OCL_ICD_VENDORS``, else ``OPENCL_VENDOR_PATH``, empty values ignored.

        If ``OCL_ICD_VENDORS`` is no folder, it names an ICD file or a library, and that driver is the only one.
        """
        if path := self._get("OPENCL_VENDOR_PATH"):
            vendors = str(self._environment.absolute(path))
        if named := self._get("OCL_ICD_VENDORS"):
            place = str(self._environment.absolute(named))
            if not os.path.isdir(place):
                if (driver := self._named(named, place, vendors)) is not None:
                    yield driver
                return
            vendors = place
        yield from self._folder(vendors, nested=self._loader.nested)
        if self._loader.also is not None:
            yield from self._folder(self._loader.also)

    def _named(self, named: str, place: str, vendors: str) -> Driver | None:
        if not named.endswith(_SUFFIX) or named == _SUFFIX:
            return self._library(named)
        in_folder = None if "/" in named else self._file(f"{vendors}/{named}")
        return in_folder or self._file(place)

    def _folder(self, folder: str, *, nested: bool = False) -> Iterator[Driver]:
        for file in _icd_files(folder, nested=nested):
            # Only the Khronos loader takes a file without a name before its suffix.
            if not (self._loader.is_ocl_icd and file.endswith(f"/{_SUFFIX}")) and (driver := self._file(file)):
                yield driver

    def _file(self, file: str) -> Driver | None:
        try:
            content = read_installed(file)
        except OSError:
            return None
        # The name is the first line, or by Khronos the whole file but for one line end.
        name = content.partition(b"\n")[0] if self._loader.is_ocl_icd else content.removesuffix(b"\n")
        return self._library(os.fsdecode(name.partition(b"\0")[0]), file)

    def _library(self, name: str, file: str | None = None) -> Driver | None:
        library = find_library(name, self._environment, self._loader.near, self._loader.file)
        return None if library is None else Driver(_maker(library), library, file or library)

    def _get(self, variable: str) -> str | None:
        return self._environment.get(variable) if variable in self._loader.variables else None


def _icd_files(folder: str, *, nested: bool, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the ICD files of a folder, sorted; if ``nested``, also those of folders in it, which may be links."""
    target = os.path.realpath(folder) if nested else ""
    if target in above:
        return
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = f"{folder}/{name}"
        if name.endswith(_SUFFIX):
            yield path
        elif nested and os.path.isdir(path):
            yield from _icd_files(path, nested=True, above=(*above, target))


def _maker(library: str) -> str:
    # A folder in the path may have another maker's name, such as a conda environment called "pocl".
    name = os.path.basename(library)
    lower = name.lower()
    return next((maker for part, maker in _MAKERS if part in lower), name)
