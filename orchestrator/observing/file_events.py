"""What happens to files while somebody else's program runs, as the Linux kernel tells it (inotify).

Events tell of every program of this machine, whoever runs it, and of nothing that another machine does. The calls are
made through the C library: they are three, have not changed since 2008, and need no package.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# sys/inotify.h
_ACCESS, _MODIFY, _ATTRIBUTES, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = (1 << bit for bit in (0, 1, 2, 6, 7, 8, 9))
_DELETE_SELF, _MOVE_SELF, _UNMOUNTED, _OVERFLOW = (1 << bit for bit in (10, 11, 13, 14))
_OPEN: Final = 0x20
_MASK_ADD: Final = 0x20000000
_FOLDER: Final = 0x40000000
_HEADER: Final = struct.Struct("iIII")

#: What an event means in words; opening and reading a folder only lists it, and is left out.
OPENED: Final = "was opened"
READ: Final = "was read"
VANISHED: Final = "vanished"
MOVED: Final = "was moved"
_WORDS: Final = {
    _OPEN: OPENED,
    _ACCESS: READ,
    _MODIFY: "was written",
    _ATTRIBUTES: "was touched",
    _CREATE: "appeared",
    _MOVED_TO: "appeared",
    _DELETE: VANISHED,
    _MOVED_FROM: VANISHED,
    _DELETE_SELF: VANISHED,
    _MOVE_SELF: MOVED,
    _UNMOUNTED: "was unmounted",
}
_EVERYTHING: Final = sum(_WORDS) - _UNMOUNTED
_COMING: Final = _CREATE | _MOVED_TO
_COMING_AND_GOING: Final = _COMING | _DELETE | _MOVED_FROM
#: So many different events are kept; who does more has long been found out.
_ENOUGH: Final = 100_000
_REASONS: Final = {
    errno.ENOSPC: "more folders than the system lets one user watch (fs.inotify.max_user_watches)",
    errno.EMFILE: "too many programs of this user watch files already (fs.inotify.max_user_instances)",
}

#: Accepts a name in a watched folder.
Wanted = Callable[[str], bool]


def _either(one: Callable[[str], bool] | None, other: Callable[[str], bool]) -> Callable[[str], bool]:
    return other if one is None else lambda name: one(name) or other(name)


def _everything(_: str) -> bool:
    return True


def _reason(code: int) -> str:
    return _REASONS.get(code, os.strerror(code))


def nearest(path: Path) -> Path:
    """Return the nearest folder above a path that is there."""
    return next((folder for folder in path.parents if os.path.isdir(folder)), Path(path.anchor))


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to one path: ``what`` is one of the words of this module."""

    path: Path
    what: str


