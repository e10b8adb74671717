"""Files that a command writes, whole or not at all: the names they may have, and the files they may replace.

A mistyped name must not destroy a file. So the name of a layer is not accepted as FILE, and an existing file is
replaced only if cachectl wrote it, or with ``--force``.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from cachectl.layers.base.errors import BadRequest, CachectlError, printable
from cachectl.layers.disk.atomic import replace_file, write_all
from cachectl.layers.stores.archive import is_artifact_file
from cachectl.pages import BEGINNING

#: Means standard output for a file to write.
STREAM: Final = "-"

#: Bytes that show whether cachectl wrote a file: more than the first block that zstd writes.
_HEAD: Final = 1 << 18
_PNG: Final = b"\x89PNG\r\n"


class FileInTheWay(CachectlError):
    """A file that cachectl did not write is in the way."""


class Kind(NamedTuple):
    """A kind of file that cachectl writes: its name, whether it is binary, and a check of its first bytes."""

    what: str
    is_begun_by: Callable[[bytes], bool]
    is_binary: bool = True


def json_kind(schema: str) -> Kind:
    """Return the kind of a JSON document of a schema, in any version."""
    pattern = re.compile(rb'\s*\{\s*"schema":\s*"' + re.escape(schema.encode()) + rb"/\d")
    return Kind(f"JSON of {schema}", lambda head: pattern.match(head) is not None, is_binary=False)


def _is_picture(head: bytes) -> bool:
    return head.startswith((_PNG, b"<?xml")) and MAKER.encode() in head


#: The entry for the maker in a picture that bench has drawn.
MAKER: Final = "cachectl bench"
ARTIFACT: Final = Kind("an artifact", is_artifact_file)
PICTURE: Final = Kind("a picture of bench", _is_picture)
PAGE: Final = Kind("a page of cachectl", lambda head: head.startswith(BEGINNING.encode()), is_binary=False)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A FILE to write.

    ``layers`` are names that are not accepted as FILE; with ``force`` any file may be replaced.
    """

    name: str
    kind: Kind
    layers: Container[str] = ()
    force: bool = False

    def demand(self) -> None:
        """Raise an error if the file may not be written; called before there is content.

        Raises :class:`BadRequest` for an invalid name, :class:`FileInTheWay` for a file that cachectl did not write.
        """
        if self.name in self.layers:
            raise BadRequest(
                f"{self.name!r} is a layer, not a FILE: write the FILE before the layers, or ./{self.name}"
            )
        if self.name == STREAM or _is_terminal(self.name):
            if self.kind.is_binary and (self.name != STREAM or sys.stdout.isatty()):
                raise BadRequest(
                    f"{self.kind.what} is binary and is not printed to a terminal; name a FILE, or redirect the output"
                )
            return
        if self.force or not (head := self._head()) or self.kind.is_begun_by(head):
            return
        shown = printable(self.name)
        raise FileInTheWay(f"{shown} exists and is not {self.kind.what}; name another file, or replace it with --force")

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write the file whole or not at all. Checks again, because the place may have changed."""
        self.demand()
        write_chunks(self.name, chunks)

    def _head(self) -> bytes:
        """Return the first bytes of the file that would be replaced; empty if there is none."""
        mode = _mode_of(self.name)
        # A folder is refused later. A device, a pipe and the shell's redirection are written to.
        if mode is None or not stat.S_ISREG(mode) or _is_standard_output(self.name):
            return b""
        try:
            with open(self.name, "rb") as file:
                return file.read(_HEAD)
        except OSError as error:
            shown = printable(self.name)
            raise FileInTheWay(
                f"{shown} exists and cannot be read ({error.strerror}); --force replaces it unread"
            ) from error


def demand_targets(*outputs: OutputFile | None) -> None:
    """Check files that will be written after a long run: their folders, and the files to replace.

    Raises as :meth:`OutputFile.demand` does, and :class:`BadRequest` for a folder, for one file that is named twice,
    and for a file in a folder that does not exist or cannot be written.
    """
    places: set[str] = set()
    for output in filter(None, outputs):
        _demand_place(output.name)
        where = os.path.realpath(output.name)
        if where in places and os.path.isfile(where) == os.path.exists(where):
            raise BadRequest(f"{output.name!r} is named twice; name a file for each output")
        places.add(where)
        output.demand()


def _demand_place(name: str) -> None:
    """Raise :class:`BadRequest` if no file can be written there."""
    if os.path.isdir(name):
        raise BadRequest(f"{name!r} is a folder; name a file in it")
    if name == STREAM or os.path.exists(name):
        return
    folder = os.path.dirname(os.path.realpath(name) if os.path.islink(name) else name)
    if folder and not os.path.isdir(folder):
        raise BadRequest(f"{name!r}: the folder does not exist; make {printable(folder)} first")
    if not os.access(folder or ".", os.W_OK | os.X_OK):
        raise BadRequest(
            f"{name!r}: {printable(folder) or 'the working folder'} cannot be written; name a file elsewhere"
        )


def _is_terminal(name: str) -> bool:
    """Return whether a name leads to a terminal."""
    mode = _mode_of(name)
    if mode is None or not stat.S_ISCHR(mode):
        return False
    try:
        with open(name, "rb", buffering=0) as file:
            return file.isatty()
    except OSError:
        return False


def write_chunks(name: str, chunks: Iterable[bytes]) -> None:
    """Write a file next to its place and rename it into place, so that readers never see half of it.

    ``-`` is standard output. A device or a pipe cannot be renamed over: it is opened and written to. Raises
    :class:`BadRequest` for an invalid name of a file.
    """
    if name == STREAM:
        try:
            write_all(1, chunks)
        except OSError as error:
            error.filename = "standard output"
            raise
        return
    mode = _mode_of(name)
    if not name or name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        raise BadRequest(f"{name!r} is not a valid name of a file")
    if mode is not None and _is_standard_output(name):
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


def _mode_of(name: str) -> int | None:
    """Return the mode of the file that a name leads to; ``None`` if there is none."""
    try:
        return os.stat(name).st_mode
    except FileNotFoundError:
        return None


def _is_standard_output(name: str) -> bool:
    """Return whether a name leads to the file that standard output is open on."""
    try:
        return os.path.samestat(os.stat(name), os.fstat(1))
    except OSError:
        return False
