"""A shared store on a server that fsspec knows: S3, SFTP and others."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.texts import printable
from cachectl.moving.transfer import TransferFailed, located, translated, without_secrets
from cachectl.sharing.place import BadStore, Missing, Stored

#: Stores of objects, in which an upload appears whole or not at all. Elsewhere a file is renamed into its place.
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})
_WEB: Final = ("http://", "https://")
_PARTS: Final = ("index", "packs", "objects")
#: How often folders are made before that is an error.
_AGAIN: Final = 4
_MODIFIED: Final = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")


class RemotePlace:
    """The folders ``index``, ``packs`` and ``objects`` below a URL."""

    def __init__(self, url: str) -> None:
        if url.lower().startswith(_WEB):
            message = (
                f"{printable(without_secrets(url))}: a web server has no list of names; name a folder, s3://, ssh://"
            )
            raise BadRequest(message)
        if url.endswith("://"):
            raise BadRequest(f"{printable(url)} names no store; write a bucket or a server, and a folder, after it")
        self._url = url.rstrip("/")
        self.shown = printable(without_secrets(self._url))
        self._system, root = located(self._url)
        self._root = root.rstrip("/")
        protocols = self._system.protocol
        self._is_atomic = not _OBJECT_STORES.isdisjoint({protocols} if isinstance(protocols, str) else protocols)
        self._made: set[str] = set()

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``."""
        return self._listed("index")

    def contents(self) -> Sequence[Stored]:
        """List all names."""
        return [one for part in _PARTS for one in self._listed(part)]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        path = f"{self._root}/{name}"
        try:
            with self._reached("read", name):
                data = self._read(path, most + 1)
        except TransferFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                message = f"{self.shown}: {printable(name)} is missing"
                raise Missing(message) from error
            raise
        if len(data) > most:
            raise BadStore(f"{self.shown}: {printable(name)} has more than the {most:,} bytes that it may have")
        return data

    def write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        """Upload a file."""
        del holds
        path = f"{self._root}/{name}"
        with self._reached("write", name):
            if self._is_atomic:
                self._system.pipe_file(path, data)
                return
            folder = path.rpartition("/")[0]
            if folder not in self._made:
                self._make(folder)
            stage = f"{folder}/.cachectl-stage-{os.urandom(16).hex()}"
            try:
                self._write(stage, data)
                self._system.mv(stage, path)
            except BaseException:
                with suppress(Exception):
                    self._system.rm_file(stage)
                raise

    def _make(self, folder: str) -> None:
        for rest in reversed(range(_AGAIN)):
            try:
                self._system.makedirs(folder, exist_ok=True)
            except Exception:  # noqa: PERF203
                # Another writer makes the same folders at the same time, which fsspec does not expect.
                if not rest:
                    raise
            else:
                break
        self._made.add(folder)

    def finish(self) -> None:
        """Do nothing: every file is complete."""

    def pin(self) -> None:
        """Return ``None``: a place has one address."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, up to 1,000 with one request where the service has such a request."""
        with self._reached("remove from", ""):
            if self._is_atomic:
                for at in range(0, len(names), 1000):
                    with suppress(FileNotFoundError):
                        self._system.rm([f"{self._root}/{name}" for name in names[at : at + 1000]])
                return
            for name in names:
                with suppress(FileNotFoundError):
                    self._system.rm_file(f"{self._root}/{name}")

    def _listed(self, part: str) -> list[Stored]:
        folder = f"{self._root}/{part}"
        try:
            with self._reached("list", part):
                # Another writer may have added to what is known.
                self._system.invalidate_cache()
                found = self._system.ls(folder, detail=True)
        except TransferFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return []
            raise
        return [Stored(f"{part}/{name}", one.get("size"), _moment(one)) for name, one in _files(found)]

    def _read(self, path: str, most: int) -> bytes:
        if self._is_atomic:
            # With a range it is one request, without one that asks for the size.
            data: bytes = self._system.cat_file(path, start=0, end=most)
            return data
        with self._system.open(path, "rb") as file:
            if hasattr(file, "prefetch"):
                # Otherwise paramiko waits for every 32 KiB. It asks for the size, which not every server says.
                with suppress(OSError):
                    file.prefetch()
            return _read_up_to(file, most)

    def _write(self, path: str, data: bytes) -> None:
        with self._system.open(path, "wb") as file:
            if hasattr(file, "set_pipelined"):
                file.set_pipelined(True)
            file.write(data)

    @contextmanager
    def _reached(self, verb: str, name: str) -> Iterator[None]:
        with translated(verb, f"{self._url}/{name}" if name else self._url):
            yield


def _read_up_to(file: BinaryIO, most: int) -> bytes:
    held = bytearray()
    while len(held) < most and (piece := file.read(most - len(held))):
        held += piece
    return bytes(held)


def _files(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the plain files of a listing by their last names."""
    for one in found:
        name = str(one["name"]).rpartition("/")[2]
        if one.get("type") == "file" and name and not name.startswith("."):
            yield name, one


def _moment(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, in epoch seconds; each file system has a name of its own for it."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
