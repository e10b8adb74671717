"""Installed distributions, found by the names in folders of packages.

``importlib.metadata`` gives the same answers, but its import takes longer than a report of every cache. It is imported
only if an entry point exists. Sources: the binary distribution format and the entry-points specification,
packaging.python.org.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from cachectl.layers.base.errors import PARSE_ERRORS
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.plain import read_installed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from pathlib import Path

#: The fact about the folder that PyOpenCL adds with ``-I`` to the options of every build (``pyopencl/__init__.py``,
#: ``_DEFAULT_INCLUDE_OPTIONS``), and so to every key that depends on options.
PYOPENCL_INCLUDES = "pyopencl include path"
#: Names of metadata next to modules, and those with the normalised version of the distribution.
_METADATA = regex(r"(?i)([^-]+?)(?:-.*)?\.(?:dist|egg)-info")
_VERSIONED = regex(r"[^-]+-([^-_]+)\.dist-info")
#: Within one tick of the file system's clock, a folder can change again without a new modification time.
_SETTLED_NANOSECONDS = 2_000_000_000


def names_in(folder: str, *beginnings: str) -> tuple[str, ...]:
    """Return the names in a folder with one of these prefixes, sorted; none if it cannot be listed."""
    try:
        changed = os.stat(folder or ".").st_mtime_ns
        is_settled = time.time_ns() - changed >= _SETTLED_NANOSECONDS
        # Not normalised: after a link, ".." is the parent of its target.
        path = folder if os.path.isabs(folder) else os.path.join(os.getcwd(), folder)
        return (_listing if is_settled else _listing.__wrapped__)(path, beginnings, changed)
    except OSError:
        return ()


@lru_cache(maxsize=512)
def _listing(folder: str, beginnings: tuple[str, ...], changed: int) -> tuple[str, ...]:
    del changed
    return tuple(sorted(name for name in os.listdir(folder) if name.startswith(beginnings or "")))


def version_in(folders: Iterable[str], distribution: str) -> str | None:
    """Return the version of a distribution in the first folder of packages that has it, if any."""
    versions = (_version_in(folder, normal(distribution)) for folder in folders)
    return next(filter(None, versions), None)


def has_module(folders: Iterable[str], name: str) -> bool:
    """Return whether a folder has a module or package, or an editable installation that may lead to it."""
    for folder in folders:
        if any(each == name or each.startswith(f"{name}.") for each in names_in(folder, name)):
            return True
        if any(_mentions(name, os.path.join(folder, finder)) for finder in names_in(folder, "__editable__")):
            return True
    return False


def editable_folder(folders: Iterable[Path], distribution: str) -> Path | None:
    """Return the source folder of a distribution with an editable installation (PEP 610); else ``None``."""
    from json import loads
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    for folder in map(str, folders):
        for name in _metadata(names_in(folder)).get(normal(distribution), ()):
            with suppress(OSError, *PARSE_ERRORS):
                origin = loads(read_installed(os.path.join(folder, name, "direct_url.json")))
                if origin.get("dir_info", {}).get("editable") is True:
                    return Path(unquote(urlsplit(origin["url"]).path))
    return None


def versions_in(folders: Iterable[str]) -> dict[str, str]:
    """Return the versions of all distributions in folders of packages, by normalised name; the first folder counts."""
    versions: dict[str, str] = {}
    for folder in folders:
        for name in _metadata(names_in(folder)):
            if name not in versions and (version := _version_in(folder, name)) is not None:
                versions[name] = version
    return versions


def _version_in(folder: str, distribution: str) -> str | None:
    names = _metadata(names_in(folder)).get(distribution, ())
    for name in names:
        match = _VERSIONED.fullmatch(name)
        if match is not None and len(names) == 1 and os.path.exists(os.path.join(folder, name, "METADATA")):
            return match[1]
        # A folder without metadata has no version.
        if version := _read_version(os.path.join(folder, name)):
            return version
    return None


@lru_cache(maxsize=64)
def _metadata(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the names of metadata by the normalised names of their distributions."""
    versions: dict[str, list[str]] = {}
    for name in names:
        if (match := _METADATA.fullmatch(name)) is not None:
            versions.setdefault(normal(match[1]), []).append(name)
    return versions


def _read_version(path: str) -> str | None:
    """Return the version in a distribution's metadata, which is a folder or a file. No pipe or device is read."""
    for place in (f"{path}/METADATA", f"{path}/PKG-INFO", path):
        with suppress(OSError):
            headers = read_installed(place).decode(errors="replace").partition("\n\n")[0]
            pairs = (line.partition(":") for line in headers.splitlines())
            return next((value.strip() for name, _, value in pairs if name.lower() == "version"), None)
    return None


def normal(name: str) -> str:
    """Return the normalised name of a distribution, for comparisons."""
    return re.sub(r"[-_.]+", "_", name).lower()


def pyopencl_includes(site: Sequence[Path]) -> str | None:
    """Return the folder within PyOpenCL that it adds to the options of every build; ``None`` if there is none."""
    folders = (folder / "pyopencl" / "cl" for folder in site)
    return next((str(folder) for folder in folders if folder.is_dir()), None)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group of all installed distributions."""
    if not any(_has_entry_points(group, folder, names_in(folder)) for folder in sys.path):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


@lru_cache(maxsize=64)
def _has_entry_points(group: str, folder: str, names: tuple[str, ...]) -> bool:
    files = (os.path.join(folder, name, "entry_points.txt") for name in filter(_METADATA.fullmatch, names))
    return any(_mentions(group, file) for file in files)


def _mentions(text: str, file: str) -> bool:
    with suppress(OSError):
        return text.encode() in read_installed(file)
    return False
