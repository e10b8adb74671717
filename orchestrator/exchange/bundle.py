"""A bundle: a store in one file, a zip with the names of the store as members, on a disk or in a registry.

Members are stored without compression and times, so that the same content gives the same bytes. No member is ever
unpacked into a file. A new bundle is written to an unnamed file, which then gets its name by a link.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlencode, urljoin, urlsplit

from cachectl.exchange import place, wire
from cachectl.layers.base.documents import encode_json, parse_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import PARSE_ERRORS, BadRequest, CachectlError
from cachectl.layers.base.limits import LARGEST_BUNDLE, SPARED_ROOM
from cachectl.layers.base.text import printable
from cachectl.layers.disk import atomic, handles, plain

#: The most bytes of the directory of a bundle, and members in it.
_LARGEST_DIRECTORY = 24 << 20
_MOST_MEMBERS = 1 << 17
#: The header of the first member, whose name begins after 30 bytes.
_BEGINNING = re.compile(rb"PK\x03\x04.{26}(?:index|packs)/[0-9a-z]", re.DOTALL)
#: The end of a zip, and those of a large one. Source: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16.
_END = struct.Struct("<4s4H2LH")
_LARGE_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
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
_LOGIN = "check the address, and log in with docker login or podman login as a user with this right"
#: Statuses after which a request is sent again.
_PASSING = (408, 429, 500, 502, 503, 504)
#: The most bytes of a manifest.
_LARGEST_MANIFEST = 4 << 20


def is_begun_by(head: bytes) -> bool:
    """Return whether a file with these first bytes is a bundle."""
    return _BEGINNING.match(head) is not None


def unnamed_file(folder: Path) -> BinaryIO:
    """Open a temporary file that no other process can open, and that vanishes with this one."""
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder if folder.is_dir() else None))


def spool(file: BinaryIO, data: bytes, folder: Path, shown: str, spared: int = SPARED_ROOM) -> None:
    """Append to an unnamed file. Raises :class:`TransferFailed` if the disk has less than ``spared`` bytes left."""
    lacks_room = file.tell() > LARGEST_BUNDLE
    if hasattr(os, "fstatvfs"):
        disk = os.fstatvfs(file.fileno())
        spared = min(spared, disk.f_blocks * disk.f_frsize // 20) + _CHUNK
        lacks_room |= disk.f_bavail * disk.f_frsize < spared
    if lacks_room:
        raise place.TransferFailed(f"{folder} has no room for {shown}; set TMPDIR to a larger folder")
    file.write(data)


def spooled(environment: Environment, chunks: Iterable[bytes], shown: str, spared: int = SPARED_ROOM) -> BinaryIO:
    """Return an unnamed file with a bundle that arrives in pieces."""
    file = unnamed_file(environment.temporary)
    for chunk in chunks:
        if not file.tell() and not is_begun_by(chunk):
            # An endless device must not be copied.
            raise place.BadStore(f"{shown} is not a bundle of cachectl")
        spool(file, chunk, environment.temporary, shown, spared)
    file.flush()
    return file


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of an open file in pieces."""
    while chunk := file.read(_CHUNK):
        yield chunk


