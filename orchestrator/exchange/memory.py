"""What this machine remembers of a store: files of its index, and how new the newest one was.

Everything is kept in the user's state folder, and only where no other user can write; failures to read or write are
ignored. Index parts and key documents are held against the digest in their names when they are read again. By the
newest parts that were trusted, and those that have vanished since, an older state of a store is recognised.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from cachectl.exchange.format import INDEX, is_name
from cachectl.exchange.place import is_url
from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.disk import atomic, handles, plain, presence, trust

_SEEN: Final = "seen.json"
#: Largest record that is read, in bytes, and most vanished parts in it.
_LARGEST: Final = 1 << 20
_MOST_GONE: Final = 2000


class Newest(NamedTuple):
    """The newest trusted parts of a store: when they were made, in epoch seconds, and their names.

    Several parts may be made in one second. ``gone`` are parts that were read once, and were removed.
    """

    made: int = 0
    parts: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class StoreMemory:
    """What is kept of the store at an address."""

    def __init__(self, environment: Environment, address: str) -> None:
        # Machines that share a home may have different stores at one path.
        place = address if is_url(address) else f"{platform.node()}:{address}"
        name = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
        self._folder = user_state_folder(environment) / "stores" / name
        self._new: dict[str, bytes] = {}
        self._before: list[str] = []

    def look(self) -> None:
        """Note what is kept now, before the store is listed: what it does not list then was removed from it.

        What another process adds later may be newer than the listing.
        """
        with suppress(OSError), self._opened() as folder:
            self._before = sorted(os.listdir(folder))

    def read(self, name: str, most: int) -> bytes | None:
        """Return the bytes that were kept, which may have been changed since; ``None`` if there are none."""
        if name in self._new:
            return self._new[name]
        try:
            with self._opened() as folder:
                return plain.read_plain(name, dir_fd=folder, most=most)
        except OSError:
            return None

    def add(self, name: str, data: bytes) -> None:
        """Keep bytes until :meth:`save`."""
        self._new[name] = data

    def seen(self) -> Newest:
        """Return the newest parts that were trusted; none if there are none, or if they cannot be read."""
        try:
            made, parts, gone = json.loads(self.read(_SEEN, _LARGEST) or b"")
            return Newest(int(made), tuple(map(str, parts)), tuple(map(str, gone)))
        except (TypeError, ValueError, OverflowError, RecursionError):
            return Newest()

    def save(self, listed: Collection[str], newest: Newest = Newest(), *, afresh: bool = False) -> None:  # noqa: B008
        """Write what was added, and remove the index parts and keys that are not listed any more.

        ``newest`` are parts to remember unless newer ones are; ``afresh`` forgets what was remembered before.
        """
        gone = []
        with suppress(OSError), self._opened(make=bool(self._new or newest.parts)) as folder:
            for name in self._before:
                status = handles.status_of(folder, name)
                is_own = status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_own and is_name(INDEX + name) and name not in listed and name not in self._new:
                    atomic.remove_file(name, folder)
                    gone.append(name)
            known = Newest() if afresh else self.seen()
            # Another process may have seen newer ones meanwhile.
            parts = {*known.parts, *newest.parts} if known.made == newest.made else max(known, newest).parts
            vanished = tuple(dict.fromkeys((*known.gone, *gone)))[-_MOST_GONE:]
            seen = Newest(max(known.made, newest.made), tuple(sorted(parts)), vanished)
            if afresh or seen != known:
                self.add(_SEEN, json.dumps(seen).encode())
            for name, data in self._new.items():
                atomic.replace_file(name, [data], folder=folder)
        self._new.clear()

    @contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """Open the folder. Raises :class:`OSError` if another user could write there, and for a link."""
        if (why := trust.shared_because(presence.nearest(self._folder))) is not None:
            raise PermissionError(errno.EPERM, why, str(self._folder))
        if make:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with handles.opened(str(self._folder)) as folder:
            yield folder
