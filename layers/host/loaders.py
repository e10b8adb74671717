"""The OpenCL loaders that the programs of an environment use, and where each looks for drivers. None is loaded.

A loader is a library ``libOpenCL``. The names of the variables it reads, and the folder of drivers built into it, stand
in its bytes. Sources: ``ocl_icd_loader.c`` of ocl-icd 2.3; ``loader/linux/icd_linux.c`` and ``loader/icd.c`` of the
Khronos loader; ``recipe/`` of conda-forge's ``ocl-icd`` and ``ocl-icd-system``; ``scripts/build-ocl.sh`` of PyOpenCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.disk.plain import open_plain, read_installed

#: The folder of drivers that loaders are built with.
SYSTEM: Final = "/etc/OpenCL/vendors"
#: The same in a conda prefix.
_IN_PREFIX: Final = "etc/OpenCL/vendors"
#: Variables that loaders may read.
_VARIABLES: Final = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES")
_OF_OCL_ICD: Final = _VARIABLES[:2]
_ELF: Final = b"\x7fELF"
_LOADER: Final = "libOpenCL.so.1"
#: The dynamic linker's list of libraries, and folders that it searches besides.
_LINKER_CACHE: Final = "/etc/ld.so.cache"
_LINKER_FOLDERS: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
#: How the path of a folder of drivers ends.
_VENDORS: Final = ("/vendors", "/vendors/")


class Loader:
    """A loader: its library, ``None`` if it is only assumed, and what decides which drivers it finds.

    It reads the folder ``vendors`` unless one of ``variables`` names another place: by the rules of ocl-icd if
    ``is_ocl_icd``, else by those of Khronos. ``also`` is a folder that it always reads, ``nested`` says that it reads
    folders within folders, and ``near`` are folders where it finds libraries by their names alone. A loader without
    ``vendors`` is itself a driver, that of the maker ``driver``.
    """

    # A plain class, because every report starts with it and making a dataclass takes a millisecond.
    def __init__(
        self,
        file: str | None,
        vendors: str | None,
        *,
        variables: tuple[str, ...] = _VARIABLES,
        is_ocl_icd: bool = True,
        also: str | None = None,
        nested: bool = False,
        near: tuple[str, ...] = (),
        driver: str | None = None,
    ) -> None:
        self.file = file
        self.vendors = vendors
        self.variables = variables
        self.is_ocl_icd = is_ocl_icd
        self.also = also
        self.nested = nested
        self.near = near
        self.driver = driver


def find_loaders(environment: Environment) -> tuple[Loader, ...]:
    """Return the loaders of PyOpenCL in this Python, in activated environments, and in Pythons that the user named.

    If it is not known which loader this Python uses, all that programs here may use are returned.
    """
    found = _of_pyopencl(environment, environment.prefix, environment.site)
    if found is None:
        found = (*_of_prefix(environment.prefix), *_of_system(environment))
    activated = (environment.get(variable) for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    prefixes = [environment.absolute(prefix) for prefix in activated if prefix]
    # An interpreter is in the folder bin of its prefix.
    prefixes += [path.parent.parent for path in environment.python_paths]
    for prefix in dict.fromkeys(prefixes):
        if prefix != environment.prefix:
            # Debian calls the folder dist-packages.
            site = sorted(prefix.glob("lib/python3*/*-packages"))
            found += _of_pyopencl(environment, prefix, site) or _of_prefix(prefix)
    return found


def find_library(name: str, environment: Environment, near: Iterable[str] = ()) -> str | None:
    """Return the library that the dynamic linker opens by this name, ``None`` if there is none.

    Where its rules are not known, as on a platform other than Linux or without its list, the name itself is returned.
    """
    if not name:
        return None
    if environment.platform != "linux" or "$" in name:
        return name
    if "/" in name:
        path = str(environment.absolute(name))
        return path if _is_library(path) else None
    listed = (environment.get("LD_LIBRARY_PATH") or "").replace(";", ":")
    # An empty item is the working folder.
    folders = [environment.absolute(folder) for folder in listed.split(":")] if listed else []
    for folder in (*near, *folders):
        if _is_library(path := f"{folder}/{name}"):
            return path
    try:
        listed_paths = _listed(name, *_version(_LINKER_CACHE))
    except OSError:
        return name
    paths = (*listed_paths, *(f"{folder}/{name}" for folder in _LINKER_FOLDERS))
    return next(filter(_is_library, paths), None)


def _is_library(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        handle = open_plain(path, follow=True)
    except OSError:
        return False
    try:
        return os.read(handle, len(_ELF)) == _ELF
    finally:
        os.close(handle)


def run_path(file: str) -> tuple[str, ...]:
    """Return the folders that a library names for those it loads (``DT_RPATH``, ``DT_RUNPATH``)."""
    return _linked(file)[1]


def _of_pyopencl(environment: Environment, prefix: Path | None, site: Iterable[Path]) -> tuple[Loader, ...] | None:
    """Return the loader that PyOpenCL is linked with; ``None`` if PyOpenCL or its loader is not found."""
    package = next((package for folder in site if os.path.isdir(package := f"{folder}/pyopencl")), None)
    if package is None:
        return None
    # PyOpenCL's own wheels contain ocl-icd with a patch: it also reads its folder, which PyOpenCL names in a variable.
    # The extension names the folder for all libraries that it loads, and those that they load in turn.
    own = f"{package}/.libs"
    for bundled in _beginning(own, "libOpenCL"):
        return (Loader(bundled, SYSTEM, variables=_OF_OCL_ICD, also=own, near=(own,)),)
    for extension in _beginning(package, "_cl."):
        needed, folders = _linked(extension)
        near = (*folders, *_conda_libraries(prefix))
        name = next((name for name in needed if name.startswith("libOpenCL")), None)
        file = None if name is None else find_library(name, environment, near)
        if file is not None and file != name:
            return (_read_loader(file, prefix, near),)
    return None


def _of_prefix(prefix: Path | None) -> tuple[Loader, ...]:
    """Return the loader that conda packages install, in whose place there may be only a folder of drivers."""
    libraries, vendors = f"{prefix}/lib", f"{prefix}/{_IN_PREFIX}"
    if prefix is None:
        return ()
    if os.path.isfile(file := f"{libraries}/{_LOADER}"):
        return (_read_loader(file, prefix, _conda_libraries(prefix)),)
    return (Loader(None, vendors, nested=True, near=(libraries,)),) if os.path.isdir(vendors) else ()


def _of_system(environment: Environment) -> tuple[Loader, ...]:
    """Return the loader that the dynamic linker finds; without one, both kinds are assumed."""
    file = find_library(_LOADER, environment)
    if file is None or file == _LOADER:
        return Loader(None, SYSTEM), Loader(None, SYSTEM, is_ocl_icd=False)
    return (_read_loader(file, None, ()),)


def _conda_libraries(prefix: Path | None) -> tuple[str, ...]:
    """Return the folder of libraries of a conda prefix, which its programs search."""
    return () if prefix is None or not os.path.isdir(f"{prefix}/conda-meta") else (f"{prefix}/lib",)


def _beginning(folder: str, begin: str) -> Iterator[str]:
    """Yield the files of a folder whose names begin so."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield from (f"{folder}/{name}" for name in names if name.startswith(begin))


