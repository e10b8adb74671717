"""What this machine remembers of stores: parts of their indexes, and how new the newest one was.

Everything is kept in the user's state folder, and only where no other user can write. Index parts and key documents are
held against the digest in their names when they are read again. Which store was at an address, the newest parts that
were trusted there, and the parts that have vanished since are remembered: an older state of a store, another store, and
parts that ``gc`` removed are then recognised.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from cachectl.exchange.format import is_index_name
from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.disk.atomic import remove_file, replace_file
from cachectl.layers.disk.handles import opened, status_of
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import shared_because

_RECORD: Final = "stores.json"
#: Largest record that is read, in bytes, and most stores in it.
_LARGEST: Final = 1 << 22
_MOST: Final = 1000
#: Most vanished parts of one store that are remembered.
_MOST_GONE: Final = 2000


@dataclass(frozen=True, slots=True)
class Remembered:
    """The store that was at an address, and its newest trusted parts: when they were made, and their names.

    ``made`` is in epoch seconds; several parts may be made in one second. ``gone`` are parts that were read there once,
    and were removed.
    """

    store: str
    made: int = 0
    parts: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def recall(environment: Environment, shown: str) -> Remembered | None:
    """Return what is remembered of an address; ``None`` if nothing is, or if another user could have written it."""
    found = _records(environment).get(shown)
    try:
        if found is None:
            return None
        parts, gone = (tuple(map(str, found[name])) for name in ("parts", "gone"))
        return Remembered(str(found["store"]), int(found["made"]), parts, gone)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def remember(environment: Environment, shown: str, seen: Remembered) -> None:
    """Remember a store, unless the record cannot be written, or another user could replace it.

    Newer parts of the same store, which another process has seen meanwhile, stay.
    """
    known = recall(environment, shown)
    if known is not None and known.store == seen.store:
        gone = tuple(dict.fromkeys((*known.gone, *seen.gone)))[-_MOST_GONE:]
        if known.made == seen.made:
            seen = replace(seen, parts=tuple(sorted({*known.parts, *seen.parts})))
        seen = replace(known if known.made > seen.made else seen, gone=gone)
        if known == seen:
            return
    records = _records(environment)
    records.pop(shown, None)
    records[shown] = asdict(seen)
    _keep(environment, records)


def forget(environment: Environment, shown: str) -> None:
    """Forget an address, so that what lies there now is taken as new."""
    records = _records(environment)
    if records.pop(shown, None) is not None:
        _keep(environment, records)


def _keep(environment: Environment, records: Mapping[str, Any]) -> None:
    kept = dict(list(records.items())[-_MOST:])
    file = user_state_folder(environment) / _RECORD
    with suppress(OSError):
        if shared_because(nearest(file.parent)) is None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, [json.dumps({"stores": kept}, indent=1).encode()])


def _records(environment: Environment) -> dict[str, Any]:
    file = user_state_folder(environment) / _RECORD
    try:
        if not file.is_file() or shared_because(file.parent, (file.name,)):
            return {}
        found = json.loads(read_plain(file, most=_LARGEST))["stores"]
        return dict(found) if isinstance(found, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


class IndexCache:
    """Index parts and key documents of one store that were read before; failures to read or write are ignored."""

    def __init__(self, environment: Environment, store: str) -> None:
        self._folder = user_state_folder(environment) / "stores" / store
        self._new: dict[str, bytes] = {}

    def read(self, name: str, most: int) -> bytes | None:
        """Return the bytes that were kept, which may have been changed since; ``None`` if there are none."""
        if name in self._new:
            return self._new[name]
        try:
            with self._opened() as folder:
                return read_plain(name, dir_fd=folder, most=most)
        except OSError:
            return None

    def add(self, name: str, data: bytes) -> None:
        """Keep bytes until :meth:`save`."""
        self._new[name] = data

    def save(self, listed: Iterable[str] | Mapping[str, object]) -> tuple[str, ...]:
        """Write what was added, and remove the files of index parts and keys that the store does not list any more.

        Returns the names of the removed files.
        """
        gone = []
        with suppress(OSError), self._opened(make=bool(self._new)) as folder:
            for name, data in self._new.items():
                replace_file(name, [data], folder=folder)
            for name in set(filter(is_index_name, os.listdir(folder))) - set(listed):
                status = status_of(folder, name)
                if status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    remove_file(name, folder)
                    gone.append(name)
        self._new.clear()
        return tuple(gone)

    @contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """Open the folder. Raises :class:`OSError` if another user could write there, and for a link."""
        if (why := shared_because(nearest(self._folder))) is not None:
            raise PermissionError(errno.EPERM, why, str(self._folder))
        if make:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened(str(self._folder)) as folder:
            yield folder
