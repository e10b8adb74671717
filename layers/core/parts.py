"""What is known of a layer's product beyond its places, its switch and its store: :class:`About`, and its parts.

A missing part is ``None``. Verbs then do without: a forecast is unknown, a trace compares entries before and after the
run, and a started driver cannot be salted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.finding import Code, Hazard, Severity
from cachectl.layers.core.root import Scope
from cachectl.layers.disk.place import Use

#: Facts of a place or an entry, by name. ``None`` is unknown, and equals nothing.
Facts = Mapping[str, str | None]


class Outlook(NamedTuple):
    """Whether a program here can hit an entry: yes, no, or ``None`` for unknown; ``because`` is the reason.

    ``entries`` is the number of entries of which it was said.
    """

    hits: bool | None
    because: str = ""
    entries: int = 0

    @property
    def words(self) -> str:
        """Return it as text."""
        if self.hits:
            return "will hit"
        return f"not known: {self.because}" if self.hits is None else f"cannot hit: {self.because}"


#: Joins the values that one fact has of several drivers.
OR = "; "
#: The outlook of an entry whose layer does not say what its key depends on.
UNFORESEEN = Outlook(None, "what decides about this layer cannot be read without its driver")


class Portability(NamedTuple):
    """The facts that decide whether a program elsewhere computes the key of an entry.

    Facts are compared by name between the place where a bundle was made and the place where it is imported. The
    platform and the kind of processor are always compared, and decide alone unless a layer adds facts.
    """

    #: Describes an environment. Imports no library, starts no driver, raises nothing. A fact of several drivers has a
    #: value of each, joined by :data:`OR`; another place that has one of them may hit.
    facts: Callable[[Environment], Facts] = lambda _: {}
    #: Facts on which every key depends, each with the reason. If one differs, no entry can be hit.
    deciding: Mapping[str, str] = {}
    #: Facts without which nothing can be foreseen, even if neither place knows them.
    needed: tuple[str, ...] = ()
    #: Facts that are shown to readers and decide nothing.
    informing: tuple[str, ...] = ()
    #: Judges an entry here by its versions, the facts of the other place, and the environment; ``None`` if the facts
    #: of the two places decide.
    outlook: Callable[[Mapping[str, str], Facts, Environment], Outlook | None] = lambda *_: None
    #: Keeps of facts of several drivers those of the one that built an entry, by the versions of the entry.
    of_entry: Callable[[Mapping[str, str], Facts], Facts] = lambda _, there: there
    #: The deciding fact that keys of portable builds do not depend on.
    bound: str = ""


#: A driver's compilation: the kernel, ``None`` for a whole program as it is built; when it began in epoch seconds,
#: ``None`` for a kernel that is compiled from its launch on; and when it ended.
Compilation = tuple[str | None, float | None, float]


class Lookups(NamedTuple):
    """How the lookups and stores of a run are observed.

    A library in Python is watched in the interpreter by ``watchers``. A driver is listened to while it builds, or its
    files are watched. A layer with none of these is judged by its entries before and after the run.
    """

    #: Who reports, in words: "pytools", "PoCL's own messages".
    by: str = ""
    #: Modules with the file that watches each: its ``watch(module, notes)`` replaces functions by others that note.
    #: The file imports only the standard library, and runs on Python 3.8. It may also time functions, by the stages
    #: of a timeline (``notes.timed``, ``notes.span``).
    watchers: Mapping[str, Path] = {}
    #: Those of the watched modules that must be watched for the numbers to be exact.
    modules: tuple[str, ...] = ()
    #: Packages whose import is part of a start.
    imports: tuple[str, ...] = ()
    #: Packages whose version is part of keys, and variables whose value is.
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    #: OpenCL platforms with the file that listens to the driver of each: its class ``Listener`` hears whether a build
    #: was compiled, and notes a ``messages`` event.
    listeners: Mapping[str, Path] = {}
    #: Parts of the path of a file that a process has mapped, or opened, if it uses the cache.
    mapped: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    #: Whether the cache opens a file for each entry that it hits, and writes or renames one for each that it stores.
    #: The path of the file below the root is the entry's key.
    files: bool = False
    #: Matches the names of files that hold many entries instead.
    shared: re.Pattern[str] | None = None
    #: Why the opening of such a file shows no lookup.
    otherwise: str = ""
    #: How often the file of a damaged entry is opened by a lookup, which misses, and by the store after it.
    openings_of_miss: int = 1
    #: Whether every hit leaves a time of use, so that no such time means no hit.
    keeps_use: bool = False
    #: Returns whether a lookup is that of the layer with the third name, by what its watcher noted: a layer, and the
    #: dictionary, or "".
    owns: Callable[[str, str, str], bool] = lambda noted, _, layer: noted == layer
    #: Infers hits and misses from the number of openings of files with many entries, and of entries that appeared;
    #: ``None`` if they show neither.
    by_openings: Callable[[int, int, Environment], tuple[int, int] | None] = lambda *_: None
    #: Whether the driver links programs again though it has stored them.
    relinks: bool = False
    #: The OpenCL platforms whose builds the cache serves; empty if any.
    platforms: tuple[str, ...] = ()
    #: The stages of a start that a hit saves.
    saves: tuple[str, ...] = ("compile",)
    #: Returns the bytes of a file that a listener saw stored; ``None`` if it no longer exists.
    weigh: Callable[[str], int | None] = lambda _: None
    #: Returns what was compiled into a program that a listener saw stored, and when; nothing if that is unknown.
    compilations: Callable[[str], tuple[Compilation, ...]] = lambda _: ()
    #: Returns what was compiled into an entry of this path since a moment: the kernel and its launch, in words, and
    #: when. Moments are in epoch seconds.
    compiled_since: Callable[[str, float], tuple[tuple[str, str, float], ...]] = lambda *_: ()
    #: Returns the part of a driver's error stream that is not the driver's.
    other_output: Callable[[bytes], bytes] = lambda heard: heard


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
    #: What the library does in its roots, and what follows where a root does not let it.
    uses: Mapping[Use, Hazard] = {
        Use.WRITE: Hazard(Severity.RECOMPILES, "nothing that is new is stored"),
        Use.CHANGE: Hazard(Severity.RECOMPILES, "what belongs there is not stored"),
    }
    #: Whether the library needs its place while the cache is off, too.
    needs_place: bool = False
    #: Whether the library opens its files while the cache is off, without a lookup.
    opens_while_off: bool = False
    #: The states that only this product can be in.
    codes: tuple[Code, ...] = ()
    #: What ``verify`` does not look at.
    unchecked: str = ""
    #: What a pushed entry reveals about its user, in words; ``None`` if that is not known.
    reveals: str | None = None
    #: Layers whose entries of programs that this layer holds too are hit only together with its own.
    ahead_of: tuple[str, ...] = ()
    #: The facts that decide whether a program elsewhere can hit an entry.
    portability: Portability | None = None
    #: How the lookups and stores of a run are observed.
    lookups: Lookups | None = None
    #: Whether the store recognises entries of tagged builds: builds of a source with a constant of a unique name. It
    #: has a method ``find_tagged(root, tag, since, known)``, which yields these entries, each with its tag as text;
    #: ``tag`` is a pattern of bytes. Entries that have not changed after ``since`` (epoch seconds) are not read. A rest
    #: of an entry among the ``known`` keys has the tag ``""`` if it does not name the constant. It raises
    #: :class:`LayerError` or :class:`OSError` if the root cannot be read.
    finds_tags: bool = False
    #: Libraries, by the beginning of their file names: if one has started, builds reach the cache through it. A driver
    #: that has started cannot be switched off, but it has no entry for a tagged source: with these and ``platforms``
    #: the layer can be salted in a running process. Without either, the layer stores builds for any platform, and only
    #: what they stored is removed.
    libraries: tuple[str, ...] = ()
    #: Names of the OpenCL platforms of that driver, which stores every program that is built for them.
    platforms: tuple[str, ...] = ()
    #: Pattern of the log, or leaked temporary, that the message of a failed build names.
    failure_trace: re.Pattern[str] | None = None
    #: Returns where in the first root of a layer a file of the library belongs that lies elsewhere, ``None`` for other
    #: files. The keys of its entries begin with that relative path.
    place_of_file: Callable[[Any, Path], Path | None] | None = None
