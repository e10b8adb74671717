"""When a file was made, which ``os.stat`` does not say on Linux."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

# From linux/stat.h and linux/fcntl.h.
_HERE: Final = -100
_NO_FOLLOW: Final = 0x100
_BIRTH: Final = 0x800
_SIZE: Final = 256
#: Where the answer has the time of birth: seconds, then nanoseconds.
_BIRTH_AT: Final = 80


def birth_time(path: str) -> float | None:
    """Return when a file or folder was made, in epoch seconds; ``None`` if the system does not keep it.

    Links are not followed.
    """
    import ctypes
    import struct

    statx = _statx()
    answer = ctypes.create_string_buffer(_SIZE)
    if statx is None or statx(_HERE, os.fsencode(path), _NO_FOLLOW, _BIRTH, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer)[0] & _BIRTH:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BIRTH_AT)
    return int(seconds) + int(nanoseconds) / 1e9


@cache
def _statx() -> Any:  # noqa: ANN401 - a function of C
    """Return the function of the C library, from glibc 2.28 and musl 1.2.5 on."""
    import ctypes

    return getattr(ctypes.CDLL(None), "statx", None) if os.name == "posix" else None
