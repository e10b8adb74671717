"""What earlier traced runs built and what that cost: a private file, against which the next trace is compared.

It is one JSON file of the user's state folder, which no other user can read, and holds the sources of kernels. Nothing
copies it elsewhere. Only the last run of each kernel is kept, and no more than :data:`_LARGEST` bytes. A file that is
damaged, or of a newer cachectl, is never written to.
"""

from __future__ import annotations

import math
import os
import warnings
import zlib
from base64 import b85decode, b85encode
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cachectl.layers.base.documents import encode_json, parse_json
from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.base.errors import PARSE_ERRORS, CachectlError, reason_of
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.from_json import read_fact
from cachectl.layers.disk import atomic, handles, plain, temporaries
from cachectl.watching import LEDGER

SCHEMA = "cachectl/ledger/1"
FORGET = "cachectl trace --forget"
_FILE = LEDGER.rpartition("/")[2]
#: Bytes of the file; the kernels that were not built for longest are dropped.
_LARGEST = 8 << 20
#: Different builds that are kept of a name, runs of which their keys are kept, and keys of lookups.
_MOST_BUILDS, _MOST_KEYS, _MOST_ASKED = 16, 8, 64
#: Runs whose sums are kept.
_MOST_RUNS = 2000
#: Removals that are kept, keys of one of them, and characters of a key.
_MOST_REMOVALS, _MOST_REMOVED, _SHORT = 40, 5000, 12
#: Portable builds, and kernels of others, that are kept; and those that one moment may be part of.
_MOST_PORTABLE, _MOST_KEPT, _AT_ONCE = 20_000, 200, 64
#: Seconds to wait for another trace that writes the file.
_WAIT = 2.0


class Build(NamedTuple):
    """What a program was built from, as far as it shows. ``headers`` are included files with their digests.

    ``source`` is a checksum, and ``packed`` the compressed text, empty if it was too long to be kept. ``includes`` is
    the folder that PyOpenCL adds to the options, ``variables`` those that are part of keys, and ``program`` the script
    or command that built it.
    """

    source: str = ""
    packed: str = ""
    options: str = ""
    devices: tuple[str, ...] = ()
    platform: str = ""
    version: str = ""
    includes: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    program: str = ""

    @property
    def text(self) -> str | None:
        """Return the source; ``None`` if it was not kept, or cannot be unpacked."""
        with suppress(ValueError, zlib.error):
            unpacking = zlib.decompressobj()
            source = unpacking.decompress(b85decode(self.packed), _LARGEST)
            return source.decode() if unpacking.eof else None
        return None


class Known(NamedTuple):
    """A kernel as the last traced run that built it or looked it up left it.

    ``builds`` are those of the last runs, the newest last: programs may have kernels of one name. ``layers`` are those
    that hit or stored it, with the path of the first root of each. ``packages`` are versions by name. ``keys`` are
    digests of the builds of the last runs, and ``kinds`` what differed in each, the newest last. ``seconds`` are what a
    miss took in each layer when it was last measured, ``asked`` the keys of its last lookups, where they are seen, and
    ``paths`` those of its entries that drivers stored or hit, shortened. ``at`` is in epoch seconds.
    """

    at: float
    builds: tuple[Build, ...] = ()
    layers: Mapping[str, str] = {}
    python: str = ""
    packages: Mapping[str, str] = {}
    keys: tuple[str, ...] = ()
    seconds: Mapping[str, float] = {}
    asked: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


class Run(NamedTuple):
    """The sums of one traced run: when it began, lookups, and seconds that it took, lost by misses, saved by hits."""

    at: float
    hits: int
    misses: int
    seconds: float
    missed: float
    saved: float


class Sums(NamedTuple):
    """The sums of several traced runs, as in :class:`Run`; ``first`` is when the first began, in epoch seconds."""

    runs: int
    hits: int
    misses: int
    first: float | None
    seconds: float
    missed: float
    saved: float


class Removed(NamedTuple):
    """What a verb has removed from a layer: when it began, in epoch seconds, and the keys, shortened."""

    at: float
    verb: str
    layer: str
    keys: tuple[str, ...]


class Ledger(NamedTuple):
    """All that is kept: kernels by their names, and the sums of runs and what was removed, the oldest first.

    ``portable`` says when portable builds began and ended, in epoch seconds, and ``kept`` what other kernels of such
    runs need a folder for.
    """

    kernels: dict[str, Known]
    runs: list[Run]
    removals: list[Removed]
    portable: list[tuple[float, float]]
    kept: dict[str, str]

    def is_of_portable(self, entry: Entry) -> bool:
        """Return whether an entry was last used, or stored, during a portable build."""
        moment = entry.latest or 0.0
        begun = bisect(self.portable, (moment, math.inf))
        return any(end >= moment for _, end in self.portable[max(0, begun - _AT_ONCE) : begun])

    def since(self, moment: float) -> Sums:
        """Return the sums of the runs since a moment in epoch seconds."""
        runs = [run for run in self.runs if run.at >= moment]
        columns = zip(*(run[1:] for run in runs), strict=True) if runs else [()] * 5
        hits, misses, *seconds = map(sum, columns)
        return Sums(len(runs), int(hits), int(misses), runs[0].at if runs else None, *map(float, seconds))

    def worth(self, entries: Sequence[Entry]) -> list[float]:
        """Return the seconds that each entry saves: those of its kernel in its layer, shared by the entries of both.

        Entries that were not measured get the mean by bytes of those that were. Empty if none was measured.
        """
        shares = Counter((entry.layer, entry.details.kernels) for entry in entries)
        measured: list[float | None] = []
        for entry in entries:
            kernel = self.kernels.get(" ".join(sorted(entry.details.kernels or ())))
            seconds = None if kernel is None else kernel.seconds.get(entry.layer)
            measured.append(None if seconds is None else seconds / shares[entry.layer, entry.details.kernels])
        pairs = [(one, entry.bytes) for one, entry in zip(measured, entries, strict=True) if one is not None]
        if not pairs:
            return []
        mean = sum(seconds for seconds, _ in pairs) / max(1, sum(size for _, size in pairs))
        return [mean * entry.bytes if one is None else one for one, entry in zip(measured, entries, strict=True)]


