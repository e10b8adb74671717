"""Running programs and their loaded libraries and open files, if the platform shows them."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from cachectl.layers.base.errors import printable
from cachectl.layers.host.mounts import network_file_system

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment

_PROC: Final = Path("/proc")


def using(libraries: tuple[str, ...], *, processes: Path = _PROC) -> tuple[int, ...] | None:
    """Return the ids of processes that map a library whose file name has one of these prefixes.

    ``None`` if unknown: only Linux shows the maps of a process. Checks this user's processes, and for the superuser
    all. A process that hides its maps from its own user runs with other privileges and does not write into this user's
    caches.
    """
    if not (processes / "self" / "maps").exists():
        return None
    maps = ((pid, libraries_here(pid, processes=processes)) for pid in _concerned(processes))
    return tuple(pid for pid, loaded in maps if loaded.has(libraries))


def open_elsewhere(environment: Environment, path: Path) -> str | None:
    """Return who has a file open, or may have; ``None`` if surely nobody has, or there is no file."""
    if not os.path.lexists(path):
        return None
    if (kind := network_file_system(path)) is not None:
        return f"lies on {kind}, where a program of another machine may have it open: end those, and move it by hand"
    status = path.lstat()
    # Processes of other users are not visible.
    may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or status.st_uid != os.geteuid()
    if may_write and not environment.superuser:
        return "may be open in a program of another user, who can write to it: do it as the superuser, or by hand"
    processes = environment.processes
    if not (processes / "self" / "fd").is_dir():
        users = None
    else:
        open_in = ((pid, _open_files(processes / str(pid) / "fd")) for pid in _concerned(processes))
        users = tuple(pid for pid, files in open_in if any(os.path.samestat(status, file) for file in files))
    return None if users == () else f"is open in {process_names(users)}, which must end first"


def _open_files(descriptors: Path) -> Iterator[os.stat_result]:
    # It may have ended, or is not readable.
    with suppress(OSError):
        for number in os.listdir(descriptors):
            with suppress(OSError):
                yield (descriptors / number).stat()


def mentioning(folder: Path, *, processes: Path = _PROC) -> bool | None:
    """Return whether a process was started with a folder's path in its environment, or has a file in it open.

    ``None`` if unknown, as in :func:`using`.
    """
    if not (processes / "self" / "maps").exists():
        return None
    return any(_mentions(processes / str(pid), folder) for pid in _concerned(processes))


def _mentions(process: Path, folder: Path) -> bool:
    # It may have ended, or is not readable.
    with suppress(OSError):
        if os.fsencode(folder) in (process / "environ").read_bytes():
            return True
        for link in (process / "cwd", *(process / "fd").iterdir()):
            with suppress(OSError):
                opened = Path(os.readlink(link))
                if folder in (opened, *opened.parents):
                    return True
    return False


def start_of(pid: int, *, processes: Path = _PROC) -> int | None:
    """Return the start of a process in clock ticks since boot; ``None`` if that is unknown, or it has ended.

    Source: field 22 of ``/proc/PID/stat`` in proc(5).
    """
    try:
        fields = _fields_of(pid, processes)
        return None if fields[0] == b"Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _fields_of(pid: int, processes: Path) -> list[bytes]:
    return (processes / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()


def process_names(users: tuple[int, ...] | None, *, processes: Path = _PROC) -> str:
    """Return a phrase for processes: ``process 4711 (python3)``."""
    if users is None:
        return "programs that this platform does not show"
    shown = ", ".join(f"{pid}{_name_of(pid, processes)}" for pid in users[:5])
    return f"process {shown}" if len(users) == 1 else f"processes {shown}" + ("…" if len(users) > 5 else "")  # noqa: PLR2004


def _name_of(pid: int, processes: Path) -> str:
    try:
        name = (processes / str(pid) / "comm").read_bytes().removesuffix(b"\n")
    except OSError:
        return ""
    return f" ({printable(os.fsdecode(name))})"


def age_of(pid: int, *, processes: Path = _PROC) -> float | None:
    """Return the age of a process in seconds; ``None`` if that is unknown, or it has ended.

    ``/proc/uptime`` is not used: in some containers it is that of the container.
    """
    ticks = start_of(pid, processes=processes)
    # Only Linux has this clock and shows processes.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if ticks is None or clock is None else time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK")


class Loaded(NamedTuple):
    """The libraries of a process at one moment; ``maps`` is ``None`` if unknown."""

    maps: bytes | None

    def has(self, libraries: tuple[str, ...]) -> bool | None:
        """Return whether a library whose file name has one of these prefixes is loaded; ``None`` if unknown."""
        return None if self.maps is None else any(b"/" + library.encode() in self.maps for library in libraries)


def libraries_here(number: int | str = "self", *, processes: Path = _PROC) -> Loaded:
    """Read the loaded libraries of a process, once, because it is slow."""
    try:
        return Loaded((processes / str(number) / "maps").read_bytes())
    except OSError:
        return Loaded(None)


def first_variables(number: int | str = "self", *, processes: Path = _PROC) -> dict[str, str] | None:
    """Return the environment a process was started with, without later changes; ``None`` is unknown."""
    try:
        block = (processes / str(number) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (os.fsdecode(item).partition("=") for item in block.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def finds(number: int, path: Path, folder: Path, *, processes: Path = _PROC) -> bool:
    """Return whether a process finds a folder of this one under an absolute path. Raises :class:`OSError` if unknown.

    It is unknown where a path in a container, with a root folder or mounts of its own, has a link, which may lead
    elsewhere from here.
    """
    ours, top = folder.stat(), processes / str(number) / "root"
    seen = top.joinpath(*path.parts[1:])
    steps = (step for step in (seen, *seen.parents) if top in step.parents)
    is_other = True
    with suppress(OSError):
        pairs = ((processes / str(number) / name, processes / "self" / name) for name in ("ns/mnt", "root"))
        is_other = any(os.readlink(its) != os.readlink(own) for its, own in pairs)
    if is_other and (".." in path.parts or any(map(os.path.islink, steps))):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(seen))
    try:
        return os.path.samestat(seen.stat(), ours)
    except (FileNotFoundError, NotADirectoryError):
        return False


def maps_below(number: int, folder: Path, *, processes: Path = _PROC) -> bool:
    """Return whether a process maps a file below a folder. Raises :class:`OSError` if unknown."""
    process, ours, above = processes / str(number), folder.stat(), {"/"}
    for line in (process / "maps").read_bytes().splitlines():
        if b" /" in line:
            place = os.path.dirname(os.fsdecode(line[line.index(b"/") :]))
            while place not in above:
                above.add(place)
                place = os.path.dirname(place)
    for place in above:
        # It has no links; the files of one that is gone are still mapped.
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(f"{process}/root{place}"), ours):
                return True
    return False


def _concerned(processes: Path) -> list[int]:
    user, found = os.geteuid(), []
    for name in filter(str.isdigit, os.listdir(processes)):
        with suppress(OSError):
            if user in (0, (processes / name).stat().st_uid):
                found.append(int(name))
    return sorted(found)


def has_ended(pid: int, *, processes: Path = _PROC) -> bool:
    """Return whether a process of this user has surely ended; a zombie counts as ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    with suppress(OSError):
        return _fields_of(pid, processes)[:1] == [b"Z"]
    return False
