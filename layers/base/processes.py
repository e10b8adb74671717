"""Running programs with their loaded libraries and open files, and mounts, if the platform shows them in ``/proc``.

``processes`` is the folder in which the system shows them. Only Linux shows the maps of a process. Root examines all
processes, other users only their own: one that hides its maps from its own user runs with other privileges, and does
not write to this user's caches.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.environment import MOUNTS, Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import printable

_PROC = Path("/proc")
#: A lock in ``/proc/locks``, see proc(5): kind, holder, device and inode. Lines of waiting processes have an arrow.
_LOCK = regex(rb"\d+: (?:POSIX|FLOCK) +\w+ +(READ|WRITE) +([1-9]\d*) (\w+:\w+):(\d+) ")
#: Seconds that the kernel takes to execute another program in a process.
_MOMENT = 0.02
#: The most processes that a phrase names, and the most characters of each command.
_NAMED = 5
_LONGEST = 60
#: File systems on which locks and access times of other machines are unreliable. Only MIOpen and comgr have such lists
#: and avoid these places; sqlite, PoCL, CUDA, Mesa and NEO use whatever the variables name.
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p", "glusterfs"}
    | {"coda", "ocfs2", "gfs2", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs"}
)
#: File systems that only one machine has mounted.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "overlay", "tmpfs", "ramfs"})
#: File systems of a container's own layer, and in memory.
_LAYERED, _IN_MEMORY = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"}), frozenset({"tmpfs", "ramfs"})
#: Files in these folders are not meant to stay.
TEMPORARY_FOLDERS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - only compared


def read(number: int | str, name: str, processes: Path = _PROC) -> bytes | None:
    """Return a file of a process, such as ``maps``; ``None`` if the process has ended or is hidden."""
    try:
        return (processes / str(number) / name).read_bytes()
    except OSError:
        return None


def environment_of(number: int | str, processes: Path = _PROC) -> bytes | None:
    """Return the environment with which a process was started, as bytes; ``None`` if it is hidden."""
    block = read(number, "environ", processes)
    with suppress(OSError):
        # A process that is just executing another program shows none; a kernel thread has none, and no program.
        if block == b"" and os.readlink(processes / str(number) / "exe"):
            time.sleep(_MOMENT)
            block = read(number, "environ", processes)
    return block


def stat_fields(number: int, processes: Path = _PROC) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on, see proc(5); none if the process is hidden."""
    return (read(number, "stat", processes) or b"").rpartition(b") ")[2].split()


def children_of(number: int) -> set[int]:
    """Return the child processes of a process, which can end at any moment."""
    children: set[int] = set()
    with suppress(OSError):
        for task in os.listdir(_PROC / f"{number}/task"):
            children.update(map(int, (read(number, f"task/{task}/children") or b"").split()))
    return children


def seconds_run(pid: int) -> float | None:
    """Return the CPU time in seconds of the threads of a process; ``None`` if it is hidden."""
    seconds: float | None = None
    with suppress(OSError):
        for task in os.listdir(_PROC / f"{pid}/task"):
            # The first field is the CPU time in nanoseconds, see proc(5).
            if fields := (read(pid, f"task/{task}/schedstat") or b"").split():
                seconds = (seconds or 0.0) + int(fields[0]) / 1e9
    return seconds


def using(libraries: tuple[str, ...], processes: Path = _PROC) -> tuple[int, ...] | None:
    """Return the processes that map a library whose file name has one of these prefixes; ``None`` if unknown."""
    return _passing(lambda process: has_loaded(libraries, read(process.name, "maps", processes)), processes)


def _passing(test: Callable[[Path], bool | None], processes: Path) -> tuple[int, ...] | None:
    """Return the processes whose folders pass a test; ``None`` if the platform does not show processes."""
    if not (processes / "self" / "maps").exists():
        return None
    user, passed = os.geteuid(), []
    for name in sorted(filter(str.isdigit, os.listdir(processes)), key=int):
        with suppress(OSError):
            if user in (0, (processes / name).stat().st_uid) and test(processes / name):
                passed.append(int(name))
    return tuple(passed)


