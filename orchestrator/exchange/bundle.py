"""A bundle: a store in one file, a zip with the names of the store as members, on a disk or in a registry.

Members are stored without compression and without times, so that the same content gives the same bytes. The directory
is measured before it is parsed, and no member is ever unpacked into a file: its name only says what it holds. A new
bundle is written to an unnamed file and linked into its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlencode, urljoin, urlsplit

from cachectl.exchange import place, wire
from cachectl.layers import core
from cachectl.layers.disk import atomic
from cachectl.layers.disk.plain import own_name

#: Bytes of the directory of a bundle, and members in it.
_LARGEST_DIRECTORY = 24 << 20
_MOST_MEMBERS = 1 << 17
#: The header of the first member; its name begins after 30 bytes.
_BEGINNING = re.compile(rb"PK\x03\x04.{26}(?:index|packs)/[0-9a-z]", re.DOTALL)
#: The end of a zip, and those of a large one. Source: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16.
_END = struct.Struct("<4s4H2LH")
_LARGE_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_BUNDLE = "application/vnd.cachectl.bundle.v1+zip"
_EMPTY = b"{}"
_ADDRESS = re.compile(
    r"oci(?P<plain>\+http)?://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
_LOCAL = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
#: Limit on the bytes of a manifest.
_LARGEST_MANIFEST = 4 << 20


# ---------------------------------------------------------------------- open files


def is_begun_by(head: bytes) -> bool:
    """Return whether bytes are the beginning of a bundle."""
    return _BEGINNING.match(head) is not None


def unnamed_file(folder: Path) -> BinaryIO:
    """Open a temporary file that nobody else can open, and that vanishes with this process."""
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder if folder.is_dir() else None))


def spool(file: BinaryIO, data: bytes, folder: Path, shown: str) -> None:
    """Add to an unnamed file. Raises :class:`TransferFailed` if that would fill a disk that others use too."""
    lacks_room = file.tell() > core.LARGEST_BUNDLE
    if hasattr(os, "fstatvfs"):
        disk = os.fstatvfs(file.fileno())
        spared = min(core.SPARED_ROOM, disk.f_blocks * disk.f_frsize // 20) + _CHUNK
        lacks_room |= disk.f_bavail * disk.f_frsize < spared
    if lacks_room:
        raise place.TransferFailed(f"{folder} has no room for {shown}; set TMPDIR to a larger folder")
    file.write(data)


def spooled(environment: core.Environment, chunks: Iterable[bytes], shown: str) -> BinaryIO:
    """Return an unnamed file with a bundle that comes in pieces."""
    file = unnamed_file(environment.temporary)
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
        environment: core.Environment,
        *,
        shown: str = "",
        writes: bool = False,
        force: bool = False,
    ) -> None:
        self.shown = shown or ("-" if path is None else core.printable(path))
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
                raise core.BadRequest(f"a bundle is binary and is not {verb} a terminal; name a FILE")
            rest = pieces(sys.stdin.buffer, rest=True)
            return None if self._writes else spooled(self._environment, rest, self.shown)
        if self._writes and self._path.exists() and not self._path.is_file():
            raise core.BadRequest(f"{self.shown} is no plain file; name another FILE, or - for standard output")
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
        """List the names in a folder of the old bundle."""
        infos = [] if self._members is None else self._members.infolist()
        return [
            place.Stored(info.filename, info.file_size, None)
            for info in infos
            if info.filename.startswith(f"{folder}/") and info.filename not in self._removed
        ]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name of the old bundle."""
        info = None if self._members is None else self._members.NameToInfo.get(name)
        if self._members is None or info is None or name in self._removed:
            raise self.lacks(name)
        self.require_small(name, info.file_size, most)
        with _reading(self.shown):
            return self._members.read(info)

    def digest(self) -> str | None:
        """Return the SHA-256 of the file; ``None`` for no file."""
        return None if self._members is None or self._old is None else sha256_of(self._old)

    def write(self, name: str, data: bytes) -> None:
        """Add a member to the new bundle."""
        with self.reached("write"):
            self._new = self._new or self._begin()
            if name not in self._new.NameToInfo:
                self._new.writestr(_info(name, len(data)), data)
        self._removed.discard(name)

    def remove(self, names: Sequence[str]) -> None:
        """Leave names out of the new bundle."""
        self._removed.update(names)

    def _begin(self) -> zipfile.ZipFile:
        """Open the new bundle in an unnamed file; other pushes to the old one wait until it is in its place."""
        if self._path is None:
            return zipfile.ZipFile(unnamed_file(self._environment.temporary), "w")
        if self._old is not None:
            place.lock(self._path, self._old)
        return zipfile.ZipFile(_linkable_file(self._path.parent), "w")

    def finish(self) -> None:
        """Complete the new bundle with what stays of the old one, and put it in its place."""
        if self._new is None and not self._removed:
            return
        with self.reached("write"):
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

    def failure(self, verb: str, name: str, error: OSError) -> place.TransferFailed:
        """Return what could not be written; the new bundle is given up."""
        if self._new is not None:
            # Its finaliser would complete it, and print what fails then.
            self._new.fp = None
        return place.TransferFailed(f"cannot {verb} {name or self.shown}: {error.strerror or error}")

    def _publish(self, file: BinaryIO) -> None:
        """Put the complete file in its place, or copy it to standard output."""
        if self._path is None:
            atomic.write_all(1, pieces(file))
            return
        if self._old is not None:
            place.lock(self._path, self._old)
        mode = None if self._old is None else stat.S_IMODE(os.fstat(self._old.fileno()).st_mode)
        try:
            try:
                _link(file, self._path, mode)
            except FileExistsError:
                raise
            except OSError:
                # The file system has no such files, or the system does not show open files.
                atomic.replace_file(self._path, pieces(file), new=self._old is None)
        except FileExistsError as error:
            # A first push was faster.
            raise place.Changed(self.shown) from error


