"""The facts that layers return: frozen data without access to the disk.

Sizes are bytes, times are epoch seconds. ``None`` is *unknown*; zero is zero.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from cachectl.layers.disk import plain

_T = TypeVar("_T")
_Sum = TypeVar("_Sum", "Plan", "Outcome")
#: Results of :func:`json_keys`, by class.
_KEYS: dict[type, Mapping[str, str]] = {}


class AsJson(NamedTuple):
    """The differences between the fields of a class of facts and its JSON, which :func:`as_json` declares.

    ``schema`` is the name of a document (``cachectl/report/1``). ``also`` lists properties to include, ``hidden``
    fields to leave out, ``flat`` fields that are replaced by their own keys, ``optional`` those left out if ``None``.
    ``names`` maps attributes to keys. ``sums`` are what :func:`total` sums over layers.
    """

    schema: str | None = None
    also: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    flat: Container[str] = ()
    optional: Container[str] = ()
    names: Mapping[str, str] = {}
    sums: tuple[str, ...] = ()


def as_json(schema: str | None = None, **differences: Any) -> Callable[[type[_T]], type[_T]]:  # noqa: ANN401 - fields of AsJson
    """Declare the JSON of a class of facts, by the fields of :class:`AsJson`."""

    def declare(kind: type[_T]) -> type[_T]:
        setattr(kind, "json_form", AsJson(schema, **differences))  # noqa: B010 - no field of the class
        return kind

    return declare


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


ENABLED, DISABLED, BYPASSED, ABSENT, UNKNOWN = Condition


class Ability(Enum):
    """An operation of a layer."""

    GET = "get"
    PUT = "put"
    CLEAR = "clear"
    DISABLE = "disable"
    RELOCATE = "relocate"
    KERNELS = "kernels"


#: The moments when a switch takes effect.
NOW, NEXT_IMPORT, NEXT_START = "now", "at the next import", "at the next driver start"


class Root(NamedTuple):
    """One place where a layer keeps entries.

    ``source`` is the reason for the place in words (the variable or default); ``role`` distinguishes roots of one layer
    with different meanings (PoCL's ``kcache`` and ``uncached``).
    """

    path: Path
    scope: Scope
    source: str
    role: str = ""

    @property
    def exists(self) -> bool:
        """Return whether something exists there now. Raises :class:`OSError` if that is unknown."""
        try:
            return plain.status_at(self.path, follow=True) is not None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise

    @property
    def may_exist(self) -> bool:
        """Return whether something exists there, a link without a target included, or that is unknown."""
        try:
            return self.exists or os.path.lexists(self.path)
        except OSError:
            return True


@as_json(names={"condition": "state"})
class State(NamedTuple):
    """A layer's condition, with the reason in words; ``drivers`` are the files that register its OpenCL drivers."""

    condition: Condition
    why: str
    drivers: tuple[str, ...] = ()


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
        return _short(self, "detail", "stamp", "stored")

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


class Severity(Enum):
    """The effect of a problem on programs, the worst first."""

    UNSAFE = "lets others run code as you"
    FAILS = "fails every run"
    RISKS = "may fail a run"
    RECOMPILES = "recompiles every run"
    HEALS = "recompiles once"
    WASTES = "wastes space"
    HARMLESS = "harmless"


UNSAFE, FAILS, RISKS, RECOMPILES, HEALS, WASTES, HARMLESS = Severity


class Hazard(NamedTuple):
    """The effect of a place or of concurrent users that the library does not support."""

    severity: Severity
    message: str


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
        return _short(self, "data")


class Note(NamedTuple):
    """A key and the reason why it was skipped or failed."""

    key: str
    because: str


class Plan(NamedTuple):
    """The exact entries that a removal from one layer would remove, and what it would leave.

    The stamp of each entry is compared again before it is removed. ``failed`` are places that could not be read or
    must not be changed.
    """

    layer: str
    entries: tuple[Entry, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        return _short(self, "entries")

    def plus(self, other: Plan) -> Plan:
        """Return the sum of both."""
        return _plus(self, other)

    @property
    def outcome(self) -> Outcome:
        """Return the plan in the form of an outcome that lists its entries; nothing has been removed."""
        orphans = sum(entry.is_orphan for entry in self.entries)
        size = sum(entry.bytes for entry in self.entries)
        removed, roots = len(self.entries) - orphans, tuple(dict.fromkeys(entry.root for entry in self.entries))
        return Outcome(self.layer, removed, size, self.skipped, self.failed, orphans, self.entries, roots)


@as_json(optional=("entries",))
class Outcome(NamedTuple):
    """The result of a removal, or (with ``entries``) its plan.

    ``removed`` counts entries, ``orphans_removed`` orphans; ``roots`` are the places of both.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    orphans_removed: int = 0
    entries: tuple[Entry, ...] | None = None
    roots: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return _short(self, "entries")

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return _plus(self, other)


def _plus(left: _Sum, right: _Sum) -> _Sum:
    """Return the sum of two facts about one layer, field by field; ``None`` counts as nothing."""
    pairs: Iterable[tuple[Any, Any]] = zip(left[1:], right[1:], strict=True)
    sums = (more if before is None else before if more is None else before + more for before, more in pairs)
    return type(left)(left.layer, *sums)


#: A method to be replaced while a layer is off, for a library that has no switch of its own: the module, the class
#: (``None`` for a function of the module), the name, and what makes the replacement from the original.
Patch = tuple[str, str | None, str, Callable[[Callable[..., object]], Callable[..., object]]]


class Switch(NamedTuple):
    """The changes that turn a layer on or off, as data.

    In this process: ``flags`` are values by ``(module, attribute)``, to be set in modules that are loaded; ``patches``
    replace methods of a library without a switch; ``memo_patches`` replace methods that remember, in modules that are
    loaded; ``clear_functions`` are ``(module, function)`` pairs that empty copies in memory; ``reloads`` are
    ``(module, attribute)`` pairs: such a module, first imported while the layer was off, lacks the attribute and must
    be executed again.

    For programs that start: variables to ``set`` and ``unset``. They are read only once, when a library whose file name
    begins with one of ``read_at_load`` starts, or when one of ``read_at_import`` is imported. ``makes`` are folders
    that must exist before the library starts, since it makes none and keeps nothing without.
    """

    layer: str
    set: Mapping[str, str] = {}
    unset: frozenset[str] = frozenset()
    flags: Mapping[tuple[str, str], bool] = {}
    patches: tuple[Patch, ...] = ()
    memo_patches: tuple[Patch, ...] = ()
    clear_functions: tuple[tuple[str, str], ...] = ()
    reloads: tuple[tuple[str, str], ...] = ()
    read_at_load: tuple[str, ...] = ()
    read_at_import: tuple[str, ...] = ()
    makes: tuple[Path, ...] = ()
    takes_effect: str = NEXT_START


@as_json(hidden=("thing",))
class Finding(NamedTuple):
    """One problem, with the command that fixes it.

    ``thing`` is what ``purge --damaged`` removes: the damaged entry, or (as an orphan) a whole file that its library
    cannot open. It is ``None`` if removing something would not fix the problem.
    """

    layer: str
    root: Path
    key: str | None
    severity: Severity
    code: str
    message: str
    fix: str
    thing: Entry | None = None


def _short(fact: Any, *hidden: str) -> str:  # noqa: ANN401 - a fact of any class
    """Return the text of a fact without its contents and what it does not say."""
    values = zip(fact._fields, fact, strict=True)
    shown = (f"{name}={value!r}" for name, value in values if name not in hidden and value not in (None, (), {}))
    return f"{type(fact).__name__}({', '.join(shown)})"


def declared(kind: type) -> AsJson:
    """Return the JSON declaration of a class of facts."""
    declaration: AsJson = getattr(kind, "json_form", AsJson())
    return declaration


def json_keys(kind: Any) -> Mapping[str, str]:  # noqa: ANN401 - a class of facts
    """Return the key of each attribute of a class of facts that JSON shows, in its order."""
    if kind not in _KEYS:
        say = declared(kind)
        shown = (*(name for name in kind.__match_args__ if name not in say.hidden), *say.also)
        _KEYS[kind] = {name: say.names.get(name, name) for name in shown}
    return _KEYS[kind]


def total(document: Any) -> SimpleNamespace:  # noqa: ANN401 - a fact with layers
    """Return the sums over the layers of a document, as it declares them; a tuple or list counts by its length."""
    sums = dict.fromkeys(declared(type(document)).sums, 0)
    for layer in document.layers:
        for name in sums:
            value = getattr(layer, name)
            sums[name] += value if isinstance(value, int) else len(value)
    return SimpleNamespace(**sums)
