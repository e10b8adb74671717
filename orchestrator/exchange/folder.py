"""A store in a folder, of this machine or of a network file system.

Everything is done relative to open folders, and no link is followed below the folder itself. Who may read and write
in the folder may do so in its folders, and read every file, whatever the umask of the writer is.
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

from cachectl.exchange.format import MOST_NAMES
from cachectl.exchange.place import FOLDERS, BadStore, Missing, Stored, StorePlace, TransferFailed, is_stage
from cachectl.layers.base.errors import CachectlError, printable
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import remove_file, replace_file
from cachectl.layers.disk.handles import open_folder
from cachectl.layers.disk.plain import open_plain
from cachectl.layers.disk.presence import means_absent, means_no_file

_CHUNK: Final = 1 << 20
#: Permissions to read a file.
_READABLE: Final = 0o444
#: Names of files of a store, and of their stages.
_WRITTEN: Final = regex(r"[a-z0-9.-]*[0-9a-f]{16}")


class FolderPlace(StorePlace):
    """A folder with the folders ``index``, ``packs`` and ``objects``, which are made by the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown = printable(folder)

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``, as far as a store can have so many."""
        return self._listed("index", MOST_NAMES + 1)

    def contents(self) -> Sequence[Stored]:
        """List all names, and the stages that killed writers left."""
        return [one for part in FOLDERS for one in self._listed(part, stages=True)]

    @contextmanager
    def _reached(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn an error into a line that names the place."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CachectlError):
                raise
            where = f"{self.shown}/{printable(name)}" if name else self.shown
            reason, advice = error.strerror or str(error), ""
            if isinstance(error, NotADirectoryError):
                advice = "; name a folder or a URL"
            elif isinstance(error, PermissionError):
                access = "g+rX" if verb in ("list", "read") else "g+rwX"
                advice = f"; chmod -R {access} {self.shown} lets the group of the folder do it"
            message = f"cannot {verb} {where}: {reason}{advice}"
            raise TransferFailed(message) from error

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        part, _, file = name.partition("/")
        with self._reached("read", name):
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

    def write(self, name: str, data: bytes) -> None:
        """Write a file next to its place, sync it and rename it."""
        part, _, file = name.partition("/")
        with self._reached("write", name):
            os.makedirs(self._folder, exist_ok=True)
            mode = stat.S_IMODE(os.stat(self._folder).st_mode)
            made = False
            with suppress(FileExistsError):
                os.mkdir(self._folder / part)
                made = True
            with self._opened(part) as folder:
                # Another user may have put another folder into its place.
                if made and _is_new(folder):
                    os.fchmod(folder, mode)
                with suppress(OSError):
                    # A link in the place would be replaced; its mode must not be taken over.
                    if not stat.S_ISREG(os.stat(file, dir_fd=folder, follow_symlinks=False).st_mode):
                        remove_file(file, folder)
                chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
                try:
                    replace_file(file, chunks, folder=folder, mode=mode & _READABLE)
                except PermissionError:
                    # In a sticky folder, the same file of another user cannot be replaced.
                    if not self._has(name, data):
                        raise

    def _has(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name, len(data)) == data
        except CachectlError:
            return False

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            part, _, file = name.partition("/")
            with self._reached("remove", name), suppress(FileNotFoundError), self._opened(part) as folder:
                remove_file(file, folder)

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

    def _listed(self, part: str, most: int | None = None, *, stages: bool = False) -> list[Stored]:
        with self._reached("list"):
            try:
                with self._opened(part) as folder:
                    return list(islice(_files(folder, part, stages=stages), most))
            except OSError as error:
                if isinstance(error, NotADirectoryError) or not means_absent(error):
                    raise
                return []


def _is_new(folder: int) -> bool:
    """Return whether an open folder is this user's, and has at most what other writers have added since it was made."""
    is_own = os.fstat(folder).st_uid == os.geteuid()
    return is_own and all(_WRITTEN.fullmatch(name) for name in os.listdir(folder))


def _files(folder: int, part: str, *, stages: bool) -> Iterator[Stored]:
    with os.scandir(folder) as found:
        for one in found:
            with suppress(FileNotFoundError):
                status = one.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and (not one.name.startswith(".") or (stages and is_stage(one.name))):
                    yield Stored(f"{part}/{one.name}", status.st_size, status.st_mtime)
