"""A place that a child process reaches, so that no server decides how long a command takes, and how much memory.

Libraries for S3, SFTP and registries are used only in the child, which is killed with all that it has started when it
reaches a limit. Each message between the two processes is a JSON text and bytes. While a request is carried out, the
child says regularly what has moved.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from cachectl.exchange import place
from cachectl.layers import core

#: Bytes of memory for the child, and how many copies of the data of a request libraries make besides.
MEMORY = 512 << 20
_COPIES = 3
#: Seconds within which a server has to answer; then it may be silent for :data:`place.SILENCE`.
ANSWER = 10.0
#: Bytes a second that are progress, as is a fiftieth of a processor's time: hashing a large file sends nothing.
_SLOWEST = 256
_BUSY = 50
#: Bytes that a server may send besides what was asked for, and for each name of a listing.
_OVERHEAD = 16 << 20
_LISTED = 400
#: Seconds between two messages of what has moved.
_PULSE = 0.2
#: The child finds modules where its parent does, and not in the working folder.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from cachectl.exchange import network, store; "
    "network.serve(store.place_of)"
)
#: The bytes that were acknowledged and received, in ``struct tcp_info`` of Linux.
_MOVED = struct.Struct("=120x2Q")


def _send(link: Connection, message: Mapping[str, object], data: bytes = b"") -> None:
    link.send_bytes(json.dumps(message, default=str).encode())
    link.send_bytes(data)


def _receive(link: Connection) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises :class:`EOFError` if the other process has ended."""
    return json.loads(link.recv_bytes()), link.recv_bytes()


# ---------------------------------------------------------------------- the parent


