"""Wait for a child that root has started as this user, stop it, and write N MiB in its name if N is given."""

import contextlib
import ctypes
import os
import signal
import sys
import time

PIDFD_GETFD = 438


def child():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if b"-m\0cachectl." in file.read() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                    return int(name)
        except OSError:
            pass
    return None


if __name__ == "__main__":
    print("waiting", flush=True)
    while (found := child()) is None:
        time.sleep(0.001)
    os.kill(found, signal.SIGSTOP)
    if len(sys.argv) > 1:
        # The descriptor of its standard output: this user may trace it.
        pipe = ctypes.CDLL(None).syscall(PIDFD_GETFD, os.pidfd_open(found), 1, 0)
        with contextlib.suppress(BrokenPipeError):
            for _ in range(int(sys.argv[1])):
                os.write(pipe, b" " * (1 << 20))
    time.sleep(600)
