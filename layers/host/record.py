"""The record of what was seen on this host: Pythons, drivers and libraries, each with its path and version.

It is the only witness for *stale*. An entry is stale if a version that could hit it was seen here, its path is gone or
has another version, nothing else that was seen has that version, and the entry was not used since. Otherwise that is
unknown: another container, another machine with the same home, or a program that is started by its path may use the
entry. If hits leave no trace, nothing shows that an entry was not used.

The record is one private file. It is read only if no other user can write to it. Without it, nothing is stale.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base import documents, processes
from cachectl.layers.base.environment import Environment, answered_once, node, user_state_folder
from cachectl.layers.base.errors import PARSE_ERRORS
from cachectl.layers.disk import atomic, plain
from cachectl.layers.disk.trust import shared_because

#: The name of the file in cachectl's folder for its own state, and the most bytes that are read of it.
FILE = "seen.json"
_LARGEST = 1 << 22
#: The most sightings that are kept; those that have been gone for longest are dropped first.
_MOST = 500
#: File systems of disks. A root folder on any other, such as a container's, may be a different one in the next run.
_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "apfs"})
#: The version of a file that shows none, so that it is not read again.
UNREADABLE = ""
#: Whether no known program can hit an entry (``None`` is unknown), and the reason.
Staleness = tuple[bool | None, str | None]


class Sighting(NamedTuple):
    """One version of a product that was seen at a path.

    ``system`` names the host or container that saw it. ``target`` is the file that the path leads to, ``places`` are
    the mounts of both, and ``size`` (bytes) and ``time`` (epoch nanoseconds) those of the file. ``gone`` is a time
    (epoch seconds) at which the path certainly no longer had this version; ``None`` while it has, or that is unknown.
    """

    product: str
    path: str
    version: str
    system: str
    target: str
    places: tuple[str, str]
    size: int
    time: int
    gone: float | None = None

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a file with this status is as it was seen."""
        return (self.size, self.time) == (status.st_size, status.st_mtime_ns)


