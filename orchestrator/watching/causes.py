"""The sentences of a verdict: what each says, from what evidence, and how certain it is. The docs print this table."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """One reason why a kernel missed: its sentence with the names of its values, its evidence, and what to do.

    ``certainty`` says how sure the sentence is.
    """

    text: str
    evidence: str
    certainty: str
    cure: str

    def say(self, **values: object) -> str:
        """Return the sentence."""
        return self.text.format(**values)


_SEEN = "certain"
#: It differs between the runs; whether something else differs too is unknown.
_COMPARED = "certain that it differs"

OFF = Cause(
    "the {layer} cache is {state} ({reason})",
    "the variables of the program at its builds",
    _SEEN,
    "look in the program and its job script for the variable; `cachectl doctor` gives the command for the shell",
)
COLLISION = Cause(
    "another key in {layers} has the same hash",
    "the library's own exception",
    _SEEN,
    "nothing: both are compiled again in turn, which a new version of the library ends",
)
UNCOMPARED = Cause(
    "earlier runs were not compared",
    "`--no-ledger`, or a ledger that cannot be read",
    _SEEN,
    "trace it without `--no-ledger`",
)
OLDER = Cause(
    "{layer} has an entry of it for {before}, but this run used {now}",
    "entries that were there before the run, where no earlier run is known",
    _COMPARED,
    "nothing, if the driver was to change; `cachectl prune --stale` removes what only the old one hits",
)
NEW = Cause(
    "no remembered run built it",
    "the ledger",
    _SEEN,
    "nothing: it is new, or was built by runs without `trace`",
)
OTHER_PROGRAM = Cause(
    "no remembered run of {program} built it; {other} built another kernel of this name",
    "the ledger",
    _SEEN,
    "nothing: it is another kernel",
)
RENAMED = Cause("it is `{before}` under another name", "the sources in the ledger", _SEEN, "give the kernel one name")
MOVED = Cause(
    "the {layer} cache moved from {before} to {place} ({source})",
    "the variables and folders of the program at its builds",
    _SEEN,
    "look for the variable, or for a folder that is relative to where the program starts",
)
CHANGED = Cause(
    "{name} changed from {before} to {now}",
    "versions of Python, of the driver, and of packages that are part of keys; variables that drivers hash",
    _COMPARED,
    "nothing, if it was intended; else start from a [store](store.md) of that environment",
)
DEVICE = Cause(
    "the device changed from {before} to {now}",
    "the context of the build",
    _COMPARED,
    "nothing: a cache holds code for one device",
)
INCLUDES = Cause(
    "PyOpenCL's folder, an option of each build, changed from {before} to {now}",
    "the program's paths",
    _COMPARED,
    "install PyOpenCL at one path, or build with `--portable`",
)
_IN_OPTIONS = ("the options of the build", _COMPARED, "nothing, if it was intended")
OPTION = Cause("the option `{before}` changed to `{now}`", *_IN_OPTIONS)
OPTION_NEW = Cause("the option `{now}` is new", *_IN_OPTIONS)
OPTION_GONE = Cause("the option `{before}` was removed", *_IN_OPTIONS)
OPTIONS = Cause("the options `{before}` changed to `{now}`", *_IN_OPTIONS)
MACRO = Cause(
    "the macro `{name}` changed from {before} to {now}",
    "the source of the build",
    _COMPARED,
    "if it *changed in each of the last runs*, pass the value as an argument of the kernel",
)
ORDER = Cause(
    "the lines of the source are in another order",
    "the source of the build",
    _COMPARED,
    "sort what the generator writes",
)
NAMES = Cause(
    "the source differs only in names (`{now}` was `{before}`)",
    "the source of the build",
    _COMPARED,
    "make names that do not depend on the run",
)
SOURCE = Cause(
    "the source changed{where}",
    "the source of the build",
    _COMPARED,
    "if it *changed in each of the last runs*, look for a seed, a time or a path in the kernel",
)
HEADER = Cause(
    "the header {names} changed", "included files at the end of the run", _COMPARED, "nothing, if it was intended"
)
LEFT_NOTHING = Cause(
    "the last traced run stored nothing of it in {layers}",
    "the ledger",
    _SEEN,
    "`cachectl doctor` says why nothing is stored",
)
OTHER_KEY = Cause(
    "its key in {layers} changed{although}",
    "the keys of lookups and stores",
    _SEEN,
    "look for an option that leaves the source as it is, or a key that differs in each process",
)
REMOVED = Cause(
    "its entry in {layers} is missing: cachectl {verb} removed it on {moment}, unless it was built again since",
    "what `purge` and `prune` noted",
    "certain that it was removed then",
    "nothing: the purge has a date",
)
RELINKED = Cause(
    "{layer} links it again in each run",
    "a link, whose entry was there before the run",
    _SEEN,
    "build it from one source",
)
NOT_TAKEN = Cause(
    "its entry in {layer} existed before the run but was stored again: it was damaged, or removed meanwhile",
    "the entries before the run",
    _SEEN,
    "nothing, if it does not happen again; else `cachectl verify`",
)
EMPTY = Cause(
    "the {layers} cache was empty",
    "the entries before the run",
    _SEEN,
    "somebody removed the entries, or this is another home",
)
MISSING = Cause(
    "its entry in {layers} is missing",
    "the same key as in an earlier run",
    _SEEN,
    "somebody removed it, or the cache has a [limit](troubleshooting.md#cap)",
)
UNEXPLAINED = Cause(
    "{layers} had no entry of it, and the cause is unknown",
    "what is left",
    "unknown",
    "trace it again, so that its keys are known",
)

#: All of them, in the order in which they are asked.
CAUSES = tuple(value for value in vars().copy().values() if isinstance(value, Cause))