def _read_loader(file: str, prefix: Path | None, near: tuple[str, ...]) -> Loader:
    """Return a loader by the names in its bytes; one that cannot be read is taken for ocl-icd."""
    try:
        vendors, variables, is_ocl_icd, is_pocl = _names(file, *_version(file))
    except OSError:
        return Loader(file, SYSTEM, near=near)
    if vendors is None and not variables:
        return Loader(file, None, driver="PoCL" if is_pocl else os.path.basename(file))
    # A patch of conda-forge's, for the package ocl-icd-system, which links the system's folder into the prefix.
    nested = is_ocl_icd and vendors not in (None, SYSTEM) and bool(_conda_libraries(prefix))
    return Loader(file, vendors or SYSTEM, variables=variables, is_ocl_icd=is_ocl_icd, nested=nested, near=near)


# The results are kept, because a report asks for each layer of a driver.
@lru_cache(maxsize=16)
def _names(file: str, *_version: int) -> tuple[str | None, tuple[str, ...], bool, bool]:
    """Return the folder in a loader's bytes, the variables, and whether it is ocl-icd, or PoCL without a loader."""
    content = read_installed(file)
    vendors = next((path for end in _VENDORS for path in _ending(content, end)), None)
    variables = tuple(name for name in _VARIABLES if f"{name}\0".encode() in content)
    return vendors, variables, b"OCL_ICD_DEFAULT_PLATFORM\0" in content, b"POCL_CACHE_DIR\0" in content


@lru_cache(maxsize=64)
def _listed(name: str, *_version: int) -> tuple[str, ...]:
    """Return the paths of a library in the dynamic linker's list."""
    return tuple(_ending(read_installed(_LINKER_CACHE), f"/{name}"))


def _ending(content: bytes, end: str) -> Iterator[str]:
    """Yield the absolute paths in a file's strings that end with ``end``."""
    wanted, at = os.fsencode(end) + b"\0", -1
    while (at := content.find(wanted, at + 1)) >= 0:
        text = content[content.rfind(b"\0", 0, at) + 1 : at + len(wanted) - 1]
        if text.startswith(b"/"):
            yield os.fsdecode(text)


def _version(file: str) -> tuple[int, int, int]:
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _linked(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the libraries that a library needs, and the folders that it names for them."""
    try:
        return _dynamic(file, *_version(file))
    except OSError:
        return (), ()


@lru_cache(maxsize=4)
def _dynamic(file: str, *_version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from cachectl.layers.formats.elf import NEEDED, RUN_PATHS, read_elf

    elf = read_elf(read_installed(file))
    strings = () if elf is None else tuple(elf.dynamic_strings())
    folders = (folder for tag, text in strings if tag in RUN_PATHS for folder in text.split(":") if folder)
    origin = os.path.dirname(file)
    expanded = (folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders)
    return tuple(text for tag, text in strings if tag == NEEDED), tuple(expanded)
