"""A shared store in a folder, of this machine or of a network file system.

Everything is done relative to open folders, and no link is followed below the folder itself.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from cachectl.layers.base.errors import printable
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.handles import open_folder
from cachectl.layers.disk.plain import open_plain
from cachectl.layers.disk.presence import means_absent, means_no_file
from cachectl.sharing.format import MOST_NAMES
from cachectl.sharing.place import BadStore, Missing, Stored

_PARTS: Final = ("index", "packs", "objects")
_CHUNK: Final = 1 << 20


class FolderPlace:
    """A folder with the folders ``index``, ``packs`` and ``objects``, which are made by the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown = printable(folder)

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``, as far as a store can have so many."""
        return self._listed("index", MOST_NAMES + 1)

    def contents(self) -> Sequence[Stored]:
        """List all names."""
        return [one for part in _PARTS for one in self._listed(part)]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        part, _, file = name.partition("/")
        try:
            with self._opened(part) as folder:
                handle = open_plain(file, dir_fd=folder)
        except OSError as error:
            if not means_no_file(error):
                raise
            message = f"{self.shown}: {printable(name)} is missing, or is no plain file"
            raise Missing(message) from error
        with os.fdopen(handle, "rb") as opened:
            data = opened.read(most + 1)
        if len(data) > most:
            raise BadStore(f"{self.shown}: {printable(name)} has more than the {most:,} bytes that it may have")
        return data

    def write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        """Write a file beside its place, sync it and rename it."""
        del holds
        part, _, file = name.partition("/")
        os.makedirs(self._folder, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self._folder / part)
        with self._opened(part) as folder:
            with suppress(OSError):
                # A link in the place would be replaced; its mode must not be taken over.
                if not stat.S_ISREG(os.stat(file, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.unlink(file, dir_fd=folder)
            replace_file(file, [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)], folder=folder)

    def finish(self) -> None:
        """Do nothing: every file is complete."""

    def pin(self) -> None:
        """Return ``None``: a place has one address."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            part, _, file = name.partition("/")
            with suppress(FileNotFoundError), self._opened(part) as folder:
                os.unlink(file, dir_fd=folder)

    @contextmanager
    def _opened(self, part: str) -> Iterator[int]:
        """Open a folder of the store. Raises :class:`OSError` for a link."""
        above = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            folder = open_folder(part, above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise BadStore(f"{self.shown}: {part} is a link or no folder") from error
            raise
        finally:
            os.close(above)
        try:
            yield folder
        finally:
            os.close(folder)

    def _listed(self, part: str, most: int | None = None) -> list[Stored]:
        try:
            with self._opened(part) as folder:
                return list(islice(_files(folder, part), most))
        except OSError as error:
            if isinstance(error, NotADirectoryError) or not means_absent(error):
                raise
            return []


def _files(folder: int, part: str) -> Iterator[Stored]:
    with os.scandir(folder) as found:
        for one in found:
            with suppress(FileNotFoundError):
                status = one.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not one.name.startswith("."):
                    yield Stored(f"{part}/{one.name}", status.st_size, status.st_mtime)
