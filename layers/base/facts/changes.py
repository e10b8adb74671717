"""Facts about changes: artifacts, plans and their results, switches, and findings with the command that fixes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.facts.found import Orphan, Problem, Removable, Severity, When


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of one entry, with the tag of their format.

    ``form`` names layer and format version (``pocl-entry/1``). ``data`` is the raw value of a one-file
    entry, or a deterministic tar of a many-file one.
    """

    layer: str
    key: str
    form: str
    data: bytes = field(repr=False)
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """A key and the reason why it was skipped or failed."""

    key: str
    because: str


def note_of(problem: Problem) -> Note:
    """Return a problem as the reason why something was not removed."""
    return Note(str(problem.path), problem.message)


@dataclass(frozen=True, slots=True)
class Plan:
    """The exact entries that a removal from one layer would remove, and what it would leave.

    The stamp of each entry is compared again before it is removed. ``failed`` are places that could not be read or
    must not be changed. ``recreate`` lists missing folders that running programs need: they are recreated.
    """

    layer: str
    entries: tuple[Removable, ...] = field(default=(), repr=False)
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreate: tuple[Path, ...] = ()

    def plus(self, other: Plan) -> Plan:
        """Return the sum of both."""
        return Plan(
            self.layer,
            self.entries + other.entries,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.recreate + other.recreate,
        )

    @property
    def outcome(self) -> Outcome:
        """Return the plan in the form of an outcome that lists its entries; nothing has been removed."""
        orphans = sum(isinstance(entry, Orphan) for entry in self.entries)
        size = sum(entry.bytes for entry in self.entries)
        removed = len(self.entries) - orphans
        return Outcome(
            self.layer, removed, size, self.skipped, self.failed, self.recreate, orphans, entries=self.entries
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a removal, or (with ``entries``) its plan.

    ``removed`` counts entries, ``orphans_removed`` orphans; ``recreated`` lists folders.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreated: tuple[Path, ...] = ()
    orphans_removed: int = 0
    entries: tuple[Removable, ...] | None = field(default=None, repr=False)
    as_json: ClassVar[AsJson] = AsJson(optional=("entries",), names={"recreated": "remade"})

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return Outcome(
            self.layer,
            self.removed + other.removed,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.recreated + other.recreated,
            self.orphans_removed + other.orphans_removed,
            None if self.entries is None and other.entries is None else (self.entries or ()) + (other.entries or ()),
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
    #: Makes the replacement from the original method.
    replacement: Callable[[Callable[..., object]], Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Switch:
    """The changes that turn a layer on or off, as data.

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


@dataclass(frozen=True, slots=True)
class Finding:
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
    thing: Removable | None = None
    as_json: ClassVar[AsJson] = AsJson(hidden=("thing",))
