"""The protocol of stores, in which layers keep their entries, and of codecs, which read the bytes of one entry.

A layer declares one store. :mod:`cachectl.layers.stores` has three general ones: files in a folder tree, rows of sqlite
files, and records of text files. A store lists, reads, places and removes entries safely, when the layer lets it.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import Counter
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
#: An error of one entry among several.
EntryError = LayerError | OSError
#: The damage of an entry's bytes, and its effect on the library.
Damage = Hazard


class Doubt(Damage):
    """Possible damage that the bytes of an entry cannot prove: ``purge --damaged`` leaves the entry."""


#: What a path below a root can be by its name: the key of an entry, another path of the layer, or neither.
ENTRY, OWN, FOREIGN = "entry", "own", "foreign"


class Codec:
    """Reads the bytes of one entry, without disk or environment. The base class learns nothing from them."""

    #: The tag of artifacts in this format: layer and format version, such as ``pocl-entry/1``.
    form: str = ""

    def __init__(self, form: str = "") -> None:
        self.form = form or self.form

    def describe(self, data: bytes) -> Details:
        """Return the details in the bytes of an entry, as far as damaged bytes can be read."""
        return Details()

    def check(self, data: bytes) -> Damage | None:
        """Return the damage of an entry's bytes, if any."""
        return None

    def foreign(self, data: bytes) -> str | None:
        """Return why a damaged entry may be of an unknown version of the format; ``None`` if the version is known."""
        return None


class Bound:
    """A store or a part of one, which a layer declares. It is bound to the layer's name and environment."""

    #: The layer's name.
    name: str
    environment: Environment


class Store(Bound, ABC):
    """The store of a layer's entries.

    The abstract methods are the protocol; each handles many entries. The others are implemented for entries whose keys
    are paths below the root; a store overrides one if it has a faster or safer way.

    A store whose writes can be interrupted halfway also has ``recover(root)``, which finishes them or rolls them back,
    as the next program would.
    """

    #: Artifact forms that :meth:`write` accepts and :meth:`read` returns.
    forms: tuple[str, ...]
    #: Whether removing entries needs free disk space. Layers whose stores need none are cleared first.
    clearing_needs_room: ClassVar[bool] = False
    #: The abilities missing on this platform or installation, each with the reason.
    refusals: Mapping[Ability, str] = {}
    #: Separates a file from its contents, or from the folder above it, in keys.
    separator: str = "/"

    @abstractmethod
    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield the items in a root, at least those that the selection matches.

        Damage is yielded as a problem, never raised. With ``contents=False`` entries are not read: their kernels are
        unknown, and only their name can show that they are stale.
        """

    @abstractmethod
    def read(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | EntryError]:
        """Map each key that the root has to its artifact, or to the reading error."""

    @abstractmethod
    def write(
        self, root: Root, artifacts: Sequence[Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | EntryError]:
        """Verify, stage and place entries with different keys; the caller has checked their forms.

        Maps each key to ``True`` if the entry was placed, ``False`` if the same one is present, else to the error:
        :class:`EntryExists` if a different one is present and ``replace`` is not set.
        """

    @abstractmethod
    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Remove the entries of a plan in one root, except those that have changed since."""

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every entry as its library would, and yield findings about those that it could not use."""
        for item in self.scan(root):
            if isinstance(item, Entry) and item.is_unknown:
                yield unknown_finding(self, root, item)
            elif isinstance(item, Problem):
                yield finding_of(self, root, item)

    def kind_of(self, root: Root, path: str) -> str | None:
        """Return :data:`ENTRY`, :data:`OWN` or :data:`FOREIGN` for a path below a root, or a key; ``None`` if unknown.

        Called before an artifact is placed: its key may come from an untrusted bundle, and becomes a file name. The
        part before the separator has no control characters (:func:`~cachectl.layers.base.text.key_complaint`).
        """
        return None

    def usage(self, root: Root) -> Usage:
        """Count a root."""
        return sum_usage(self.scan(root, contents=False))

    def written(self, root: Root) -> Iterator[Path]:
        """Yield the files in a root that the library opens for writing, and the folders in which it makes files."""
        yield from ()

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Pair each item to be cleared with the reason to leave it for now, ``None`` if there is none."""
        for target in targets:
            yield target, None


