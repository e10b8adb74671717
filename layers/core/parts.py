"""What is known of a layer's product beyond its places, its switch and its store: :class:`About`, and its parts.

A missing part is ``None``. Verbs then do without: a forecast is unknown, a trace compares entries before and after the
run, and a started driver cannot be salted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cachectl.layers.core.environment import Environment
from cachectl.layers.core.facts import Entry, Hazard, Scope, Severity

#: Facts of a place or an entry, by name. ``None`` is unknown, and equals nothing.
Facts = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether a program here can hit an entry: yes, no, or ``None`` for unknown; ``because`` is the reason."""

    hits: bool | None
    because: str = ""

    @property
    def words(self) -> str:
        """Return it as text."""
        if self.hits:
            return "will hit"
        return f"not known: {self.because}" if self.hits is None else f"cannot hit: {self.because}"


#: The longest text in a key that is shown, in characters.
_SHORT = 160
#: The outlook of an entry whose layer does not say what its key depends on.
UNFORESEEN = Outlook(None, "what decides about this layer cannot be read without its driver")


class Portability:
    """The facts that decide whether a program elsewhere computes the key of an entry.

    Facts are compared by name between the place where a bundle was made and the place where it is imported. The
    platform and the kind of processor are always compared, and decide alone unless a layer adds facts.
    """

    #: Facts on which every key depends, each with the reason. If one differs, no entry can be hit.
    deciding: ClassVar[Mapping[str, str]] = {}
    #: Facts without which nothing can be foreseen, even if neither place knows them.
    needed: ClassVar[tuple[str, ...]] = ()
    #: Facts that are shown to readers and decide nothing.
    informing: ClassVar[tuple[str, ...]] = ()

    def facts(self, environment: Environment) -> Facts:
        """Describe an environment. Import no library and start no driver; raise nothing."""
        del environment
        return {}

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
        """Judge an entry by its own versions; return ``None`` if the facts of the two places decide."""
        del versions, there, environment
        return None


class EntryFiles(NamedTuple):
    """A cache that opens a file for each entry that it hits, and writes or renames one for each that it stores.

    The path of the file below the root is the entry's key. ``shared`` matches the names of files that hold many
    entries instead; ``otherwise`` says why the opening of one shows no lookup.
    """

    shared: re.Pattern[str] | None = None
    otherwise: str = ""


#: A driver's compilation: the kernel, ``None`` for a whole program as it is built; when it began in epoch seconds,
#: ``None`` for a kernel that is compiled from its launch on; and when it ended.
Compilation = tuple[str | None, float | None, float]


class Lookups:
    """How the lookups and stores of a run are observed.

    A library in Python is watched in the interpreter by ``watchers``. A driver is listened to while it builds, or
    counts by itself. A layer with none of these is judged by its entries before and after the run.
    """

    #: Who reports, in words: "pytools", "PoCL's own messages".
    by: str = ""
    #: Modules with the file that watches each: its ``watch(module, notes)`` replaces functions by others that note.
    #: The file imports the standard library alone, and runs on Python 3.8. It may also time functions, by the stages
    #: of a timeline (``notes.timed``, ``notes.span``).
    watchers: Mapping[str, Path] = {}
    #: Those of the watched modules that must be watched for the numbers to be exact.
    modules: tuple[str, ...] = ()
    #: Packages whose import is part of a start.
    imports: tuple[str, ...] = ()
    #: OpenCL platforms with the file that listens to the driver of each: its class ``Listener`` hears whether a build
    #: was compiled, and notes a ``messages`` event.
    listeners: Mapping[str, Path] = {}
    #: Variables to set in the run, so that the cache counts or reports. They must not change its keys.
    variables: Mapping[str, str] = {}
    #: Parts of the path of a file that a process has mapped, or opened, if it uses the cache.
    mapped: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    #: How the cache uses its files, if lookups show by file events; ``None`` if they do not.
    files: EntryFiles | None = None
    #: Whether every hit leaves a time of use, so that no such time means no hit.
    keeps_use: bool = False

    def __init__(
        self,
        by: str = "",
        watchers: Mapping[str, Path] | None = None,
        *,
        files: EntryFiles | None = None,
        mapped: tuple[str, ...] = (),
    ) -> None:
        self.by = by or self.by
        if watchers is not None:
            self.watchers, self.modules = watchers, tuple(watchers)
        self.files = files or self.files
        self.mapped = mapped or self.mapped

    def owns(self, event: Mapping[str, Any], layer: str) -> bool:
        """Return whether an event is this layer's; its ``layer`` is the name under which the watcher noted it."""
        return bool(event["layer"] == layer)

    def counters(self, environment: Environment) -> tuple[int, int] | None:
        """Return the hits and misses that the cache itself has counted since it was made; ``None`` if it has not."""
        del environment
        return None

    def by_openings(self, openings: int, stores: int, environment: Environment) -> tuple[int, int] | None:
        """Infer hits and misses from the openings of files with many entries, and the entries that appeared.

        ``None`` if they show neither.
        """
        del openings, stores, environment
        return None

    def weigh(self, path: str) -> int | None:
        """Return the bytes of a file that a listener saw stored; ``None`` if it no longer exists."""
        del path
        return None

    def compilations(self, path: str) -> tuple[Compilation, ...]:
        """Return what was compiled into a program that a listener saw stored, and when; nothing if that is unknown."""
        del path
        return ()

    def other_output(self, heard: bytes) -> bytes:
        """Return the part of a driver's error stream that is not the driver's."""
        return heard

    def part_of(self, detail: Mapping[str, Any]) -> str | None:
        """Return the name of a part of the cache, as a dictionary's, by an event or the detail of an entry.

        ``None`` if it has no parts. Only entries of the part that was asked can have answered a lookup.
        """
        del detail
        return None

    def difference(self, alike: Sequence[Entry], event: Mapping[str, Any]) -> str:
        """Explain in words why a lookup missed although these entries of the same kernel are there.

        If the miss shows by the entry that was stored, the event has its ``root``, ``key`` and ``device``.
        """
        here, there = event.get("device"), sorted({entry.device or "" for entry in alike})
        if here and "" not in there and here not in there:
            return (
                f"an entry of the same kernel is there, but its device differs: {', '.join(there)} there, {here} here"
            )
        return "an entry of the same kernel is there, but the kernel itself, its types or its target differ"


