"""Let WRITERS and READERS work on one shared store for SECONDS, kill two of them every second, and check the rest.

``store_stress.py URL FOLDER SECONDS [WRITERS READERS]``: a home for each worker is made below FOLDER. A writer adds a
kernel to its cache, pushes, and notes what the push acknowledged; a reader pulls, and compares every kernel with what
its number says. A collector runs ``gc`` beside them. Prints what was done, and what is wrong, as JSON.
"""

import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

# Before the forks.
import cachectl.exchange.push_pull
import cachectl.exchange.store
import cachectl.verbs.store
from cachectl.exchange.trust import Trust
from cachectl.stack import Stack

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.miopen_kernels import store, stored_whole, user_file

TRUSTED = Trust(trust=True)
#: How many numbers each writer has.
SPAN = 1_000_000


def code_of(number):
    seed = hashlib.sha256(str(number).encode()).digest()
    return b"\x7fELF" + seed * (9000 if number % 5 == 4 else 3)


def noted(home):
    """Return the lines of a worker's log, as far as they are whole."""
    with suppress(FileNotFoundError):
        return [line.split() for line in (home / "log").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return []


def note(home, *words):
    """Append a line to the log of a worker, on the disk before anything else happens."""
    with (home / "log").open("a") as log:
        print(*words, file=log)
        log.flush()
        os.fsync(log.fileno())


def checked(layer, known=()):
    """Return the kernels whose code is not what their number says, and the numbers of all by key."""
    keys = [entry.key for entry in layer.entries() if entry.key not in known]
    numbers = {key: int(key.partition(".cl.o")[0].rpartition("k")[2]) for key in keys}
    from cachectl.layers.core.layer import get_many

    read = get_many(layer, keys)
    return [key for key in keys if getattr(read.get(key), "data", None) != code_of(numbers[key])], numbers


def write(url, home, number):
    cachectl.exchange.store._TOO_SLOW = 15.0
    stack, first = Stack(), (number + 1) * SPAN
    for kernel in range(first + len(noted(home)), first + SPAN):
        store(user_file(home), {(f"k{kernel}.cl.o", " -O3"): stored_whole(code_of(kernel))})
        stack.push(url, layers=["miopen"])
        note(home, kernel)


def read(url, home, _number):
    stack, known = Stack(), {}
    while True:
        with suppress(FileNotFoundError):
            stack.pull(url, TRUSTED, layers=["miopen"])
            wrong, numbers = checked(stack["miopen"], known)
            known.update(numbers)
            note(home, "wrong" if wrong else "right", len(known))
        time.sleep(0.05)


def collect(url, _home, _number):
    # What killed writers leave is removed while others write.
    cachectl.verbs.store.GRACE = 20.0
    target = Stack().store(url)
    while True:
        with suppress(FileNotFoundError):
            target.gc()
        time.sleep(1)


WORK = {"write": write, "read": read, "collect": collect}


def started(url, folder, role, number):
    """Start a worker, a fork of this program, so that the next one after a kill works at once; return its number."""
    home = folder / f"{role}{number}"
    home.mkdir(parents=True, exist_ok=True)
    if pid := os.fork():
        return pid
    os.environ["HOME"] = str(home)
    try:
        WORK[role](url, home, number)
    except BaseException:  # noqa: BLE001 - reported
        with (home / "errors").open("a") as errors:
            traceback.print_exc(file=errors)
    os._exit(1)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main(url, folder, seconds, writers, readers):
    draw = random.Random(17)  # noqa: S311
    # Once here, and not in each worker.
    if url.startswith("s3:"):
        importlib.import_module("s3fs")
        importlib.import_module("aiobotocore.session")
    elif url.startswith("ssh:"):
        importlib.import_module("fsspec.implementations.sftp")
    roles = [("write", n) for n in range(writers)] + [("read", n) for n in range(readers)] + [("collect", 0)]
    running = {one: started(url, folder, *one) for one in roles}
    kills, deaths = 0, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        for one, pid in running.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                deaths.append(f"{one}: {(folder / f'{one[0]}{one[1]}' / 'errors').read_text()[-600:]}")
                running[one] = started(url, folder, *one)
        for one in draw.sample(roles, 2):
            kill(running[one])
            running[one] = started(url, folder, *one)
            kills += 1
    for pid in running.values():
        kill(pid)
    logs = {role: [] for role in WORK}
    for role, number in roles:
        logs[role] += noted(folder / f"{role}{number}")
    last = folder / "last"
    last.mkdir()
    os.environ["HOME"] = str(last)
    stack = Stack()
    check = stack.store(url).verify()
    stack.pull(url, TRUSTED, layers=["miopen"])
    wrong, numbers = checked(stack["miopen"])
    acknowledged = {int(kernel) for (kernel,) in logs["write"]}
    result = {
        "acknowledged": len(acknowledged),
        "pulls": len(logs["read"]),
        "kills": kills,
        "deaths": deaths,
        "damaged": [f"{one.code} {one.name}" for one in check.findings if one.severity == "error"],
        "lost": sorted(acknowledged - set(numbers.values())),
        "wrong": wrong + [line for line in logs["read"] if line[0] == "wrong"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(("XDG_", "MIOPEN_"))]:
        del os.environ[name]
    address, place, length, *crowd = sys.argv[1:]
    main(address, Path(place), float(length), *(int(one) for one in crowd or ("8", "8")))
