"""The sentences of a verdict: what each says, from what evidence, and how certain it is. The docs print this table."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """One reason why a kernel missed: its sentence with the names of its values, the evidence, and the certainty."""

    text: str
    evidence: str
    certainty: str

    def say(self, **values: object) -> str:
        """Return the sentence."""
        return self.text.format(**values)


_SEEN = "certain"
#: The runs have it in common with nothing else; that nothing more differs is not known.
_COMPARED = "certain that it differs"

OFF = Cause("the cache of {layer} is {state} ({reason})", "the variables of the program at its builds", _SEEN)
COLLISION = Cause("its entry in {layers} has another key, of the same hash", "the library's own exception", _SEEN)
UNCOMPARED = Cause("earlier runs were not asked", "`--no-ledger`, or a ledger that cannot be read", _SEEN)
OLDER = Cause(
    "{layer} has an entry of it for {before}, and this run is on {now}",
    "entries that were there before the run, where no earlier run is known",
    _COMPARED,
)
NEW = Cause("the ledger of traces has no run that built it", "the ledger", "certain; runs without `trace` count not")
OTHER_PROGRAM = Cause(
    "the ledger has no run of {program} that built it; {other} built another kernel of this name", "the ledger", _SEEN
)
RENAMED = Cause("it is `{before}` with another name", "the sources in the ledger", _SEEN)
MOVED = Cause(
    "the cache of {layer} is {place} ({source}), and was {before}",
    "the variables and folders of the program at its builds",
    _SEEN,
)
CHANGED = Cause(
    "{name} is {now}, and was {before}",
    "versions of Python, of the driver, and of packages that are part of keys; variables that drivers hash",
    _COMPARED,
)
DEVICE = Cause("the device is {now}, and was {before}", "the context of the build", _COMPARED)
INCLUDES = Cause(
    "PyOpenCL, whose folder is an option of each build, is {now}, and was {before}", "the program's paths", _COMPARED
)
OPTION = Cause("the option `{now}` was `{before}` before", "the options of the build", _COMPARED)
OPTION_NEW = Cause("the option `{now}` is new", "the options of the build", _COMPARED)
OPTION_GONE = Cause("the option `{before}` is gone", "the options of the build", _COMPARED)
OPTIONS = Cause("the options `{now}` were `{before}` before", "the options of the build", _COMPARED)
MACRO = Cause("the macro `{name}` is {now}, and was {before}", "the source of the build", _COMPARED)
ORDER = Cause("the same lines of the source are in another order", "the source of the build", _COMPARED)
NAMES = Cause("the source differs in names only (`{now}` was `{before}`)", "the source of the build", _COMPARED)
SOURCE = Cause("the source changed{where}", "the source of the build", _COMPARED)
HEADER = Cause("the header {names} changed", "included files at the end of the run", _COMPARED)
LEFT_NOTHING = Cause("the last traced run left nothing of it in {layers}", "the ledger", _SEEN)
OTHER_KEY = Cause("its key in {layers} is another one{although}", "the keys of lookups and stores", _SEEN)
REMOVED = Cause(
    "its entry in {layers} is missing: cachectl {verb} removed it on {moment}",
    "what `purge` and `prune` noted",
    "certain that it was removed then",
)
NOT_TAKEN = Cause(
    "its entry in {layer} was there before the run, and was made again: it was damaged, or removed meanwhile",
    "the entries before the run",
    _SEEN,
)
EMPTY = Cause("the cache of {layers} was empty", "the entries before the run", _SEEN)
MISSING = Cause("its entry in {layers} is missing", "the same key as in an earlier run", _SEEN)
UNEXPLAINED = Cause("{layers} did not have it, and nothing shows why", "what is left", "unknown")

#: All of them, in the order in which they are asked.
CAUSES = tuple(value for value in vars().copy().values() if isinstance(value, Cause))
