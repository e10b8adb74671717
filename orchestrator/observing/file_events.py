"""File events while another program runs, as the Linux kernel reports them (inotify).

Events come from every program and every user of this machine, and from no other machine: what a second node does on a
network file system is not reported.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachectl.entry_files.inotify import Inotify

# sys/inotify.h
_ACCESS, _MODIFY, _ATTRIBUTES, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = (1 << bit for bit in (0, 1, 2, 6, 7, 8, 9))
_DELETE_SELF, _MOVE_SELF, _UNMOUNTED, _OVERFLOW = (1 << bit for bit in (10, 11, 13, 14))
_OPEN: Final = 0x20
_MASK_ADD: Final = 0x20000000
_FOLDER: Final = 0x40000000

#: The meaning of each event. Opening and reading a folder only lists it, and is left out.
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
#: Limit on the number of different events that are kept.
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


def _reason(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def nearest(path: Path) -> Path:
    """Return the nearest existing folder above a path."""
    return next((folder for folder in path.parents if os.path.isdir(folder)), Path(path.anchor))


@dataclass(frozen=True, slots=True)
class Event:
    """An event at one path: ``what`` is one of the words of this module."""

    path: Path
    what: str


class FileEvents:
    """Folders and files under watch, from :meth:`watch` to :meth:`stop`.

    ``why_not`` is the reason why nothing can be watched here; ``None`` means that watching works.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        #: Whether the kernel dropped events because they came too fast.
        self.lost = False
        self._paths: dict[int, dict[Path, Wanted]] = {}
        self._expected: list[Path] = []
        self._awaited: set[tuple[int, str]] = set()
        self._seen: dict[tuple[int, int, str], None] = {}
        self._notify: Inotify | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open()
        except OSError as error:
            self.why_not = error.strerror or str(error)
        except RuntimeError as error:
            # No watch could be had, or no thread could be started.
            self.why_not = str(error)

    def _open(self) -> None:
        with ExitStack() as opened:
            try:
                notify = Inotify()
            except OSError as error:
                raise RuntimeError(_reason(error)) from error
            opened.callback(notify.close)
            self._ending, self._end = os.pipe()
            opened.callback(os.close, self._ending)
            opened.callback(os.close, self._end)
            thread = threading.Thread(target=self._drain, args=(notify,), name="cachectl-file-events", daemon=True)
            thread.start()
            self._notify, self._thread = notify, thread
            # `stop` closes them.
            opened.pop_all()

    def watch(self, path: Path, wanted: Wanted | None = None) -> str | None:
        """Watch a folder's files, or one file; return why that is not possible, or ``None``.

        With ``wanted``, only the arrival and departure of names that it accepts are reported: in a folder that many
        users share, most events concern others.
        """
        if self._notify is None:
            return self.why_not
        try:
            number = self._notify.watch(path, _MASK_ADD | (_COMING_AND_GOING if wanted else _EVERYTHING))
        except OSError as error:
            return _reason(error)
        self._want(number, path, wanted or _everything)
        return None

    def expect(self, path: Path) -> str | None:
        """Watch for a folder that does not exist; return why that is not possible, or ``None``.

        Its arrival is reported, and that of each folder on the way to it: these are watched once they exist.
        """
        self._expected.append(path)
        return self._approach(path)

    def _approach(self, path: Path) -> str | None:
        if self._notify is None:
            return self.why_not
        # Each turn gets one folder nearer, or finds that one has vanished.
        for _ in path.parts:
            folder = nearest(path)
            step = path.relative_to(folder).parts[0]
            try:
                number = self._notify.watch(folder, _MASK_ADD | _COMING_AND_GOING | _DELETE_SELF | _MOVE_SELF)
            except OSError as error:
                if os.path.isdir(folder):
                    return _reason(error)
                continue
            if (number, step) not in self._awaited:
                self._awaited.add((number, step))
                self._want(number, folder, lambda name, step=step: name in ("", step))  # type: ignore[misc]
            if not os.path.isdir(folder / step):
                return None
            if folder / step == path:
                # It arrived before the watch was set.
                self._seen[number, _CREATE, step] = None
                return None
        return None

    def _want(self, number: int, path: Path, wanted: Wanted) -> None:
        watches = self._paths.setdefault(number, {})
        # Several roots may be expected in one folder.
        watches[path] = _either(watches.get(path), wanted)

    def stop(self) -> tuple[Event, ...]:
        """Stop watching, and return the events, each once, in order."""
        if self._thread is not None and self._notify is not None:
            os.write(self._end, b".")
            self._thread.join()
            self._take(self._notify)
            self._notify.close()
            for descriptor in (self._ending, self._end):
                os.close(descriptor)
            self._notify = self._thread = None
        return tuple(
            Event(folder / name if name else folder, _WORDS[bit])
            for number, bit, name in self._seen
            for folder, wanted in self._paths.get(number, {}).items()
            if wanted(name)
        )

    def _drain(self, notify: Inotify) -> None:
        """Read events as they come, because the kernel queues a limited number."""
        poll = select.poll()
        poll.register(notify, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while all(descriptor != self._ending for descriptor, _ in poll.poll()):
            self._take(notify)

    def _take(self, notify: Inotify) -> None:
        while events := list(notify.read()):
            for event in events:
                self._note(event.watch, event.mask, event.name)

    def _note(self, number: int, mask: int, name: str) -> None:
        if not (mask & _OVERFLOW or self._is_wanted(number, name)):
            return
        if mask & _OVERFLOW or len(self._seen) >= _ENOUGH:
            self.lost = True
            return
        if mask & _COMING:
            self._follow(number, name)
        ignored = _OPEN | _ACCESS | _ATTRIBUTES if mask & _FOLDER else 0
        for bit in _WORDS:
            if mask & bit & ~ignored:
                self._seen[number, bit, name] = None

    def _follow(self, number: int, name: str) -> None:
        """Watch a folder that has arrived on the way to an expected one."""
        come = [folder / name for folder in list(self._paths.get(number, {}))]
        for path in self._expected:
            if any(folder in path.parents for folder in come):
                self._approach(path)

    def _is_wanted(self, number: int, name: str) -> bool:
        # A new watch gets its path a moment later: until then its events are kept.
        watches = self._paths.get(number)
        return watches is None or any(wanted(name) for wanted in list(watches.values()))
