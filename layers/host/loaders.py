"""The OpenCL loaders that the programs of an environment use, and where each looks for drivers. None is loaded.

A loader is a library ``libOpenCL``. The names of the variables it reads, and the folder of drivers built into it, stand
in its bytes. Sources: ``ocl_icd_loader.c`` of ocl-icd 2.3; ``loader/linux/icd_linux.c`` and ``loader/icd.c`` of the
Khronos loader; ``recipe/`` of conda-forge's ``ocl-icd`` and ``ocl-icd-system``; ``scripts/build-ocl.sh`` of PyOpenCL.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.environment import Environment
from cachectl.layers.disk.plain import open_plain, read_installed
from cachectl.layers.host.listings import names_in

#: The folder of drivers that loaders are built with.
SYSTEM: Final = "/etc/OpenCL/vendors"
#: The same in a conda prefix.
_IN_PREFIX: Final = "etc/OpenCL/vendors"
#: Variables that loaders may read.
_VARIABLES: Final = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES")
_OF_OCL_ICD: Final = _VARIABLES[:2]
_LOADER: Final = "libOpenCL.so.1"
#: The dynamic linker's list of libraries.
_LINKER_CACHE: Final = "/etc/ld.so.cache"
#: How the path of a folder of drivers ends.
_VENDORS: Final = ("/vendors", "/vendors/")


class Loader(NamedTuple):
    """A loader: its library, ``None`` if it is only assumed, and what decides which drivers it finds.

    It reads the folder ``vendors`` unless one of ``variables`` names another place: by the rules of ocl-icd if
    ``is_ocl_icd``, else by those of Khronos. ``also`` is a folder that it always reads, ``nested`` says that it reads
    folders within folders, and ``near`` are folders where it finds libraries by their names alone. A loader without
    ``vendors`` is itself a driver, that of the maker ``driver``.
    """

    file: str | None
    vendors: str | None
    variables: tuple[str, ...] = _VARIABLES
    is_ocl_icd: bool = True
    also: str | None = None
    nested: bool = False
    near: tuple[str, ...] = ()
    driver: str | None = None


def find_loaders(environment: Environment) -> tuple[Loader, ...]:
    """Return the loaders of PyOpenCL in this Python, in activated environments, and in Pythons that the user named.

    If it is not known which loader this Python uses, all that programs here may use are returned.
    """
    found = _of_pyopencl(environment, environment.prefix, environment.site)
    if found is None:
        found = _of_prefix(environment.prefix)
        file = find_library(_LOADER, environment)
        if file is None or file == _LOADER:
            # Both kinds are assumed.
            found += Loader(None, SYSTEM), Loader(None, SYSTEM, is_ocl_icd=False)
        else:
            found += (_read_loader(file, None, ()),)
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


def find_library(name: str, environment: Environment, near: Iterable[str] = (), by: str | None = None) -> str | None:
    """Return the library that the dynamic linker opens by this name, ``None`` if there is none.

    ``by`` is the library that asks for it, and ``near`` are the folders that those which opened ``by`` name for all
    that is opened in turn (``DT_RPATH``). Where the linker's rules are not known, as on a platform other than Linux or
    without its list, the name itself is returned. Source: ``elf/dl-load.c`` of glibc, ``_dl_map_object``.
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
    folders = [str(environment.absolute(folder)) for folder in listed.split(":")] if listed else []
    linked = _Linked() if by is None else _linked(by)
    # A library with a DT_RUNPATH makes the linker ignore every DT_RPATH.
    before = () if linked.run_path else (*linked.rpath, *near)
    for folder in (*before, *folders, *linked.run_path):
        if _is_library(path := f"{folder}/{name}"):
            return path
    try:
        paths = (*_listed(name, *_version(_LINKER_CACHE)), *(f"{folder}{name}" for folder in _linker_folders()))
    except OSError:
        return name
    return next(filter(_is_library, paths), None)


def _is_library(path: str) -> bool:
    """Return whether a file is an ELF file of this Python's kind: the linker passes over a file of another kind."""
    return (kind := _kind(path)) is not None and kind == (_kind(sys.executable) or kind)