class Record:
    """The sightings of one user, by product, path, version and system."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.file = user_state_folder(environment) / FILE
        self.system = _system(environment)
        self._written = _read(self.file) if environment.searches_pythons else {}
        self.sightings = dict(self._written)
        for key, sighting in self._written.items():
            # Times in the future are from a wrong clock.
            if sighting.gone is None or sighting.gone > environment.clock():
                is_gone = sighting.system == self.system and _has_gone(sighting)
                self.sightings[key] = sighting._replace(gone=self._moment(Path(sighting.path)) if is_gone else None)

    def here(self, product: str) -> Iterator[Sighting]:
        """Yield the sightings of a product by this system."""
        wanted = (product, self.system)
        return (each for each in tuple(self.sightings.values()) if (each.product, each.system) == wanted)

    def version_at(self, product: str, path: str | Path) -> str | None:
        """Return the version that was seen at a path, if its file still has the same size and time; else ``None``."""
        with suppress(OSError):
            status = os.stat(path)
            for sighting in self.here(product):
                is_same = sighting.gone is None and sighting.path == str(path) and sighting.is_of(status)
                if is_same and sighting.target == os.path.realpath(path):
                    return sighting.version
        return None

    def note(self, product: str, path: str | Path, version: str) -> None:
        """Record the version at a path, and that an earlier version there is gone."""
        target = os.path.realpath(path)
        try:
            status, places = os.stat(path), (_place(Path(path)), _place(Path(target)))
        except OSError:
            return
        moment = self._moment(Path(path))
        for key, sighting in tuple(self.sightings.items()):
            at_path = (sighting.product, sighting.path, sighting.system) == (product, str(path), self.system)
            is_other = at_path and sighting.places == places and sighting.version != version
            # The old target of a changed link is still usable by another path.
            if is_other and sighting.gone is None and (sighting.target == target or not _is_unchanged(sighting)):
                self.sightings[key] = sighting._replace(gone=moment)
        key = (product, str(path), version, self.system)
        self.sightings[key] = Sighting(*key, target, places, status.st_size, status.st_mtime_ns)

    def last_gone(self, product: str) -> float:
        """Return when the last sighting of a product by this system was gone (epoch seconds), 0 if none is."""
        return max((sighting.gone for sighting in self.here(product) if sighting.gone is not None), default=0.0)

    def judge(
        self, product: str, used: float | None, by: str, made: Callable[[str], bool], hits: Callable[[str], bool]
    ) -> Staleness:
        """Return whether no version of a product that was seen can hit an entry.

        ``used`` is when the entry was last used (epoch seconds), ``None`` if uses leave no trace. ``by`` describes what
        made the entry, ``made`` says whether a version did, and ``hits`` whether a version may hit it.
        """
        for sighting in tuple(self.sightings.values()):
            if sighting.product == product and sighting.gone is None and hits(sighting.version):
                if sighting.system == self.system:
                    return None, None
                return None, f"unknown: {by}, which {sighting.system.partition(' ')[0]} has at {sighting.path}"
        witnesses = [sighting for sighting in self.here(product) if made(sighting.version)]
        if not witnesses:
            return None, f"unknown: {by}, which was never seen on this host"
        witness = max(witnesses, key=lambda sighting: sighting.gone or 0.0)
        moment = witness.gone or 0.0
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
        because = f"{by}; {witness.path} had {product} {witness.version} until {day}"
        if used is None:
            return None, f"unknown: {because}, and a hit since would have left no trace"
        return (True, because) if used < moment else (None, f"unknown: {because}, and it was used since")

    def save(self) -> None:
        """Write the record if it has changed; do nothing if that fails, or for a hypothetical environment."""
        if self.sightings == self._written or not self.environment.searches_pythons:
            return
        latest = sorted(self.sightings.values(), key=lambda item: (item.gone is None, item.gone or 0.0, item.path))
        document = {"sightings": [sighting._asdict() for sighting in latest[-_MOST:]]}
        with suppress(OSError, ValueError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.replace_file(self.file, [documents.encode_json(document, indent=1)])
            self._written = dict(self.sightings)

    def _moment(self, path: Path) -> float:
        """Return the latest possible time of a change of a path: now, or when its file or the folder above changed."""
        now = self.environment.clock()
        with suppress(OSError):
            return min(now, plain.nearest(path).stat().st_ctime)
        return now


@answered_once
def record_of(environment: Environment) -> Record:
    """Return the record of an environment."""
    return Record(environment)


def _read(file: Path) -> dict[tuple[str, str, str, str], Sighting]:
    """Return the sightings in a file; none if it is missing, damaged, or open to other users."""
    with suppress(OSError, *PARSE_ERRORS):
        if shared_because(file.parent, (file.name,)) is None:
            document = documents.parse_json(plain.read_plain(file, limit=_LARGEST))
            sightings = [Sighting(**values) for values in document["sightings"]]
            return {sighting[:4]: sighting for sighting in map(_checked, sightings)}
    return {}


def _checked(sighting: Sighting) -> Sighting:
    """Validate a sighting that was read. Raises :class:`TypeError` or :class:`ValueError` for a wrong value."""
    place, target_place = sighting.places
    are_texts = all(isinstance(text, str) for text in (*sighting[:5], place, target_place))
    if any("\0" in path or not os.path.isabs(path) for path in (sighting.path, sighting.target)):
        raise ValueError(FILE)
    if not are_texts or not (sighting.gone is None or isinstance(sighting.gone, int | float)):
        raise TypeError(FILE)
    return sighting._replace(places=(place, target_place))


def _is_unchanged(sighting: Sighting) -> bool:
    """Return whether the file that a sighting's path led to is unchanged, or cannot be examined."""
    try:
        status = plain.status_at(sighting.target)
    except OSError:
        return True
    return status is not None and sighting.is_of(status)


def _system(environment: Environment) -> str:
    """Return an identifier of this host or container; a container may share a home and a name with its host.

    A container's root folder is not on a disk's file system, and has the time of its image or of its start.
    """
    status = os.stat("/")
    kind = processes.mount_of(Path("/"), mounts=environment.mounts).kind
    container = () if kind in _DISKS else (status.st_dev, status.st_ctime_ns)
    return " ".join(map(str, (node(), status.st_ino, *container)))


def _has_gone(sighting: Sighting) -> bool:
    """Return whether the path of a sighting, or its target, is missing although its file system is mounted."""
    for path, place in zip((sighting.path, sighting.target), sighting.places, strict=True):
        # After an error, its existence is unknown.
        with suppress(OSError):
            if plain.status_at(path) is None:
                return _place(Path(path)) == place
    return False


def _place(path: Path) -> str:
    """Return the mount of the nearest folder above a path: device (or type and source), root and mount point.

    Another folder of the same file system may be mounted over it, perhaps only for one program.
    """
    folder = plain.nearest(path.parent)
    device, mount = folder.stat().st_dev, processes.mount_of(folder)
    # Device numbers without a major number are assigned in the order of mounting.
    is_lasting = os.name != "posix" or os.major(device)
    return ":".join((str(device) if is_lasting else f"{mount.kind}:{mount.source}", mount.root, mount.point))
