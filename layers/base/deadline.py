"""A time limit for third-party code, on platforms that can interrupt it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLong(BaseException):
    """A block exceeded its time limit. Not an :class:`Exception`, so that the interrupted code does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLong` in a block that takes more than ``seconds``.

    This interrupts Python code and waits, but not a loop in C. There is no limit outside the main thread, or if the
    program uses an alarm of its own.
    """
    can = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if running:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Repeat, because the interrupted code may continue with something else that hangs.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