def open_elsewhere(environment: Environment, path: Path) -> str | None:
    """Return who has a file open, or may have; ``None`` if certainly nobody has, or there is no file."""
    if not os.path.lexists(path):
        return None
    if (kind := network_file_system(environment, path)) is not None:
        return f"is on {kind}, and a program on another machine may have it open: end those, and move it by hand"
    status = path.lstat()
    # Processes of other users are hidden.
    may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or status.st_uid != os.geteuid()
    if may_write and not environment.superuser:
        return "may be open in a program of another user who can write to it: do it as root, or by hand"

    users = _passing(lambda process: _has_open(process, status), environment.processes)
    return None if users == () else f"is open in {process_names(users)}, which must end first"


def mentioning(folder: Path, processes: Path) -> bool | None:
    """Return whether any process was started with a folder's path in its environment, or has a file in it open."""
    mark = os.fsencode(folder)

    def is_in(link: Path) -> bool:
        opened = Path(os.readlink(link))
        return folder in (opened, *opened.parents)

    def mentions(process: Path) -> bool:
        return mark in (environment_of(process.name, processes) or b"") or _any_open(process, is_in)

    users = _passing(mentions, processes)
    return None if users is None else bool(users)


def _any_open(process: Path, test: Callable[[Path], bool]) -> bool:
    """Return whether a link to the working directory or an open file passes a test. Raises :class:`OSError`."""
    links = [process / "cwd"]
    with suppress(FileNotFoundError, ProcessLookupError):
        links += (process / "fd").iterdir()
    for link in links:
        with suppress(FileNotFoundError, ProcessLookupError):
            if test(link):
                return True
    return False


def _has_open(process: Path, status: os.stat_result) -> bool:
    with suppress(OSError):
        return _any_open(process, lambda link: os.path.samestat(link.stat(), status))
    return False


def writers_of(status: os.stat_result, processes: Path = _PROC) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the processes that have a file open for writing, and those of its owner that hide their files."""

    def writes(link: Path) -> bool:
        # The link has the access mode of the open file.
        return bool(link.lstat().st_mode & stat.S_IWUSR) and os.path.samestat(link.stat(), status)

    shown, hidden, owner = list[int](), list[int](), rb"^Uid:.*\t%d\b" % status.st_uid
    for pid in sorted(map(int, filter(str.isdigit, os.listdir(processes) if processes.exists() else ()))):
        writing = None
        with suppress(OSError):
            writing = _any_open(processes / str(pid), writes)
        if writing:
            shown.append(pid)
        # Root owns the folder of a process that has changed its user, but this line has the real user.
        elif writing is None and re.search(owner, read(pid, "status", processes) or b"", re.MULTILINE):
            hidden.append(pid)
    return tuple(shown), tuple(hidden)


def lockers_of(paths: Iterable[Path], *, kind: bytes = b"WRITE", processes: Path = _PROC) -> tuple[int, ...]:
    """Return the processes that have one of these files locked for writing, or with ``READ`` for reading."""
    locks = _LOCK.findall(read("", "locks", processes) or b"")
    pids = set[int]()
    for path in paths if locks else ():
        with suppress(OSError):
            status = path.stat()
            own = b"%02x:%02x" % (os.major(status.st_dev), os.minor(status.st_dev))
            same = ((pid, device) for how, pid, device, inode in locks if (how, int(inode)) == (kind, status.st_ino))
            # On btrfs, stat(2) gives another device than this list.
            pids.update(int(pid) for pid, at in same if at == own or _has_open(processes / pid.decode(), status))
    return tuple(sorted(pids))


def start_of(pid: int, processes: Path) -> int | None:
    """Return the start of a process in clock ticks since boot; ``None`` if it is unknown or the process has ended."""
    fields = stat_fields(pid, processes)
    return None if fields[:1] in ([], [b"Z"]) else int(fields[19])


def age_of(pid: int, processes: Path) -> float | None:
    """Return the age of a process in seconds; ``None`` if it is unknown or the process has ended."""
    ticks = start_of(pid, processes)
    # Only Linux has this clock. In some containers, ``/proc/uptime`` is the container's.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if ticks is None or clock is None else time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    """Return whether a process of this user has certainly ended; a zombie counts as ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return stat_fields(pid)[:1] == [b"Z"]


