"""A place that has to answer before a deadline.

Timeouts of sockets limit each silence of a server, not a whole pull. So each request runs in a thread of its own, which
is given up at the deadline: its answer, if one comes later, is read by nobody. Everything that writes on this machine
runs in the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar, cast

from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.place import Place, Stored

_T = TypeVar("_T")


class Deadline:
    """A moment, some seconds after this object was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left; 0 if it has passed."""
        return max(0.0, self._end - time.monotonic())

    def wait_for(self, work: Callable[[], _T]) -> _T:
        """Return what some work returns, or raise what it raises; :class:`TransferFailed` if it takes too long."""
        done: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again by the calling thread
                done.put((None, error))

        Thread(target=run, daemon=True).start()
        try:
            found, error = done.get(timeout=self.left)
        except Empty:
            message = f"no answer within {self.seconds:g} s; --store-wait gives it more"
            raise TransferFailed(message) from None
        if error is not None:
            raise error
        return cast("_T", found)


class TimelyPlace:
    """A place for reading, every request to which ends before a deadline."""

    def __init__(self, place: Callable[[], Place], deadline: Deadline) -> None:
        self._deadline = deadline
        self._place = deadline.wait_for(place)
        self.shown = self._place.shown

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``."""
        return self._deadline.wait_for(self._place.names)

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        return self._deadline.wait_for(lambda: self._place.read(name, most))
