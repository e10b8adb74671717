"""What is known about a layer's product beyond its places, switch and store: :class:`About` and its parts.

Without a part, verbs do less: a forecast is unknown, a trace compares entries before and after the run, and a started
driver cannot be salted.
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

#: Facts about a place or an entry, by name. ``None`` is unknown, and equals nothing.
Facts = Mapping[str, str | None]


class Outlook(NamedTuple):
    """Whether a program here can hit ``entries`` entries, ``None`` if unknown; ``because`` is the reason."""

    hits: bool | None
    because: str = ""
    entries: int = 0

    @property
    def words(self) -> str:
        """Return the outlook as text."""
        if self.hits:
            return "will hit"
        return f"not known: {self.because}" if self.hits is None else f"cannot hit: {self.because}"


#: Joins the values of one fact for several drivers.
OR = "; "
#: The outlook of an entry whose layer does not declare what its key depends on.
UNFORESEEN = Outlook(None, "what decides about this layer cannot be read without its driver")


class Portability(NamedTuple):
    """The facts that decide whether a program elsewhere computes the key of an entry.

    Facts are compared by name between the machine where a bundle was made and the one where it is imported. The
    platform and the kind of processor are always compared; unless a layer adds facts, nothing else is.
    """

    #: Returns the facts of an environment, without an import of a library, the start of a driver or an exception. With
    #: several drivers, a fact has the values of all, joined by :data:`OR`; a machine that shares one of them may hit.
    facts: Callable[[Environment], Facts] = lambda _: {}
    #: Facts on which every key depends, each with the reason. If one differs, no entry can be hit.
    deciding: Mapping[str, str] = {}
    #: Facts without which there is no forecast, even if neither machine knows them.
    needed: tuple[str, ...] = ()
    #: Facts that are only shown.
    informing: tuple[str, ...] = ()
    #: Judges an entry by its versions, the other machine's facts and the environment; ``None`` if the facts decide.
    outlook: Callable[[Mapping[str, str], Facts, Environment], Outlook | None] = lambda *_: None
    #: Reduces the facts of several drivers to those of the driver that built an entry, by the versions of the entry.
    of_entry: Callable[[Mapping[str, str], Facts], Facts] = lambda _, there: there
    #: The deciding fact on which keys of portable builds do not depend.
    bound: str = ""


#: A driver's compilation: the kernel (``None`` for a whole program at its build), and its begin (``None`` for a kernel
#: that is compiled at its launch) and end in epoch seconds.
Compilation = tuple[str | None, float | None, float]


class Lookups(NamedTuple):
    """How the lookups and stores of a run are observed.

    ``watchers`` observe a Python library in the interpreter. For a driver, its messages or its files are observed. A
    layer with none of these is judged by its entries before and after the run.
    """

    #: The source of the reports, in words: "pytools", "PoCL's own messages".
    by: str = ""
    #: Modules, each with the file that observes it: its ``watch(module, notes)`` wraps functions of the module. The
    #: file imports only the standard library, runs on Python 3.8, and may time functions by the stages of a timeline
    #: (``notes.timed``, ``notes.span``).
    watchers: Mapping[str, Path] = {}
    #: The modules that must be observed for the numbers to be exact.
    modules: tuple[str, ...] = ()
    #: Packages whose import is part of a start.
    imports: tuple[str, ...] = ()
    #: Packages whose versions are part of keys, and variables whose values are.
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    #: OpenCL platforms, each with the file whose class ``Listener`` notes in a ``messages`` event what was compiled.
    listeners: Mapping[str, Path] = {}
    #: Parts of the path of a file that a process maps, or opens, if it uses the cache.
    mapped: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    #: Whether the cache opens a file for each entry that it hits, and writes or renames one for each that it stores.
    #: The file's path below the root is the key.
    files: bool = False
    #: Matches the names of files that hold many entries instead.
    shared: re.Pattern[str] | None = None
    #: Why opening such a file is no evidence of a lookup.
    otherwise: str = ""
    #: How often the file of a damaged entry is opened by a lookup, which misses, and by the store after it.
    openings_of_miss: int = 1
    #: Whether every hit updates a time of use, so that an entry without a newer one was not hit.
    keeps_use: bool = False
    #: Returns whether a lookup is that of the layer with the third name, by what its watcher noted: a layer, and the
    #: dictionary, or "".
    owns: Callable[[str, str, str], bool] = lambda noted, _, layer: noted == layer
    #: Infers hits and misses, if possible, from the number of openings of files with many entries, and of new entries.
    by_openings: Callable[[int, int, Environment], tuple[int, int] | None] = lambda *_: None
    #: Whether the driver links programs again even if it has stored them.
    relinks: bool = False
    #: The OpenCL platforms whose builds the cache stores; empty for any.
    platforms: tuple[str, ...] = ()
    #: The stages of a start that a hit saves.
    saves: tuple[str, ...] = ("compile",)
    #: Returns the bytes of a file that a listener saw being stored; ``None`` if it no longer exists.
    weigh: Callable[[str], int | None] = lambda _: None
    #: Returns what was compiled into a program that a listener saw being stored, and when; empty if unknown.
    compilations: Callable[[str], tuple[Compilation, ...]] = lambda _: ()
    #: Returns what was compiled into the entry at a path since a time: kernel, launch in words, time (epoch seconds).
    compiled_since: Callable[[str, float], tuple[tuple[str, str, float], ...]] = lambda *_: ()
    #: Returns the part of a driver's error stream that the driver did not write.
    other_output: Callable[[bytes], bytes] = lambda heard: heard


class About(NamedTuple):
    """What verbs know about a layer's product beyond its places, switch and store."""

    #: The owner of the entries. Those of a package are read, never changed.
    scope: Scope = Scope.USER
    #: Whether the layer holds tuning results that no rerun restores: it is cleared only if named.
    precious: bool = False
    #: The problem with a root on a network file system, if there is one.
    on_network: Hazard | None = Hazard(
        Severity.HARMLESS, "every lookup goes over the network, where locks of other machines may have no effect"
    )
    #: The problem with a root that the ranks of one job share, if there is one.
    among_ranks: Hazard | None = Hazard(Severity.HARMLESS, "they may wait for each other")
    #: What the library does in its roots, and the consequence if it cannot.
    uses: Mapping[Use, Hazard] = {
        Use.WRITE: Hazard(Severity.RECOMPILES, "nothing new is stored"),
        Use.CHANGE: Hazard(Severity.RECOMPILES, "entries that belong there are not stored"),
    }
    #: Whether the library needs its place even while the cache is off.
    needs_place: bool = False
    #: Whether the library opens its files while the cache is off, without a lookup.
    opens_while_off: bool = False
    #: The codes of problems that only this product has.
    codes: tuple[Code, ...] = ()
    #: What ``verify`` does not check.
    unchecked: str = ""
    #: What a pushed entry reveals about its user; ``None`` if unknown.
    reveals: str | None = None
    #: Layers whose entries are hit only together with this layer's entries for the same programs.
    ahead_of: tuple[str, ...] = ()
    #: The facts that decide whether a program elsewhere can hit an entry.
    portability: Portability | None = None
    #: How the lookups and stores of a run are observed.
    lookups: Lookups | None = None
    #: Whether the store recognises entries of tagged builds, whose source has a constant of a unique name. Its method
    #: ``find_tagged(root, tag, since, known)`` yields these entries, each with its tag as text; ``tag`` is a pattern of
    #: bytes. Entries that have not changed after ``since`` (epoch seconds) are not read. A remnant of an entry among
    #: the ``known`` keys has the tag ``""`` if it does not name the constant. The method raises :class:`LayerError` or
    #: :class:`OSError` if the root cannot be read.
    finds_tags: bool = False
    #: Prefixes of the file names of the driver's libraries: once one has started, builds reach the cache through it. A
    #: started driver cannot be switched off, but has no entry for a tagged source: with these and ``platforms``, the
    #: layer can be salted in a running process. Without either, the layer stores builds for any platform, and only what
    #: they stored is removed.
    libraries: tuple[str, ...] = ()
    #: Names of that driver's OpenCL platforms; it stores every program that is built for them.
    platforms: tuple[str, ...] = ()
    #: Pattern of the log or leaked temporary file that the message of a failed build names.
    failure_trace: re.Pattern[str] | None = None
    #: Returns where in the layer's first root a file of the library from elsewhere belongs, ``None`` for other files.
    #: The keys of its entries begin with that relative path.
    place_of_file: Callable[[Any, Path], Path | None] | None = None
