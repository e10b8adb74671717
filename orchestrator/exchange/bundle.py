"""A bundle: a store in one file, a zip with the names of the store as members.

Members are stored without compression and without times, so that the same content gives the same bytes. The directory
is measured before it is parsed, and no member is ever unpacked into a file: its name only says what it holds. A new
bundle is written to an unnamed file and linked into its place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

from cachectl.exchange import place
from cachectl.exchange.format import is_name
from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment
from cachectl.layers.disk import atomic, handles
from cachectl.layers.disk.plain import own_name

#: Bytes of the directory of a bundle, and members in it.
_LARGEST_DIRECTORY: Final = 24 << 20
_MOST_MEMBERS: Final = 1 << 17
#: The header of the first member; its name begins after 30 bytes.
_BEGINNING: Final = re.compile(rb"PK\x03\x04.{26}(?:index|packs)/[0-9a-z]", re.DOTALL)
#: The end of a zip, and those of a large one. Source: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16.
_END: Final = struct.Struct("<4s4H2LH")
_LARGE_END: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_DATE: Final = (1980, 1, 1, 0, 0, 0)
_CHUNK: Final = 1 << 20


# ---------------------------------------------------------------------- open files


def is_begun_by(head: bytes) -> bool:
    """Return whether bytes are the beginning of a bundle."""
    return _BEGINNING.match(head) is not None


def unnamed_file(environment: Environment) -> BinaryIO:
    """Open a temporary file that nobody else can open, and that vanishes with this process."""
    folder = environment.temporary
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder if folder.is_dir() else None))


def spool(file: BinaryIO, data: bytes, folder: Path, shown: str) -> None:
    """Add to an unnamed file. Raises :class:`TransferFailed` if that would fill a disk that others use too."""
    lacks_room = file.tell() > errors.LARGEST_BUNDLE
    if hasattr(os, "fstatvfs"):
        disk = os.fstatvfs(file.fileno())
        spared = min(errors.SPARED_ROOM, disk.f_blocks * disk.f_frsize // 20) + _CHUNK
        lacks_room |= disk.f_bavail * disk.f_frsize < spared
    if lacks_room:
        raise place.TransferFailed(f"{folder} has no room for {shown}; set TMPDIR to a larger folder")
    file.write(data)


def spooled(environment: Environment, chunks: Iterable[bytes], shown: str) -> BinaryIO:
    """Return an unnamed file with a bundle that comes in pieces."""
    file = unnamed_file(environment)
    for chunk in chunks:
        if not file.tell() and not is_begun_by(chunk):
            # Before a device that never ends is copied.
            raise place.BadStore(f"{shown} is not a bundle of cachectl")
        spool(file, chunk, environment.temporary, shown)
    file.flush()
    return file


def pieces(file: BinaryIO, size: int = _CHUNK, *, rest: bool = False) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, or only the rest of it."""
    if not rest:
        file.seek(0)
    while chunk := file.read(size):
        yield chunk


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of the content of an open file."""
    digest = hashlib.sha256()
    for chunk in pieces(file):
        digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------- the place


class BundlePlace(place.StorePlace):
    """A bundle in a file; without a path in standard input or, if it ``writes``, in standard output.

    Everything is read through one descriptor. A pipe is read once, into an unnamed file. With ``force`` a file that is
    not a bundle is replaced.
    """

    is_bundle = True

    def __init__(
        self,
        path: Path | None,
        environment: Environment,
        *,
        shown: str = "",
        writes: bool = False,
        force: bool = False,
    ) -> None:
        self.shown = shown or ("-" if path is None else errors.printable(path))
        # The name of a shell's pipe leads nowhere.
        self._path = path.resolve() if path is not None and (writes or path.is_file()) else path
        self._environment = environment
        self._writes = writes
        self._new: zipfile.ZipFile | None = None
        self._removed: set[str] = set()
        self._use(self._open(), force=force)

    def _use(self, file: BinaryIO | None, *, force: bool = False) -> None:
        """Read what there is in an open file; an empty one was made to be written to."""
        self._old = file
        self._members: zipfile.ZipFile | None = None
        try:
            if file is not None and file.seek(0, os.SEEK_END):
                self._members = _members(file, self.shown)
        except place.BadStore as error:
            if not force:
                advice = "; name another file, or replace it with --force" if self._writes else ""
                raise place.BadStore(f"{error}{advice}") from error

    def _open(self) -> BinaryIO | None:
        """Open the file; ``None`` if there is none."""
        if self._path is None:
            verb, stream = ("printed to", sys.stdout) if self._writes else ("read from", sys.stdin)
            if stream.isatty():
                raise errors.BadRequest(f"a bundle is binary and is not {verb} a terminal; name a FILE")
            rest = pieces(sys.stdin.buffer, rest=True)
            return None if self._writes else spooled(self._environment, rest, self.shown)
        if self._writes and self._path.exists() and not self._path.is_file():
            raise errors.BadRequest(f"{self.shown} is no plain file; name another FILE, or - for standard output")
        try:
            # In a network file system, only a file that is open for writing can be locked for writing.
            file = open(self._path, "r+b" if self._writes and os.access(self._path, os.W_OK) else "rb")  # noqa: SIM115
        except FileNotFoundError:
            return None
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        with file:
            return spooled(self._environment, pieces(file, rest=True), self.shown)

    def names(self, folder: str) -> Sequence[place.Stored]:
        """List the names in a folder."""
        sizes = {
            info.filename: info.file_size
            for members in (self._members, self._new)
            for info in (() if members is None else members.infolist())
        }
        names = [name for name in sizes if name.startswith(f"{folder}/") and name not in self._removed]
        return [place.Stored(name, sizes[name], None) for name in names]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        for members in filter(None, (self._new, self._members)):
            info = members.NameToInfo.get(name)
            if info is not None and name not in self._removed:
                self.require_small(name, info.file_size, most)
                with _reading(self.shown):
                    return members.read(info)
        raise self.lacks(name)

    def digest(self) -> str | None:
        """Return the SHA-256 of the file; ``None`` for no file."""
        return None if self._members is None or self._old is None else sha256_of(self._old)

    def write(self, name: str, data: bytes) -> None:
        """Add a member to the new bundle."""
        with self._written():
            self._new = self._new or self._begin()
            if name not in self._new.NameToInfo:
                self._new.writestr(_info(name, len(data)), data)
        self._removed.discard(name)

    def remove(self, names: Sequence[str]) -> None:
        """Leave names out of the new bundle."""
        self._removed.update(names)

    def _begin(self) -> zipfile.ZipFile:
        """Open the new bundle in an unnamed file; other pushes to the old one wait until it is in its place."""
        if self._old is None or self._path is None:
            return zipfile.ZipFile(self._unnamed(), "w")
        handles.take_flock(self._old.fileno(), wait=True)
        self._require_same()
        file = self._unnamed()
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._old.fileno()).st_mode))
        return zipfile.ZipFile(file, "w")

    def _unnamed(self) -> BinaryIO:
        """Open the file that becomes the new bundle."""
        if self._path is not None and hasattr(os, "O_TMPFILE"):
            # Not every file system has such files.
            with suppress(IsADirectoryError):
                return open(os.open(self._path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
        return unnamed_file(self._environment)

    def _require_same(self) -> None:
        """Raise :class:`Changed` if another command has replaced or made the bundle meanwhile."""
        if self._path is None:
            return
        same = not self._path.exists() if self._old is None else handles.is_same_file(self._path, self._old.fileno())
        if not same:
            raise place.Changed(self.shown)

    def finish(self) -> None:
        """Complete the new bundle with what stays of the old one, and put it in its place."""
        if self._new is None and not self._removed:
            return
        with self._written():
            new = self._new = self._new or self._begin()
            left_out = self._removed | new.NameToInfo.keys()
            for info in () if self._members is None else self._members.infolist():
                if self._members is not None and info.filename not in left_out:
                    copied = _info(info.filename, info.file_size)
                    with _reading(self.shown), self._members.open(info) as old, new.open(copied, "w") as target:
                        shutil.copyfileobj(old, target, _CHUNK)
            file = cast("BinaryIO", new.fp)
            new.filelist.sort(key=lambda info: info.filename)
            # A zip that is given a file leaves it open.
            new.close()
            file.flush()
            self._publish(file)
        self._new, self._removed = None, set()
        self._use(file)

    def _written(self) -> AbstractContextManager[None]:
        return place.translated(self._failure, OSError)

    def _failure(self, error: OSError) -> place.TransferFailed:
        if self._new is not None:
            # Its finaliser would complete it, and print what fails then.
            self._new.fp = None
        return place.TransferFailed(f"cannot write {self.shown}: {error.strerror or error}")

    def _publish(self, file: BinaryIO) -> None:
        """Put the complete file in its place, or copy it to standard output."""
        if self._path is None:
            atomic.write_all(1, pieces(file))
            return
        self._require_same()
        os.fsync(file.fileno())
        stage = self._path.with_name(own_name())
        try:
            _link(file, self._path, None if self._old is None else stage)
        except FileExistsError as error:
            # A first push was faster.
            raise place.Changed(self.shown) from error
        except OSError:
            # It lies elsewhere, or the system does not show open files.
            try:
                atomic.replace_file(self._path, pieces(file), new=self._old is None)
            except FileExistsError as error:
                raise place.Changed(self.shown) from error
        finally:
            atomic.remove_file(stage)


def _link(file: BinaryIO, path: Path, stage: Path | None) -> None:
    """Give an unnamed file a name, which must be free unless a stage is given, and sync the folder."""
    folder = os.open(path.parent, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        # Only with an open folder does Python follow the link in /proc.
        os.link(f"/proc/self/fd/{file.fileno()}", (stage or path).name, dst_dir_fd=folder)
        if stage is not None:
            atomic.move_in(stage.name, folder, path.name, folder)
        os.fsync(folder)
    finally:
        os.close(folder)


# ---------------------------------------------------------------------- the zip


def _info(name: str, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system, info.external_attr, info.file_size = 3, 0o644 << 16, size
    return info


def _members(file: BinaryIO, shown: str) -> zipfile.ZipFile:
    """Return the members of a bundle in an open file. Raises :class:`BadStore` for anything else."""
    with _reading(shown):
        end = _require_directory(file, shown)
        members = zipfile.ZipFile(file)
        found: set[str] = set()
        for info in members.infolist():
            fit = is_name(info.filename) and info.filename not in found
            plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits
            inside = info.file_size == info.compress_size and 0 <= info.header_offset <= end - info.file_size
            if not (fit and plain and inside):
                raise place.BadStore(
                    f"{shown}: {errors.printable(info.filename)[:200]} is not a member that a bundle has"
                )
            found.add(info.filename)
        if sum(info.file_size for info in members.infolist()) > end:
            raise place.BadStore(f"{shown} is damaged: its members overlap")
        return members


def _require_directory(file: BinaryIO, shown: str) -> int:
    """Measure the directory before anybody parses it; return where it begins."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not is_begun_by(file.read(_CHUNK)) or size < _END.size:
        raise place.BadStore(f"{shown} is not a bundle of cachectl")
    stop = size - _END.size
    file.seek(stop)
    magic, *_, members, length, start, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06" or comment:
        raise place.BadStore(f"{shown} is cut short, or has bytes after its end")
    if stop >= _LARGE_END.size + _LOCATOR.size:
        file.seek(stop - _LOCATOR.size)
        if file.read(4) == b"PK\x06\x07":
            stop -= _LOCATOR.size + _LARGE_END.size
            file.seek(stop)
            magic, *_, members, length, start = _LARGE_END.unpack(file.read(_LARGE_END.size))
            if magic != b"PK\x06\x06":
                raise place.BadStore(f"{shown} is damaged: its end cannot be read")
    if members > _MOST_MEMBERS or length > _LARGEST_DIRECTORY:
        raise place.BadStore(f"{shown} has a directory of {members:,} members and {length:,} bytes, which is too large")
    if start + length != stop:
        raise place.BadStore(f"{shown} is damaged: its directory is not where it should be")
    return int(start)


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    """Turn any error of a damaged zip into one line."""
    try:
        yield
    except (errors.CachectlError, OSError, MemoryError):
        raise
    except Exception as error:
        raise place.BadStore(f"{shown} is damaged: {errors.printable(str(error)) or type(error).__name__}") from error
