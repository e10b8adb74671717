"""Files written whole or not at all, and standard output in the place of one."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.disk.handles import hold_alone
from cachectl.layers.disk.plain import STAGE, open_plain, own_name

#: Stands for standard output where a file is written, and for standard input where one is read.
STREAM: Final = "-"


def write_chunks(name: str, chunks: Iterable[bytes]) -> None:
    """Write a file beside its place and rename it in, so that half of one is never seen; ``-`` is standard output.

    Only a plain file can be written so: a device or a pipe is opened and written to. Raises :class:`BadRequest`
    for what is no name of a file.
    """
    if name == STREAM:
        _write_all(1, chunks)
        return
    mode = mode_of(name)
    if not name or name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        message = f"{name!r} is no name of a file"
        raise BadRequest(message)
    if mode is not None and is_standard_output(name):
        # What others wrote there before us stays, wherever it leads.
        _write_all(1, chunks)
        return
    if mode is not None and not stat.S_ISREG(mode):
        with open(name, "wb", buffering=0) as file:
            _write_all(file.fileno(), chunks)
        return
    try:
        _replace(os.path.realpath(name), chunks, mode)
    except OSError as error:
        # The name that was given, not that of the stage.
        error.filename, error.filename2 = name, None
        raise


def _replace(place: str, chunks: Iterable[bytes], mode: int | None) -> None:
    stage, handle = _stage(place)
    try:
        try:
            _write_all(handle, chunks)
            os.fsync(handle)
        finally:
            os.close(handle)
        if mode is not None:
            os.chmod(stage, stat.S_IMODE(mode))
        os.replace(stage, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(stage)
        raise


def _stage(place: str) -> tuple[str, int]:
    """Make and lock the file that is to take a place. Where a killed command left one for that place, it goes."""
    folder, name = os.path.split(place)
    stage = os.path.join(folder, STAGE + hashlib.sha256(os.fsencode(name)).hexdigest()[:32])
    _remove_left(stage)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(stage, flags, 0o666)
    except FileExistsError:
        # Another command is writing to the same place, or the file is another user's.
        stage = os.path.join(folder, own_name())
        return stage, os.open(stage, flags, 0o666)
    if _hold(handle) and _is_there(stage, handle):
        return stage, handle
    # It cannot be locked, or another command took it for one that was left.
    os.close(handle)
    with suppress(FileNotFoundError):
        os.unlink(stage)
    stage = os.path.join(folder, own_name())
    return stage, os.open(stage, flags, 0o666)


def _remove_left(stage: str) -> None:
    """Remove a stage whose command has ended."""
    with suppress(OSError):
        handle = open_plain(stage)
        try:
            if _hold(handle) and _is_there(stage, handle):
                os.unlink(stage)
        finally:
            os.close(handle)


def _hold(handle: int) -> bool:
    try:
        return hold_alone(handle)
    except ImportError:
        # This platform has no such locks.
        return False


def _is_there(name: str, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(name), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write_all(handle: int, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(handle, rest) :]


def mode_of(name: str) -> int | None:
    """Return the mode of what a name leads to; ``None`` where nothing is there."""
    try:
        return os.stat(name).st_mode
    except FileNotFoundError:
        return None


def is_standard_output(name: str) -> bool:
    """Tell whether a name leads to what standard output is open on."""
    try:
        return os.path.samestat(os.stat(name), os.fstat(1))
    except OSError:
        return False
