"""Every event in some folders, in order, as the Linux kernel reports them (inotify).

The library inotify_simple searches for the C library with a compiler at each start, which takes longer than many
commands that are watched, and leaks a descriptor in Python before 3.11.4 if none is free. Source: inotify(7).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.entry_files.kernel_queue import KernelQueue

_HEAD: Final = struct.Struct("=iIII")


class FileEvent(NamedTuple):
    """An event: the number of the watch, what happened, and the name in the folder."""

    watch: int
    mask: int
    name: str


class Inotify(KernelQueue):
    """Folders under watch. Raises :class:`OSError` where that is not possible."""

    def __init__(self) -> None:
        super().__init__("inotify_init1", only="every file that is opened")
        self._number = self._checked(self._library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def watch(self, folder: Path, mask: int) -> int:
        """Watch a folder, and return the number of the watch. Raises :class:`OSError`."""
        import ctypes

        add = self._library.inotify_add_watch
        return self._checked(add(self._number, os.fsencode(folder), ctypes.c_uint32(mask)))

    def read(self) -> Iterator[FileEvent]:
        """Yield the next events, in order; nothing if none has come."""
        data = self._waiting()
        at = 0
        while at + _HEAD.size <= len(data):
            watch, mask, _, length = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            yield FileEvent(watch, mask, os.fsdecode(name))
