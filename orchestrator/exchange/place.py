"""Where a store lies: named bytes, in a folder, at a URL, or in the one file of a bundle.

A name is ``index/NAME`` or ``packs/SHA256``. The names under ``index/`` are the index: a writer adds its part last, so
that whatever a reader finds there is complete.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, unquote

from cachectl.layers.base import errors

_T = TypeVar("_T")

#: Means standard output for a file to write, standard input for a file to read.
STREAM: Final = "-"
#: The folders of a store.
FOLDERS: Final = ("index", "packs")
#: A scheme and its slashes, or several schemes chained by fsspec.
_URL: Final = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SECRETS: Final = (re.compile(r"(?<=//)[^/@\s]+(?=@)"), re.compile(r"(?<=\?)[^\s'\"]+"))


class TransferFailed(errors.CachectlError):
    """A place could not be read or written."""


class Changed(TransferFailed):
    """A bundle was written by another command meanwhile: what is missing in it has to be found again."""

    def __init__(self, shown: str) -> None:
        super().__init__(f"{shown} was written by another command meanwhile; push again")


class Missing(errors.CachectlError, FileNotFoundError):
    """There is no store."""


class BadStore(errors.CachectlError, ValueError):
    """A store in which something is missing, cut or changed. Nothing in it may be used."""


class Gone(BadStore):
    """A name that a store does not have, or not any more."""


class Stored(NamedTuple):
    """A name in a store, with its size in bytes and when it was written, in epoch seconds; ``None`` if unknown."""

    name: str
    bytes: int | None
    modified: float | None


class StorePlace(ABC):
    """A folder, a bucket or a bundle that holds a store.

    Every method raises :class:`TransferFailed` or :class:`OSError` if the place cannot be reached. :meth:`read` raises
    :class:`Gone`, and :class:`BadStore` for more than ``most`` bytes. A name is written whole or not at all, also over
    the same name; removing a missing one is no error.
    """

    #: The address, without a password.
    shown: str
    #: Whether it is one file, which one push rewrites: no name in it may depend on the clock.
    is_bundle: bool = False

    @abstractmethod
    def names(self, folder: str) -> Sequence[Stored]:
        """List the names in a folder, with one request for each 1,000 names; empty if there is no store.

        Stages that killed writers left are among them.
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

    def finish(self) -> None:  # noqa: B027 - a hook of bundles
        """Do what is done once after all writing: nothing, where every file is complete."""

    def digest(self) -> str | None:
        """Return the SHA-256 of a bundle; ``None`` for other places, which the names of their index pin."""
        return None

    def lacks(self, name: str) -> Gone:
        """Return the error for a name that the store does not have."""
        return Gone(f"{self.shown}: {errors.printable(name)} is missing")

    def require_small(self, name: str, size: int, most: int) -> None:
        """Raise :class:`BadStore` if a name has more than ``most`` bytes."""
        if size > most:
            raise BadStore(f"{self.shown}: {errors.printable(name)} has more than the {most:,} bytes that it may have")


def is_url(name: str) -> bool:
    """Return whether a name is a URL."""
    return _URL.match(name) is not None


def without_secrets(name: str) -> str:
    """Return a URL without its password and its query, which may grant access."""
    if not is_url(name):
        return name
    for secret in _SECRETS:
        name = secret.sub("…", name)
    return name


def redacted(text: str, url: str) -> str:
    """Remove from a text the secrets of a URL, which may lack there what stands around them in the URL."""
    for secret in _SECRETS:
        for found in secret.findall(url):
            password = found.partition(":")[2]
            parts = (found, password, unquote(password), *(value for _, value in parse_qsl(found)))
            for part in filter(None, parts):
                text = text.replace(part, "…")
        text = secret.sub("…", text)
    return text


@contextmanager
def translated(explain: Callable[[Any], Exception], kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn the errors of a disk, a server or a library into what a function makes of them, which has one line."""
    try:
        yield
    except errors.CachectlError:
        raise
    except kind as error:
        raise explain(error) from error


class Deadline:
    """A moment, some seconds after this object was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left; 0 if it has passed."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> TransferFailed:
        """Return the error for what takes longer."""
        return TransferFailed(f"not done within {self.seconds:g} s; --store-wait gives it more")


def in_time(deadline: Deadline | None, work: Callable[[], _T]) -> _T:
    """Return what some work returns, or raise what it raises; :class:`TransferFailed` after a deadline.

    Timeouts of sockets limit each silence of a server, not a whole transfer. So what depends on a server runs in a
    thread of its own, which is given up at the deadline: its result, if one comes later, is read by nobody. Everything
    that writes into caches of this machine runs in the calling thread.
    """
    if deadline is None:
        return work()
    done: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the calling thread
            done.put((None, error))

    try:
        if not deadline.left:
            raise Empty
        Thread(target=run, daemon=True).start()
        result, error = done.get(timeout=deadline.left)
    except Empty:
        raise deadline.passed() from None
    if error is not None:
        raise error
    return cast("_T", result)
