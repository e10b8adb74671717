"""Files written whole or not at all, and standard output in the place of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.disk.atomic import replace_file, write_all

#: Stands for standard output where a file is written, and for standard input where one is read.
STREAM: Final = "-"


def write_chunks(name: str, chunks: Iterable[bytes]) -> None:
    """Write a file beside its place and rename it in, so that half of one is never seen; ``-`` is standard output.

    Only a plain file can be written so: a device or a pipe is opened and written to. Raises :class:`BadRequest`
    for what is no name of a file.
    """
    if name == STREAM:
        write_all(1, chunks)
        return
    mode = mode_of(name)
    if not name or name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        message = f"{name!r} is no name of a file"
        raise BadRequest(message)
    if mode is not None and is_standard_output(name):
        # What others wrote there before us stays, wherever it leads.
        write_all(1, chunks)
        return
    if mode is not None and not stat.S_ISREG(mode):
        with open(name, "wb", buffering=0) as file:
            write_all(file.fileno(), chunks)
        return
    try:
        replace_file(os.path.realpath(name), chunks)
    except OSError as error:
        # The name that was given, not that of the stage.
        error.filename, error.filename2 = name, None
        raise


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
