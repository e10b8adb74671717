"""Facts about changes: artifacts, plans and their results, switches, and findings with the command that fixes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.facts.found import Problem, Removable, Severity, When


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of one entry, with the tag of their format.

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
    """One thing to remove, with its version stamp when it was planned.

    ``entries`` is 0 for an orphan and may be many for a whole table; ``stamp`` is compared again before
    anything is removed.
    """

    root: Path
    key: str
    bytes: int
    entries: int
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A key and the reason why it was skipped or failed.

    ``starved`` lists targets that failed only for lack of space: they can be removed after other things.
    """

    key: str
    because: str
    starved: tuple[Target, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(hidden=("starved",))


def note_of(problem: Problem) -> Note:
    """Return a problem as the reason why something was not removed."""
    return Note(str(problem.path), problem.message)


@dataclass(frozen=True, slots=True)
class ClearPlan:
    """The exact list of things that a clear of one layer would remove.

    ``recreate`` lists missing folders that running programs need: they are recreated. ``things`` describes the targets
    that were listed one by one, for dry runs; a target that stands for a whole table has none.
    """

    layer: str
    targets: tuple[Target, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreate: tuple[Path, ...] = ()
    things: tuple[Removable, ...] = ()

    @property
    def entries(self) -> int:
        """Count the entries to remove."""
        return sum(target.entries for target in self.targets)

    @property
    def bytes(self) -> int:
        """Sum the bytes to remove."""
        return sum(target.bytes for target in self.targets)


@dataclass(frozen=True, slots=True)
class Foresight:
    """The expected result of a removal: ``going`` would be removed and free ``bytes_freed``; the others stay."""

    going: tuple[Target, ...] = ()
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()

    def plus(self, other: Foresight) -> Foresight:
        """Return the sum of both."""
        return Foresight(
            self.going + other.going,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a clear, or the expected one.

    ``removed`` counts entries; ``bytes_freed`` is measured on the disk; ``recreated`` lists folders. ``things`` lists
    the things to remove in an expected result; it is empty after a clear.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    recreated: tuple[Path, ...] = ()
    things: tuple[Removable, ...] = ()
    orphans_removed: int = 0
    as_json: ClassVar[AsJson] = AsJson(hidden=("things",), names={"recreated": "remade"})

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return Outcome(
            self.layer,
            self.removed + other.removed,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.recreated + other.recreated,
            self.things + other.things,
            self.orphans_removed + other.orphans_removed,
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

    ``thing`` is what quarantine would move: the damaged entry, or (as an orphan) a whole file that its library cannot
    open. It is ``None`` if moving something would not fix the problem.
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


@dataclass(frozen=True, slots=True)
class Unverified:
    """Content of a root that verify did not check: ``what`` of ``count`` things, each a ``thing``.

    ``remedy`` says in a few words how to check it; it is empty if that is impossible.
    """

    layer: str
    what: str
    count: int
    thing: str
    remedy: str = ""
    as_json: ClassVar[AsJson] = AsJson(blank_is_null=("remedy",))


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One thing in quarantine, in the root it came from.

    ``name`` is its name for ``restore``; ``key`` is the key of the former entry or whole file; ``moved`` is the time
    (epoch seconds); ``code`` and ``message`` give the reason.
    """

    name: str
    layer: str
    root: Path
    key: str
    bytes: int
    moved: float
    code: str
    message: str
