"""A store in a folder, of this machine or of a network file system.

Everything is done relative to open folders, and no link is followed below the folder itself. Who may read and write
in the folder may do so in its folders, and read every file, whatever the umask of the writer is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from cachectl.exchange import place, wire
from cachectl.layers.base import errors, lazy
from cachectl.layers.disk import atomic, handles, plain

_CHUNK: Final = 1 << 20
#: Permissions to read a file.
_READABLE: Final = 0o444
#: Names of files of a store, and of their stages.
_WRITTEN: Final = lazy.regex(r"[a-z0-9.-]*[0-9a-f]{16}")


class FolderPlace(place.StorePlace):
    """A folder with the folders ``index`` and ``packs``, which are made by the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown = errors.printable(folder)

    def names(self, folder: str) -> Sequence[place.Stored]:
        """List the plain files in a folder, as far as a store can have so many."""
        found: list[place.Stored] = []
        try:
            with self._opened("list", folder) as handle, os.scandir(handle) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(place.Stored(f"{folder}/{entry.name}", status.st_size, status.st_mtime))
                    if len(found) > wire.MOST_NAMES:
                        break
        except place.Gone:
            return []
        return found

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        with (
            self._opened("read", name) as folder,
            os.fdopen(plain.open_plain(_last(name), dir_fd=folder), "rb") as file,
        ):
            data = file.read(most + 1)
            self.require_small(name, len(data), most)
            return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file next to its place, sync it and rename it."""
        part, file = name.partition("/")[0], _last(name)
        made = False
        with self._reached("write", name):
            os.makedirs(self._folder, exist_ok=True)
            mode = stat.S_IMODE(os.stat(self._folder).st_mode)
            with suppress(FileExistsError):
                os.mkdir(self._folder / part)
                made = True
        with self._opened("write", name) as folder:
            # Another user may have put another folder into its place.
            if made and _is_new(folder):
                os.fchmod(folder, mode)
            with suppress(OSError):
                # A link in the place would be replaced; its mode must not be taken over.
                if not stat.S_ISREG(os.stat(file, dir_fd=folder, follow_symlinks=False).st_mode):
                    atomic.remove_file(file, folder)
            chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
            atomic.replace_file(file, chunks, folder=folder, mode=mode & _READABLE)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            with suppress(place.Gone), self._opened("remove", name) as folder:
                atomic.remove_file(_last(name), folder)

    @contextmanager
    def _opened(self, verb: str, name: str) -> Iterator[int]:
        """Open the folder of a name, which may not be a link, and turn errors into a line that names the place."""
        with self._reached(verb, name):
            above = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            part = name.partition("/")[0]
            try:
                folder = handles.open_folder(part, above)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise place.BadStore(f"{self.shown}: {part} is a link or no folder") from error
                raise
            finally:
                os.close(above)
            try:
                yield folder
            finally:
                os.close(folder)

    def _reached(self, verb: str, name: str) -> AbstractContextManager[None]:
        return place.translated(partial(self._failure, verb, name), OSError)

    def _failure(self, verb: str, name: str, error: OSError) -> errors.CachectlError:
        advice = ""
        if isinstance(error, NotADirectoryError):
            advice = "; name a folder or a URL"
        elif (verb == "read" and plain.means_no_file(error)) or (verb != "write" and plain.means_absent(error)):
            return self.lacks(name)
        elif isinstance(error, PermissionError):
            access = "g+rX" if verb in ("list", "read") else "g+rwX"
            advice = f"; chmod -R {access} {self.shown} lets the group of the folder do it"
        reason = error.strerror or str(error)
        return place.TransferFailed(f"cannot {verb} {self.shown}/{errors.printable(name)}: {reason}{advice}")


def _last(name: str) -> str:
    return name.partition("/")[2]


def _is_new(folder: int) -> bool:
    """Return whether an open folder is this user's, and has at most what other writers have added since it was made."""
    is_own = os.fstat(folder).st_uid == os.geteuid()
    return is_own and all(_WRITTEN.fullmatch(name) for name in os.listdir(folder))
