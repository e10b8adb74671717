"""The kinds of locks that libraries take on their caches; taken with a timeout, never broken."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment, node, user_name
from cachectl.layers.base.errors import Busy, Unreachable
from cachectl.layers.disk import handles, plain
from cachectl.layers.disk.atomic import create, remove_file

#: The process namespace of the machine, not of a container: ``PROC_PID_INIT_INO`` in the kernel's ``proc_ns.h``.
_FIRST_NAMESPACE = "/pid:[4026531836]"


def busy(layer: str, seconds: float, path: Path, *related: Path, advice: str = "", pids: tuple[int, ...] = ()) -> Busy:
    """Return the error that a lock was held too long, by ``pids`` or by the processes that have the files locked."""
    files = (path, *related)
    holders = pids or processes.lockers_of(files) or processes.lockers_of(files, kind=b"READ")
    named = processes.process_names(holders) if holders else "another process"
    return Busy(layer, f"locked by {named} for more than {seconds:g} s{advice}", path)


@contextmanager
def record_lock(layer: str, path: Path, *, folder: int, lock_timeout: float) -> Iterator[int]:
    """Hold a POSIX record lock on an entire plain file; yield the open file's descriptor.

    The file is opened or created in the open ``folder``, even if its path now leads elsewhere. The CUDA driver and
    MIOpen use such locks, which ``flock`` would not exclude. Raises :class:`Busy` after ``lock_timeout`` seconds, and
    :class:`Unreachable` if the file cannot be opened or is not a plain file.
    """
    with ExitStack() as stack:
        try:
            opened = plain.opened_locked(path.name, dir_fd=folder, flags=os.O_RDWR | os.O_CREAT)
            handle = stack.enter_context(opened)
        except OSError as error:
            raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
        if not handles.wait_until(partial(handles.try_record_lock, handle), lock_timeout):
            raise busy(layer, lock_timeout, path)
        yield handle


@contextmanager
def file_lock(layer: str, path: Path, *, folder: int | None = None, lock_timeout: float) -> Iterator[int | None]:
    """Hold ``flock`` on a plain file, as Intel's driver does; yield its descriptor, ``None`` if there is no such file.

    The file is opened in the open ``folder``, if given. If it was replaced during the wait, the new one is locked
    instead. Raises the errors of :func:`record_lock`.
    """
    name = path if folder is None else path.name
    while True:
        with ExitStack() as stack:
            try:
                handle = plain.open_plain(name, dir_fd=folder, flags=os.O_RDWR)
            except FileNotFoundError:
                yield None
                return
            except OSError as error:
                raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
            stack.callback(os.close, handle)
            if not handles.wait_until(partial(handles.try_flock, handle), lock_timeout):
                raise busy(layer, lock_timeout, path)
            if handles.is_same_file(name, handle, dir_fd=folder):
                yield handle
                return


# ---------------------------------------------------------------------- locks that exist while they are held


class Custody(NamedTuple):
    """The processes that hold a lock file, or why they are unknown; the file is abandoned if there is neither."""

    holders: tuple[int, ...] = ()
    reason: str = ""


ABANDONED = Custody()


def custody_of(environment: Environment, path: Path, waits: float, *, folder: int) -> Custody:
    """Return who holds a lock file in an open folder, if its library waits ``waits`` seconds for it.

    The holder keeps it open for writing. cachectl also holds ``flock`` on its own, which shows its state at any age.
    Raises :class:`OSError`.
    """
    with open(plain.open_plain(path.name, dir_fd=folder), "rb") as file:
        status, match = os.fstat(file.fileno()), re.fullmatch(rb"(?:cachectl \d+ (.*)\n)?", file.read(300))
        if match is None:
            return Custody(reason="its content is not that of a lock")
        if match[1] == os.fsencode(node()) and handles.take_flock(file.fileno()):
            return ABANDONED
        if environment.clock() - status.st_mtime <= waits:
            return Custody(reason=f"it is not older than {waits:g} s, for which its library waits")
        writers, hidden = processes.writers_of(status, environment.processes)
        is_open = handles.is_written_elsewhere(file.fileno())
    kind, reason = processes.mount_of(path, mounts=environment.mounts).kind, ""
    if kind not in processes.LOCAL:
        reason = f"it is on {kind or 'an unknown file system'}, and a program on another machine may hold it"
    elif not os.path.realpath(environment.processes / "self/ns/pid").endswith(_FIRST_NAMESPACE):
        reason = "programs of this machine are hidden here, as in a container"
    elif hidden and is_open is not False:
        named = processes.process_names(hidden, environment.processes)
        reason = f"a process of {user_name(status.st_uid)} that hides its files may have it open: {named}"
    elif is_open:
        reason = "a program that is hidden here has it open"
    return Custody(writers, "" if writers else reason)


@contextmanager
def presence_lock(
    layer: str, path: Path, environment: Environment, waits: float = math.inf, *, folder: int | None = None
) -> Iterator[None]:
    """Hold a lock that is the existence of a file, like PyOpenCL's.

    ``folder`` is the open folder of the lock; without it the parent of ``path`` is opened, which must not be a link.
    The lock stays in that folder even if another folder takes its name.

    Such a lock outlives a killed holder; :func:`custody_of` decides by ``waits`` whether it did, and then the lock is
    replaced. Raises :class:`Busy` after the environment's timeout. Never removes a lock that may be held, or another
    file of its name.
    """
    with ExitStack() as stack:
        try:
            place = stack.enter_context(handles.opened(str(path.parent))) if folder is None else folder

            def is_made() -> bool:
                while plain.status_at(path.name, dir_fd=place) is not None or not _make_lock(place, path.name, stack):
                    if not remove_abandoned(environment, path, waits, place):
                        return False
                return True

            if not handles.wait_until(is_made, environment.lock_timeout):
                status = plain.status_at(path.name, dir_fd=place)
                writers = () if status is None else processes.writers_of(status, environment.processes)[0]
                raise busy(layer, environment.lock_timeout, path, pids=writers, advice="; see cachectl doctor")
        except Busy:
            raise
        except OSError as error:
            raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
        yield


def remove_abandoned(environment: Environment, path: Path, waits: float, folder: int | None = None) -> bool:
    """Remove an abandoned lock file, in an open folder if one is given; return whether it was removed.

    Only one cachectl at a time may check and remove: of two that found the same abandoned lock, the second would remove
    the new lock of the first, or of a program. ``flock`` on the folder excludes others, leaves no file and ends with
    the process. Only cachectl removes abandoned locks; comparing stamps detects a removal by hand.
    """
    # Opened again, because flock belongs to the open file description, and the given folder is used by others.
    with suppress(OSError), handles.opened(str(path.parent) if folder is None else ".", folder) as own:
        if not handles.take_flock(own):
            return False
        judged = _stamp(own, path.name)
        custody = custody_of(environment, path, waits, folder=own)
        if custody == ABANDONED and _stamp(own, path.name) == judged:
            remove_file(path.name, own)
            return True
    return False


def _make_lock(folder: int, name: str, stack: ExitStack) -> bool:
    """Make a lock that names this process, to be removed when the stack closes; return ``False`` if one exists.

    The file gets its name last, so that a kill leaves no lock without an owner. Without unnamed files, a kill in
    between leaves an empty lock, which only its age shows to be abandoned.
    """
    unnamed = None
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):
            unnamed = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o644, dir_fd=folder)
    try:
        handle = create(name, folder, 0o644) if unnamed is None else unnamed
        stack.callback(os.close, handle)
        # ``flock`` shows others whether this process still runs.
        handles.take_flock(handle)
        with suppress(OSError):
            # On a full disk the lock stays empty, like PyOpenCL's own, and is still valid.
            os.write(handle, b"cachectl %d %s\n" % (os.getpid(), os.fsencode(node())))
        if unnamed is not None:
            os.link(f"/proc/self/fd/{unnamed}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    stack.callback(_let_go, folder, name, handle)
    return True


def _let_go(folder: int, name: str, handle: int) -> None:
    # The user may have removed it, as PyOpenCL's warning advises, and another program may have made a new one.
    if handles.is_same_file(name, handle, dir_fd=folder):
        remove_file(name, folder)


def _stamp(folder: int, name: str) -> tuple[int, ...]:
    """Return a stamp that differs between locks even if the file system reuses an inode."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
