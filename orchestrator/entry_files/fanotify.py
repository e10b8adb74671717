"""The processes that use files, as the Linux kernel reports them (fanotify), which only root may ask for.

Whole file systems are watched, because both the run and another program may use a folder before it could be watched.
The kernel opens no file for this reader: it reports the folder, by a handle, and the name in it.
Sources: ``include/uapi/linux/fanotify.h``, fanotify(7), name_to_handle_at(2).
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.entry_files.kernel_queue import KernelQueue

#: Close at exec, do not block, a queue without limit, and folders and names in place of descriptors (Linux 5.9).
_FLAGS: Final = 0x1 | 0x2 | 0x10 | 0x400 | 0x800
_ADD, _FILE_SYSTEM, _HERE = 0x1, 0x100, -100
_CLOSE_WRITE, _CLOSE_NOWRITE, _OPEN, _MOVED_TO, _OVERFLOW = 0x8, 0x10, 0x20, 0x80, 0x4000
#: Length of the event and of its fixed part, version, reserved, mask, descriptor of the file, process.
_EVENT: Final = struct.Struct("=IBBHQii")
#: Kind of the record, reserved, its length; then the file system, the length of the handle, and its kind.
_RECORD: Final = struct.Struct("=BBH8sIi")
_VERSION: Final = 3
_FOLDER_AND_NAME: Final = 2
#: How many events in unknown folders are kept until the folder is known: a new one is known within milliseconds.
_KEPT: Final = 1 << 14
_LONGEST_HANDLE: Final = 128
_HANDLE: Final = struct.Struct("=Ii")
#: For file systems that report handles but cannot be asked for a file by one.
_ONLY_TO_IDENTIFY: Final = 0x200


@dataclass(frozen=True, slots=True)
class Access:
    """What a process did with a file since the last event: opened it, closed it after writing, renamed it to this.

    ``closed`` says that it closed the file where it could not write to it.
    ``process`` is 0 for one that cannot be seen from here. ``moment`` is that of :meth:`Fanotify.read`, ``at`` the
    time (epoch seconds).
    """

    path: Path
    process: int
    opened: bool
    written: bool
    arrived: bool
    moment: int
    at: float
    closed: bool = False


class _Event(NamedTuple):
    folder: tuple[bytes, int, bytes]
    name: bytes
    process: int
    mask: int
    moment: int
    at: float


class Fanotify(KernelQueue):
    """File systems under watch. Raises :class:`OSError` where that is not possible or not allowed."""

    def __init__(self) -> None:
        super().__init__("fanotify_init", "name_to_handle_at", only="who opens a file")
        import ctypes

        #: Whether the kernel dropped events.
        self.lost = False
        #: Whether there were events, so that more may wait.
        self.behind = False
        self._folders: dict[tuple[bytes, int, bytes], Path] = {}
        self._marked: dict[int, bytes] = {}
        #: The last events in unknown folders.
        self._unknown: deque[_Event] = deque(maxlen=_KEPT)
        self._is_new_folder = False
        self._library.fanotify_mark.argtypes = (
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_char_p,
        )
        self._number = self._checked(self._library.fanotify_init(_FLAGS, os.O_RDONLY))

    def watch(self, folder: Path) -> None:
        """Watch a folder's file system, and yield what happens in the folder. Raises :class:`OSError`."""
        device = folder.stat().st_dev
        if device not in self._marked:
            mark = (_ADD | _FILE_SYSTEM, _OPEN | _CLOSE_WRITE | _CLOSE_NOWRITE | _MOVED_TO, _HERE, os.fsencode(folder))
            self._checked(self._library.fanotify_mark(self._number, *mark))
            self._marked[device] = struct.pack("=Q", os.statvfs(folder).f_fsid & 0xFFFFFFFFFFFFFFFF)
        self._folders[(self._marked[device], *self._handle(folder))] = folder
        self._is_new_folder = True

    def _handle(self, folder: Path) -> tuple[int, bytes]:
        import ctypes

        buffer = ctypes.create_string_buffer(_HANDLE.size + _LONGEST_HANDLE)
        mount = ctypes.c_int()
        for flags in (0, _ONLY_TO_IDENTIFY):
            _HANDLE.pack_into(buffer, 0, _LONGEST_HANDLE, 0)
            result = self._library.name_to_handle_at(_HERE, os.fsencode(folder), buffer, ctypes.byref(mount), flags)
            if result == 0 or ctypes.get_errno() != errno.EOPNOTSUPP:
                break
        self._checked(result)
        length, kind = _HANDLE.unpack_from(buffer)
        return kind, buffer.raw[_HANDLE.size : _HANDLE.size + length]

    def read(self, moment: int) -> Iterator[Access]:
        """Yield the next events, in order, and set :attr:`behind`; several of one process and file may be one.

        Those in a folder that was watched after them come late, with the moment at which they were read.
        """
        if self._is_new_folder:
            self._is_new_folder = False
            yield from (self._access(event) for event in self._unknown if event.folder in self._folders)
            self._unknown.clear()
        data = self._waiting()
        self.behind = bool(data)
        for event in self._parse(data, moment):
            if event.folder in self._folders:
                yield self._access(event)
            else:
                self._unknown.append(event)

    def _access(self, event: _Event) -> Access:
        path = self._folders[event.folder] / os.fsdecode(event.name)
        opened, written, arrived = (bool(event.mask & bit) for bit in (_OPEN, _CLOSE_WRITE, _MOVED_TO))
        closed = bool(event.mask & _CLOSE_NOWRITE)
        return Access(path, event.process, opened, written, arrived, event.moment, event.at, closed)

    def _parse(self, data: bytes, moment: int) -> Iterator[_Event]:
        at, now = 0, time.time()
        while at + _EVENT.size <= len(data):
            length, version, _, fixed, mask, _, process = _EVENT.unpack_from(data, at)
            begin, at = at + fixed, at + max(length, _EVENT.size)
            if mask & _OVERFLOW or version != _VERSION or begin + _RECORD.size > at:
                self.lost = True
                continue
            kind, _, size, system, bytes_, form = _RECORD.unpack_from(data, begin)
            if kind == _FOLDER_AND_NAME:
                handle = begin + _RECORD.size
                name = data[handle + bytes_ : begin + size].partition(b"\0")[0]
                yield _Event((system, form, data[handle : handle + bytes_]), name, process, mask, moment, now)
