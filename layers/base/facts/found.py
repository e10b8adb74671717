"""Facts about roots and their content: what a report needs."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.disk.presence import status_at


class Scope(Enum):
    """The owner of the entries in a root."""

    USER = "user"
    SYSTEM = "system"


class Condition(Enum):
    """Whether a layer takes part in a run started from this environment."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    BYPASSED = "bypassed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Ability(Enum):
    """An operation of a layer."""

    GET = "get"
    PUT = "put"
    CLEAR = "clear"
    DISABLE = "disable"
    RELOCATE = "relocate"
    KERNELS = "kernels"


class When(Enum):
    """The moment when a switch takes effect."""

    NOW = "now"
    NEXT_IMPORT = "at the next import"
    NEXT_START = "at the next driver start"


@dataclass(frozen=True, slots=True)
class Root:
    """One place where a layer keeps entries.

    ``source`` is the reason for the place in words (the variable or default); ``role`` distinguishes roots of one layer
    with different meanings (PoCL's ``kcache`` and ``uncached``).
    """

    path: Path
    scope: Scope
    source: str
    role: str = ""
    as_json: ClassVar[AsJson] = AsJson(blank_is_null=("role",))

    @property
    def exists(self) -> bool:
        """Return whether something exists there now. Raises :class:`OSError` if that is unknown."""
        try:
            return status_at(self.path, follow=True) is not None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise


@dataclass(frozen=True, slots=True)
class State:
    """A layer's condition, with the reason in words; ``drivers`` are the files that register its OpenCL drivers."""

    condition: Condition
    why: str
    drivers: tuple[str, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(names={"condition": "state"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing a cache can hit.

    ``written_before`` bounds the age of an entry that has no time of its own: a row is no younger than the
    last write to its file. ``kernels`` is ``None`` if the bytes do not contain the names or were not read.
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
    versions: Mapping[str, str] = field(default_factory=dict)
    stale: bool | None = None
    stale_because: str | None = None
    detail: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: The store's version stamp, to detect later changes.
    stamp: tuple[int, ...] = field(default=(), repr=False)
    #: The owner, if the entry is foreign and only shares the root: it is not counted, and cleared only by its key.
    guest: str | None = None
    #: Bytes of disk blocks; ``None`` is unknown. A row has no blocks of its own.
    disk: int | None = None
    as_json: ClassVar[AsJson] = AsJson(hidden=("stamp", "guest", "disk"), also=("state",))

    @property
    def state(self) -> str:
        """Return ``live`` or ``stale``."""
        return "stale" if self.stale else "live"


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files of the layer that no lookup can reach: leaked temporaries, failed builds, database files beyond repair.

    ``key`` is the path relative to the root. ``idle_only`` is set if a live process may still be writing.
    """

    key: str
    root: Path
    bytes: int
    files: int
    modified: float
    why: str
    idle_only: bool = True
    stamp: tuple[int, ...] = ()
    disk: int | None = None
    as_json: ClassVar[AsJson] = AsJson(hidden=("idle_only", "stamp", "disk"), also=("state",), names={"why": "because"})

    @property
    def state(self) -> str:
        """Return ``orphan``."""
        return "orphan"


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Files that belong to the cache as a whole and to no entry, such as an index or an empty dictionary.

    ``stale`` is set for a dictionary that nothing will open again, ``fixed`` for a file of constant size, which does
    not shrink when entries are removed.
    """

    key: str
    root: Path
    bytes: int
    files: int = 1
    modified: float | None = None
    stale: bool | None = None
    fixed: bool = False
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Bulk:
    """Entries counted without being listed; ``oldest`` and ``newest`` are times of last change."""

    entries: int
    files: int
    bytes: int
    oldest: float | None
    newest: float | None
    stale: bool | None = None
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a root that its library would not have left there."""

    path: Path
    code: str
    message: str

    @property
    def hides(self) -> bool:
        """Return whether there may be entries that could not be listed."""
        return self.code in ("unreadable", "busy", "sqlite")

    @property
    def stays(self) -> bool:
        """Return whether this has the name of an entry but is none, or holds a foreign file, and so is not removed."""
        return self.code == "unrecognised"


Found = Entry | Orphan | Housekeeping | Problem
#: Items of a count: things found, and things counted without being listed.
Counted = Found | Bulk
#: Things that a plan may list.
Removable = Entry | Orphan


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of one root.

    ``files`` and ``bytes`` count the layer's files on disk without orphans; ``stale_*`` is ``None`` if the layer cannot
    recognise stale entries. ``disk_bytes`` are disk blocks of all files, orphans included; ``None`` if the store or the
    system does not say. If a problem hides a part of the root, the numbers are lower bounds, and ``None`` instead
    of 0.
    """

    entries: int | None = 0
    files: int | None = 0
    bytes: int | None = 0
    orphan_files: int | None = 0
    orphan_bytes: int | None = 0
    stale_entries: int | None = None
    stale_bytes: int | None = None
    oldest: float | None = None
    newest: float | None = None
    problems: tuple[Problem, ...] = ()
    disk_bytes: int | None = None
    as_json: ClassVar[AsJson] = AsJson(hidden=("stale_entries", "stale_bytes"), also=("complete",))

    @property
    def complete(self) -> bool:
        """Return whether everything could be counted."""
        return not any(problem.hides for problem in self.problems)


class Severity(Enum):
    """The effect of a problem on programs."""

    FAILS = "fails every run"
    RISKS = "may fail a run"
    RECOMPILES = "recompiles every run"
    HEALS = "recompiles once"
    UNSAFE = "lets others run code as you"
    WASTES = "wastes space"
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True)
class Hazard:
    """The effect of a place or of concurrent users that the library does not support."""

    severity: Severity
    message: str