class FileEvents:
    """Folders and files under watch, from :meth:`watch` to :meth:`stop`.

    ``why_not`` says why nothing can be watched here, ``None`` where it can.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        #: Whether the kernel dropped events because they came too fast.
        self.lost = False
        self._paths: dict[int, dict[Path, Wanted]] = {}
        self._expected: list[Path] = []
        self._awaited: set[tuple[int, str]] = set()
        self._seen: dict[tuple[int, int, bytes], None] = {}
        self._notify = -1
        self._thread: threading.Thread | None = None
        self._add: Callable[[int, bytes, int], int] | None = None
        try:
            self._open()
        except AttributeError:
            self.why_not = "the C library has no inotify"
        except OSError as error:
            self.why_not = error.strerror or str(error)
        except RuntimeError as error:
            # There can be no thread.
            self.why_not = str(error)

    def _open(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, "only Linux reports every file that is opened")
        library = ctypes.CDLL(None, use_errno=True)
        self._add = library.inotify_add_watch
        self._notify = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._notify < 0:
            raise OSError(ctypes.get_errno(), _reason(ctypes.get_errno()))
        with ExitStack() as opened:
            opened.callback(os.close, self._notify)
            self._ending, self._end = os.pipe()
            opened.callback(os.close, self._ending)
            opened.callback(os.close, self._end)
            thread = threading.Thread(target=self._drain, name="cachectl-file-events", daemon=True)
            thread.start()
            self._thread = thread
            # They are closed by the end of the watch instead.
            opened.pop_all()

    def watch(self, path: Path, wanted: Wanted | None = None) -> str | None:
        """Watch a folder's files, or one file; return why that is not possible, or ``None``.

        With ``wanted``, only what comes into the folder and goes is told, and only of names that this accepts: in a
        folder that is everybody's, most of what happens is nobody's concern.
        """
        if self._add is None or self.why_not is not None:
            return self.why_not
        number = self._add(self._notify, os.fsencode(path), _MASK_ADD | (_COMING_AND_GOING if wanted else _EVERYTHING))
        if number < 0:
            return _reason(ctypes.get_errno())
        self._want(number, path, wanted or _everything)
        return None

    def expect(self, path: Path) -> str | None:
        """Watch for a folder that is not there; return why that is not possible, or ``None``.

        Its coming is told, and that of each folder on the way to it. One that comes is watched from then on.
        """
        self._expected.append(path)
        return self._approach(path)

    def _approach(self, path: Path) -> str | None:
        if self._add is None or self.why_not is not None:
            return self.why_not
        # Each turn ends a folder nearer, or has found one gone.
        for _ in path.parts:
            folder = nearest(path)
            step = path.relative_to(folder).parts[0]
            mask = _MASK_ADD | _COMING_AND_GOING | _DELETE_SELF | _MOVE_SELF
            number = self._add(self._notify, os.fsencode(folder), mask)
            if number < 0:
                why = _reason(ctypes.get_errno())
                if os.path.isdir(folder):
                    return why
                continue
            if (number, step) not in self._awaited:
                self._awaited.add((number, step))
                self._want(number, folder, lambda name, step=step: name in ("", step))  # type: ignore[misc]
            if not os.path.isdir(folder / step):
                return None
            if folder / step == path:
                # It was faster than the watch.
                self._seen[number, _CREATE, os.fsencode(step)] = None
                return None
        return None

    def _want(self, number: int, path: Path, wanted: Wanted) -> None:
        watches = self._paths.setdefault(number, {})
        # Several roots may be awaited in one folder.
        watches[path] = _either(watches.get(path), wanted)

    def stop(self) -> tuple[Event, ...]:
        """Stop watching, and return what happened, each thing once, in order."""
        if self._thread is not None:
            os.write(self._end, b".")
            self._thread.join()
            self._take()
            for descriptor in (self._notify, self._ending, self._end):
                os.close(descriptor)
            self._thread = None
        return tuple(
            Event(folder / os.fsdecode(name) if name else folder, _WORDS[bit])
            for number, bit, name in self._seen
            for folder, wanted in self._paths.get(number, {}).items()
            if wanted(os.fsdecode(name))
        )

    def _drain(self) -> None:
        """Take events as they come: what the kernel holds back for a reader is bounded."""
        poll = select.poll()
        poll.register(self._notify, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while all(descriptor != self._ending for descriptor, _ in poll.poll()):
            self._take()

    def _take(self) -> None:
        with suppress(BlockingIOError):
            while block := os.read(self._notify, 1 << 16):
                self._note(block)

    def _note(self, block: bytes) -> None:
        at = 0
        while at < len(block):
            number, mask, _, length = _HEADER.unpack_from(block, at)
            at += _HEADER.size + length
            name = block[at - length : at].rstrip(b"\0")
            if not (mask & _OVERFLOW or self._is_wanted(number, name)):
                continue
            if mask & _OVERFLOW or len(self._seen) >= _ENOUGH:
                self.lost = True
                continue
            if mask & _COMING:
                self._follow(number, os.fsdecode(name))
            ignored = _OPEN | _ACCESS | _ATTRIBUTES if mask & _FOLDER else 0
            for bit in _WORDS:
                if mask & bit & ~ignored:
                    self._seen[number, bit, name] = None

    def _follow(self, number: int, name: str) -> None:
        """Watch what has come on the way to something expected."""
        come = [folder / name for folder in list(self._paths.get(number, {}))]
        for path in self._expected:
            if any(folder in path.parents for folder in come):
                self._approach(path)

    def _is_wanted(self, number: int, name: bytes) -> bool:
        # What has a watch has its path a moment later: until then it is kept.
        watches = self._paths.get(number)
        return watches is None or any(wanted(os.fsdecode(name)) for wanted in list(watches.values()))
