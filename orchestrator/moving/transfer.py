"""Bundles in files and at URLs that fsspec knows.

fsspec is imported only for URLs. A bundle is finished on this machine before its first byte is sent, and appears at its
address only when all of it has arrived (``autocommit=False`` in ``fsspec/spec.py``: an upload to S3 is completed or
aborted, a file of SFTP is renamed). So nobody reads half a bundle.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.limits import LARGEST_SIGNATURE
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.temporaries import temporary_folder
from cachectl.moving.whole_files import STREAM, write_chunks

#: A scheme and its slashes, or several schemes chained by fsspec.
_URL: Final = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_HTTP: Final = re.compile("https?://", re.IGNORECASE)
_SFTP: Final = re.compile("(?:ssh|sftp)://", re.IGNORECASE)
_S3: Final = re.compile("s3a?://", re.IGNORECASE)
_FILE: Final = re.compile("(?:file|local)://", re.IGNORECASE)
#: The libraries that schemes need beside fsspec. For other schemes fsspec's own error names the library.
_LIBRARIES: Final = (
    (_HTTP, "aiohttp"),
    (_S3, "s3fs"),
    (_SFTP, "paramiko"),
    (re.compile("(?:gs|gcs)://", re.IGNORECASE), "gcsfs"),
    (re.compile("(?:abfss?|az)://", re.IGNORECASE), "adlfs"),
)
_SECRETS: Final = (re.compile(r"(?<=//)[^/@\s]+(?=@)"), re.compile(r"(?<=\?)[^\s'\"]+"))
#: Limit on the silence of a server, in seconds. The whole transfer has no limit.
_SILENCE: Final = 60
#: Limit on a connection, in seconds, and how often a request is tried: s3fs and botocore together would try for half an
#: hour.
_CONNECTING: Final = 15
_ATTEMPTS: Final = 3
_LONGEST_REASON: Final = 300


class TransferFailed(CachectlError):
    """A URL could not be read or written."""


class Source(Protocol):
    """A source that is read piece by piece."""

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, fewer only at the end."""
        ...


def is_url(name: str) -> bool:
    """Return whether a name is for fsspec; ``file://`` names a local file."""
    return _URL.match(name) is not None and _FILE.match(name) is None


def without_secrets(name: str) -> str:
    """Return a URL without its password and its query, which may grant access."""
    if not is_url(name):
        return name
    for secret in _SECRETS:
        name = secret.sub("…", name)
    return name


def signature_name(name: str) -> str:
    """Return the name of a bundle's signature: the name with ``.sig``, placed before the query of a web address."""
    if _HTTP.match(name):
        path, mark, query = name.partition("?")
        return f"{path}.sig{mark}{query}"
    return f"{name}.sig"


def beginning(name: str, length: int) -> bytes:
    """Return the first bytes at a URL; empty if nothing is there.

    Raises :class:`TransferFailed` if that cannot be determined.
    """
    try:
        with opened(name) as source:
            return source.read(length)
    except TransferFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return b""
        message = f"{error}; --force writes without this check"
        raise TransferFailed(message) from error


def demand_writable(name: str) -> None:
    """Raise :class:`CachectlError` for a name that cannot be written to, before anything is gathered."""
    if not is_url(name):
        return
    if _HTTP.match(name):
        message = f"{_shown(name)}: cannot write to a web server; export to a file and upload that"
        raise TransferFailed(message)
    located(name)


@contextmanager
def opened(name: str) -> Iterator[Source]:
    """Open a bundle to be read once, from its beginning to its end.

    Raises :class:`OSError` for a file, :class:`TransferFailed` for a URL, also while it is read.
    """
    if not is_url(name):
        if name == STREAM:
            yield _standard_input()
            return
        with open(local_path(name), "rb") as file:
            yield file
        return
    system, path = located(name)
    with translated("read", name):
        # Without blocks the web is read as a stream: not every server gives parts. A size spares the question for it,
        # whose every failure fsspec takes for a file that is missing.
        options = {"block_size": 0, "size": 1} if _HTTP.match(name) else {}
        remote = system.open(path, "rb", **options)
    try:
        yield _Remote(remote, name)
    finally:
        with suppress(Exception):
            remote.close()


@contextmanager
def signature_of(name: str) -> Iterator[str]:
    """Yield the name of a local file with the signature beside a bundle; the expected name if there is none."""
    if name == STREAM:
        raise BadRequest("a bundle on standard input has no FILE.sig; give --sha256 or --trust")
    beside = signature_name(name)
    if not is_url(name):
        yield local_path(beside)
        return
    with temporary_folder() as folder:
        try:
            with opened(beside) as source:
                data = source.read(LARGEST_SIGNATURE)
        except TransferFailed as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            yield without_secrets(beside)
            return
        place = folder / "signature"
        place.write_bytes(data)
        yield str(place)