def _linkable_file(folder: Path) -> BinaryIO:
    """Open an unnamed file that can be given a name in a folder, or a temporary one where there are no such files."""
    with suppress(AttributeError, IsADirectoryError):
        return open(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    return unnamed_file(folder)


def _link(file: BinaryIO, path: Path, mode: int | None) -> None:
    """Give an unnamed file a name, and sync it. Without the ``mode`` of the file to replace, the name must be free."""
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())
    name = path.name if mode is None else own_name()
    folder = os.open(path.parent, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        # Only with an open folder does Python follow the link in /proc.
        os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=folder)
        try:
            if mode is not None:
                atomic.move_in(name, folder, path.name, folder)
        except OSError:
            atomic.remove_file(name, folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


class RegistryPlace(BundlePlace):
    """The bundle at ``oci://HOST/NAME:TAG``: one blob and the manifest of a tag, moved through the library ``oras``.

    Plain HTTP is for this machine, and for ``oci+http://``.
    Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
    """

    explained = Exception

    def __init__(self, url: str, environment: core.Environment) -> None:
        address = _ADDRESS.fullmatch(url)
        if address is None:
            message = f"{core.printable(url)[:200]!r} is not of the form oci://HOST/NAME:TAG"
            if "@" in url.partition("://")[2].partition("/")[0]:
                message = "an oci:// address takes no password; use docker login or podman login"
            raise core.BadRequest(message)
        self.shown = core.printable(url)
        host, name, tag = address["host"], address["name"], address["tag"] or "latest"
        with self.reached("reach"):
            from oras.container import Container
            from oras.provider import Registry

            # Oras prints each failure, besides what is raised here.
            logging.getLogger("oras.logger").setLevel(logging.CRITICAL)
            plain = address["plain"] is not None or _LOCAL.fullmatch(host) is not None
            self._registry = Registry(host, insecure=plain)
            self._container = Container(f"{host}/{name}:{tag}", registry=host)
            self._registry.auth.load_configs(self._container)
        session = self._registry.session
        session.request = partial(session.request, timeout=place.SILENCE)
        self._seen: bytes | None = None
        super().__init__(None, environment, shown=self.shown)

    def _open(self) -> BinaryIO | None:
        """Download the bundle of the tag; ``None`` if there is no such tag."""
        self._seen = self._manifest()
        if self._seen is None:
            return None
        try:
            (layer,) = json.loads(self._seen)["layers"]
            digest, is_bundle = str(layer["digest"]), layer["mediaType"] == _BUNDLE
        except (KeyError, TypeError, ValueError, RecursionError):
            is_bundle = False
        if not is_bundle or not re.fullmatch("sha256:[0-9a-f]{64}", digest):
            raise place.BadStore(f"{self.shown} is not a bundle of cachectl; choose another tag")
        url = self._url(self._container.get_blob_url(digest))
        with self.reached("reach"), self._asked(url, "GET", stream=True) as response:
            file = spooled(self._environment, response.iter_content(_CHUNK), self.shown)
        if f"sha256:{sha256_of(file)}" != digest:
            raise place.BadStore(f"{self.shown}: the blob {digest} was changed")
        return file

    def _publish(self, file: BinaryIO) -> None:
        """Upload the bundle, then the manifest of the tag."""
        if self._manifest() != self._seen:
            raise place.Changed(self.shown)
        digest = f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}"
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest, "size": len(_EMPTY)}
        layer = {"mediaType": _BUNDLE, "digest": f"sha256:{sha256_of(file)}", "size": file.tell()}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _BUNDLE,
            "config": empty,
            "layers": [layer],
        }
        file.seek(0)
        self._upload(layer["digest"], file)
        self._upload(digest, _EMPTY)
        text = json.dumps(manifest, sort_keys=True).encode()
        url = self._url(self._container.manifest_url())
        self._asked(url, "PUT", data=text, headers={"Content-Type": _MANIFEST})

    def _upload(self, digest: object, data: bytes | BinaryIO) -> None:
        # The first request logs in, so that no body is sent twice.
        started = self._asked(self._url(self._container.upload_blob_url()), "POST")
        place = urljoin(started.url, started.headers.get("Location", ""))
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": digest})
        self._asked(place, "PUT", data=data, headers={"Content-Type": "application/octet-stream"})

    def _manifest(self) -> bytes | None:
        """Return the manifest of the tag; ``None`` if there is none."""
        headers = {"Accept": _MANIFEST}
        response = self._asked(self._url(self._container.manifest_url()), "GET", headers=headers, stream=True)
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None
        with self.reached("reach"):
            return bytes(response.raw.read(_LARGEST_MANIFEST + 1, decode_content=True))

    def _url(self, path: str) -> str:
        return f"{self._registry.prefix}://{path}"

    def _asked(self, url: str, method: str, **given: Any) -> Any:  # noqa: ANN401 - an answer of requests
        """Send a request. Raises :class:`TransferFailed` for a status that is a failure, except 404 of a manifest."""
        with self.reached("reach"):
            response = self._registry.do_request(url, method, **given)
        missing = response.status_code == HTTPStatus.NOT_FOUND and "/manifests/" in url and method == "GET"
        if response.status_code >= HTTPStatus.MULTIPLE_CHOICES and not missing:
            verb = "read" if method == "GET" else "write"
            advice = f"check the address, and log in with docker login or podman login as a user who may {verb} it"
            raise place.TransferFailed(f"cannot {verb} {self.shown}: status {response.status_code}; {advice}")
        return response

    def failure(self, verb: str, name: str, error: Exception) -> place.TransferFailed:
        """Return an error of oras or requests, or of writing a temporary file, as one line."""
        if verb == "write" and isinstance(error, OSError):
            return super().failure(verb, name, error)
        if isinstance(error, ImportError):
            return place.TransferFailed("oci:// needs the package oras: pip install 'opencl-cachectl[oci]'")
        # Requests wraps the reason into the pool and the path.
        reason = getattr(next(iter(error.args), None), "reason", None) or error
        why = place.one_line(str(reason)) or type(error).__name__
        return place.TransferFailed(
            f"cannot reach {self.shown}: {why}; check the address and the network, and try again"
        )


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
            fit = wire.is_name(info.filename) and info.filename not in found
            plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits
            inside = info.file_size == info.compress_size and 0 <= info.header_offset <= end - info.file_size
            if not (fit and plain and inside):
                raise place.BadStore(
                    f"{shown}: {core.printable(info.filename)[:200]} is not a member that a bundle has"
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
    except (core.CachectlError, OSError, MemoryError):
        raise
    except Exception as error:
        raise place.BadStore(f"{shown} is damaged: {core.printable(str(error)) or type(error).__name__}") from error