def bound(part: _P, name: str, environment: Environment) -> _P:
    """Return a copy of a store with its parts, bound to the name and environment of a layer."""
    clone = object.__new__(type(part))
    clone.__dict__.update(part.__dict__, name=name, environment=environment)
    inner = {key: bound(value, name, environment) for key, value in vars(part).items() if isinstance(value, Bound)}
    clone.__dict__.update(inner)
    return clone


def finding_of(part: Bound, root: Root, problem: Problem) -> Finding:
    """Return the finding of a problem; an unreadable item may hide entries that make programs fail."""
    import shlex

    quoted, message = shlex.quote(str(problem.path)), problem.message
    code = COMMON.get(problem.code, UNRECOGNISED)
    severity, fix = HARMLESS, f"nothing, or move {quoted} elsewhere"
    if code is UNREADABLE:
        closed = trust.closed_by_another(problem.path, part.environment.home_folder)
        message += closed.owner
        severity, fix = FAILS, closed.cure or f"chmod u+rwX {quoted}"
    key = None if problem.path == root.path else os.path.relpath(problem.path, root.path)
    return code.finding(part.name, root.path, message, fix, key=key, severity=severity)


def unknown_finding(part: Bound, root: Root, entry: Entry) -> Finding:
    """Return the finding of an entry of an unknown format."""
    return finding_of(part, root, Problem(root.path / entry.key, "unknown", str(entry.because)))


def damage_findings(
    part: Bound, root: Root, entry: Entry, damages: Sequence[Damage], foreign: str | None
) -> Iterator[Finding]:
    """Yield the findings about an entry's damages, or the one that it may be of an unknown version instead."""
    if damages and foreign is not None:
        yield unknown_finding(part, root, unknown(entry, foreign))
    else:
        yield from (damage_finding(entry, damage) for damage in damages)


def damage_finding(entry: Entry, damage: Damage) -> Finding:
    """Return the finding of a damaged item, which ``purge --damaged`` removes, or of a doubtful one."""
    place, (severity, message) = (entry.layer, entry.root), damage
    if isinstance(damage, Doubt):
        import shlex

        fix = f"cachectl purge {entry.layer} --key {shlex.quote(entry.key)}"
        return DOUBTFUL.finding(*place, message, fix, key=entry.key, severity=severity)
    fix = f"cachectl purge --damaged {entry.layer}"
    return DAMAGED.finding(*place, message, fix, key=entry.key, severity=severity, item=entry)


def unreadable(path: Path, error: EntryError) -> Problem:
    """Return the problem of an entry that could not be read, and may be undamaged."""
    return Problem(path, "unreadable", reason_of(error))


def attempt(act: Callable[[], _T]) -> _T | EntryError:
    """Return the result of a call, or the error that it raises about an entry."""
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
    """Record the failure of one part under a name, so that the other parts still run."""
    try:
        yield
    except FAILURES as error:
        failed.append(Note(name, reason_of(error)))


@contextlib.contextmanager
def counting(layer: str, index: Path, recount: Callable[[], None]) -> Iterator[None]:
    """Update an index after a change, also a failed one. Raises :class:`Unsettled` if only the update fails."""
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

        advice = "free some disk space, then " if isinstance(error, OSError) and error.errno in NO_ROOM else ""
        message = f"cannot update the index: {reason_of(error)}; {advice}put or purge any entry"
        raise Unsettled(layer, message, index) from error


#: The numbers of a root that are sums over its parts; the last two of ``ADDED`` may be unknown even if all was counted.
_COUNTED = ("entries", "files", "bytes", "orphan_files", "orphan_bytes", "unknown_files", "stale_unknown")
ADDED = (*_COUNTED, "stale_entries", "stale_bytes")


def usage_of(entry: Entry, number: int = 1) -> Usage:
    """Return the usage of ``number`` entries that together have this size: 0 for the free pages of a database."""
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
    """Sum a scan, holding one item at a time."""
    sums = dict.fromkeys(_COUNTED, 0)
    span: tuple[float, float] | None = None
    problems: list[Problem] = []
    reasons: Counter[str] = Counter()
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
        reasons.update(part.stale_because)
    # If something could not be counted, a number is a lower bound, and zero says nothing.
    nothing = None if any(problem.hides for problem in problems) else 0
    known = {name: number or nothing for name, number in sums.items()}
    return Usage(**known, span=span, problems=tuple(problems), stale_because=reasons)
