"""One child that has become a user, and what it wrote.

The user owns the child: he can trace and stop it, and write anything in its name. The parent reads two pipes, at most
so much and for so long, and believes nothing. The child gets no file, variable or terminal of the superuser.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import cachectl
from cachectl.homes.accounts import Account
from cachectl.layers.base.texts import printable

if TYPE_CHECKING:
    from threading import Event

#: Bytes that a child may write: a listing of some hundred thousand entries.
MOST_OUTPUT: Final = 64 << 20
#: Seconds between two looks at the clock, and those that a killed child has to end.
_TICK: Final = 0.1
_DYING: Final = 5.0
#: The status of a child whose home does not exist: only the user may be able to look.
NO_HOME: Final = 77
_PROGRAM: Final = "cachectl.cli.in_home"


class Answer(NamedTuple):
    """What a child wrote and its exit status; ``problem`` says why it could not be heard to its end."""

    status: int
    output: bytes
    errors: bytes
    problem: str | None = None


def ask(account: Account, words: Sequence[str], *, seconds: float, stop: Event) -> Answer:
    """Run a command of cachectl as a user, in his home; end it after so many seconds, or when ``stop`` is set.

    The child is an isolated interpreter (``-I``): it reads no ``PYTHON*`` variable, and no module of the user.
    """
    command = (sys.executable, "-I", "-X", "utf8", "-m", _PROGRAM, *words)
    try:
        child = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=_variables(account),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=account.uid,
            group=account.gid,
            extra_groups=account.groups,
            umask=0o077,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(-1, b"", b"", _not_started(error))
    kept: dict[IO[bytes], bytearray] = {stream: bytearray() for stream in (child.stdout, child.stderr) if stream}
    try:
        problem = _listen(child, kept, time.monotonic() + seconds, stop)
    finally:
        _end(child)
    output, errors = (bytes(data) for data in kept.values())
    if problem == _LATE:
        problem += f" {seconds:g} s; --time-limit sets how long it may"
    return Answer(-1 if child.returncode is None else child.returncode, output, errors, problem or _closed(errors))


_LATE: Final = "took longer than"


def _variables(account: Account) -> Mapping[str, str]:
    return {**account.variables, "LC_ALL": "C.UTF-8"}


def _listen(
    child: subprocess.Popen[bytes], kept: Mapping[IO[bytes], bytearray], deadline: float, stop: Event
) -> str | None:
    """Read what a child writes until it has ended; return why that was given up, ``None`` if it was not."""
    with selectors.DefaultSelector() as pipes:
        for stream in kept:
            pipes.register(stream, selectors.EVENT_READ)
        while True:
            # Another process of the user may keep the pipes open, and write, after the child has ended.
            ended = _has_ended(child)
            ready = [key.fd for key, _ in pipes.select(0 if ended else _TICK)] if pipes.get_map() else []
            for stream, data in kept.items():
                if stream.fileno() in ready and not _take(stream, data):
                    pipes.unregister(stream)
            if ended and not ready:
                return None
            if any(len(data) > MOST_OUTPUT for data in kept.values()):
                return f"wrote more than {MOST_OUTPUT >> 20} MiB; select fewer entries"
            if time.monotonic() > deadline:
                return _LATE
            if stop.is_set():
                return "was interrupted"
            if not ready:
                time.sleep(_TICK / 10)


def _take(stream: IO[bytes], data: bytearray) -> bool:
    """Read a piece of a pipe; return whether there may be more."""
    piece = os.read(stream.fileno(), 1 << 16)
    data += piece
    return bool(piece)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without freeing its process id where the system supports that."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # This process was started with SIGCHLD ignored, so that the system keeps no status of a child.
        return child.poll() is not None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child with its process group, whose id is its own until it is waited for."""
    if child.returncode is None:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    # A file system of the user may keep it from ending.
    with suppress(subprocess.TimeoutExpired):
        child.wait(_DYING)


# ---------------------------------------------------------------------- a child that cannot start


def _not_started(error: OSError) -> str:
    closed = _closed_folder()
    if error.errno == errno.EACCES and closed is not None:
        return _unreadable(closed)
    return f"cannot start {printable(sys.executable)} as that user: {error.strerror}"


def _closed(errors: bytes) -> str | None:
    """Return why the child's Python found no cachectl, if it says so."""
    if b"No module named 'cachectl" in errors or b"No module named 'encodings'" in errors:
        closed = _closed_folder()
        return f"{printable(sys.executable)} finds no cachectl" if closed is None else _unreadable(closed)
    return None


def _unreadable(closed: Path) -> str:
    return f"cannot read this cachectl, as {closed} is closed to others; install it where every user can read it"


def _closed_folder() -> Path | None:
    """Return the first folder on the way to this Python or to cachectl that not everybody can enter."""
    places = (os.path.realpath(sys.executable), sys.prefix, os.path.realpath(cachectl.__file__))
    for place in map(Path, places):
        for folder in reversed(place.parents):
            with suppress(OSError):
                if not os.stat(folder).st_mode & 0o001:
                    return folder
    return None