class NetworkPlace(place.StorePlace):
    """A place that :func:`store.place_of` opens in a child process, which ends with this object.

    Each method also raises :class:`TransferFailed` after a ``deadline``, a moment of :func:`time.monotonic`, and if a
    server is silent, and :class:`BadStore` if it sends more than was asked for.
    """

    explained = Exception

    def __init__(
        self, address: str, environment: core.Environment, *, writes: bool, force: bool, deadline: float | None
    ) -> None:
        self.shown = core.printable(place.without_secrets(address))
        self._deadline = deadline
        # A disk may be silent until the deadline.
        self._is_remote = place.is_url(address)
        #: Bytes that the child has received, and what counts as progress, up to its last message.
        self._received = self._moved = 0.0
        with self.reached("reach"):
            self._link, link = Pipe()
            command = (sys.executable, "-c", _PROGRAM, *map(str, sys.path))
            with link:
                process = subprocess.Popen(  # noqa: S603
                    command, stdin=link.fileno(), stdout=-3, stderr=-3, start_new_session=True
                )
            self._end = weakref.finalize(self, _end, process, self._link)
        opened = self._request("open", address, str(environment.temporary), writes, force)
        self.shown, self.is_bundle, expected = opened[0]
        if expected:
            self._request("fetch", most=expected)

    def names(self, folder: str) -> Mapping[str, place.Written]:
        """List the names in a folder."""
        listed: dict[str, place.Written] = self._request("names", folder, most=place.MOST_NAMES * _LISTED)[0]
        return listed

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

    def failure(self, verb: str, name: str, error: Exception) -> place.TransferFailed:
        """Return that the child could not be started, or has ended."""
        return place.TransferFailed(f"cannot {verb} {name or self.shown}: its process failed: {core.reason_of(error)}")

    def _request(
        self, what: str, *words: object, data: bytes = b"", most: int = 0, size: int = 0, patience: float = ANSWER
    ) -> tuple[Any, bytes]:
        """Return what the child answers to a request, and bytes; or raise its error.

        A server has ``patience`` seconds to begin to answer, and may send ``most`` bytes; ``size`` is that of the data.
        """
        place.require_time(self._deadline)
        try:
            with self.reached("reach"):
                _send(self._link, {"what": what, "words": words, "memory": MEMORY + _COPIES * size}, data)
                answer, data = self._answer(patience, most + _OVERHEAD)
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            raise _error_of(*answer["error"])
        return answer["result"], data

    def _answer(self, window: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Wait for the answer as long as there is progress in each window of some seconds."""
        first, moved, since = self._received, self._moved, time.monotonic()
        while True:
            ends = (since + window if self._is_remote else math.inf, self._deadline or math.inf)
            left = min(ends) - time.monotonic()
            if left <= 0 or not self._link.poll(None if left == math.inf else left):
                place.require_time(self._deadline)
                message = f"cannot reach {self.shown}: no answer, or no progress, in {window:g} s; {place.NETWORK}"
                raise place.TransferFailed(message)
            answer, data = _receive(self._link)
            counted = answer.pop("moved")
            if counted is not None:
                self._received, self._moved = counted
            if "result" in answer:
                return answer, data
            if self._received - first > most:
                raise place.BadStore(f"{self.shown} sends more than the {most:,} bytes that it may for one request")
            # A server has to begin to answer, however busy this machine is.
            progress = self._received - first if window == ANSWER else self._moved - moved
            if counted is None:
                since = time.monotonic()
            elif progress >= _SLOWEST * window:
                moved, since, window = self._moved, time.monotonic(), place.SILENCE


def _error_of(name: str, text: str, cause: str) -> Exception:
    """Return an error as the child has met it."""
    kind: type[Exception] = getattr(place, name, getattr(core, name, core.CachectlError))
    error = kind.__new__(kind)
    error.args, error.__cause__ = (text,), RuntimeError(cause)
    return error


def _end(process: subprocess.Popen[bytes], link: Connection) -> None:
    link.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------- the child


def serve(place_of: Callable[..., place.StorePlace]) -> None:
    """Answer the requests of the process that has started this one, until that ends, or ends this one."""
    link = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    child = _Child(link, place_of)
    Thread(target=child.report, daemon=True).start()
    with contextlib.suppress(OSError, EOFError):
        while True:
            child.answer(*_receive(link))
    os.killpg(0, signal.SIGKILL)


class _Child:
    """The place that this process reaches for its parent."""

    def __init__(self, link: Connection, place_of: Callable[..., place.StorePlace]) -> None:
        self._link = link
        self._place_of = place_of
        self._lock = Lock()
        self._is_busy = False
        self._place: Any = None
        #: Bytes that each connection has sent and received.
        self._connections: dict[str, tuple[int, int]] = {}

    def answer(self, request: Mapping[str, Any], data: bytes) -> None:
        """Carry out a request, and answer it."""
        self._is_busy, what, words = True, request["what"], request["words"]
        try:
            with contextlib.suppress(ImportError, OSError, ValueError):
                import resource

                # Not of the address space, in which each thread has room for its stack.
                most = resource.getrlimit(resource.RLIMIT_DATA)[1]
                resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], most))
            result = getattr(self if what == "open" else self._place, what)(*words, *[data] * (what == "write"))
            content, answer = (result, {}) if what == "read" else (b"", {"result": result})
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            if isinstance(error, MemoryError):
                error = place.BadStore(f"the server sends more than {request['memory']:,} bytes of memory hold")
            elif not isinstance(error, core.CachectlError):
                error = place.TransferFailed(core.reason_of(error))
            content, answer = b"", {"error": (type(error).__name__, str(error), repr(error.__cause__))}
        with self._lock:
            self._is_busy = False
            _send(self._link, {"result": None, **answer, "moved": self._count()}, content)

    def open(self, address: str, temporary: str, writes: bool, force: bool) -> tuple[str, bool, int]:
        """Open the place; return what its parent shows of it."""
        environment = core.Environment.here()._replace(temporary=Path(temporary))
        self._place = self._place_of(address, environment, writes=writes, force=force, in_child=True)
        return self._place.shown, self._place.is_bundle, self._place.expected

    def report(self) -> None:
        """Tell the parent regularly what has moved for a request; end when the parent has ended."""
        while True:
            time.sleep(_PULSE)
            with self._lock:
                try:
                    if self._is_busy:
                        _send(self._link, {"moved": self._count()})
                except OSError:
                    os.killpg(0, signal.SIGKILL)

    def _count(self) -> tuple[float, float] | None:
        """Return the bytes that were received, and what counts as progress; ``None`` before a connection is seen."""
        for entry in os.scandir("/proc/self/fd") if sys.platform == "linux" else ():
            # What is no connection, or not any more. No other one ever has the same name.
            with contextlib.suppress(OSError):
                if (name := os.readlink(entry.path)).startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED.size)
                    self._connections[name] = _MOVED.unpack(state)
        if not self._connections:
            return None
        sent, received = map(sum, zip(*self._connections.values(), strict=True))
        return received, sent + received + time.process_time() * _SLOWEST * _BUSY