def _content(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    return pieces(file)


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of the content of an open file."""
    digest = hashlib.sha256()
    for chunk in _content(file):
        digest.update(chunk)
    return digest.hexdigest()


class BundlePlace(place.StorePlace):
    """A bundle in a file; without a path it is standard input or, if it ``writes``, standard output.

    Everything is read through one descriptor: that of an open ``file``, if given. A pipe is read once, into an unnamed
    file. ``force`` replaces a file that is not a bundle.
    """

    is_bundle = True

    def __init__(
        self,
        path: Path | None,
        environment: Environment,
        *,
        shown: str = "",
        file: BinaryIO | None = None,
        writes: bool = False,
        force: bool = False,
    ) -> None:
        self.shown = shown or ("-" if path is None else printable(path))
        # The link to a shell's pipe cannot be resolved.
        self._path = path.resolve() if path is not None and (writes or path.is_file()) else path
        self._environment = environment
        self._writes = writes
        self._use(file or self._open(), force=force)

    def _use(self, file: BinaryIO | None, *, force: bool = False) -> None:
        """Read the bundle in an open file; an empty file was made to be written to."""
        self._old = file
        self._new: zipfile.ZipFile | None = None
        #: The old bundle, and its members that are kept.
        self._zip: Any = None
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._is_cut = False
        try:
            if file is not None and file.seek(0, os.SEEK_END):
                self._zip = _opened(file, self.shown)
                self._members = self._zip.NameToInfo
        except place.BadStore as error:
            if not force:
                advice = "; name another file, or replace it with --force" if self._writes else ""
                raise place.BadStore(f"{error}{advice}") from error

    def _open(self) -> BinaryIO | None:
        if self._path is None:
            if (sys.stdout if self._writes else sys.stdin).isatty():
                raise BadRequest("a bundle is binary, and this is a terminal; name a FILE")
            return None if self._writes else spooled(self._environment, pieces(sys.stdin.buffer), self.shown)
        if self._writes and self._path.exists() and not self._path.is_file():
            raise BadRequest(f"{self.shown} is not a regular file; name another FILE, or - for standard output")
        try:
            # On a network file system, an exclusive lock needs a file that is open for writing.
            file = open(self._path, "r+b" if self._writes and os.access(self._path, os.W_OK) else "rb")  # noqa: SIM115
        except FileNotFoundError:
            return None
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        with file:
            return spooled(self._environment, pieces(file), self.shown)

    def names(self, folder: str) -> Mapping[str, place.Written]:
        """List the names in a folder of the old bundle."""
        return {name: (info.file_size, None) for name, info in self._members.items() if name.startswith(f"{folder}/")}

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name of the old bundle."""
        if name not in self._members:
            raise self.lacks(name)
        self.require_small(name, self._members[name].file_size, most)
        with _reading(self.shown):
            return bytes(self._zip.read(name))

    def digest(self) -> str | None:
        """Return the SHA-256 of the file; ``None`` for no file."""
        return None if self._zip is None else sha256_of(self._zip.fp)

    def write(self, name: str, data: bytes) -> None:
        """Add a member to the new bundle."""
        with self.reached("write"):
            self._new = self._new or self._begin()
            if name not in self._new.NameToInfo:
                self._new.writestr(_info(name, len(data)), data)

    def remove(self, names: Sequence[str]) -> None:
        """Omit names from the new bundle."""
        for name in names:
            self._is_cut |= self._members.pop(name, None) is not None

    def _begin(self) -> zipfile.ZipFile:
        """Open the new bundle in an unnamed file; other pushes to the old one wait until this one has finished."""
        if self._path is None:
            return zipfile.ZipFile(unnamed_file(self._environment.temporary), "w")
        if self._old is not None:
            place.lock(self._path, self._old)
        try:
            # A file that can get a name.
            return zipfile.ZipFile(open(os.open(self._path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b"), "w")
        except (AttributeError, IsADirectoryError):
            return zipfile.ZipFile(unnamed_file(self._path.parent), "w")

    def finish(self) -> None:
        """Complete the new bundle with the kept members of the old one, and replace that."""
        if self._new is None and not self._is_cut:
            return
        with self.reached("write"):
            new = self._new = self._new or self._begin()
            for name, info in self._members.items():
                if name not in new.NameToInfo:
                    copied = _info(name, info.file_size)
                    with _reading(self.shown), self._zip.open(info) as old, new.open(copied, "w") as target:
                        shutil.copyfileobj(old, target, _CHUNK)
            file = cast("BinaryIO", new.fp)
            new.filelist.sort(key=lambda info: info.filename)
            # This does not close the file.
            new.close()
            file.flush()
            self._publish(file)
        self._use(file)

    def failure(self, verb: str, name: str, error: OSError) -> place.TransferFailed:
        """Return the error of writing; the new bundle is abandoned."""
        if self._new is not None:
            # Its finaliser would try to complete it, and print the error.
            self._new.fp = None
        return place.TransferFailed(f"cannot {verb} {name or self.shown}: {error.strerror or error}")

    def _publish(self, file: BinaryIO) -> None:
        if self._path is None:
            atomic.write_all(1, _content(file))
            return
        mode = None
        if self._old is not None:
            place.lock(self._path, self._old)
            mode = stat.S_IMODE(os.fstat(self._old.fileno()).st_mode)
        try:
            try:
                _link(file, self._path, mode)
            except FileExistsError:
                raise
            except OSError:
                # The file system has no unnamed files, or there is no /proc.
                atomic.replace_file(self._path, _content(file), new=self._old is None)
            else:
                with handles.opened(str(self._path.parent)) as folder:
                    os.fsync(folder)
        except FileExistsError as error:
            # Another first push was faster.
            raise place.Changed(self.shown) from error


def _link(file: BinaryIO, path: Path, mode: int | None) -> None:
    """Sync an unnamed file, and give it a name, which must be free unless ``mode`` is that of the file to replace."""
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())
    name = path.name if mode is None else plain.own_name()
    # Python follows the link in /proc only relative to an open folder.
    with handles.opened(str(path.parent)) as folder:
        os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=folder)
        try:
            if mode is not None:
                atomic.move_in(name, folder, path.name, folder)
        except OSError:
            atomic.remove_file(name, folder)
            raise


class RegistryPlace(BundlePlace):
    """The bundle at ``oci://HOST/NAME:TAG``: one blob and the manifest of a tag, transferred with the library ``oras``.

    Plain HTTP is used for this machine, and for ``oci+http://``.
    Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
    """

    explained = Exception

    def __init__(self, url: str, environment: Environment) -> None:
        address = _ADDRESS.fullmatch(url)
        if address is None:
            shown = printable(place.without_secrets(url))[:200]
            raise BadRequest(f"{shown!r} is not of the form oci://HOST/NAME:TAG; for a password, use docker login")
        self.shown = printable(url)
        host, name, tag = address["host"], address["name"], address["tag"] or "latest"
        with self.reached("reach"):
            from oras.container import Container
            from oras.provider import Registry
            from requests.adapters import HTTPAdapter
            from urllib3 import Retry

            # Oras also prints each failure that is raised here.
            logging.getLogger("oras.logger").setLevel(logging.CRITICAL)
            plain = address["plain"] is not None or _LOCAL.fullmatch(host) is not None
            self._registry = Registry(host, insecure=plain)
            self._container = Container(f"{host}/{name}:{tag}", registry=host)
            self._registry.auth.load_configs(self._container)
        session = self._registry.session
        session.request = partial(session.request, timeout=place.SILENCE)
        again = Retry(2, connect=0, read=0, status_forcelist=_PASSING, allowed_methods=None, raise_on_status=False)
        session.mount(f"{self._registry.prefix}://", HTTPAdapter(max_retries=again))
        self._digest = ""
        super().__init__(None, environment, shown=self.shown)

    def _open(self) -> None:
        """Read the blob of the bundle from the manifest of the tag, if the tag exists."""
        self._seen = self._manifest()
        if self._seen is None:
            return
        try:
            (layer,) = parse_json(self._seen)["layers"]
            self._digest, self.expected, is_bundle = str(layer["digest"]), layer["size"], layer["mediaType"] == _BUNDLE
            is_bundle = is_bundle and type(self.expected) is int and 0 < self.expected <= LARGEST_BUNDLE
        except PARSE_ERRORS:
            is_bundle = False
        if not is_bundle or not re.fullmatch("sha256:[0-9a-f]{64}", self._digest):
            raise place.BadStore(f"{self.shown} is not a bundle of cachectl; choose another tag")

    def fetch(self) -> None:
        """Download the bundle of the tag."""
        blob = self._container.get_blob_url(self._digest)
        with self.reached("reach"), self._send(blob, "GET", stream=True) as response:
            # Without decoding: a bundle is not compressed.
            file = spooled(self._environment, pieces(response.raw), self.shown)
        if f"sha256:{sha256_of(file)}" != self._digest:
            raise place.BadStore(f"{self.shown}: the blob {self._digest} was changed")
        self._use(file)

    def _publish(self, file: BinaryIO) -> None:
        if self._manifest() != self._seen:
            raise place.Changed(self.shown)
        digest = f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}"
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest, "size": len(_EMPTY)}
        layer = {"mediaType": _BUNDLE, "digest": f"sha256:{sha256_of(file)}", "size": file.tell()}
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "artifactType": _BUNDLE}
        text = encode_json({**manifest, "config": empty, "layers": [layer]}, sort_keys=True)
        file.seek(0)
        self._upload(layer["digest"], file)
        self._upload(digest, _EMPTY)
        self._send(self._container.manifest_url(), "PUT", data=text, headers={"Content-Type": _MANIFEST})

    def _upload(self, digest: object, data: bytes | BinaryIO) -> None:
        # The first request logs in, so that no body is sent twice.
        started = self._send(self._container.upload_blob_url(), "POST")
        place = urljoin(started.url, started.headers.get("Location", ""))
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": digest})
        self._send(place, "PUT", data=data, headers={"Content-Type": "application/octet-stream"})

    def _manifest(self) -> bytes | None:
        path, headers = self._container.manifest_url(), {"Accept": _MANIFEST}
        response = self._send(path, "GET", HTTPStatus.NOT_FOUND, headers=headers, stream=True)
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None
        with self.reached("reach"):
            return bytes(response.raw.read(_LARGEST_MANIFEST + 1, decode_content=True))

    def _send(self, path: str, method: str, *fine: int, **given: Any) -> Any:  # noqa: ANN401 - an answer of requests
        """Send a request. Raises :class:`TransferFailed` for the status of a failure, unless it is one of ``fine``."""
        with self.reached("reach"):
            url = path if place.is_url(path) else f"{self._registry.prefix}://{path}"
            # Oras itself would retry for two minutes, whatever the reason.
            response = inspect.unwrap(type(self._registry).do_request)(self._registry, url, method, **given)
        if response.status_code >= HTTPStatus.MULTIPLE_CHOICES and response.status_code not in fine:
            verb = "read" if method == "GET" else "write"
            raise place.TransferFailed(f"cannot {verb} {self.shown}: status {response.status_code}; {_LOGIN}")
        return response

    def failure(self, verb: str, name: str, error: Exception) -> place.TransferFailed:
        """Return an error of oras or requests, or of writing a temporary file, in one line."""
        if verb == "write" and isinstance(error, OSError):
            return super().failure(verb, name, error)
        if isinstance(error, ImportError):
            return place.TransferFailed("oci:// needs the package oras: pip install 'opencl-cachectl[oci]'")
        # Requests wraps the reason in a text with the pool and the path.
        cause = getattr(next(iter(error.args), None), "reason", None) or error
        reason = place.one_line(str(cause)) or type(error).__name__
        # Oras raises ValueError if it cannot log in.
        advice = _LOGIN if isinstance(error, ValueError) else place.NETWORK
        return place.TransferFailed(f"cannot reach {self.shown}: {reason}; {advice}")


