"""A place that a child process accesses, so that no server decides how long a command runs and how much memory it uses.

Libraries for S3, SFTP and registries are used only in the child, which is killed with its own children when it reaches
a limit. Each message between the two processes is a JSON text and bytes. During a request, the child reports its
progress regularly.
"""

from __future__ import annotations

import contextlib
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
from concurrent import futures
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, cast

from cachectl.exchange import place
from cachectl.layers.base import errors
from cachectl.layers.base.documents import encode_json, parse_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError, reason_of
from cachectl.layers.base.text import printable
from cachectl.layers.host.here import this_environment

#: Bytes of memory for the child, and how many more copies of a request's data libraries make.
MEMORY = 512 << 20
_COPIES = 3
#: Seconds in which a server must begin to answer; after that it may be silent for :data:`place.SILENCE`.
ANSWER = 10.0
#: Bytes per second that count as progress; so does a fiftieth of CPU time, because hashing a large file sends nothing.
_SLOWEST = 256
_BUSY = 50
#: Bytes that a server may send in addition to what was requested, and for each name of a listing.
_OVERHEAD = 16 << 20
_LISTED = 400
#: Seconds between two reports of progress.
_PULSE = 0.2
#: The child finds modules where its parent does, and not in the working directory.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from cachectl.exchange import network, store; "
    "network.serve(store.place_of)"
)
#: The bytes acknowledged and received, in ``struct tcp_info`` of Linux.
_MOVED = struct.Struct("=120x2Q")


def _send(link: Connection, message: Mapping[str, object], data: bytes = b"") -> None:
    link.send_bytes(encode_json(message, default=str))
    link.send_bytes(data)


