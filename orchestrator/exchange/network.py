"""A place that a child process reaches, so that no server decides how long a command takes, and how much memory.

Libraries for S3, SFTP and registries are used only in the child, which is killed with all that it has started when it
reaches a limit. A message between the two processes is a JSON text and bytes, after the lengths of both. While a
request is carried out, the child says regularly what has moved.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from cachectl.exchange import place
from cachectl.layers import core

#: Bytes of memory for the child, and how many copies of the data of a request libraries make beside.
MEMORY = 512 << 20
_COPIES = 3
#: Seconds within which a server has to answer; then it may be silent for :data:`place.SILENCE`.
ANSWER = 10.0
#: Bytes a second that are progress, or the part of a processor's time that is: hashing a large file sends nothing.
_SLOWEST = 256
_BUSY = 0.02
#: Bytes that a server may send besides what was asked for, and for each name of a listing.
_OVERHEAD = 16 << 20
_LISTED = 1 << 10
#: Seconds between two messages of what has moved.
_PULSE = 0.2
_HEADER = struct.Struct(">QQ")
#: The child finds modules where its parent does, and not in the working folder.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from cachectl.exchange import network; network.serve()"
#: The bytes that were acknowledged and received, in ``struct tcp_info`` of Linux.
_MOVED = struct.Struct("=120x2Q")


def _send(link: socket.socket, message: Mapping[str, object], data: bytes = b"") -> None:
    text = json.dumps(message, default=str).encode()
    link.sendall(_HEADER.pack(len(text), len(data)) + text)
    link.sendall(data)


def _receive(link: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises :class:`OSError` if the other process has ended."""
    length, size = _HEADER.unpack(_received(link, _HEADER.size))
    return json.loads(_received(link, length)), _received(link, size)


def _received(link: socket.socket, length: int) -> bytes:
    # Unlike a list of pieces, it is not copied at the end.
    data = io.BytesIO()
    while data.tell() < length:
        piece = link.recv(min(length - data.tell(), 1 << 20))
        if not piece:
            raise ConnectionError("the process for the network has ended")
        data.write(piece)
    return data.getvalue()


# ---------------------------------------------------------------------- the parent


