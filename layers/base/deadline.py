"""A bound on the time that somebody else's code may take, where the platform can interrupt it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLong(BaseException):
    """A block went on for longer than it may; no :class:`Exception`, so that what it interrupts does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let a block take so many seconds, then raise :class:`TookTooLong` in it.

    It interrupts Python, and waiting; not a loop of C code. Only the main thread can be interrupted, and a program
    that has set an alarm of its own keeps it: elsewhere, and there, the block may take any time.
    """
    import signal
    import threading

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
        # Again and again: what is interrupted may go on to something else that hangs.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
