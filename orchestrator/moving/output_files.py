"""Files that a command writes: which names they may have, and which of them may be replaced.

A name that was mistyped must not cost anybody a file: a layer's name is no FILE, and a file that is there is replaced
only if cachectl wrote it, or with ``--force``.
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
from cachectl.layers.stores.archive import is_artifact_file
from cachectl.moving import bundle
from cachectl.moving.transfer import beginning, is_url, local_path, place, without_secrets
from cachectl.moving.whole_files import STREAM, is_standard_output, mode_of

#: As much of a file as shows whether cachectl wrote it, in bytes: more than the first block that zstd writes.
_HEAD: Final = 1 << 18
_PNG: Final = b"\x89PNG\r\n"


class FileInTheWay(CachectlError):
    """A file stands where one is to be written, and cachectl did not write it."""


class Kind(NamedTuple):
    """A kind of file that cachectl writes: what to call it, whether it is binary, and whether bytes begin one."""

    what: str
    is_begun_by: Callable[[bytes], bool]
    is_binary: bool = True


def json_kind(schema: str) -> Kind:
    """Return the kind of a JSON document of a schema, of any version."""
    pattern = re.compile(rb'\s*\{\s*"schema":\s*"' + re.escape(schema.encode()) + rb"/\d")
    return Kind(f"JSON of {schema}", lambda head: pattern.match(head) is not None, is_binary=False)


def _is_picture(head: bytes) -> bool:
    return head.startswith((_PNG, b"<?xml")) and MAKER.encode() in head


#: What a picture that bench has drawn says of its maker.
MAKER: Final = "cachectl bench"
BUNDLE: Final = Kind("a bundle", bundle.is_begun_by)
ARTIFACT: Final = Kind("an artifact", is_artifact_file)
PICTURE: Final = Kind("a picture of bench", _is_picture)
SIGNATURE: Final = Kind("a signature", lambda head: head.startswith(b"-----BEGIN SSH SIGNATURE-----"), is_binary=False)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A FILE or URL that is to be written. ``layers`` are the names that no FILE has; ``force`` replaces anything."""

    name: str
    kind: Kind
    layers: Container[str] = ()
    force: bool = False

    def demand(self) -> None:
        """Find out, before there is anything to write, whether the file may be written.

        Raises :class:`BadRequest` for a name that is none, :class:`FileInTheWay` for a file that is not cachectl's.
        """
        if self.name in self.layers:
            message = f"{self.name!r} is a layer, and no FILE: name the FILE first, or write ./{self.name}"
            raise BadRequest(message)
        if self.name == STREAM or _is_terminal(self.name):
            if self.kind.is_binary and (self.name != STREAM or sys.stdout.isatty()):
                message = f"{self.kind.what} is binary, and this is a terminal; name a FILE, or redirect the output"
                raise BadRequest(message)
            return
        if self.force or not (head := self._head()) or self.kind.is_begun_by(head):
            return
        message = f"{self._shown} is there, and is not {self.kind.what}; name another file, or --force replaces it"
        raise FileInTheWay(message)

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write it whole or not at all, if that may be done now: what is there may be younger than the question."""
        self.demand()
        place(self.name, chunks)

    @property
    def _shown(self) -> str:
        return printable(without_secrets(self.name))

    def _head(self) -> bytes:
        """Return how the file begins that would be replaced; nothing where there is none."""
        if is_url(self.name):
            return beginning(self.name, _HEAD)
        name = local_path(self.name)
        mode = mode_of(name)
        # A folder is refused later, a device or a pipe is written to, and so is what the shell has opened.
        if mode is None or not stat.S_ISREG(mode) or is_standard_output(name):
            return b""
        try:
            with open(name, "rb") as file:
                return file.read(_HEAD)
        except OSError as error:
            message = f"{self._shown} is there, and cannot be read ({error.strerror}); --force replaces it unseen"
            raise FileInTheWay(message) from error


def demand_targets(*outputs: OutputFile | None) -> None:
    """Check files that will be written after a long run: their folders, and what is there now.

    Raises as :meth:`OutputFile.demand` does, and :class:`BadRequest` for a folder that does not exist.
    """
    for output in filter(None, outputs):
        folder = os.path.dirname(output.name)
        if folder and not os.path.isdir(folder):
            message = f"{output.name!r} lies in no folder; make {folder} first"
            raise BadRequest(message)
        output.demand()


def _is_terminal(name: str) -> bool:
    """Tell whether a name is that of a terminal."""
    mode = None if is_url(name) else mode_of(name)
    if mode is None or not stat.S_ISCHR(mode):
        return False
    try:
        with open(name, "rb", buffering=0) as file:
            return file.isatty()
    except OSError:
        return False