# ---------------------------------------------------------------------- the zip


def _info(name: str, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr, info.file_size = 3, 0o644 << 16, size
    return info


def _opened(file: BinaryIO, shown: str) -> zipfile.ZipFile:
    with _reading(shown):
        file.seek(0)
        is_bundle = is_begun_by(file.read(_CHUNK))
        stop = file.seek(0, os.SEEK_END) - _END.size
        _require(is_bundle and stop >= 0, f"{shown} is not a bundle of cachectl")
        magic, *_, members, length, start, comment = _unpacked(_END, file, stop)
        _require(magic == b"PK\x05\x06" and not comment, f"{shown} is truncated, or has bytes after its end")
        before = stop - _LOCATOR.size - _LARGE_END.size
        if before >= 0 and _unpacked(_LOCATOR, file, stop - _LOCATOR.size)[0] == b"PK\x06\x07":
            stop = before
            magic, *_, members, length, start = _unpacked(_LARGE_END, file, stop)
            _require(magic == b"PK\x06\x06", f"{shown} is damaged: its end cannot be read")
        # The size of the directory is checked before it is parsed.
        is_small = members <= _MOST_MEMBERS and length <= _LARGEST_DIRECTORY
        _require(is_small, f"{shown} has a directory that is too large: {members:,} members, {length:,} bytes")
        _require(start + length == stop, f"{shown} is damaged: its directory is not where it should be")
        bundle = zipfile.ZipFile(file)
        for name, info in zip(bundle.namelist(), bundle.infolist(), strict=True):
            is_once = wire.is_name(name) and bundle.NameToInfo[name] is info
            is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits
            inside = info.file_size == info.compress_size and 0 <= info.header_offset <= start - info.file_size
            is_member = is_once and is_plain and inside
            _require(is_member, f"{shown}: {printable(name)[:200]} is not a member that a bundle has")
        _require(sum(info.file_size for info in bundle.infolist()) <= start, f"{shown} is damaged: its members overlap")
        return bundle


def _unpacked(form: struct.Struct, file: BinaryIO, at: int) -> tuple[Any, ...]:
    file.seek(at)
    return form.unpack(file.read(form.size))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise place.BadStore(message)


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    """Turn any error of a damaged zip into one line."""
    try:
        yield
    except (CachectlError, OSError, MemoryError):
        raise
    except Exception as error:
        raise place.BadStore(f"{shown} is damaged: {printable(str(error)) or type(error).__name__}") from error
