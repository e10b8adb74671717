"""The distributions installed beside cachectl, found by the names in the folders of ``sys.path``.

``importlib.metadata`` gives the same answers, but its import takes longer than a report of every cache. It is used only
if names do not suffice: for an egg, a zip, or a custom finder.

Sources: the binary distribution format and the entry-points specification, packaging.python.org.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Final

from cachectl.layers.disk.plain import read_installed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from pathlib import Path

#: The fact about that folder, which is added with ``-I`` to the options of every build (``pyopencl/__init__.py``,
#: ``_DEFAULT_INCLUDE_OPTIONS``), and so to every key that is made from options.
PYOPENCL_INCLUDES: Final = "pyopencl include path"
_INFORMATION: Final = ".dist-info"
_METADATA: Final = (_INFORMATION, ".egg-info", ".egg-link", ".egg")
#: Within one tick of the file system's clock, a folder may change again without a new time.
_SETTLED_NANOSECONDS: Final = 2_000_000_000


def names_in(folder: str, *beginnings: str) -> tuple[str, ...]:
    """Return the names in a folder with one of these prefixes, sorted; none if it cannot be listed.

    The listing of a folder that does not change is kept.
    """
    try:
        changed = os.stat(folder or ".").st_mtime_ns
        settled = time.time_ns() - changed >= _SETTLED_NANOSECONDS
        # Not normalised: after a link, ".." is not the folder above its name.
        whole = folder if os.path.isabs(folder) else os.path.join(os.getcwd(), folder)
        return (_listing if settled else _listing.__wrapped__)(whole, beginnings, changed)
    except OSError:
        return ()


@lru_cache(maxsize=512)
def _listing(folder: str, beginnings: tuple[str, ...], changed: int) -> tuple[str, ...]:
    del changed
    return tuple(sorted(name for name in os.listdir(folder) if name.startswith(beginnings or "")))


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, ``None`` if it is not installed."""
    wanted, is_known = normal(distribution), _names_suffice()
    for folder in sys.path if is_known else ():
        versions, doubtful = _offered_by(names_in(folder))
        if wanted in versions or wanted in doubtful:
            name, version = versions.get(wanted, ("", ""))
            if wanted not in doubtful and os.path.exists(os.path.join(folder, name, "METADATA")):
                return version
            is_known = False
            break
    if is_known:
        return None
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
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
    for name in names if doubtful else ():
        if name.lower().endswith(_METADATA[:2]):
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
    if _names_suffice() and not any(_mentions(group, folder, names_in(folder)) for folder in sys.path):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _names_suffice() -> bool:
    """Return whether every distribution is a metadata folder beside its modules, so that names suffice."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return False
    return not any(folder.endswith(".egg") or os.path.isfile(folder) for folder in sys.path)


@lru_cache(maxsize=64)
def _offered_by(names: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], frozenset[str]]:
    """Return folder and version of the distributions that names show, and those for which names do not suffice."""
    versions: dict[str, tuple[str, str]] = {}
    doubtful: set[str] = set()
    for name in names:
        stem, ending = os.path.splitext(name)
        distribution, dash, version = stem.partition("-")
        # A version in normal form has neither a dash nor an underscore.
        is_plain = ending == _INFORMATION and dash and not {"-", "_"} & set(version)
        if is_plain and normal(distribution) not in versions:
            versions[normal(distribution)] = name, version
        elif ending.lower() in _METADATA:
            # Two of one name, an egg, or a form that only old tools used.
            doubtful.add(normal(distribution.partition(".egg")[0]))
    return versions, frozenset(doubtful)


@lru_cache(maxsize=64)
def _mentions(group: str, folder: str, names: tuple[str, ...]) -> bool:
    """Return whether any distribution in a folder has entry points of a group."""
    for name in names:
        if name.lower().endswith(_METADATA):
            with suppress(OSError):
                if group.encode() in read_installed(os.path.join(folder, name, "entry_points.txt")):
                    return True
    return False


def normal(name: str) -> str:
    """Return the name of a distribution as it is compared."""
    return re.sub(r"[-_.]+", "_", name).lower()
