"""The names in a folder with their status, so that two looks can be compared. Nothing is opened or hashed.

A file's last change of any kind (``ctime``) cannot be set back. So a file with the same inode, size and times is
unchanged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

#: The stamp of a name: kind, inode, size in bytes, last change of content and of any kind (ns). Folders have no size,
#: because the names in them are compared.
Stamp = tuple[int, int, int, int, int]
#: Separates the name of a link from that of the file behind it.
LEADS_TO: Final = " -> "


class Snapshot:
    """Every name below a folder that ``accepts`` takes, by its relative path; the folder itself is ``""``.

    ``files`` maps the resolved path of each file to its name; ``watch`` lists the paths to watch so that all files are
    covered; ``doubts`` maps names to why they could not be examined. With ``one_by_one`` the files of the top folder
    are watched one by one, because most files there belong to others.
    """

    def __init__(self, top: str, accepts: Callable[[str], object], *, one_by_one: bool = False) -> None:
        self.stamps: dict[str, Stamp] = {}
        self.files: dict[str, str] = {}
        self.watch: list[str] = []
        self.folders = 0
        self.doubts: list[tuple[str, str]] = []
        self._top = top
        self._accepts = accepts
        self._one_by_one = one_by_one
        self._descend()

    def _descend(self) -> None:
        try:
            self.stamps[""] = _stamp(os.lstat(self._top))
        except OSError:
            return
        folders = [""]
        while folders:
            folder = folders.pop()
            self.watch.append(folder)
            self.folders += 1
            for entry in self._entries(folder):
                relative = f"{folder}/{entry.name}" if folder else entry.name
                if self._accepts(relative) and self._note(entry, relative):
                    folders.append(relative)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(f"{self._top}/{folder}") as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.doubts.append((folder, f"cannot be listed: {error.strerror}"))
            return []

    def _note(self, entry: os.DirEntry[str], relative: str) -> bool:
        """Record one name; return whether it is a folder."""
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return False
        self.stamps[relative] = _stamp(status)
        if stat.S_ISDIR(status.st_mode):
            return True
        if stat.S_ISLNK(status.st_mode):
            self._note_behind(entry.path, relative)
            return False
        self.files[entry.path] = relative
        if status.st_nlink > 1 or (self._one_by_one and "/" not in relative):
            # A read by another name causes no event in its folder.
            self.watch.append(relative)
        return False

    def _note_behind(self, path: str, relative: str) -> None:
        """Record the file that a link leads to. A folder elsewhere is not searched, and ``doubts`` says so."""
        try:
            status = os.stat(path)
        except OSError:
            # It is dangling or circular.
            return
        if stat.S_ISDIR(status.st_mode):
            self.doubts.append((relative, "is a link to a folder elsewhere, which is not watched"))
            return
        real = os.path.realpath(path)
        self.stamps[f"{relative}{LEADS_TO}{real}"] = _stamp(status)
        self.files[real] = relative
        self.watch.append(relative)


def is_folder(stamp: Stamp) -> bool:
    """Return whether a stamp is that of a folder."""
    return stat.S_ISDIR(stamp[0])


def changed(before: Stamp | None, after: Stamp | None) -> str | None:
    """Return in words what happened to a name; ``None`` if nothing did."""
    if before == after:
        return None
    if before is None or after is None:
        return "appeared" if before is None else "vanished"
    if is_folder(before) and is_folder(after):
        return "was changed"
    return "was touched" if before[:-1] == after[:-1] else "was written"


def _stamp(status: os.stat_result) -> Stamp:
    kind = stat.S_IFMT(status.st_mode)
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return kind, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns
