"""The protocol of stores, in which layers keep their entries, and of codecs, which read the bytes of one entry.

A layer declares one store. :mod:`cachectl.layers.stores` has three general ones: files in a folder tree, rows of sqlite
files, and records of text files. A store lists, reads, places and removes entries safely; the layer decides when that
is allowed.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, LayerError, Unsettled, reason_of
from cachectl.layers.core.codes import COMMON, DAMAGED, DOUBTFUL, UNREADABLE, UNRECOGNISED
from cachectl.layers.core.entry import Artifact, Entry, Found, Note, Problem, Usage, unknown
from cachectl.layers.core.finding import FAILS, HARMLESS, Finding, Hazard
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import trust
from cachectl.layers.formats.details import Details

_T = TypeVar("_T")
_P = TypeVar("_P", bound="Bound")
#: What can go wrong with one entry of several.
EntryError = LayerError | OSError
#: The damage of an entry's bytes, and its effect on the library.
Damage = Hazard


class Doubt(Damage):
    """What may be wrong with an entry, but its bytes cannot tell: ``purge --damaged`` leaves it."""


#: What a path below a root can be to a layer, by its name: the key of an entry, something else that is the layer's or
#: leads to its files, or neither.
ENTRY, OWN, FOREIGN = "entry", "own", "foreign"


class Codec:
    """Reads the bytes of one entry: no disk, no environment. One without methods of its own knows nothing of them."""

    #: The tag of artifacts in this format: layer and format version, as ``pocl-entry/1``.
    form: str = ""

    def __init__(self, form: str = "") -> None:
        self.form = form or self.form

    def describe(self, data: bytes) -> Details:
        """Return the details in the bytes of an entry; damaged bytes give those that can still be read."""
        return Details()

    def check(self, data: bytes) -> Damage | None:
        """Return the damage of an entry's bytes, ``None`` if there is none."""
        return None

    def foreign(self, data: bytes) -> str | None:
        """Return why a damaged entry may be of an unknown version of the format; ``None`` if it is of a known one."""
        return None


class Bound:
    """A store, or a part of one. A layer declares it, and it is bound to a name and environment with the layer."""

    #: The layer's name.
    name: str
    environment: Environment


class Store(Bound, ABC):
    """The store of a layer's entries.

    The first five methods are the protocol; each takes and gives many entries. The others have a general implementation
    for entries whose keys are paths below the root; a store overrides one if it has a faster or safer way.

    A store whose writes may be interrupted halfway also has ``recover(root)``, which finishes them, or rolls them back,
    as the next program there would.
    """

    #: Artifact forms that :meth:`write` takes; what :meth:`read` returns has one of them.
    forms: tuple[str, ...]
    #: Whether removing entries needs free disk space. Layers whose stores need none are cleared first.
    clearing_needs_room: ClassVar[bool] = False
    #: The abilities missing on this platform or installation, each with the reason.
    refusals: Mapping[Ability, str] = {}
    #: Separates a file from what is in it, or above it, in keys.
    separator: str = "/"

    @abstractmethod
    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield the things in a root, at least those that the selection matches.

        Damage is yielded as a problem, never raised. With ``contents=False`` entries are not read: their kernels are
        unknown, and they are stale only if their name shows it.
        """

    @abstractmethod
    def read(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | EntryError]:
        """Map each key that the root has to its artifact, or to the reading error."""

    @abstractmethod
    def write(
        self, root: Root, artifacts: Sequence[Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | EntryError]:
        """Verify, stage and place entries with different keys; the caller has checked their forms.

        Maps each key to ``True`` if the entry was placed, ``False`` if the same one was present, else to the error:
        :class:`EntryExists` if a different one is present and ``replace`` is not set.
        """

    @abstractmethod
    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Remove the entries of a plan in one root, and skip those that have changed since."""

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every entry as its library would, and yield those it could not use."""
        for item in self.scan(root):
            if isinstance(item, Entry) and item.is_unknown:
                yield unknown_finding(self, root, item)
            elif isinstance(item, Problem):
                yield finding_of(self, root, item)

    def kind_of(self, root: Root, path: str) -> str | None:
        """Return :data:`ENTRY`, :data:`OWN` or :data:`FOREIGN` for a path below a root, or a key; ``None`` if unknown.

        Called before an artifact is placed, because the key may come from an untrusted bundle and becomes a file name.
        :func:`core.key_complaint` has refused control characters in the part before the separator.
        """
        return None

    def usage(self, root: Root) -> Usage:
        """Count a root."""
        return sum_usage(self.scan(root, contents=False))

    def written(self, root: Root) -> Iterator[Path]:
        """Yield the files and folders in a root that the library opens for writing, or makes something in."""
        yield from ()

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Pair each thing to be cleared with the reason to leave it for now, ``None`` if there is none."""
        for target in targets:
            yield target, None


def bound(part: _P, name: str, environment: Environment) -> _P:
    """Return a store, with its parts, as that of the layer of a name in an environment."""
    clone = object.__new__(type(part))
    clone.__dict__.update(part.__dict__, name=name, environment=environment)
    inner = {key: bound(value, name, environment) for key, value in vars(part).items() if isinstance(value, Bound)}
    clone.__dict__.update(inner)
    return clone


