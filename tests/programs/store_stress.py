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

import cachectl.exchange.pull
import cachectl.exchange.push
import cachectl.verbs.store  # noqa: F401 - before the forks
from cachectl.exchange.trust import Trust
from cachectl.stack import Stack

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.miopen_kernels import store, user_file

TRUSTED = Trust(blindly=True)
#: How many numbers each writer has.
SPAN = 1_000_000


def code_of(number):
    seed = hashlib.sha256(str(number).encode()).digest()
    return b"\x7fELF" + seed * (9000 if number % 5 == 4 else 3)


def add(home, number):
    code = code_of(number)
    digest = hashlib.md5(code).hexdigest()  # noqa: S324 - MIOpen's choice
    store(user_file(home), {(f"k{number}.cl.o", " -O3"): (code, digest, 0)})


def note(home, *words):
    """Append a line to the log of a worker, on the disk before anything else happens."""
    with (home / "log").open("a") as log:
        print(*words, file=log)
        log.flush()
        os.fsync(log.fileno())


def noted(home):
    with suppress(FileNotFoundError):
        return [line.split() for line in (home / "log").read_text().splitlines() if line.endswith(("0", "1"))]
    return []


def wrong_in(layer, known=frozenset()):
    """Return the kernels whose code is not what their number says, and the numbers of all."""
    keys = [entry.key for entry in layer.entries() if entry.key not in known]
    numbers, wrong = set(), []
    for key, artifact in layer.get_many(keys).items():
        number = number_of(key)
        numbers.add(number)
        if getattr(artifact, "data", None) != code_of(number):
            wrong.append(key)
    return wrong, numbers, keys


def number_of(key):
    return int(key.partition(".cl.o")[0].rpartition("k")[2])


def write(url, home, first):
    stack = Stack()
    done = len(noted(home))
    while True:
        add(home, first + done)
        stack.push(url, layers=["miopen"])
        note(home, first + done, 1)
        done += 1


def read(url, home):
    stack = Stack()
    known = set()
    while True:
        with suppress(FileNotFoundError):
            stack.pull(url, TRUSTED, layers=["miopen"])
            wrong, _, keys = wrong_in(stack["miopen"], known)
            known.update(keys)
            note(home, "wrong" if wrong else "right", len(known), 0)
        time.sleep(0.05)


def collect(url):
    store = Stack().store(url)
    while True:
        with suppress(FileNotFoundError):
            store.gc()
        time.sleep(1)


class Worker:
    """A fork of this program, so that the next one after a kill works at once."""

    def __init__(self, url, folder, role, number):
        home = folder / f"{role}{number}"
        home.mkdir(parents=True, exist_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            os.environ["HOME"] = str(home)
            try:
                if role == "write":
                    write(url, home, (number + 1) * SPAN)
                elif role == "read":
                    read(url, home)
                else:
                    collect(url)
            except BaseException:  # noqa: BLE001 - reported
                with (home / "errors").open("a") as errors:
                    traceback.print_exc(file=errors)
            os._exit(1)

    def has_ended(self):
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def main(url, folder, seconds, writers, readers):
    draw = random.Random(17)  # noqa: S311
    # Once here, and not in each worker.
    if url.startswith("s3:"):
        importlib.import_module("s3fs")
        importlib.import_module("aiobotocore.session")
    elif url.startswith("ssh:"):
        importlib.import_module("fsspec.implementations.sftp")
    roles = [("write", n) for n in range(writers)] + [("read", n) for n in range(readers)] + [("collect", 0)]
    running = {one: Worker(url, folder, *one) for one in roles}
    kills, deaths = 0, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        for one, worker in running.items():
            if worker.has_ended():
                deaths.append(f"{one}: {(folder / f'{one[0]}{one[1]}' / 'errors').read_text()[-600:]}")
                running[one] = Worker(url, folder, *one)
        for one in draw.sample(roles, 2):
            running[one].kill()
            running[one] = Worker(url, folder, *one)
            kills += 1
    for worker in running.values():
        worker.kill()
    logs = {one: noted(folder / f"{one[0]}{one[1]}") for one in roles}
    acknowledged = {int(line[0]) for (role, _), lines in logs.items() if role == "write" for line in lines}
    last = folder / "last"
    last.mkdir()
    os.environ["HOME"] = str(last)
    stack = Stack()
    check = stack.store(url).verify()
    stack.pull(url, TRUSTED, layers=["miopen"])
    wrong, numbers, _ = wrong_in(stack["miopen"])
    pulls = [line for (role, _), lines in logs.items() if role == "read" for line in lines]
    result = {
        "acknowledged": len(acknowledged),
        "pulls": len(pulls),
        "kills": kills,
        "deaths": deaths,
        "damaged": [f"{one.code} {one.name}" for one in check.findings if one.severity == "error"],
        "notes": sorted({one.code for one in check.findings if one.severity != "error"}),
        "lost": sorted(acknowledged - numbers),
        "wrong": wrong + [line for line in pulls if line[0] == "wrong"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(("XDG_", "MIOPEN_"))]:
        del os.environ[name]
    address, place, length, *crowd = sys.argv[1:]
    main(address, Path(place), float(length), *(int(one) for one in crowd or ("8", "8")))
