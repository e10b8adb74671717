"""The distributions installed beside cachectl, found by the names in the folders of ``sys.path``.

``importlib.metadata`` gives the same answers, but its import takes longer than a report of every cache. It is used only
if names do not suffice: for an egg, a zip, or a custom finder.

Sources: the binary distribution format and the entry-points specification, packaging.python.org.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.plain import read_installed
from cachectl.layers.host.listings import names_in

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from pathlib import Path

_INFORMATION: Final = ".dist-info"
#: The fact about that folder, which is added with ``-I`` to the options of every build (``pyopencl/__init__.py``,
#: ``_DEFAULT_INCLUDE_OPTIONS``), and so to every key that is made from options.
PYOPENCL_INCLUDES: Final = "pyopencl include path"
#: Characters of a version that is not in normal form.
_ODD: Final = regex("[-_]")
#: Names of metadata beside modules.
_PLAIN: Final = regex(r"(?i)\.(?:dist|egg)-info\Z")
_EGG: Final = (".egg-info", ".egg-link", ".egg")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, ``None`` if it is not installed."""
    folders, wanted = tuple(sys.path), normal(distribution)
    if not _names_suffice(folders):
        return _asked_version(distribution)
    for folder in folders:
        versions, doubtful = _offered_by(names_in(folder))
        if wanted in versions and wanted not in doubtful:
            name, version = versions[wanted]
            if os.path.exists(os.path.join(folder, name, "METADATA")):
                return version
        if wanted in versions or wanted in doubtful:
            return _asked_version(distribution)
    return None


def pyopencl_includes(site: Sequence[Path]) -> str | None:
    """Return the folder of PyOpenCL in folders of packages that it names in every build; ``None`` if there is none."""
    folders = (folder / "pyopencl" / "cl" for folder in site)
    return next((str(folder) for folder in folders if folder.is_dir()), None)


def versions_in(folder: str) -> dict[str, str]:
    """Return the versions of all distributions in one folder of packages, by their normal names."""
    names = names_in(folder)
    versions, doubtful = _offered_by(names)
    found = {name: version for name, (_, version) in versions.items() if name not in doubtful}
    for name in filter(_PLAIN.search, names) if doubtful else ():
        headers = _headers(os.path.join(folder, name))
        # A folder without metadata has no name.
        if headers.get("name") and headers.get("version"):
            found.setdefault(normal(headers["name"]), headers["version"])
    return found


def _headers(path: str) -> dict[str, str]:
    """Return the headers of a distribution's metadata, which is in a folder or is a file itself.

    The folder may be another user's: a pipe or a device there is not read.
    """
    for place in (f"{path}/METADATA", f"{path}/PKG-INFO", path):
        with suppress(OSError):
            lines = read_installed(place).decode(errors="replace").partition("\n\n")[0].splitlines()
            pairs = (line.partition(":") for line in reversed(lines))
            return {name.lower(): value.strip() for name, _, value in pairs}
    return {}


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group of all installed distributions."""
    folders = tuple(sys.path)
    if _names_suffice(folders) and not any(_mentions(group, folder, names_in(folder)) for folder in folders):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _names_suffice(folders: Sequence[str]) -> bool:
    """Return whether every distribution is a metadata folder beside its modules, so that names suffice."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    if any(hasattr(finder, "find_distributions") for finder in finders):
        return False
    return not any(folder.endswith(".egg") or os.path.isfile(folder) for folder in folders)


@lru_cache(maxsize=64)
def _offered_by(names: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], frozenset[str]]:
    """Return folder and version of the distributions that names show, and those for which names do not suffice."""
    versions: dict[str, tuple[str, str]] = {}
    doubtful: set[str] = set()
    for name in names:
        stem, ending = os.path.splitext(name)
        distribution, dash, version = stem.partition("-")
        if ending == _INFORMATION and dash and not _ODD.search(version) and normal(distribution) not in versions:
            versions[normal(distribution)] = name, version
        elif ending.lower() in (_INFORMATION, *_EGG):
            # Two of one name, an egg, or a form that only old tools used.
            doubtful.add(normal(distribution.partition(".egg")[0]))
    return versions, frozenset(doubtful)


@lru_cache(maxsize=64)
def _mentions(group: str, folder: str, names: tuple[str, ...]) -> bool:
    """Return whether any distribution in a folder has entry points of a group."""
    information = (name for name in names if name.lower().endswith((_INFORMATION, *_EGG)))
    return any(group.encode() in _read(os.path.join(folder, name, "entry_points.txt")) for name in information)


def _read(path: str) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def normal(name: str) -> str:
    """Return the name of a distribution as it is compared."""
    return re.sub(r"[-_.]+", "_", name).lower()


def _asked_version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