class NetworkPlace(place.StorePlace):
    """A place that :func:`store.open_place` opens in a child process, which ends with this object.

    Each method also raises :class:`TransferFailed` after a ``deadline``, a moment of :func:`time.monotonic`, and if a
    server is silent, and :class:`BadStore` if it sends more than was asked for.
    """

    def __init__(
        self, address: str, environment: core.Environment, *, writes: bool, force: bool, deadline: float | None
    ) -> None:
        self.shown = core.printable(place.without_secrets(address))
        self._deadline = deadline
        # A disk may be silent until the deadline.
        self._is_remote = place.is_url(address)
        #: Bytes that the child has received, and what counts as progress, up to its last message.
        self._received = self._moved = 0.0
        if not sys.executable:
            raise place.TransferFailed(f"cannot reach {self.shown}: sys.executable names no Python that could do it")
        self._link, link = socket.socketpair()
        with link, self.reached("reach"):
            command = (sys.executable, "-c", _PROGRAM, *map(str, sys.path))
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=link, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self._end = weakref.finalize(self, _end, self._process, self._link)
        self._request("load", address, patience=place.SILENCE)
        opened, _ = self._request("open", address, str(environment.temporary), writes, force)
        self.shown, self.is_bundle, expected = opened
        if expected:
            self._request("fetch", most=expected)

    def names(self, folder: str) -> Mapping[str, place.Written]:
        """List the names in a folder."""
        listed, _ = self._request("names", folder, most=place.MOST_NAMES * _LISTED)
        return {name: (size, moment) for name, size, moment in listed}

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        return self._request("read", name, most, most=_COPIES * most, size=most)[1]

    def write(self, name: str, data: bytes) -> None:
        """Write a name."""
        self._request("write", name, data=data, size=len(data), patience=place.SILENCE)

    def remove(self, names: Sequence[str]) -> None:
        """Remove names."""
        self._request("remove", names, patience=place.SILENCE)

    def finish(self) -> None:
        """Complete what was written."""
        self._request("finish", patience=place.SILENCE)

    def digest(self) -> str | None:
        """Return the SHA-256 of a bundle."""
        digest: str | None = self._request("digest", patience=place.SILENCE)[0]
        return digest

    def close(self) -> None:
        """End the child, and what it has started."""
        self._end()

    def failure(self, verb: str, name: str, error: OSError) -> place.TransferFailed:
        """Return that the child could not be started, or has ended."""
        return place.TransferFailed(f"cannot {verb} {name or self.shown}: {core.reason_of(error)}")

    def _request(
        self, what: str, *words: object, data: bytes = b"", most: int = 0, size: int = 0, patience: float = ANSWER
    ) -> tuple[Any, bytes]:
        """Return what the child answers to a request, and bytes; or raise its error.

        A server has ``patience`` seconds to begin to answer, and may send ``most`` bytes; ``size`` is that of the data.
        """
        place.require_time(self._deadline)
        try:
            with self.reached("reach"):
                self._link.settimeout(None)
                _send(self._link, {"what": what, "words": words, "memory": MEMORY + _COPIES * size}, data)
                answer, data = self._answer(patience, most + _OVERHEAD)
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            raise _error_of(answer)
        return answer["result"], data

    def _answer(self, window: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Wait for the answer as long as there is progress in each window of some seconds."""
        first, moved, since = self._received, self._moved, time.monotonic()
        while True:
            end = since + window if self._is_remote else math.inf
            end = min(end, math.inf if self._deadline is None else self._deadline)
            left = end - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                self._link.settimeout(None if left == math.inf else left)
                answer, data = _receive(self._link)
            except TimeoutError as error:
                place.require_time(self._deadline)
                message = f"cannot reach {self.shown}: no answer, or no progress, in {window:g} s; {place.NETWORK}"
                raise place.TransferFailed(message) from error
            counted = answer.pop("moved")
            if counted is not None:
                self._received, self._moved = counted
            if answer:
                return answer, data
            if self._received - first > most:
                raise place.BadStore(f"{self.shown} sends more than the {most:,} bytes that it may for one request")
            # A server has to begin to answer, however busy this machine is.
            progress = self._received - first if window == ANSWER else self._moved - moved
            if counted is None or progress >= _SLOWEST * window:
                moved, since, window = self._moved, time.monotonic(), place.SILENCE


def _error_of(answer: Mapping[str, Any]) -> Exception:
    """Return the error that :func:`_described` has taken apart."""
    name, words = answer["error"], answer["words"]
    kind: type[Exception] = getattr(place, name, None) or getattr(core, name, OSError)
    error = kind.__new__(kind, *words)
    error.args = tuple(words)
    vars(error).update(answer["attributes"])
    error.__cause__ = None if answer["cause"] is None else RuntimeError(answer["cause"])
    return error


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------- the child


def serve() -> None:
    """Answer the requests of the process that has started this one, until that ends, or ends this one."""
    with socket.socket(fileno=os.dup(0)) as link, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        child = _Child(link)
        Thread(target=child.report, daemon=True).start()
        with contextlib.suppress(OSError):
            while True:
                child.answer(*_receive(link))
    os.killpg(0, signal.SIGKILL)


class _Child:
    """The place that this process reaches for its parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = Lock()
        self._is_busy = False
        self._place: Any = None
        #: Bytes that each connection has sent and received.
        self._connections: dict[str, tuple[int, int]] = {}

    def answer(self, request: Mapping[str, Any], data: bytes) -> None:
        """Carry out a request, and answer it."""
        self._is_busy, content = True, b""
        try:
            _limit_memory(request["memory"])
            more = (data,) if request["what"] == "write" else ()
            result = self._result(request["what"], *request["words"], *more)
            if isinstance(result, bytes):
                result, content = None, result
            answer = {"result": result}
        except MemoryError as error:
            memory = f"{request['memory'] >> 20:,} MiB of memory"
            answer = _described(place.BadStore(f"the server sends more than fits into {memory}"), error)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            answer = _described(error, error.__cause__)
        with self._lock:
            self._is_busy = False
            _send(self._link, {**answer, "moved": self._count()}, content)

    def _result(self, what: str, *words: Any) -> Any:  # noqa: ANN401 - what the place takes and returns
        if what == "load":
            return _load(*words)
        if what == "open":
            from cachectl.exchange.store import open_place

            address, temporary, writes, force = words
            environment = core.Environment.here()._replace(temporary=Path(temporary))
            self._place = open_place(address, environment, writes=writes, force=force)
            return self._place.shown, self._place.is_bundle, self._place.expected
        result = getattr(self._place, what)(*words)
        return [(name, *written) for name, written in result.items()] if what == "names" else result

    def report(self) -> None:
        """Tell the parent regularly what has moved for a request; end when the parent has ended."""
        while True:
            time.sleep(_PULSE)
            with self._lock:
                if self._is_busy:
                    try:
                        _send(self._link, {"moved": self._count()})
                    except OSError:
                        os.killpg(0, signal.SIGKILL)

    def _count(self) -> tuple[float, float] | None:
        """Return the bytes that were received, and what counts as progress; ``None`` where the system does not say."""
        if not sys.platform.startswith("linux"):
            return None
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                # No other connection ever has the same name.
                name = os.readlink(entry.path)
                if name.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED.size)
                    self._connections[name] = _MOVED.unpack(state)
        sent, received = (sum(numbers) for numbers in zip((0, 0), *self._connections.values(), strict=True))
        return received, sent + received + time.process_time() * _SLOWEST / _BUSY


def _load(address: str) -> None:
    """Import the library for an address, which may take long from a slow disk; opening the place says what fails."""
    with contextlib.suppress(Exception):
        if place.is_registry(address):
            importlib.import_module("oras.provider")
        elif place.is_url(address):
            fsspec = importlib.import_module("fsspec")
            for scheme in address.partition("://")[0].split("::"):
                fsspec.get_filesystem_class(scheme)


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        # Not of the address space, in which each thread has room for its stack.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size if hard < 0 else min(size, hard), hard))


def _described(error: Exception, cause: BaseException | None) -> dict[str, object]:
    """Return the parts of an error: its class, what it was made of, its attributes, and what caused it."""
    name, words = type(error).__name__, error.args
    if not isinstance(error, core.CachectlError):
        is_system = isinstance(error, OSError) and error.errno is not None
        name = "OSError" if is_system else "TransferFailed"
        words = (error.errno, error.strerror, error.filename) if is_system else (core.reason_of(error),)
    attributes = {attribute: None if value is None else str(value) for attribute, value in vars(error).items()}
    text = None if cause is None else f"{type(cause).__name__}: {cause}"
    return {"error": name, "words": words, "attributes": attributes, "cause": text}