def _receive(link: Connection) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises :class:`EOFError` if the other process ended."""
    return parse_json(link.recv_bytes()), link.recv_bytes()


# ---------------------------------------------------------------------- the parent


class NetworkPlace(place.StorePlace):
    """A place that :func:`store.place_of` opens in a child process, which ends with this object.

    Each method also raises :class:`TransferFailed` after a ``deadline`` (of :func:`time.monotonic`) or if a server is
    silent, and :class:`BadStore` if it sends more than was requested.
    """

    explained = Exception

    def __init__(
        self, address: str, environment: Environment, *, writes: bool, force: bool, deadline: float | None
    ) -> None:
        self.shown = printable(place.without_secrets(address))
        self._deadline = math.inf if deadline is None else deadline
        # A disk may take until the deadline.
        self._is_remote = place.is_url(address)
        #: Bytes that the child had received at its last message, and its progress.
        self._received = self._moved = 0.0
        with self.reached("reach"):
            self._link, link = Pipe()
            command = (sys.executable, "-c", _PROGRAM, *map(str, sys.path))
            with link:
                process = subprocess.Popen(command, stdin=link.fileno(), stdout=-3, stderr=-3, start_new_session=True)  # noqa: S603
            self._end = weakref.finalize(self, _end, process, self._link)
        opened = self._request("open", address, str(environment.temporary), writes, force)
        self.shown, self.is_bundle, expected = opened[0]
        if expected:
            self._request("fetch", most=expected)

    def names(self, folder: str) -> Mapping[str, place.Written]:
        """List the names in a folder."""
        return dict(self._request("names", folder, most=place.MOST_NAMES * _LISTED)[0])

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
        return cast("str | None", self._request("digest", patience=place.SILENCE)[0])

    def close(self) -> None:
        """End the child and its own children."""
        self._end()

    def failure(self, verb: str, name: str, error: Exception) -> place.TransferFailed:
        """Return the error that the child could not be started, or ended."""
        return place.TransferFailed(f"cannot {verb} {name or self.shown}: its process failed: {reason_of(error)}")

    def _request(
        self, what: str, *words: object, data: bytes = b"", most: int = 0, size: int = 0, patience: float = ANSWER
    ) -> tuple[Any, bytes]:
        """Return the child's answer to a request, and bytes; or raise its error.

        A server has ``patience`` seconds to begin its answer, and may send ``most`` bytes; ``size`` is that of data.
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
            name, text, cause = answer["error"]
            kind: type[Exception] = getattr(place, name, getattr(errors, name, CachectlError))
            # The text from the child is complete, so the constructor must not format it again.
            error = kind.__new__(kind)
            error.args, error.__cause__ = (text,), RuntimeError(cause)
            raise error
        return answer["result"], data

    def _answer(self, window: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Wait for the answer as long as there is progress in each ``window`` of seconds."""
        first, moved, since = self._received, self._moved, time.monotonic()
        while True:
            left = min(since + window if self._is_remote else math.inf, self._deadline) - time.monotonic()
            if left <= 0 or not self._link.poll(left):
                place.require_time(self._deadline)
                message = f"cannot reach {self.shown}: no answer or no progress in {window:g} s; {place.NETWORK}"
                raise place.TransferFailed(message)
            answer, data = _receive(self._link)
            counted = answer.pop("moved")
            if counted is not None:
                self._received, self._moved = counted
            if self._received - first > most:
                raise place.BadStore(f"{self.shown} sends more than {most:,} bytes for one request")
            if answer:
                return answer, data
            # Until the server begins to answer, CPU time does not count as progress.
            progress = self._received - first if window == ANSWER else self._moved - moved
            if counted is None:
                since = time.monotonic()
            elif progress >= _SLOWEST * window:
                moved, since, window = self._moved, time.monotonic(), place.SILENCE


def _end(process: subprocess.Popen[bytes], link: Connection) -> None:
    link.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------- the child


def serve(place_of: Callable[..., place.StorePlace]) -> None:
    """Answer the requests of the parent process until it ends, or ends this one; report progress during requests."""
    link = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    worker, places, connections = futures.ThreadPoolExecutor(1), list[place.StorePlace](), dict[str, tuple[int, int]]()
    with contextlib.suppress(OSError, EOFError):
        while True:
            work = worker.submit(_carry_out, place_of, places, *_receive(link))
            while not futures.wait([work], _PULSE).done:
                _send(link, {"moved": _count(connections)})
            answer, content = work.result()
            _send(link, {**answer, "moved": _count(connections)}, content)
    os.killpg(0, signal.SIGKILL)


def _carry_out(
    place_of: Callable[..., place.StorePlace], places: list[place.StorePlace], request: Mapping[str, Any], data: bytes
) -> tuple[dict[str, object], bytes]:
    """Return the answer to a request, and bytes. The first request opens a place, which is added to ``places``."""
    what, words, error = request["what"], request["words"], CachectlError()
    result: Any
    try:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            # Not the address space, which includes room for the stack of each thread.
            most = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], most))
        if what == "open":
            address, temporary, writes, force = words
            environment = this_environment()._replace(temporary=Path(temporary))
            where = place_of(address, environment, writes=writes, force=force, in_child=True)
            places.append(where)
            result = where.shown, where.is_bundle, where.expected
        else:
            result = getattr(places[0], what)(*words, *[data] * (what == "write"))
    except MemoryError:
        error = place.BadStore(f"the server sends more than fits into {request['memory']:,} bytes of memory")
    except CachectlError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - raised again in the parent
        error = place.TransferFailed(reason_of(raised))
    else:
        return ({"result": None}, result) if what == "read" else ({"result": result}, b"")
    return {"error": (type(error).__name__, str(error), repr(error.__cause__))}, b""


def _count(connections: dict[str, tuple[int, int]]) -> tuple[float, float] | None:
    """Return the bytes received, and what counts as progress; ``None`` before there is a connection.

    ``connections`` has the bytes sent and received by each, also by closed ones.
    """
    for entry in os.scandir("/proc/self/fd") if sys.platform == "linux" else ():
        # Errors mean that it is not, or no longer, a connection. Names of sockets are unique.
        with contextlib.suppress(OSError):
            if (name := os.readlink(entry.path)).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED.size)
                connections[name] = _MOVED.unpack(state)
    if not connections:
        return None
    sent, received = map(sum, zip(*connections.values(), strict=True))
    return received, sent + received + time.process_time() * _SLOWEST * _BUSY
