"""The facts that layers answer with: frozen, plain, free of behaviour that touches a disk.

Sizes are bytes, times are epoch seconds. ``None`` is *unknown*; zero is zero.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.lazy import dataclass, field
from cachectl.layers.disk.presence import status_at


class Scope(Enum):
    """Who owns what lies in a root."""

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
    """What a layer may be asked to do."""

    GET = "get"
    PUT = "put"
    CLEAR = "clear"
    QUARANTINE = "quarantine"
    DISABLE = "disable"
    RELOCATE = "relocate"
    KERNELS = "kernels"


class When(Enum):
    """The moment from which a switch counts."""

    NOW = "now"
    NEXT_IMPORT = "at the next import"
    NEXT_START = "at the next driver start"


@dataclass(frozen=True, slots=True)
class Root:
    """One place where a layer keeps entries.

    ``source`` says in words why it is there (which variable, which default); ``role`` tells a layer's own
    roots apart where they differ in meaning (PoCL's ``kcache`` and ``uncached``).
    """

    path: Path
    scope: Scope
    source: str
    role: str = ""
    as_json: ClassVar = AsJson(blank_is_null=("role",))

    @property
    def exists(self) -> bool:
        """Return whether something is there now. Raises :class:`OSError` where that is unknown."""
        try:
            return status_at(self.path, follow=True) is not None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise


@dataclass(frozen=True, slots=True)
class State:
    """A layer's condition, with the reason in words."""

    condition: Condition
    why: str
    as_json: ClassVar = AsJson(names={"condition": "state"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing a cache can hit.

    ``written_before`` bounds the age of an entry that has no time of its own: a row is no younger than the
    last write to its file. ``kernels`` is ``None`` where the bytes do not tell, or were not asked.
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
    detail: Mapping[str, str] = field(default_factory=dict)
    #: The store's own fingerprint, by which a later change is noticed.
    stamp: tuple[int, ...] = ()
    #: Whose it is, where it merely shares a root with the layer's own: not counted, and cleared only by its key.
    guest: str | None = None
    as_json: ClassVar = AsJson(hidden=("stamp", "guest"))


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files of the layer's own making that no lookup can ever reach: leaked temporaries, left-over builds.

    ``key`` is the path relative to the root. ``idle_only`` marks those that a live process may still be
    writing, ``kept`` those that wait in quarantine to be brought back: only a purge of their layer removes them.
    """

    key: str
    root: Path
    bytes: int
    files: int
    modified: float
    why: str
    idle_only: bool = True
    stamp: tuple[int, ...] = ()
    kept: bool = False
    as_json: ClassVar = AsJson(hidden=("idle_only", "stamp", "kept"), names={"why": "because"})


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Files that belong to the cache as a whole (an index, an empty dictionary), and so to no entry.

    ``stale`` says of a dictionary that nothing will open it again, ``fixed`` of a file that it is as long whatever the
    cache holds: removing entries frees nothing of it.
    """

    key: str
    root: Path
    bytes: int
    files: int = 1
    modified: float | None = None
    stale: bool | None = None
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Bulk:
    """Entries counted together, where nobody asked for each; ``oldest`` and ``newest`` are their last changes."""

    entries: int
    files: int
    bytes: int
    oldest: float | None
    newest: float | None
    stale: bool | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a root that does not look as its library would have left it."""

    path: Path
    code: str
    message: str

    @property
    def hides(self) -> bool:
        """Return whether there may be entries that could not be listed."""
        return self.code in ("unreadable", "busy", "sqlite")

    @property
    def stays(self) -> bool:
        """Return whether this has the name of an entry, but is none or holds a foreign file, so that it is left."""
        return self.code == "unrecognised"

    @property
    def note(self) -> Note:
        """Return the problem as a reason why something was not removed."""
        return Note(str(self.path), self.message)


Found = Entry | Orphan | Housekeeping | Problem
#: What counting yields: the same, and what was counted without being listed.
Counted = Found | Bulk
#: What a plan may list.
Removable = Entry | Orphan


@dataclass(frozen=True, slots=True)
class Usage:
    """What one root holds, counted.

    ``files`` and ``bytes`` are what lies on disk for the layer, orphans apart; ``stale_*`` is ``None`` where
    the layer cannot tell a dead entry from a live one. Where a problem hides a part of the root, the numbers are lower
    bounds, and ``None`` instead of 0.
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
    as_json: ClassVar = AsJson(hidden=("stale_entries", "stale_bytes"), also=("complete",))

    @property
    def complete(self) -> bool:
        """Return whether everything could be counted."""
        return not any(problem.hides for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of one entry, with the tag that says how to read them.

    ``form`` names layer and format version (``pocl-entry/1``). ``data`` is the raw value of a one-file
    entry, or a deterministic tar of a many-file one.
    """

    layer: str
    key: str
    form: str
    data: bytes
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """One line of a plan: what is to be removed, and what it looked like when it was planned.

    ``entries`` is 0 for an orphan and may be many for a whole table; ``mark`` is compared again before
    anything is removed.
    """

    root: Path
    key: str
    bytes: int
    entries: int
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A key and the reason why it was skipped, or why it failed.

    ``starved`` lists what failed for lack of room alone: it can be removed after other things have gone.
    """

    key: str
    because: str
    starved: tuple[Target, ...] = ()
    as_json: ClassVar = AsJson(hidden=("starved",))


@dataclass(frozen=True, slots=True)
class ClearPlan:
    """Exactly what a clear of one layer would remove, before anything is touched.

    ``recreate`` lists folders that have gone, and without which running programs fail: they are made again. ``things``
    describes the targets that were listed one by one, for a dry run to name; a target that stands for a whole table
    has none.
    """

    layer: str
    targets: tuple[Target, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreate: tuple[Path, ...] = ()
    things: tuple[Removable, ...] = ()

    @property
    def entries(self) -> int:
        """Count the entries that would go."""
        return sum(target.entries for target in self.targets)

    @property
    def bytes(self) -> int:
        """Sum the bytes of what would go."""
        return sum(target.bytes for target in self.targets)


@dataclass(frozen=True, slots=True)
class Foresight:
    """What removing targets would do: ``going`` would go and free ``bytes_freed``; the others would be left or fail."""

    going: tuple[Target, ...] = ()
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()

    def plus(self, other: Foresight) -> Foresight:
        """Return both as one."""
        return Foresight(
            self.going + other.going,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a clear did, or would do.

    ``bytes_freed`` is what vanished from the disk, measured; ``recreated`` are
    folders made again. ``things`` names what would go; it is empty where something was done.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreated: tuple[Path, ...] = ()
    things: tuple[Removable, ...] = ()
    as_json: ClassVar = AsJson(hidden=("things",), names={"recreated": "remade"})

    def plus(self, other: Outcome) -> Outcome:
        """Return both outcomes as one."""
        return Outcome(
            self.layer,
            self.removed + other.removed,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.recreated + other.recreated,
            self.things + other.things,
        )


@dataclass(frozen=True, slots=True)
class Flag:
    """A module attribute that switches a cache in a running process, and the value to give it."""

    module: str
    attribute: str
    value: bool


@dataclass(frozen=True, slots=True)
class Patch:
    """A method to be replaced while a layer is off, for a library that has no switch of its own.

    ``owner`` is the class, ``None`` for a function of the module.
    """

    module: str
    owner: str | None
    method: str
    #: Makes the stand-in from the method it stands in for.
    replacement: Callable[[Callable[..., object]], Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Switch:
    """How to turn a layer on or off, as data: nothing is changed by having one.

    In this process: ``flags`` are set in modules that are loaded; ``patches`` replace methods of a library without a
    switch; ``memo_patches`` replace methods that remember, in modules that are loaded; ``clear_functions`` are
    ``(module, function)`` pairs that empty copies in memory; ``reloads`` are ``(module, attribute)`` pairs: such a
    module, first imported while the layer was off, lacks the attribute and must be executed again.

    For programs that start: variables to ``set`` and ``unset``. They are read only once, when a library whose file name
    begins with one of ``read_at_load`` starts, or when one of ``read_at_import`` is imported. ``makes`` are folders
    that must exist before the library starts, since it makes none and keeps nothing without.
    """

    layer: str
    set: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    flags: tuple[Flag, ...] = ()
    patches: tuple[Patch, ...] = ()
    memo_patches: tuple[Patch, ...] = ()
    clear_functions: tuple[tuple[str, str], ...] = ()
    reloads: tuple[tuple[str, str], ...] = ()
    read_at_load: tuple[str, ...] = ()
    read_at_import: tuple[str, ...] = ()
    makes: tuple[Path, ...] = ()
    takes_effect: When = When.NEXT_START


class Severity(Enum):
    """What something wrong does to the program that meets it."""

    FAILS = "fails every run"
    RISKS = "may fail a run"
    RECOMPILES = "recompiles every run"
    HEALS = "recompiles once"
    UNSAFE = "lets others run code as you"
    WASTES = "wastes space"
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True)
class Hazard:
    """What goes wrong with a cache in a place, or in company, that its library was not made for."""

    severity: Severity
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with the command that mends it.

    ``thing`` is what quarantine would move aside: the damaged entry, or (as an orphan) a whole file that its
    library cannot open. It is ``None`` where moving something would mend nothing.
    """

    layer: str
    root: Path
    key: str | None
    severity: Severity
    code: str
    message: str
    fix: str
    thing: Removable | None = None
    as_json: ClassVar = AsJson(hidden=("thing",))


@dataclass(frozen=True, slots=True)
class Unverified:
    """Content of a root that verify did not check: ``what`` of ``count`` things, each a ``thing``.

    ``remedy`` says how it can be checked, in a few words; it is empty where it cannot.
    """

    layer: str
    what: str
    count: int
    thing: str
    remedy: str = ""
    as_json: ClassVar = AsJson(blank_is_null=("remedy",))


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One thing that lies in quarantine in the root it came from.

    ``name`` is what a user calls it by; ``key`` is the key of the entry, or of the whole file, that it was;
    ``moved`` is when (epoch seconds), ``code`` and ``message`` say why.
    """

    name: str
    layer: str
    root: Path
    key: str
    bytes: int
    moved: float
    code: str
    message: str
