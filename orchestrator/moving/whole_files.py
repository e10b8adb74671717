"""Write files whole or not at all; ``-`` means standard output."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.disk.atomic import replace_file, write_all

#: Means standard output for a file to write, standard input for a file to read.
STREAM: Final = "-"


def write_chunks(name: str, chunks: Iterable[bytes]) -> None:
    """Write a file beside its place and rename it into place, so that readers never see half of it.

    ``-`` is standard output. A device or a pipe cannot be renamed over: it is opened and written to. Raises
    :class:`BadRequest` for an invalid name of a file.
    """
    if name == STREAM:
        write_all(1, chunks)
        return
    mode = mode_of(name)
    if not name or name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        message = f"{name!r} is not a valid name of a file"
        raise BadRequest(message)
    if mode is not None and is_standard_output(name):
        # Standard output may be a file with earlier content, which stays.
        write_all(1, chunks)
        return
    if mode is not None and not stat.S_ISREG(mode):
        with open(name, "wb", buffering=0) as file:
            write_all(file.fileno(), chunks)
        return
    try:
        replace_file(os.path.realpath(name), chunks)
    except OSError as error:
        # Name the given file in the error, not the stage.
        error.filename, error.filename2 = name, None
        raise


def mode_of(name: str) -> int | None:
    """Return the mode of the file that a name leads to; ``None`` if there is none."""
    try:
        return os.stat(name).st_mode
    except FileNotFoundError:
        return None


def is_standard_output(name: str) -> bool:
    """Return whether a name leads to the file that standard output is open on."""
    try:
        return os.path.samestat(os.stat(name), os.fstat(1))
    except OSError:
        return False
