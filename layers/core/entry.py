"""What a scan finds, what an entry holds, and what they are counted as.

Sizes are bytes, times are epoch seconds. ``None`` is *unknown*; zero is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.text import short_repr
from cachectl.layers.core.json_form import as_json


class Note(NamedTuple):
    """A key and the reason why it was skipped or failed."""

    key: str
    because: str


class Stored(NamedTuple):
    """The place of an entry's artifact in a store: at an offset of the content of a pack.

    ``form`` and ``sha256`` are those of the artifact. ``pack`` is the name of the pack, empty before it is written;
    ``packed`` and ``unpacked`` are the bytes of its file and of its content.
    """

    form: str = ""
    sha256: str = ""
    pack: str = ""
    packed: int = 0
    unpacked: int = 0
    offset: int = 0


@as_json(hidden=("stamp", "guest", "idle_only", "sums", "fixed", "stored"), also=("state",), optional=("because",))
class Entry(NamedTuple):
    """One thing that a scan finds: what a cache can hit, files of the layer that it cannot, or a sum.

    ``bytes`` are those that it takes on the disk, as ``du`` counts them; those of a row are its payload. ``files`` is 0
    for a row, whose database is counted as a sum, and for an entry of a store, where it is unknown.
    ``written_before`` bounds the age of an entry that has no time of its own: a row is no younger than the
    last write to its file. ``kernels`` is ``None`` if the bytes do not contain the names or were not read.

    An orphan (:func:`orphan`) has a ``because``: no lookup can reach it, such as a leaked temporary, a failed build or
    a database file beyond repair. A thing with ``sums`` belongs to the cache as a whole, such as an index, or stands
    for entries that are counted without being listed; it is never removed by itself.
    """

    layer: str
    key: str
    root: Path
    bytes: int
    files: int
    created: float | None = None
    modified: float | None = None
    used: float | None = None
    written_before: float | None = None
    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = {}
    stale: bool | None = None
    stale_because: str | None = None
    detail: Mapping[str, str] = {}
    #: The store's version stamp, to detect later changes.
    stamp: tuple[int, ...] = ()
    #: The owner, if the entry is foreign and only shares the root: it is not counted, and cleared only by its key.
    guest: str | None = None
    #: Why it is an orphan.
    because: str | None = None
    #: Whether a live process may still be writing the orphan.
    idle_only: bool = False
    #: The number of entries that it stands for, 0 for files of the cache as a whole.
    sums: int | None = None
    #: Whether its size is constant, and does not shrink when entries are removed.
    fixed: bool = False
    #: Where it lies, if it is an entry of a store, which has no root; its ``bytes`` are then those of its artifact.
    stored: Stored = Stored()

    def __repr__(self) -> str:
        return short_repr(self, "detail", "stamp", "stored")

    @property
    def length(self) -> int:
        """Return the bytes of the contents of a file's or folder's entry, which its stamp has."""
        return self.stamp[1]

    @property
    def latest(self) -> float | None:
        """Return the moment of its last known use or change."""
        if self.used is not None:
            return self.used
        return self.written_before if self.modified is None else self.modified

    @property
    def is_orphan(self) -> bool:
        """Return whether no lookup can reach it."""
        return self.because is not None

    @property
    def is_listed(self) -> bool:
        """Return whether ``ls`` lists it: it is neither an orphan nor a sum."""
        return self.because is None and self.sums is None

    @property
    def state(self) -> str:
        """Return ``live``, ``stale`` or ``orphan``."""
        return "orphan" if self.is_orphan else "stale" if self.stale else "live"


def orphan(entry: Entry, because: str, *, idle_only: bool = False) -> Entry:
    """Return an entry as an orphan, whose key is its path below the root; it has no kernel and counts as stale."""
    return entry._replace(because=because, idle_only=idle_only, stale=True, kernels=())


class Problem(NamedTuple):
    """Something in a root that its library would not have left there."""

    path: Path
    code: str
    message: str

    @property
    def note(self) -> Note:
        """Return it as the reason why something was not removed."""
        return Note(str(self.path), self.message)

    @property
    def hides(self) -> bool:
        """Return whether there may be entries that could not be listed."""
        return self.code in ("unreadable", "busy", "sqlite")

    @property
    def is_unknown(self) -> bool:
        """Return whether it is of a format that no layer knows, in the place of entries."""
        return self.code == "unknown"


Found = Entry | Problem


@as_json(hidden=("stale_entries", "stale_bytes", "stale_unknown"), also=("complete",))
class Usage(NamedTuple):
    """Numbers of one root.

    ``files`` and ``bytes`` count the layer's files on disk without orphans; ``stale_*`` is ``None`` if the layer cannot
    recognise stale entries, and ``stale_unknown`` counts those whose staleness is unknown. ``stale_because`` has the
    number of stale entries by the reason. If a problem hides a part of the root, the numbers are lower bounds, and
    ``None`` instead of 0.
    """

    entries: int | None = 0
    files: int | None = 0
    bytes: int | None = 0
    orphan_files: int | None = 0
    orphan_bytes: int | None = 0
    stale_entries: int | None = None
    stale_bytes: int | None = None
    stale_unknown: int | None = 0
    oldest: float | None = None
    newest: float | None = None
    problems: tuple[Problem, ...] = ()
    stale_because: Mapping[str, int] = {}

    @property
    def complete(self) -> bool:
        """Return whether everything could be counted."""
        return not any(problem.hides for problem in self.problems)


#: The numbers of a root that could not be counted.
UNCOUNTED = Usage(None, None, None, None, None)


class Artifact(NamedTuple):
    """The bytes of one entry, with the tag of their format.

    ``form`` names layer and format version (``pocl-entry/1``). ``data`` is the raw value of a one-file
    entry, or a deterministic tar of a many-file one.
    """

    layer: str
    key: str
    form: str
    data: bytes
    detail: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return short_repr(self, "data")
