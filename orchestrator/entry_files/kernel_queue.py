"""A queue of events that the Linux kernel fills, opened through the C library."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

#: Bytes of events that are read at once.
_AT_ONCE: Final = 1 << 16


class KernelQueue:
    """A descriptor with events. Raises :class:`OSError` for another system, or a C library without these functions."""

    def __init__(self, *functions: str, only: str) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, f"only Linux reports {only}")
        import ctypes

        self._library: Any = ctypes.CDLL(None, use_errno=True)
        if not all(hasattr(self._library, name) for name in functions):
            raise OSError(errno.ENOSYS, f"the C library has no {functions[0].partition('_')[0]}")
        self._number = -1

    def _checked(self, result: int) -> int:
        import ctypes

        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        """Return the descriptor, which is readable if there are events."""
        return self._number

    def _waiting(self) -> bytes:
        """Return the next events; nothing if none has come."""
        try:
            return os.read(self._number, _AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return b""

    def close(self) -> None:
        """Stop watching."""
        os.close(self._number)
