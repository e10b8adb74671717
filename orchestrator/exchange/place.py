"""The places of stores: named bytes in a folder, at a URL, or in the file of a bundle.

A name is ``index/NAME`` or ``packs/SHA256``. The names under ``index/`` are the index: a writer adds its index part
last, so that everything a reader finds there is complete.
"""

from __future__ import annotations

import datetime as dt
import errno
import io
import logging
import os
import posixpath
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from cachectl.layers.base.errors import BadRequest, CachectlError, reason_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import printable
from cachectl.layers.disk import atomic, handles, plain

#: The name of standard output for writing, and of standard input for reading.
STREAM = "-"
#: The most names in a folder of a store, and the most answers to a listing by S3: 1,000 names each, or maliciously
#: none.
MOST_NAMES = 250_000
_MOST_ANSWERS = 1000
#: The folders of a store.
FOLDERS = ("index", "packs")
#: Seconds that a store may delay a command, and that the push after it may take, by default.
PATIENCE = 30.0
#: A scheme and its slashes, or several schemes chained by fsspec.
_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_REASON = 300
#: What to do if a server does not answer as expected.
NETWORK = "check the address and the network, and try again"
#: Object stores, in which uploads are atomic. Elsewhere a temporary file is renamed.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})
_S3 = ("s3", "s3a")
_SFTP = ("ssh", "sftp")
#: How often making a folder is tried again.
_AGAIN = 3
_MODIFIED = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
#: How many seconds a server may be silent. The whole transfer has no limit.
SILENCE = 60
#: Seconds for a connection, and how often a request is tried: s3fs and botocore would retry for half an hour.
_CONNECTING = 10
_ATTEMPTS = 2
#: Permissions to read a file.
_READABLE = 0o444
#: Names of files of a store, and of their temporary files.
_WRITTEN = regex(r"[a-z0-9.-]*[0-9a-f]{16}")
_SECRETS = (re.compile(r"(?<=//)[^/@\s]+(?=@)"), re.compile(r"(?<=\?)[^\s'\"]+"))

#: The bytes of a file, and when it was written, in epoch seconds; ``None`` if unknown.
Written = tuple[int | None, float | None]


class TransferFailed(CachectlError):
    """A place could not be read or written."""


class Changed(TransferFailed):
    """Another command wrote the bundle meanwhile: what it lacks must be determined again."""

    def __init__(self, shown: str) -> None:
        super().__init__(f"another command wrote {shown} meanwhile; push again")


class Missing(CachectlError, FileNotFoundError):
    """There is no store."""


class BadStore(CachectlError, ValueError):
    """A store in which something is missing, truncated or changed. Nothing in it may be used."""


class Gone(BadStore):
    """A name that a store does not have, or no longer has."""