def finding_of(part: Bound, root: Root, problem: Problem) -> Finding:
    """Return the finding of a problem: unreadable things may hide entries that fail a program."""
    import shlex

    quoted, message = shlex.quote(str(problem.path)), problem.message
    code = COMMON.get(problem.code, UNRECOGNISED)
    severity, fix = HARMLESS, f"nothing, or move {quoted} elsewhere"
    if code is UNREADABLE:
        closed = trust.closed_by_another(problem.path, part.environment.home_folder)
        message += closed.owner
        severity, fix = FAILS, closed.cure or f"chmod u+rwX {quoted}"
    key = os.path.relpath(problem.path, root.path)
    where = None if key == "." else key
    return code.finding(part.name, root.path, message, fix, key=where, severity=severity)


def unknown_finding(part: Bound, root: Root, entry: Entry) -> Finding:
    """Return the finding of an entry of an unknown format."""
    return finding_of(part, root, Problem(root.path / entry.key, "unknown", str(entry.because)))


def damage_findings(
    part: Bound, root: Root, entry: Entry, damages: Sequence[Damage], foreign: str | None
) -> Iterator[Finding]:
    """Yield the findings of the damages of an entry, or why it may be of an unknown version instead."""
    if damages and foreign is not None:
        yield unknown_finding(part, root, unknown(entry, foreign))
    else:
        yield from (damage_finding(entry, damage) for damage in damages)


def damage_finding(entry: Entry, damage: Damage) -> Finding:
    """Return the finding of a damaged thing, which ``purge --damaged`` removes, or of a doubtful one."""
    fix = f"cachectl purge --damaged {entry.layer}"
    place, severity = (entry.layer, entry.root), damage.severity
    if isinstance(damage, Doubt):
        import shlex

        fix = f"cachectl purge {entry.layer} --key {shlex.quote(entry.key)}"
        return DOUBTFUL.finding(*place, damage.message, fix, key=entry.key, severity=severity)
    return DAMAGED.finding(*place, damage.message, fix, key=entry.key, severity=severity, item=entry)


def unreadable(path: Path, error: EntryError) -> Problem:
    """Return the problem of an entry that could not be read, and may be whole."""
    return Problem(path, "unreadable", reason_of(error))


def attempt(act: Callable[[], _T]) -> _T | EntryError:
    """Return the result of a call, or the error that it raises about one entry."""
    try:
        return act()
    except (LayerError, OSError) as error:
        return error


def read_each(read: Callable[[str], Artifact | None], keys: Iterable[str]) -> dict[str, Artifact | EntryError]:
    """Read entries one by one, for :meth:`Store.read`."""
    items = ((key, attempt(partial(read, key))) for key in keys)
    return {key: artifact for key, artifact in items if artifact is not None}


@contextlib.contextmanager
def noted(failed: list[Note], name: str) -> Iterator[None]:
    """Note the failure of a part under a name, so that the other parts still run and count."""
    try:
        yield
    except FAILURES as error:
        failed.append(Note(name, reason_of(error)))


@contextlib.contextmanager
def counting(layer: str, index: Path, recount: Callable[[], None]) -> Iterator[None]:
    """Recount the entries into an index after a change, even after a failed one, which may be half done.

    Raises :class:`Unsettled` if only the recount fails.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(LayerError, OSError):
            recount()
        raise
    try:
        recount()
    except (LayerError, OSError) as error:
        from cachectl.layers.disk.handles import NO_ROOM

        advice = "make room, then " if isinstance(error, OSError) and error.errno in NO_ROOM else ""
        message = f"cannot count the entries again: {reason_of(error)}; {advice}put or purge any entry"
        raise Unsettled(layer, message, index) from error


#: The numbers of a root that parts of it add up to, and those that may be unknown although all could be counted.
_COUNTED = ("entries", "files", "bytes", "orphan_files", "orphan_bytes", "unknown_files", "stale_unknown")
ADDED = (*_COUNTED, "stale_entries", "stale_bytes")


def usage_of(entry: Entry, number: int = 1) -> Usage:
    """Return what an entry counts, or so many entries of its age and staleness that together have its size.

    No entry stands for files that hold none, such as the free pages of a database.
    """
    if entry.is_orphan:
        return Usage(orphan_files=entry.files, orphan_bytes=entry.bytes)
    if entry.is_unknown:
        # A row has no file of its own.
        return Usage(files=entry.files, bytes=entry.bytes, unknown_files=entry.files or 1)
    stale, because = entry.stale, entry.because
    moment = None if not number else entry.written_before if entry.modified is None else entry.modified
    return Usage(
        number,
        entry.files,
        entry.bytes,
        stale_entries=None if stale is None else number * stale,
        stale_bytes=None if stale is None else entry.bytes * stale,
        stale_unknown=number if stale is None and because is not None else 0,
        span=None if moment is None else (moment, moment),
        stale_because={because: number} if stale and number and because is not None else {},
    )


def sum_usage(items: Iterable[Found]) -> Usage:
    """Sum a scan, holding one thing at a time."""
    sums = dict.fromkeys(_COUNTED, 0)
    span: tuple[float, float] | None = None
    problems: list[Problem] = []
    reasons: dict[str, int] = {}
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        if isinstance(item, Entry) and item.is_foreign:
            continue
        part = item if isinstance(item, Usage) else usage_of(item)
        for name in ADDED:
            if (number := getattr(part, name)) is not None:
                sums[name] = sums.get(name, 0) + number
        if part.span is not None:
            span = part.span if span is None else (min(span[0], part.span[0]), max(span[1], part.span[1]))
        for reason, number in part.stale_because.items():
            reasons[reason] = reasons.get(reason, 0) + number
    # If something could not be counted, a number is a lower bound, and zero means nothing.
    nothing = None if any(problem.hides for problem in problems) else 0
    known = {name: number or nothing for name, number in sums.items()}
    return Usage(**known, span=span, problems=tuple(problems), stale_because=reasons)