def place(name: str, chunks: Iterable[bytes]) -> None:
    """Write bytes whole or not at all: a file by a rename, a URL by an upload that ends with the last byte.

    Raises :class:`OSError` for a file, :class:`TransferFailed` for a URL.
    """
    if not is_url(name):
        write_chunks(local_path(name), chunks)
        return
    system, path = located(name)
    with translated("write", name):
        remote = system.open(path, "wb", autocommit=False)
        try:
            for chunk in chunks:
                remote.write(chunk)
            remote.close()
            remote.commit()
        except BaseException:
            with suppress(Exception):
                remote.discard()
            with suppress(Exception):
                # Otherwise the garbage collector closes it, which uploads the incomplete content.
                remote.closed = True
            raise


class _Remote:
    """A file of fsspec that returns as many bytes as requested, and fails with a one-line message."""

    def __init__(self, file: Any, name: str) -> None:  # noqa: ANN401 - each file system has a class of its own
        self._file = file
        self._name = name

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, fewer only at the end."""
        held = bytearray()
        with translated("read", self._name):
            while len(held) < size and (piece := self._file.read(size - len(held))):
                held += piece
        return bytes(held)


def located(name: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    with translated("reach", name):
        from fsspec.core import url_to_fs

        if _SFTP.match(name):
            import logging

            # It logs every error with a traceback, and raises it too.
            logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

        system, path = url_to_fs(name, skip_instance_cache=True, **_options(name))
        if _S3.match(name):
            # Botocore has tried several times already.
            system.retries = 1
        elif _SFTP.match(name):
            system.ftp.get_channel().settimeout(_SILENCE)
        return system, str(path)


def _options(name: str) -> dict[str, object]:
    if _HTTP.match(name):
        return _for_the_web()
    if _S3.match(name):
        times = {"connect_timeout": _CONNECTING, "read_timeout": _SILENCE}
        return {"config_kwargs": {**times, "retries": {"total_max_attempts": _ATTEMPTS}}}
    # A rename works only within one file system, and fsspec would stage in the server's /tmp.
    return {"temppath": posixpath.dirname(urlsplit(name).path), "timeout": _CONNECTING} if _SFTP.match(name) else {}


def _for_the_web() -> dict[str, object]:
    """Return the options for a server: proxies from variables, no compression, no time limit on the whole transfer."""
    import aiohttp
    from fsspec.asyn import get_loop

    # Fsspec leaves the connection of a failed request open, and the loop would print that at some moment.
    get_loop().set_exception_handler(lambda _loop, _context: None)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
    return {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"trust_env": True, "timeout": timeout}}


@contextmanager
def translated(verb: str, name: str) -> Iterator[None]:
    """Turn any error of a file system into one line, because each has errors of its own."""
    try:
        yield
    except CachectlError:
        raise
    except ImportError as error:
        libraries = [library for scheme, library in _LIBRARIES if scheme.match(name)]
        if libraries or error.name == "fsspec":
            needed = " and ".join(("fsspec", *libraries))
            why = f"it needs {needed}, the extra remote: pip install 'opencl-cachectl[remote]'"
        else:
            why = f"{_reason(error, name)}; install that package"
        raise TransferFailed(f"cannot {verb} {_shown(name)}: {why}") from error
    except Exception as error:
        message = f"cannot {verb} {_shown(name)}: {_reason(error, name)}; {_advice(error)}"
        raise TransferFailed(message) from error


def _reason(error: Exception, name: str) -> str:
    if isinstance(error, FileNotFoundError):
        return "nothing is there"
    status = getattr(error, "status", None)
    text = f"status {status} {getattr(error, 'message', '')}" if isinstance(status, int) else str(error)
    for secret in (*_SECRETS, *_secrets_of(name)):
        text = secret.sub("…", text)
    return printable(" ".join(text.split()))[:_LONGEST_REASON].rstrip(".") or type(error).__name__


def _secrets_of(name: str) -> Iterator[re.Pattern[str]]:
    """Yield patterns for the secrets of a URL: the text of an error may lack what stands around them there."""
    for found in (one for secret in _SECRETS for one in secret.findall(name)):
        password = found.partition(":")[2]
        parts = (found, password, unquote(password), *(value for _, value in parse_qsl(found)))
        yield from (re.compile(re.escape(one)) for one in parts if one)


def _advice(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "check the address, or make the bucket or folder first"
    status = getattr(error, "status", None)
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or status in (401, 403):
        return "set up credentials as for the service's own tools"
    if isinstance(error, ValueError):
        return "schemes are s3://, gs://, ssh://, https:// and others that fsspec knows"
    return "check the address and the network, and try again"


def _shown(name: str) -> str:
    return printable(without_secrets(name))


def _standard_input() -> BinaryIO:
    if sys.stdin.isatty():
        raise BadRequest("a bundle is binary and is not read from a terminal; name a FILE, or redirect the input")
    return sys.stdin.buffer


def local_path(name: str) -> str:
    """Return the path that a name stands for. Raises :class:`BadRequest` for ``file://`` without an absolute path."""
    if not _FILE.match(name):
        return name
    address = urlsplit(name)
    if address.netloc not in ("", "localhost") or not address.path:
        raise BadRequest(f"{printable(name)!r} names no file of this machine; write file:/// and an absolute path")
    return unquote(address.path)