def _kind(path: str) -> bytes | None:
    """Return width, byte order and machine of an ELF file, ``None`` for another file."""
    head = b""
    if os.path.isfile(path):
        with suppress(OSError), open(open_plain(path, follow=True), "rb", buffering=0) as file:
            head = file.read(20)
    return head[4:6] + head[18:] if head.startswith(b"\x7fELF") else None


@lru_cache(maxsize=1)
def _linker_folders() -> tuple[str, ...]:
    """Return the folders built into this Python's dynamic linker, each with a slash at its end.

    They differ among distributions: Debian's are those of the architecture first. Raises :class:`OSError`.
    """
    from cachectl.layers.formats.elf import read_elf

    elf = read_elf(read_installed(sys.executable))
    linker = None if elf is None else elf.interpreter
    texts = () if linker is None else read_installed(linker).split(b"\0")
    folders = [os.fsdecode(text) for text in texts if text.startswith(b"/") and text.endswith(b"/")]
    if not folders:
        raise OSError(errno.ENOENT, "the folders of the dynamic linker are not known", sys.executable)
    return tuple(dict.fromkeys(folders))


def _of_pyopencl(environment: Environment, prefix: Path | None, site: Iterable[Path]) -> tuple[Loader, ...] | None:
    """Return the loader that PyOpenCL is linked with; ``None`` if PyOpenCL or its loader is not found."""
    package = next((package for folder in site if os.path.isdir(package := f"{folder}/pyopencl")), None)
    if package is None:
        return None
    # PyOpenCL's own wheels contain ocl-icd with a patch: it also reads its folder, which PyOpenCL names in a variable.
    # The extension names the folder for all libraries that it loads, and those that they load in turn.
    own = f"{package}/.libs"
    for bundled in names_in(own, "libOpenCL"):
        return (Loader(f"{own}/{bundled}", SYSTEM, variables=_OF_OCL_ICD, also=own, near=(own,)),)
    for extension in (f"{package}/{name}" for name in names_in(package, "_cl.")):
        linked, near = _linked(extension), _conda_libraries(prefix)
        name = next((name for name in linked.needed if name.startswith("libOpenCL")), None)
        file = None if name is None else find_library(name, environment, near, extension)
        if file is not None and file != name:
            return (_read_loader(file, prefix, (*linked.rpath, *near)),)
    return None


def _of_prefix(prefix: Path | None) -> tuple[Loader, ...]:
    """Return the loader that conda packages install, in whose place there may be only a folder of drivers."""
    libraries, vendors = f"{prefix}/lib", f"{prefix}/{_IN_PREFIX}"
    if prefix is None:
        return ()
    if os.path.isfile(file := f"{libraries}/{_LOADER}"):
        return (_read_loader(file, prefix, _conda_libraries(prefix)),)
    return (Loader(None, vendors, nested=True, near=(libraries,)),) if os.path.isdir(vendors) else ()


def _conda_libraries(prefix: Path | None) -> tuple[str, ...]:
    """Return the folder of libraries of a conda prefix, which its programs search."""
    return () if prefix is None or not os.path.isdir(f"{prefix}/conda-meta") else (f"{prefix}/lib",)


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


class _Linked(NamedTuple):
    """The libraries that a library needs, and the folders that it names.

    ``rpath`` are the folders for those that it loads and those that they load in turn (``DT_RPATH``), ``run_path``
    are for its own alone (``DT_RUNPATH``). With the latter, the former do not count.
    """

    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


def _linked(file: str) -> _Linked:
    try:
        return _dynamic(file, *_version(file))
    except OSError:
        return _Linked()


@lru_cache(maxsize=8)
def _dynamic(file: str, *_version: int) -> _Linked:
    from cachectl.layers.formats.elf import NEEDED, RPATH, RUN_PATH, read_elf

    elf = read_elf(read_installed(file))
    strings = () if elf is None else tuple(elf.dynamic_strings())
    origin = os.path.dirname(file)

    def folders(wanted: int) -> tuple[str, ...]:
        named = (folder for tag, text in strings if tag == wanted for folder in text.split(":") if folder)
        return tuple(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in named)

    run_path = folders(RUN_PATH)
    needed = tuple(text for tag, text in strings if tag == NEEDED)
    return _Linked(needed, () if run_path else folders(RPATH), run_path)
