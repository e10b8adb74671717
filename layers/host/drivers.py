"""The OpenCL drivers that loaders find in an environment: no OpenCL call is made.

An OpenCL call would start every driver, and PoCL's start creates folders and leaks a file.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from itertools import islice
from typing import Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.switches import first_place
from cachectl.layers.disk.plain import read_installed
from cachectl.layers.host.listings import names_in
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


class Driver(NamedTuple):
    """A driver: its maker, its library, and the ICD file that names it, or the library if a variable names that."""

    maker: str
    library: str
    file: str


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
    found = (_by_ocl_icd if loader.is_ocl_icd else _by_khronos)(loader, loader.vendors, environment)
    for name, file in found:
        library = find_library(name, environment, loader.near, loader.file)
        if library is not None:
            yield Driver(_maker(library), library, file or library)


#: The name of a library, and the ICD file that has it.
_Named = tuple[str, str | None]


def _by_khronos(loader: Loader, vendors: str, environment: Environment) -> Iterator[_Named]:
    """Yield the libraries that ``OCL_ICD_FILENAMES`` lists, then those of a folder: ``OCL_ICD_VENDORS`` if set."""
    separator = ";" if environment.platform == "win32" else ":"
    for name in (_get(loader, environment, "OCL_ICD_FILENAMES") or "").split(separator):
        yield name, None
    named = _get(loader, environment, "OCL_ICD_VENDORS")
    # An empty value names no folder.
    if named != "":
        yield from _in_folder(loader, vendors if named is None else str(environment.absolute(named)))


def _by_ocl_icd(loader: Loader, vendors: str, environment: Environment) -> Iterator[_Named]:
    """Yield the drivers of a folder: ``OCL_ICD_VENDORS``, else ``OPENCL_VENDOR_PATH``, empty values ignored.

    If ``OCL_ICD_VENDORS`` is no folder, it names an ICD file or a library, and that driver is the only one.
    """
    if path := _get(loader, environment, "OPENCL_VENDOR_PATH"):
        vendors = str(environment.absolute(path))
    if named := _get(loader, environment, "OCL_ICD_VENDORS"):
        place = str(environment.absolute(named))
        if not os.path.isdir(place):
            if not named.endswith(_SUFFIX) or named == _SUFFIX:
                yield named, None
                return
            files = (place,) if "/" in named else (f"{vendors}/{named}", place)
            named_in = (driver for file in files for driver in _in_file(loader, file))
            known = (driver for driver in named_in if find_library(driver[0], environment, loader.near, loader.file))
            yield from islice(known, 1)
            return
        vendors = place
    yield from _in_folder(loader, vendors, nested=loader.nested)
    if loader.also is not None:
        yield from _in_folder(loader, loader.also)


def _in_folder(loader: Loader, folder: str, *, nested: bool = False, above: tuple[str, ...] = ()) -> Iterator[_Named]:
    """Yield the drivers of a folder, sorted; if ``nested``, also those of folders in it, which may be links."""
    target = os.path.realpath(folder)
    for name in names_in(folder) if target not in above else ():
        path = f"{folder}/{name}"
        if nested and not name.endswith(_SUFFIX) and os.path.isdir(path):
            yield from _in_folder(loader, path, nested=True, above=(*above, target))
        # Only the Khronos loader takes a file without a name before its suffix.
        elif name.endswith(_SUFFIX) and not (loader.is_ocl_icd and name == _SUFFIX):
            yield from _in_file(loader, path)


def _in_file(loader: Loader, file: str) -> list[_Named]:
    try:
        content = read_installed(file)
    except OSError:
        return []
    # The name is the first line, or by Khronos the whole file but for one line end.
    name = content.partition(b"\n")[0] if loader.is_ocl_icd else content.removesuffix(b"\n")
    return [(os.fsdecode(name.partition(b"\0")[0]), file)]


def _get(loader: Loader, environment: Environment, variable: str) -> str | None:
    return environment.get(variable) if variable in loader.variables else None


def _maker(library: str) -> str:
    # A folder in the path may have another maker's name, such as a conda environment called "pocl".
    name = os.path.basename(library)
    lower = name.lower()
    return next((maker for part, maker in _MAKERS if part in lower), name)