class StorePlace(ABC):
    """A folder, a bucket or a bundle that holds a store.

    Every method raises :class:`TransferFailed` or :class:`OSError` if the place cannot be reached. :meth:`read` raises
    :class:`Gone`, and :class:`BadStore` for more than ``most`` bytes. Writing is atomic; a missing name is removed
    without an error.
    """

    #: The address, without a password.
    shown: str
    #: Whether it is one file, which a push rewrites: no name in it may depend on the clock.
    is_bundle: bool = False
    #: The class of the errors that :meth:`failure` explains.
    explained: type[Exception] = OSError
    #: Bytes that ``fetch`` must download before anything else is requested.
    expected: int = 0

    @abstractmethod
    def names(self, folder: str) -> Mapping[str, Written]:
        """List the names in a folder, with one request per 1,000 names; empty if there is no store.

        The list includes temporary files of killed writers.
        """

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a name."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove names."""

    @contextmanager
    def reached(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn the errors of a disk, a server or a library into one line."""
        try:
            yield
        except (CachectlError, MemoryError):
            raise
        except self.explained as error:
            raise self.failure(verb, name, error) from error

    @abstractmethod
    def failure(self, verb: str, name: str, error: Any) -> Exception:  # noqa: ANN401 - of the explained class
        """Return an error that says what failed and what to do."""

    def finish(self) -> None:  # noqa: B027 - a hook of bundles
        """Complete the store after all writing."""

    def close(self) -> None:  # noqa: B027 - a hook of places that a child process reaches
        """Release what accesses the place."""

    def digest(self) -> str | None:
        """Return the SHA-256 of a bundle; ``None`` for other places, which are pinned by the names of their index."""
        return None

    def lacks(self, name: str) -> Gone:
        """Return the error for a name that the store does not have."""
        return Gone(f"{self.shown}: {printable(name)} is missing")

    def require_small(self, name: str, size: int, most: int) -> None:
        """Raise :class:`BadStore` if a name has more than ``most`` bytes."""
        if size > most:
            raise BadStore(f"{self.shown}: {printable(name)} has more than {most:,} bytes")


class FolderPlace(StorePlace):
    """A folder with two subfolders, which the first write makes.

    All access is relative to open folders, and no link is followed below the folder itself. Anyone with access to the
    folder has the same access to its subfolders, and can read every file, whatever the umask of the writer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown = printable(folder)

    def names(self, folder: str) -> Mapping[str, Written]:
        """List the regular files in a folder, up to more than a store can have."""
        files: dict[str, Written] = {}
        with suppress(Gone), self._opened("list", folder) as handle, os.scandir(handle) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        files[f"{folder}/{entry.name}"] = status.st_size, status.st_mtime
                if len(files) > MOST_NAMES:
                    break
        return files

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        with self._opened("read", name) as folder:
            data = plain.read_plain(_file_name(name), dir_fd=folder, limit=most + 1)
            self.require_small(name, len(data), most)
            return data

    def write(self, name: str, data: bytes) -> None:
        """Write a temporary file, sync it and rename it."""
        part, _, last = name.partition("/")
        made = False
        with self.reached("write", name):
            os.makedirs(self._folder, exist_ok=True)
            mode = stat.S_IMODE(os.stat(self._folder).st_mode)
            with suppress(FileExistsError):
                os.mkdir(self._folder / part)
                made = True
        with self._opened("write", name) as folder:
            # Another user may have replaced the folder: a new one has at most what other writers have added.
            is_own = made and os.fstat(folder).st_uid == os.geteuid()
            if is_own and all(_WRITTEN.fullmatch(file) for file in os.listdir(folder)):
                os.fchmod(folder, mode)
            try:
                atomic.replace_file(last, [data], folder=folder, mode=mode & _READABLE)
            except PermissionError:
                # In a sticky folder, another user's file cannot be replaced: it may have the same content.
                with suppress(CachectlError):
                    if self.read(name, len(data)) == data:
                        return
                raise

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            with suppress(Gone), self._opened("remove", name) as folder:
                atomic.remove_file(_file_name(name), folder)

    @contextmanager
    def _opened(self, verb: str, name: str) -> Iterator[int]:
        """Open the folder of a name, which must not be a link, for a block."""
        with self.reached(verb, name):
            path = self._folder / name.partition("/")[0]
            try:
                folder = handles.open_folder(str(path))
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.lexists(path):
                    raise BadStore(f"{self.shown}: {path.name} is a link, or not a folder") from error
                raise
            try:
                yield folder
            finally:
                os.close(folder)

    def failure(self, verb: str, name: str, error: OSError) -> CachectlError:
        """Return an error that says what failed and what to do."""
        advice = ""
        if isinstance(error, NotADirectoryError):
            advice = "; name a folder or a URL"
        elif (verb == "read" and plain.means_no_file(error)) or (verb != "write" and plain.means_absent(error)):
            return self.lacks(name)
        elif isinstance(error, PermissionError):
            access = "g+rX" if verb in ("list", "read") else "g+rwX"
            advice = f"; to let the folder's group do it: chmod -R {access} {self.shown}"
        return TransferFailed(f"cannot {verb} {self.shown}/{printable(name)}: {reason_of(error)}{advice}")


def _file_name(name: str) -> str:
    return name.partition("/")[2]


class RemotePlace(StorePlace):
    """A folder or a bucket at a URL that fsspec knows: S3, SFTP and others. fsspec is imported only here."""

    explained = Exception

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.partition(":")[0].lower()
        self.shown = printable(without_secrets(self._url))
        if self._scheme in ("http", "https"):
            raise BadRequest(f"{self.shown}: web servers do not list files; for a bundle: curl -f … | cachectl pull -")
        if url.endswith("://"):
            raise BadRequest(f"{printable(url)} names no store; add a bucket, or a server and a folder")
        with self.reached("reach"):
            from fsspec.core import url_to_fs

            options: dict[str, object] = {}
            if self._scheme in _S3:
                options = {"config_kwargs": {"retries": {"total_max_attempts": _ATTEMPTS}}}
            elif self._scheme in _SFTP:
                # It logs every error that it raises, with a traceback.
                logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
                # fsspec would use the server's /tmp for temporary files, which may be another file system.
                # Without a timeout, paramiko reads an endless greeting forever.
                options = {"temppath": posixpath.dirname(urlsplit(self._url).path), "timeout": _CONNECTING}
            self._system, root = url_to_fs(self._url, skip_instance_cache=True, **options)
            if self._scheme in _S3:
                # Botocore already retries.
                self._system.retries = 1
            elif self._scheme in _SFTP:
                self._system.ftp.get_channel().settimeout(SILENCE)
        self._root = str(root).rstrip("/")
        protocols = self._system.protocol
        self._is_atomic = not _OBJECT_STORES.isdisjoint({protocols} if isinstance(protocols, str) else protocols)
        if self._is_atomic and any(sign in self._root for sign in "*?["):
            # fsspec interprets them as patterns when it removes several files with one request.
            raise BadRequest(f"{self.shown}: the URL of a store must not contain *, ? or [")
        self._made: set[str] = set()

    def names(self, folder: str) -> Mapping[str, Written]:
        """List the regular files in a folder."""
        listed: list[dict[str, Any]] = []
        with suppress(Gone), self.reached("list", folder):
            # Another writer may have added files.
            self._system.invalidate_cache()
            path = f"{self._root}/{folder}"
            listed = self._s3_files(path) if self._scheme in _S3 else self._system.ls(path, detail=True)
        files = ((posixpath.basename(file["name"]), file) for file in listed if file.get("type") == "file")
        return {f"{folder}/{name}": (file.get("size", file.get("Size")), _moment(file)) for name, file in files if name}

    def _s3_files(self, path: str) -> list[dict[str, Any]]:
        """List a folder, with a limit that s3fs does not have."""
        bucket, key, _ = self._system.split_path(path)
        request = {"Bucket": bucket, "Prefix": f"{key}/", "Delimiter": "/", **self._system.req_kw}
        files: list[dict[str, Any]] = []
        for _ in range(_MOST_ANSWERS):
            answer = self._system.call_s3("list_objects_v2", **request)
            files += [{**file, "name": file["Key"], "type": "file"} for file in answer.get("Contents", ())]
            if not answer.get("IsTruncated"):
                return files
            if len(files) > MOST_NAMES:
                break
            request["ContinuationToken"] = answer["NextContinuationToken"]
        raise BadStore(f"{self.shown}: lists more names than a store can have")

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        path = f"{self._root}/{name}"
        with self.reached("read", name):
            if self._is_atomic:
                # With a range, there is no second request for the size.
                data = bytes(self._system.cat_file(path, start=0, end=most + 1))
            else:
                with self._system.open(path, "rb") as file, io.BytesIO() as content:
                    # Without prefetch, paramiko waits for every 32 KiB. Not every server reports the size.
                    with suppress(AttributeError, OSError):
                        size = file.stat().st_size or 0
                        # Prefetch requests all of the size that the server claims.
                        self.require_small(name, size, most)
                        file.prefetch(size)
                    while content.tell() <= most and (piece := file.read(most + 1 - content.tell())):
                        content.write(piece)
                    data = content.getvalue()
            self.require_small(name, len(data), most)
            return data

    def write(self, name: str, data: bytes) -> None:
        """Upload a file."""
        path = f"{self._root}/{name}"
        with self.reached("write", name):
            if self._is_atomic:
                self._system.pipe_file(path, data)
                return
            folder = posixpath.dirname(path)
            if folder not in self._made:
                self._make(folder)
                self._made.add(folder)
            stage = f"{folder}/{plain.own_name()}"
            try:
                with self._system.open(stage, "wb") as file:
                    if hasattr(file, "set_pipelined"):
                        file.set_pipelined(True)
                    file.write(data)
                self._system.mv(stage, path)
            except BaseException:
                with suppress(Exception):
                    atomic.remove_remote(self._system, [stage], together=False)
                raise

    def _make(self, folder: str) -> None:
        # fsspec fails if another writer makes the same folder at the same time.
        for _ in range(_AGAIN):
            with suppress(Exception):
                self._system.makedirs(folder, exist_ok=True)
                return
        self._system.makedirs(folder, exist_ok=True)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, up to 1,000 with one request if the service has such a request."""
        with self.reached("remove from"):
            paths = [f"{self._root}/{name}" for name in names]
            for at in range(0, len(paths), 1000):
                atomic.remove_remote(self._system, paths[at : at + 1000], together=self._is_atomic)

    def failure(self, verb: str, name: str, error: Exception) -> Exception:
        """Return an error that says what failed and what to do, in one line; each file system has its own errors."""
        if verb in ("list", "read") and isinstance(error, FileNotFoundError):
            return self.lacks(name)
        url = f"{self._url}/{name}" if name else self._url
        reason = one_line(redacted(str(error), url)) or type(error).__name__
        advice = NETWORK
        if isinstance(error, ImportError):
            advice = "pip install 'opencl-cachectl[remote]', or the package that fsspec names"
        elif isinstance(error, FileNotFoundError):
            reason, advice = "it does not exist", "check the address, or make the bucket or folder first"
        elif isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            advice = "set up credentials as for the service's own tools"
        elif isinstance(error, ValueError):
            advice = "supported are s3://, gs://, ssh:// and other schemes of fsspec"
        return TransferFailed(f"cannot {verb} {printable(without_secrets(url))}: {reason}; {advice}")


def _moment(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, in epoch seconds; each file system has its own name for this."""
    for value in map(info.get, _MODIFIED):
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def lock(path: Path, file: BinaryIO) -> None:
    """Wait until no other push replaces an open file. Raises :class:`Changed` if one has."""
    handles.take_flock(file.fileno(), wait=True)
    if not handles.is_same_file(path, file.fileno()):
        raise Changed(printable(path))


def is_url(name: str) -> bool:
    """Return whether a name is a URL."""
    return _URL.match(name) is not None


def without_secrets(name: str) -> str:
    """Return a URL without its password and its query, both of which may grant access."""
    for secret in _SECRETS if is_url(name) else ():
        name = secret.sub("…", name)
    return name


def redacted(text: str, url: str) -> str:
    """Remove the secrets of a URL from a text, even if they appear there out of their context."""
    for secret in _SECRETS:
        for found_secret in secret.findall(url):
            password = found_secret.partition(":")[2]
            parts = (found_secret, password, unquote(password), *(value for _, value in parse_qsl(found_secret)))
            for part in filter(None, parts):
                text = text.replace(part, "…")
        text = secret.sub("…", text)
    return text


def one_line(text: str) -> str:
    """Return the text of a server or a library as part of a line."""
    return printable(" ".join(text.split()))[:_LONGEST_REASON].rstrip(".")


def require_time(deadline: float | None) -> None:
    """Raise :class:`TransferFailed` if a deadline (of :func:`time.monotonic`) has passed."""
    if deadline is not None and deadline <= time.monotonic():
        raise TransferFailed("not done in time; raise --store-wait, or use cachectl push and pull, which have no limit")