def empty() -> Ledger:
    """Return a ledger of no run."""
    return Ledger({}, [], [], [], {})


def read(environment: Environment) -> Ledger:
    """Return the ledger, an empty one if there is none. Raises :class:`CachectlError` if it cannot be used."""
    path = _file(environment)
    if not os.path.lexists(path):
        return empty()
    try:
        document = parse_json(plain.read_plain(path, most=2 * _LARGEST))
        if document["schema"] != SCHEMA:
            raise CachectlError(f"{path}: not a ledger of this cachectl; {FORGET} removes it")
        return read_fact(Ledger, document)
    except OSError as error:
        raise CachectlError(f"{path}: {reason_of(error)}; nothing is remembered of runs") from error
    except PARSE_ERRORS as error:
        raise CachectlError(f"{path}: damaged; {FORGET} removes it") from error


def readable(environment: Environment) -> Ledger:
    """Return the ledger; an empty one, with a :class:`RuntimeWarning`, if it cannot be used."""
    try:
        return read(environment)
    except CachectlError as error:
        # With the line of this module it is given once, however often a verb reads the ledger.
        warnings.warn(str(error), RuntimeWarning, stacklevel=1)
        return empty()


def change(environment: Environment, update: Callable[[Ledger], None]) -> None:
    """Read the ledger, change it, and write it, alone among traces. Raises :class:`CachectlError`."""
    folder = temporaries.private_folder(_place(environment), make=True)
    try:
        with handles.opened(str(folder)) as handle:
            # Without such locks the later one wins.
            handles.wait_until(lambda: handles.take_flock(handle) is not False, _WAIT)
            ledger = read(environment)
            update(ledger)
            atomic.replace_file(_FILE, [_encode(ledger)], folder=handle, mode=0o600)
    except OSError as error:
        raise CachectlError(f"{folder / _FILE}: {reason_of(error)}; nothing is remembered of runs") from error


def note_removals(environment: Environment, verb: str, removed: Mapping[str, Iterable[str]]) -> None:
    """Add the keys of entries that a verb has removed, by layer, if there is a ledger; a failure is silent."""
    now = environment.clock()
    added = [
        Removed(now, verb, layer, tuple(short for key in islice(keys, _MOST_REMOVED) if (short := shorten(key))))
        for layer, keys in removed.items()
    ]
    with suppress(CachectlError, OSError):
        if os.path.lexists(_file(environment)):
            change(environment, lambda ledger: ledger.removals.extend(removal for removal in added if removal.keys))


def shorten(key: str) -> str:
    """Return the beginning of a key's last part, which identifies it well enough."""
    return key.rpartition("/")[2][:_SHORT]


def forget(environment: Environment) -> bool:
    """Remove the ledger, whatever is in it; return whether there was one.

    Raises :class:`CachectlError` if its folder is not private, and :class:`OSError`.
    """
    path = _file(environment)
    existed = os.path.lexists(path)
    atomic.remove_file(path)
    return existed


def pack(source: str) -> str:
    """Return a text as :attr:`Build.packed` holds it."""
    return b85encode(zlib.compress(source.encode(errors="replace"))).decode()


def _place(environment: Environment) -> Path:
    return user_state_folder(environment) / "ledger"


def _file(environment: Environment) -> Path:
    """Return the path of the file. Raises :class:`CachectlError` if its folder is not private."""
    place = _place(environment)
    return (temporaries.private_folder(place) if os.path.lexists(place) else place) / _FILE


def _encode(ledger: Ledger) -> bytes:
    """Return the file: the newest kernels, as far as they fit."""
    kernels: dict[str, dict[str, Any]] = {}
    left = _LARGEST
    for name, kernel in sorted(ledger.kernels.items(), key=lambda item: -item[1].at):
        builds = [build._asdict() for build in kernel.builds[-_MOST_BUILDS:]]
        last = {
            "keys": kernel.keys[-_MOST_KEYS:],
            "asked": kernel.asked[-_MOST_ASKED:],
            "paths": kernel.paths[-_MOST_ASKED:],
            "kinds": kernel.kinds[-_MOST_KEYS:],
        }
        fields = {**kernel._asdict(), "builds": builds, **last}
        left -= len(encode_json(fields))
        if left < 0:
            break
        kernels[name] = fields
    return encode_json(
        {
            "schema": SCHEMA,
            "kernels": kernels,
            "runs": ledger.runs[-_MOST_RUNS:],
            "removals": ledger.removals[-_MOST_REMOVALS:],
            "portable": sorted(ledger.portable)[-_MOST_PORTABLE:],
            "kept": dict([*ledger.kept.items()][-_MOST_KEPT:]),
        }
    )
