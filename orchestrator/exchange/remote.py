"""A store at a URL that fsspec knows: S3, SFTP and others. fsspec is imported only here."""

from __future__ import annotations

import datetime as dt
import io
import logging
import posixpath
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from cachectl.exchange import place
from cachectl.layers.base import errors
from cachectl.layers.disk import plain
from cachectl.layers.disk.atomic import remove_remote

#: Stores of objects, in which an upload appears whole or not at all. Elsewhere a file is renamed into its place.
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})
_WEB: Final = ("http://", "https://")
_SFTP: Final = re.compile("(?:ssh|sftp)://", re.IGNORECASE)
_S3: Final = re.compile("s3a?://", re.IGNORECASE)
#: How often folders are made again before that is an error.
_AGAIN: Final = 3
_MODIFIED: Final = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
#: Limit on the silence of a server, in seconds. The whole transfer has no limit.
_SILENCE: Final = 60
#: Limit on a connection, in seconds, and how often a request is tried: s3fs and botocore together would try for half an
#: hour.
_CONNECTING: Final = 15
_ATTEMPTS: Final = 3
_LONGEST_REASON: Final = 300


class RemotePlace(place.StorePlace):
    """The folders ``index`` and ``packs`` below a URL."""

    def __init__(self, url: str) -> None:
        if url.lower().startswith(_WEB):
            shown = errors.printable(place.without_secrets(url))
            raise errors.BadRequest(
                f"{shown}: a web server has no list of names; for a bundle, curl -f … | cachectl pull -"
            )
        if url.endswith("://"):
            raise errors.BadRequest(
                f"{errors.printable(url)} names no store; write a bucket or a server, and a folder, after it"
            )
        self._url = url.rstrip("/")
        self.shown = errors.printable(place.without_secrets(self._url))
        with self._reached("reach"):
            self._system, root = self._connected()
        self._root = root.rstrip("/")
        protocols = self._system.protocol
        self._is_atomic = not _OBJECT_STORES.isdisjoint({protocols} if isinstance(protocols, str) else protocols)
        self._made: set[str] = set()

    def _connected(self) -> tuple[Any, str]:
        """Return the file system of the URL, and the path in it."""
        from fsspec.core import url_to_fs

        options: dict[str, object] = {}
        is_s3, is_sftp = _S3.match(self._url), _SFTP.match(self._url)
        if is_s3:
            times = {"connect_timeout": _CONNECTING, "read_timeout": _SILENCE}
            options = {"config_kwargs": {**times, "retries": {"total_max_attempts": _ATTEMPTS}}}
        elif is_sftp:
            # It logs every error with a traceback, and raises it too.
            logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
            # A rename works only within one file system, and fsspec would stage in the server's /tmp.
            options = {"temppath": posixpath.dirname(urlsplit(self._url).path), "timeout": _CONNECTING}
        system, path = url_to_fs(self._url, skip_instance_cache=True, **options)
        if is_s3:
            # Botocore has tried several times already.
            system.retries = 1
        elif is_sftp:
            system.ftp.get_channel().settimeout(_SILENCE)
        return system, str(path)

    def names(self, folder: str) -> Sequence[place.Stored]:
        """List the plain files in a folder."""
        try:
            with self._reached("list", folder):
                # Another writer may have added to what is known.
                self._system.invalidate_cache()
                found = self._system.ls(f"{self._root}/{folder}", detail=True)
        except place.Gone:
            return []
        files = [(str(file["name"]).rpartition("/")[2], file) for file in found if file.get("type") == "file"]
        return [place.Stored(f"{folder}/{name}", file.get("size"), _moment(file)) for name, file in files if name]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        with self._reached("read", name):
            data = self._read(f"{self._root}/{name}", most + 1)
            self.require_small(name, len(data), most)
            return data

    def write(self, name: str, data: bytes) -> None:
        """Upload a file."""
        path = f"{self._root}/{name}"
        with self._reached("write", name):
            if self._is_atomic:
                self._system.pipe_file(path, data)
                return
            folder = path.rpartition("/")[0]
            if folder not in self._made:
                self._make(folder)
            stage = f"{folder}/{plain.own_name()}"
            try:
                with self._system.open(stage, "wb") as file:
                    if hasattr(file, "set_pipelined"):
                        file.set_pipelined(True)
                    file.write(data)
                self._system.mv(stage, path)
            except BaseException:
                with suppress(Exception):
                    remove_remote(self._system, [stage], together=False)
                raise

    def _make(self, folder: str) -> None:
        # Another writer makes the same folders at the same time, which fsspec does not expect.
        for _ in range(_AGAIN):
            with suppress(Exception):
                self._system.makedirs(folder, exist_ok=True)
                break
        else:
            self._system.makedirs(folder, exist_ok=True)
        self._made.add(folder)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, up to 1,000 with one request where the service has such a request."""
        with self._reached("remove from"):
            paths = [f"{self._root}/{name}" for name in names]
            for at in range(0, len(paths), 1000):
                remove_remote(self._system, paths[at : at + 1000], together=self._is_atomic)

    def _read(self, path: str, most: int) -> bytes:
        if self._is_atomic:
            # With a range it is one request, without one that asks for the size.
            data: bytes = self._system.cat_file(path, start=0, end=most)
            return data
        with self._system.open(path, "rb") as file, io.BytesIO() as held:
            if hasattr(file, "prefetch"):
                # Otherwise paramiko waits for every 32 KiB. It asks for the size, which not every server says.
                with suppress(OSError):
                    file.prefetch()
            while held.tell() < most and (piece := file.read(most - held.tell())):
                held.write(piece)
            return held.getvalue()

    def _reached(self, verb: str, name: str = "") -> AbstractContextManager[None]:
        return place.translated(partial(self._failure, verb, name))

    def _failure(self, verb: str, name: str, error: Exception) -> Exception:
        """Return what went wrong, and what to do, in one line: each file system has errors of its own."""
        if verb in ("list", "read") and isinstance(error, FileNotFoundError):
            return self.lacks(name)
        url = f"{self._url}/{name}" if name else self._url
        text = errors.printable(" ".join(place.redacted(str(error), url).split()))[:_LONGEST_REASON].rstrip(".")
        reason = text or type(error).__name__
        advice = "check the address and the network, and try again"
        if isinstance(error, ImportError):
            reason = f"it needs {error.name or reason}"
            advice = "pip install 'opencl-cachectl[remote]', or the package that fsspec names"
        elif isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            advice = "set up credentials as for the service's own tools"
        return place.TransferFailed(f"cannot {verb} {errors.printable(place.without_secrets(url))}: {reason}; {advice}")


def _moment(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, in epoch seconds; each file system has a name of its own for it."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
