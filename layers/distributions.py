"""What is installed beside cachectl, read off the names in the folders of ``sys.path``.

``importlib.metadata`` answers the same questions, but importing it costs more than a report of every cache. It is asked
where names do not tell: for an egg, a zip, or a finder of somebody's own.

Sources: the binary distribution format and the entry-points specification, packaging.python.org.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Final

from cachectl.layers.listings import names_in

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_INFORMATION: Final = ".dist-info"
_EGG: Final = (".egg-info", ".egg-link", ".egg")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, ``None`` where there is none."""
    folders = tuple(sys.path)
    if _names_tell(folders):
        wanted = _normal(distribution)
        for folder in folders:
            versions, eggs = _offered_by(folder, names_in(folder))
            if wanted in versions:
                return versions[wanted]
            if wanted in eggs:
                break
        else:
            return None
    return _asked_version(distribution)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, whoever is installed."""
    folders = tuple(sys.path)
    if _names_tell(folders) and not any(group.encode() in text for text in _entry_point_files(folders)):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _names_tell(folders: Sequence[str]) -> bool:
    """Tell whether everything installed is a folder beside the modules it brought."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    if any(hasattr(finder, "find_distributions") for finder in finders):
        return False
    return not any(os.path.isfile(folder) for folder in folders)


@lru_cache(maxsize=64)
def _offered_by(folder: str, names: tuple[str, ...]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the versions of what lies in a folder, and the names of eggs, whose versions must be read."""
    del folder
    versions: dict[str, str] = {}
    eggs: set[str] = set()
    for name in names:
        if name.endswith(_INFORMATION):
            distribution, _, version = name[: -len(_INFORMATION)].rpartition("-")
            versions.setdefault(_normal(distribution), version)
        elif name.endswith(_EGG):
            eggs.add(_normal(name.partition("-")[0].rpartition(".egg")[0] or name.partition("-")[0]))
    return versions, frozenset(eggs)


def _entry_point_files(folders: Sequence[str]) -> Iterator[bytes]:
    for folder in folders:
        for name in names_in(folder):
            if name.endswith((_INFORMATION, *_EGG)):
                yield _read(os.path.join(folder, name, "entry_points.txt"))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _asked_version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