def named_parts(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Name the parts in which two keys differ, the short ones with their values; ``None`` if none does."""
    named = []
    for part in sorted(there.keys() & here.keys()):
        before, now = there[part], here[part]
        if before != now:
            short = max(len(before), len(now)) <= _SHORT and "\n" not in before + now
            named.append(f"{part} ({before or 'none'} there, {now or 'none'} here)" if short else part)
    return f"differs in {', '.join(named)}" if named else None


class Tagging(NamedTuple):
    """How entries of tagged builds are recognised: builds of a source with a constant of a unique name.

    A driver that has started cannot be switched off, but it has no entry for such a source. With ``drivers`` and
    ``platforms`` the layer of the driver can be salted in a running process. Without either, the layer stores builds
    for any platform, and only what they stored is removed.

    The store of such a layer has a method ``find_tagged(root, tag, since, known)``, which yields the entries of tagged
    builds, each with its tag as text; ``tag`` is a pattern of bytes. Entries that have not changed after ``since``
    (epoch seconds) are not read. A rest of an entry among the ``known`` keys has the tag ``""`` if it does not name the
    constant. It raises :class:`LayerError` or :class:`OSError` if the root cannot be read.
    """

    #: Libraries, by the beginning of their file names: if one has started, builds reach the cache through it.
    drivers: tuple[str, ...] = ()
    #: Names of the OpenCL platforms of that driver, which stores every program that is built for them.
    platforms: tuple[str, ...] = ()
    #: Pattern of the log, or leaked temporary, that the message of a failed build names.
    failure_trace: re.Pattern[str] | None = None


class About(NamedTuple):
    """What verbs know of a layer's product beyond its places, its switch and its store."""

    #: The owner of the entries. Entries of a package are read, never changed.
    scope: Scope = Scope.USER
    #: Whether this holds tuning results that no rerun refills: it is cleared only when named.
    precious: bool = False
    #: The problem with a root on a network file system, ``None`` if there is none.
    on_network: Hazard | None = Hazard(
        Severity.HARMLESS, "every lookup goes over the network, and locks of other machines may not hold there"
    )
    #: The problem with a root that the ranks of one job share, ``None`` if there is none.
    among_ranks: Hazard | None = Hazard(Severity.HARMLESS, "they may wait for each other")
    #: The problem with a root that this user cannot write to or make, ``None`` if there is none.
    when_closed: Hazard | None = Hazard(Severity.RISKS, "nothing that is new can be stored")
    #: What ``verify`` does not look at.
    unchecked: str = ""
    #: What a pushed entry reveals about its user, in words; ``None`` if that is not known.
    reveals: str | None = None
    #: The facts that decide whether a program elsewhere can hit an entry.
    portability: Portability | None = None
    #: How the lookups and stores of a run are observed.
    lookups: Lookups | None = None
    #: How entries of tagged builds are recognised.
    tagging: Tagging | None = None
    #: Returns where in the first root of a layer a file of the library belongs that lies elsewhere, ``None`` for other
    #: files. The keys of its entries begin with that relative path.
    place_of_file: Callable[[Any, Path], Path | None] | None = None
