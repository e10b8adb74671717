"""Files that a command writes completely or not at all: which names are valid, and which files may be replaced.

A typing error must not destroy a file: the name of a layer is not accepted as FILE, and an existing file is replaced
only if cachectl wrote it, or with ``--force``.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import NamedTuple

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.text import printable
from cachectl.layers.disk import atomic
from cachectl.layers.stores import archive

#: The name of standard output, as a file to write.
STREAM = "-"

#: How many bytes of a file show whether cachectl wrote it: more than the first block of zstd.
_HEAD = 1 << 18
_PNG = b"\x89PNG\r\n"


class Kind(NamedTuple):
    """A kind of file that cachectl writes: its name, whether it is binary, and a check of its first bytes."""

    what: str
    is_begun_by: Callable[[bytes], bool]
    is_binary: bool = True


def json_kind(schema: str) -> Kind:
    """Return the kind of a JSON document of a schema, in any version."""
    pattern = re.compile(rb'\s*\{\s*"schema":\s*"' + re.escape(schema.encode()) + rb"/\d")
    return Kind(f"JSON of {schema}", lambda head: pattern.match(head) is not None, is_binary=False)


#: The maker in the metadata of a picture drawn by bench.
MAKER = "cachectl bench"
ARTIFACT = Kind("an artifact", archive.is_artifact_file)
PICTURE = Kind("a picture of bench", lambda head: head.startswith((_PNG, b"<?xml")) and MAKER.encode() in head)


class OutputFile(NamedTuple):
    """A FILE to write, whose name must not be one of ``layers``; with ``force`` any file may be replaced."""

    name: str
    kind: Kind
    layers: Container[str] = ()
    force: bool = False

    def demand(self) -> None:
        """Raise an error unless the file may be written; called before there is content.

        Raises :class:`BadRequest` for an invalid name or a folder that is missing or not writable, and
        :class:`CachectlError` for an existing file that cachectl did not write.
        """
        name, status = self.name, _status_of(self.name)
        if name in self.layers:
            raise BadRequest(f"{name!r} is a layer, not a FILE: write the FILE before the layers, or ./{name}")
        if self.kind.is_binary and _is_terminal(name, status):
            raise BadRequest(f"{self.kind.what} is binary; name a FILE, or redirect the output, which is a terminal")
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise BadRequest(f"{name!r} is a folder; name a file in it")
        if not name or name.endswith(os.sep):
            raise BadRequest(f"{name!r} is not a valid file name")
        folder = os.path.dirname(os.path.realpath(name) if os.path.islink(name) else name) or "."
        if status is None and name != STREAM and not os.access(folder, os.W_OK | os.X_OK):
            shown = printable(folder)
            if os.path.isdir(folder):
                raise BadRequest(f"{name!r}: {shown} is not writable; name a file elsewhere")
            raise BadRequest(f"{name!r}: the folder does not exist; make {shown} first")
        # Devices, pipes and the shell's redirection need no check: they are not replaced.
        if self.force or status is None or not stat.S_ISREG(status.st_mode) or _is_standard_output(status):
            return
        try:
            with open(name, "rb") as file:
                head = file.read(_HEAD)
            reason = f"is not {self.kind.what}" if head and not self.kind.is_begun_by(head) else None
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        if reason is not None:
            advice = "name another file, or replace it with --force"
            raise CachectlError(f"{printable(name)} exists and {reason}; {advice}")

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write a temporary file and rename it, so that readers never see half of the file.

        ``-`` is standard output. A device or a pipe is opened and written to. Checks again, because the file may have
        changed.
        """
        self.demand()
        name, status = self.name, _status_of(self.name)
        try:
            if name == STREAM or (status is not None and _is_standard_output(status)):
                # If standard output is a file, its earlier content stays.
                atomic.write_all(1, chunks)
            elif status is not None and not stat.S_ISREG(status.st_mode):
                with open(name, "wb", buffering=0) as file:
                    atomic.write_all(file.fileno(), chunks)
            else:
                atomic.replace_file(os.path.realpath(name), chunks)
        except OSError as error:
            # Name the requested file in the error, not the temporary one.
            error.filename, error.filename2 = "standard output" if name == STREAM else name, None
            raise


def _status_of(name: str) -> os.stat_result | None:
    """Return the status of a file, following links; ``None`` for a missing file and for the stream."""
    try:
        return None if name == STREAM else os.stat(name)
    except FileNotFoundError:
        return None


def _is_terminal(name: str, status: os.stat_result | None) -> bool:
    if name == STREAM:
        return sys.stdout.isatty()
    with suppress(OSError):
        if status is not None and stat.S_ISCHR(status.st_mode):
            with open(name, "rb", buffering=0) as file:
                return file.isatty()
    return False


def _is_standard_output(status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(1))
    except OSError:
        return False