def process_names(users: tuple[int, ...] | None, processes: Path = _PROC) -> str:
    """Return a phrase for processes: ``PID 4711 (python train.py)``."""
    if users is None:
        return "programs that this platform hides"
    shown = []
    for pid in users[:_NAMED]:
        program, *words = (read(pid, "cmdline", processes) or b"").rstrip(b"\0").split(b"\0")
        line = b" ".join((os.path.basename(program), *words)) or (read(pid, "comm", processes) or b"").strip()
        command = printable(os.fsdecode(line))
        command = f"{command[:_LONGEST]}…" if len(command) > _LONGEST else command
        shown.append(f"{pid} ({command})" if command else str(pid))
    return f"PID{'s' * (len(users) > 1)} {', '.join(shown)}{'…' * (len(users) > _NAMED)}"


def has_loaded(libraries: tuple[str, ...], maps: bytes | None) -> bool | None:
    """Return whether the ``maps`` of a process have a library with one of these prefixes; ``None`` if unknown."""
    return None if maps is None else any(b"/" + library.encode() in maps for library in libraries)


def first_variables(number: int | str = "self", processes: Path = _PROC) -> dict[str, str] | None:
    """Return the environment that a process was started with, without later changes; ``None`` if unknown."""
    if (block := environment_of(number, processes)) is None:
        return None
    pairs = (os.fsdecode(item).partition("=") for item in block.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def finds(number: int, path: Path, folder: Path, processes: Path) -> bool:
    """Return whether an absolute path leads a process to this process's folder. Raises :class:`OSError` if unknown.

    It is unknown for a process with its own root folder or mounts, such as a container's, if the path has links: these
    may lead elsewhere when followed from here.
    """
    ours, top = folder.stat(), processes / str(number) / "root"
    shown = top.joinpath(*path.parts[1:])
    is_other = True
    with suppress(OSError):
        pairs = ((processes / str(number) / name, processes / "self" / name) for name in ("ns/mnt", "root"))
        is_other = any(os.readlink(its) != os.readlink(own) for its, own in pairs)
    steps = (step for step in (shown, *shown.parents) if top in step.parents)
    if is_other and (".." in path.parts or any(map(os.path.islink, steps))):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(shown))
    try:
        return os.path.samestat(shown.stat(), ours)
    except (FileNotFoundError, NotADirectoryError):
        return False


def maps_below(number: int, folder: Path, processes: Path) -> bool:
    """Return whether a process maps a file below a folder. Raises :class:`OSError` if unknown."""
    process, ours, above = processes / str(number), folder.stat(), {"/"}
    for line in (process / "maps").read_bytes().splitlines():
        if b" /" in line:
            place = os.path.dirname(os.fsdecode(line[line.index(b"/") :]))
            while place not in above:
                above.add(place)
                place = os.path.dirname(place)
    for place in above:
        # These paths have no links. A file stays mapped after its folder was removed.
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(f"{process}/root{place}"), ours):
                return True
    return False


# ---------------------------------------------------------------------- mounts


def network_file_system(environment: Environment, path: Path, types: frozenset[str] = NETWORK) -> str | None:
    """Return the type of a path's file system if it is one of the network ``types``, else ``None``."""
    kind = mount_of(path, mounts=environment.mounts).kind
    return kind if kind in types else None


def lost_with(environment: Environment, path: Path) -> str | None:
    """Return what a path is lost with, a container or the home's memory; ``None`` if it persists or is temporary."""
    mount = mount_of(path, mounts=environment.mounts)
    if any(map(path.is_relative_to, (environment.temporary, *TEMPORARY_FOLDERS))):
        return None
    if mount.kind in _IN_MEMORY and path.is_relative_to(environment.home_folder):
        return f"the memory in which the home is ({mount.kind})"
    if mount.kind in _LAYERED and mount.point == "/":
        return f"the container, in whose own layer it is ({mount.kind})"
    return None


class Mount(NamedTuple):
    """A mount: type, source (a device or a server's export), and its folder ``root`` at ``point``; empty is unknown."""

    kind: str = ""
    source: str = ""
    root: str = ""
    point: str = ""


def mount_of(path: Path, *, mounts: Path = MOUNTS) -> Mount:
    """Return the mount of a path."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return Mount()
    real, mount = os.path.realpath(path), Mount()
    for line in lines:
        before, _, after = line.partition(" - ")
        root, point, *_ = *before.split(" ")[3:5], "", ""
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount at the same point hides the earlier one.
        if point and is_above and len(point) >= len(mount.point):
            kind, source, *_ = *after.split(" "), "", ""
            mount = Mount(kind, source, root, point)
    return mount
