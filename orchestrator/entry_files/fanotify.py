"""The processes that open files in a folder, as the Linux kernel reports them (fanotify), which only root may ask for.

Sources: ``include/uapi/linux/fanotify.h``, fanotify(7).
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_CLOEXEC, _NONBLOCK = 0x1, 0x2
_ADD: Final = 0x1
_OPEN, _CLOSE_WRITE, _OVERFLOW, _ON_CHILD = 0x20, 0x8, 0x4000, 0x08000000
_HERE: Final = -100
#: Length of the event and of its fixed part, version, reserved, mask, descriptor of the file, process.
_EVENT: Final = struct.Struct("=IBBHQii")
_VERSION: Final = 3
_NO_FILE: Final = -1
_DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class Access:
    """A process opened a file, or closed it after writing; 0 is a process that cannot be seen from here."""

    path: Path
    file: tuple[int, int]
    process: int
    opened: bool
    written: bool


class Fanotify:
    """Folders whose files are watched. Raises :class:`OSError` where that is not possible or not allowed."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, "only Linux reports who opens a file")
        import ctypes

        #: Whether the kernel dropped events because they came too fast.
        self.lost = False
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "fanotify_init"):
            raise OSError(errno.ENOSYS, "the C library has no fanotify")
        self._library.fanotify_mark.argtypes = (
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_char_p,
        )
        # The kernel opens each file for the reader, without an event. A pipe must not wait for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOATIME", 0)
        self._number = self._checked(self._library.fanotify_init(_CLOEXEC | _NONBLOCK, flags))

    def _checked(self, result: int) -> int:
        import ctypes

        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        """Return the descriptor, which is readable if there are events."""
        return self._number

    def watch(self, folder: Path) -> None:
        """Watch the files in a folder. Raises :class:`OSError`."""
        mask = _OPEN | _CLOSE_WRITE | _ON_CHILD
        self._checked(self._library.fanotify_mark(self._number, _ADD, mask, _HERE, os.fsencode(folder)))

    def read(self) -> Iterator[Access]:
        """Yield the events that have come, in order; several of one process and file may be one."""
        while True:
            try:
                data = os.read(self._number, 1 << 16)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # The file of an event could not be opened.
                self.lost = True
                return
            yield from self._parse(data)

    def _parse(self, data: bytes) -> Iterator[Access]:
        at = 0
        while at + _EVENT.size <= len(data):
            length, version, _, _, mask, file, process = _EVENT.unpack_from(data, at)
            at += max(length, _EVENT.size)
            if mask & _OVERFLOW or version != _VERSION or file == _NO_FILE:
                self.lost = True
                continue
            try:
                with suppress(OSError):
                    status = os.fstat(file)
                    path = Path(os.readlink(f"/proc/self/fd/{file}").removesuffix(_DELETED))
                    same = (status.st_dev, status.st_ino)
                    yield Access(path, same, process, bool(mask & _OPEN), bool(mask & _CLOSE_WRITE))
            finally:
                os.close(file)

    def close(self) -> None:
        """Stop watching."""
        os.close(self._number)
