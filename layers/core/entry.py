"""What a scan finds, the contents of an entry, and the counts of both.

Sizes are bytes, times are epoch seconds. ``None`` is *unknown*; zero is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from cachectl.layers.base.text import plural, short_repr
from cachectl.layers.core.json_form import as_json
from cachectl.layers.formats.details import Details


class Note(NamedTuple):
    """A key, and the reason why it was skipped or failed."""

    key: str
    because: str


def keys_by_reason(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Group keys by reason: a full disk or a read-only home is reported once, not once per file."""
    keys: dict[str, list[str]] = {}
    for note in notes:
        keys.setdefault(note.because, []).append(note.key)
    return keys


#: What a scan can find in a root. A lookup can hit an *entry*. An *orphan* is the layer's, but out of reach of lookups:
#: a leaked temporary file, a failed build, a database file beyond repair. A *foreign* item is another program's. An
#: *unknown* item is in an entry's place, but cachectl does not know its name, length, version or content.
Kind = Literal["entry", "orphan", "foreign", "unknown"]


@as_json(
    flat=("details",),
    hidden=("kind", "because", "stamp"),
    also=("stale_because", "state", "orphaned_because"),
    optional=("orphaned_because",),
    names={"orphaned_because": "because"},
)
class Entry(NamedTuple):
    """One of a cache's entries, or something else in a root, as its ``kind`` says.

    ``bytes`` is the space on disk, as ``du`` counts it; for a row, its payload. ``files`` is 0 for a row: its database
    is counted separately. ``written_before`` bounds the age of an entry without a time of its own: a row is at least as
    old as the last write to its file. ``stamp`` reveals later changes. ``because`` is why an entry is stale, or why
    that is unknown; for other kinds, why it is of that kind, or whose it is.

    A foreign item only shares the root: it is not counted, and cleared only by key. An unknown one counts, but stays.
    """

    layer: str
    key: str
    root: Path
    bytes: int
    files: int
    modified: float | None = None
    used: float | None = None
    written_before: float | None = None
    details: Details = Details()
    stale: bool | None = None
    because: str | None = None
    kind: Kind = "entry"
    stamp: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self, "stamp")

    @property
    def length(self) -> int:
        """Return the bytes of the contents of an entry in a file or folder, which are in its stamp."""
        return self.stamp[1]

    @property
    def latest(self) -> float | None:
        """Return the time of the last known use or change."""
        if self.used is not None:
            return self.used
        return self.written_before if self.modified is None else self.modified

    @property
    def is_orphan(self) -> bool:
        """Return whether no lookup can reach it."""
        return self.kind == "orphan"

    @property
    def is_foreign(self) -> bool:
        """Return whether it belongs to another program."""
        return self.kind == "foreign"

    @property
    def is_unknown(self) -> bool:
        """Return whether it is in an entry's place, but in an unknown format."""
        return self.kind == "unknown"

    @property
    def is_listed(self) -> bool:
        """Return whether some program, its own or another one, can hit it."""
        return self.kind in ("entry", "foreign")

    @property
    def stale_because(self) -> str | None:
        """Return why the entry is stale, or why that is unknown."""
        return self.because if self.kind == "entry" else None

    @property
    def orphaned_because(self) -> str | None:
        """Return why it is an orphan."""
        return self.because if self.is_orphan else None

    @property
    def state(self) -> str:
        """Return ``live``, ``stale`` or ``orphan`` for an entry that may be removed."""
        return "orphan" if self.is_orphan else "stale" if self.stale else "live"


def orphan(entry: Entry, because: str) -> Entry:
    """Turn an entry into an orphan, which has no kernels and counts as stale; its key is its path below the root."""
    return entry._replace(kind="orphan", because=because, stale=True, details=entry.details._replace(kernels=()))


def unknown(entry: Entry, because: str) -> Entry:
    """Turn an entry into one of an unknown format, which has only a size and an age."""
    return entry._replace(kind="unknown", because=because, stale=None, details=Details())


def unknown_words(files: int) -> str:
    """Return a phrase for a number of unknown files."""
    return f"{plural(files, 'file')} in a format that this cachectl does not know"


class Problem(NamedTuple):
    """Something in a root that its library would not leave there."""

    path: Path
    code: str
    message: str

    @property
    def note(self) -> Note:
        """Return the problem as the reason why something was not removed."""
        return Note(str(self.path), self.message)

    @property
    def hides(self) -> bool:
        """Return whether the problem may hide entries."""
        return self.code in ("unreadable", "busy", "sqlite", "pending", "foreign")


@as_json(hidden=("stale_entries", "stale_bytes", "stale_unknown", "span"), also=("oldest", "newest", "complete"))
class Usage(NamedTuple):
    """The numbers of one root, or of a part of it that a scan counts without listing it, such as an index.

    ``files`` and ``bytes`` count the layer's files on disk without orphans; ``unknown_files`` are those of them whose
    format is unknown. ``stale_*`` is ``None`` if the layer cannot recognise stale entries, and ``stale_unknown`` counts
    the entries whose staleness is unknown. ``stale_because`` counts stale entries by reason. ``span`` is the time of
    the oldest and of the newest entry. If a problem hides part of it, numbers are lower bounds, and 0 is ``None``.
    """

    entries: int | None = 0
    files: int | None = 0
    bytes: int | None = 0
    orphan_files: int | None = 0
    orphan_bytes: int | None = 0
    unknown_files: int | None = 0
    stale_entries: int | None = None
    stale_bytes: int | None = None
    stale_unknown: int | None = 0
    span: tuple[float, float] | None = None
    problems: tuple[Problem, ...] = ()
    stale_because: Mapping[str, int] = {}

    @property
    def oldest(self) -> float | None:
        """Return the time of the oldest entry."""
        return None if self.span is None else self.span[0]

    @property
    def newest(self) -> float | None:
        """Return the time of the newest entry."""
        return None if self.span is None else self.span[1]

    @property
    def complete(self) -> bool:
        """Return whether everything could be counted."""
        return not any(problem.hides for problem in self.problems)


#: The numbers of a root that could not be counted.
UNCOUNTED = Usage(None, None, None, None, None, None)
Found = Entry | Usage | Problem


class Artifact(NamedTuple):
    """The bytes of one entry: the content of a file, or a deterministic tar of several.

    ``form`` names a layer and a format version (``pocl-entry/1``).
    """

    layer: str
    key: str
    form: str
    data: bytes
    detail: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return short_repr(self, "data")
