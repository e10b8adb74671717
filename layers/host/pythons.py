"""The Python interpreters of a user: which of them could have written an entry, and could still hit it.

An interpreter is asked once, in an isolated child, for its version and its folders of packages. The answer is kept with
path, size and time of the interpreter's file, together with every version of a package ever seen there. So the entries
of an interpreter that was removed, or of a package that was replaced, can be recognised later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.locks import node
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.host.distributions import normal, versions_in
from cachectl.layers.host.mounts import mount_of

#: The name of the file with the answers, in cachectl's folder for its own state.
RECORD: Final = "pythons.json"
_NAME: Final = regex(r"(?:python|pypy)(?:3(?:\.\d+)?)?(?:\.exe)?")
_SECONDS: Final = 10.0
#: Recorded for a program that is no Python 3, so that it is not started by every command.
_NO_ANSWER: Final[Mapping[str, Any]] = {"version": "", "folders": []}
#: Largest record that is read, and largest answer of an interpreter, in bytes.
_LARGEST: Final = 1 << 22
_LONGEST_ANSWER: Final = 1 << 20
_VERSION: Final = regex(r"(?:\d+\.\d+\.\d+\.[a-z]+\.\d+)?")
# Asked without ``site``, which runs what any package has written into a file ``.pth``: the folders that it would add,
# those that such a file only names included. Others may have made a pipe or a device of it. An isolated interpreter
# ignores the user's own packages, but programs that it runs later do not. Source: ``Lib/site.py`` (``venv``,
# ``addpackage``), which Debian changes.
_QUESTION: Final = """
import json, os, site, sys
PACKAGES = ("site-packages", "dist-packages")
folders, alone, here = [], False, os.path.dirname(os.path.abspath(sys.executable))
for place in here, os.path.dirname(here):
    if os.path.isfile(os.path.join(place, "pyvenv.cfg")):
        with open(os.path.join(place, "pyvenv.cfg"), errors="replace") as file:
            named = [line.partition("=")[2].strip().lower() for line in file if line.startswith("include-system")]
        alone = "true" not in named
        sys.prefix = sys.exec_prefix = os.path.dirname(here)
        folders += site.getsitepackages([sys.prefix])
        break
if not alone:
    folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])]
found = []
for folder in filter(lambda folder: folder.endswith(PACKAGES), folders):
    found.append(folder)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if name.endswith(".pth") and not name.startswith(".") and os.path.isfile(path):
            with open(path, errors="replace") as file:
                lines = file.read(1 << 16).split("\\n")
            texts = [line.strip() for line in lines if not line.startswith(("#", "import ", "import\\t"))]
            found += [os.path.join(folder, text) for text in texts if text.endswith(PACKAGES)]
print(json.dumps({"version": ".".join(map(str, sys.version_info)), "folders": list(dict.fromkeys(found))}))
"""


@dataclass(frozen=True)
class Python:
    """One interpreter: its five-part ``version``, and the versions of its packages by their normal names.

    ``seen`` has every version of each package seen there so far. ``present`` is ``False`` if the interpreter has been
    removed, and ``None`` if that cannot be known: it is on a file system that is not mounted or on another machine, or
    it does not answer now. ``lookup`` replaces ``packages``.
    """

    path: Path
    version: str
    packages: Mapping[str, str] = field(default_factory=dict)
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    present: bool | None = True
    lookup: Callable[[str], str | None] | None = None

    def installed(self, distribution: str) -> str | None:
        """Return the version of a distribution that this interpreter imports, ``None`` if it has none."""
        return self.packages.get(normal(distribution)) if self.lookup is None else self.lookup(distribution)

    def has_had(self, distribution: str, version: str) -> bool:
        """Return whether a version of a distribution was ever seen there."""
        return version in self.seen.get(normal(distribution), ())


class Record(NamedTuple):
    """What is kept of one interpreter: its answer, size and time of its file.

    ``places`` are the file systems of its folder and of the folder that it is a link into, by :func:`_place_of`.
    ``times`` are the times of the folders of packages when ``packages`` was read from them; ``seen`` adds earlier
    versions. Times are in nanoseconds of the epoch.
    """

    answer: Mapping[str, Any]
    size: int
    time: int
    places: tuple[str, ...]
    times: tuple[int, ...]
    packages: Mapping[str, str]
    seen: Mapping[str, frozenset[str]]

    @property
    def version(self) -> str:
        """The five-part version, empty for a program that did not answer."""
        version: str = self.answer["version"]
        return version

    def fits(self, status: os.stat_result) -> bool:
        """Return whether the interpreter's file is the one that was asked."""
        return (self.size, self.time) == (status.st_size, status.st_mtime_ns)


def candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the interpreters of the activated environments and those on ``PATH``.

    A script is left out, because what it starts may change without it. So is a program that another user could
    replace: looking for interpreters must not run somebody else's program.
    """
    prefixes = [Path(variables[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if variables.get(name)]
    named = map(Path, variables.get("PATH", "").split(os.pathsep))
    met = set()
    for folder in (*(prefix / _BIN for prefix in prefixes), *named):
        for path in _programs(folder) if folder.is_absolute() else ():
            if (one := identity(path)) not in met:
                met.add(one)
                yield path


_BIN: Final = "Scripts" if sys.platform == "win32" else "bin"


def _programs(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return
    for path in (folder / name for name in names):
        with suppress(OSError):
            if _is_safe(path):
                yield path


def _is_safe(path: Path) -> bool:
    """Return whether a path is a program, no script, that no other user could replace or give other modules.

    Raises :class:`OSError`.
    """
    real = Path(os.path.realpath(path))
    if not real.is_file() or not os.access(real, os.X_OK):
        return False
    with open(real, "rb") as file:
        is_script = file.read(2) == b"#!"
    # What it loads before it can answer: its standard library, which the file of a virtual environment places.
    loaded = (real.parent.parent / folder / real.name for folder in ("lib", "lib64"))
    decisive = (*loaded, *(folder / "pyvenv.cfg" for folder in (path.parent, path.parent.parent)))
    # Another user may own a link in the middle of the way.
    return not is_script and not any(shared_because(one) for one in (path, *filter(os.path.exists, decisive)))


def identity(path: Path) -> tuple[str, str]:
    """Return what makes two paths one interpreter: the real program, and the virtual environment that it starts in."""
    folder = path.parent
    environment = next((str(one) for one in (folder, folder.parent) if (one / "pyvenv.cfg").is_file()), "")
    return os.path.realpath(path), environment and os.path.realpath(environment)


def own_python(environment: Environment) -> Python:
    """Return the interpreter of the environment, without a look at its record."""
    return Python(environment.executable, environment.python, lookup=environment.installed)


def pythons_of(environment: Environment) -> tuple[Python, ...]:
    """Return the known interpreters, that of the environment first; an interpreter that does not answer is left out.

    Known are those that ``environment`` names and, if it is that of a real user, those of :func:`candidates` and those
    that were known before. The answer is kept as long as the environment.
    """
    known: tuple[Python, ...] | None = environment.memo.get("pythons")
    if known is None and hasattr(os, "geteuid") and os.geteuid() != os.getuid():
        # While the superuser works with the rights of another user, that user's programs would get the superuser's.
        return (own_python(environment),)
    if known is None:
        known = environment.memo["pythons"] = _known_pythons(environment)
    return known


def note_own(environment: Environment) -> None:
    """Record the packages of the environment's own interpreter if they have changed since the record was written."""
    if environment.searches_pythons and not environment.memo.setdefault("noted", False):
        environment.memo["noted"] = True
        if "pythons" not in environment.memo and _time_of(_record_file(environment)) < max(_times(environment.site)):
            pythons_of(environment)


def _record_file(environment: Environment) -> Path:
    return user_state_folder(environment) / RECORD


def named_pythons(environment: Environment, names: Iterable[str]) -> tuple[Path, ...]:
    """Return the paths of interpreters that a user named, by path or by a name on ``PATH``.

    Raises :class:`BadRequest` for one that neither answers nor answered before.
    """
    from shutil import which

    paths = []
    with _records_of(environment) as records:
        for name in names:
            found = which(name, path=environment.get("PATH")) if os.path.basename(name) == name else None
            path = Path(os.path.abspath(environment.expand(found or name)))
            if look(path, records, named=True) is None:
                message = f"--python {name}: {path} did not answer as Python 3; name an interpreter, such as bin/python"
                raise BadRequest(message)
            paths.append(path)
    return tuple(paths)


@contextmanager
def _records_of(environment: Environment) -> Iterator[dict[str, Record]]:
    """Yield the recorded interpreters; if the block succeeds and has changed them, write them."""
    file = _record_file(environment)
    records = read_records(file)
    before = dict(records)
    yield records
    if records != before:
        write_records(file, records)


def _known_pythons(environment: Environment) -> tuple[Python, ...]:
    own = own_python(environment)
    if not environment.searches_pythons:
        return (own,)
    answer = {"version": own.version, "folders": [str(folder) for folder in environment.site]}
    with _records_of(environment) as records:
        with suppress(OSError):
            record = records[str(own.path)] = _updated(own.path, answer, records)
            own = replace(own, seen=record.seen)
        found = {identity(own.path): own}
        for path in _paths(environment, records):
            one = identity(path)
            named = path in environment.python_paths
            if one not in found and (python := look(path, records, named=named)) is not None:
                found[one] = python
    return tuple(found.values())


def _paths(environment: Environment, records: Mapping[str, Record]) -> Iterator[Path]:
    yield from environment.python_paths
    yield from candidates(environment.variables)
    # Looking at the others may have added to the records.
    yield from map(Path, tuple(records))


def look(path: Path, records: dict[str, Record], *, named: bool = False) -> Python | None:
    """Return the interpreter of a path, asked unless its record is fresh; ``None`` if it does not answer.

    Only an interpreter that the user ``named`` may be a script, or a program that another user could replace.
    """
    record = records.get(str(path))
    try:
        if record is not None and record.fits(path.stat()) and (record.version or not named):
            answer = record.answer
        elif named or _is_safe(path):
            answer = _ask(path)
            if not answer["version"] and (earlier := _unknown(path, record)) is not None:
                # It may be slow today.
                return earlier
            if record is not None and record.version != answer["version"]:
                # What an earlier Python at this path wrote is known too. Another machine may still have it.
                here = record.places == _places(path)
                places = (record.places[0],) * 2 if here else record.places
                records[f"{path} {record.version}"] = record._replace(places=places)
        else:
            return _unknown(path, record)
        now = records[str(path)] = _updated(path, answer, records)
        return Python(path, now.version, now.packages, now.seen) if now.version else None
    except OSError:
        if record is None:
            return None
        present = False if _is_removed(path, record) else None
        return Python(path, record.version, {}, record.seen, present)


def _unknown(path: Path, record: Record | None) -> Python | None:
    """Return an interpreter that answered once and cannot be asked now."""
    return Python(path, record.version, {}, record.seen, None) if record is not None and record.version else None


def _updated(path: Path, answer: Mapping[str, Any], records: Mapping[str, Record]) -> Record:
    """Return the record of an interpreter with its packages as they are now. Raises :class:`OSError`."""
    before, status, times, places = records.get(str(path)), path.stat(), _times(answer["folders"]), _places(path)
    if before is not None and before.places != places:
        # It is of another machine that has the same home.
        before = None
    if before is not None and (before.answer, before.times) == (answer, times) and before.fits(status):
        return before
    packages: dict[str, str] = {}
    for folder in answer["folders"]:
        for name, version in versions_in(folder).items():
            packages.setdefault(name, version)
    # Another version of Python at the same path reads other dictionaries.
    seen = dict(before.seen) if before is not None and before.version == answer["version"] else {}
    for name, version in packages.items():
        seen[name] = seen.get(name, frozenset()) | {version}
    return Record(answer, status.st_size, status.st_mtime_ns, places, times, packages, seen)


def _times(folders: Iterable[str | Path]) -> tuple[int, ...]:
    return (0, *map(_time_of, folders))


def _time_of(path: str | Path) -> int:
    """Return the time of the last change in nanoseconds of the epoch, 0 for a path that does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _is_removed(path: Path, record: Record) -> bool:
    """Return whether a missing file was removed: the file systems that had it are still mounted, on this machine."""
    return _places(path) == record.places


def _places(path: Path) -> tuple[str, ...]:
    return tuple(_place_of(one.parent) for one in (path, Path(os.path.realpath(path))))


def _place_of(folder: Path) -> str:
    """Return a name of the file system of a folder, or of the nearest one above it.

    Only a file system of the network has the same name on all machines: those that share a home share the record.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    device = there.stat().st_dev
    # A file system of the network has no major number.
    mount = None if os.name != "posix" or os.major(device) else mount_of(there)
    return mount.source if mount is not None and mount.is_network else f"{node()}:{device}"


def _ask(path: Path) -> Mapping[str, Any]:
    """Start an interpreter, isolated from this process's folder and variables and from packages; return its answer."""
    import json

    try:
        # A script that starts it may print before it.
        answer = json.loads(_output_of(path, "-I", "-S", "-c", _QUESTION).splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        answer = None
    return answer if _is_answer(answer) else _NO_ANSWER


def _output_of(*command: str | Path) -> bytes:
    """Return what a program prints; nothing if it fails, prints too much, or runs too long. Raises :class:`OSError`."""
    import subprocess
    from threading import Thread

    printed = bytearray()
    with subprocess.Popen(  # noqa: S603 - looked up by candidates, or named by the user
        command,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/" if os.name == "posix" else None,
    ) as child:

        def read() -> None:
            # It is closed if the program took too long.
            with suppress(OSError, ValueError):
                while child.stdout and len(printed) <= _LONGEST_ANSWER and (piece := child.stdout.read(1 << 16)):
                    printed.extend(piece)

        # Another process may keep the pipe open after the program has ended.
        reader = Thread(target=read, daemon=True)
        try:
            reader.start()
            reader.join(_SECONDS)
            with suppress(subprocess.TimeoutExpired):
                child.wait(1 if len(printed) <= _LONGEST_ANSWER else 0)
        finally:
            child.kill()
    return b"" if child.returncode or len(printed) > _LONGEST_ANSWER else bytes(printed)


def _is_answer(answer: object) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("version"), str)
        and _VERSION.fullmatch(answer["version"]) is not None
        and isinstance(answer.get("folders"), list)
        and all(isinstance(folder, str) and _is_path(folder) for folder in answer["folders"])
    )


def _is_path(text: str) -> bool:
    """Return whether a text can be the path of a file."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeError:
        return False


def read_records(file: Path) -> dict[str, Record]:
    """Return the recorded interpreters by path; none if the file is missing, unreadable, or open to other users."""
    import json

    try:
        if not file.is_file() or file.stat().st_size > _LARGEST or shared_because(file.parent, (file.name,)):
            return {}
        found = json.loads(file.read_bytes())["pythons"].items()
        return {
            path: _record(one)
            for path, one in found
            if os.path.isabs(path) and _is_path(path) and _is_answer(one["answer"])
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {}


def _record(one: Mapping[str, Any]) -> Record:
    seen = {str(name): frozenset(map(str, versions)) for name, versions in one["seen"].items()}
    packages = {str(name): str(version) for name, version in one["packages"].items()}
    size, time = (int(one[name]) for name in ("size", "time"))
    places = tuple(map(str, one["places"]))
    return Record(one["answer"], size, time, places, tuple(map(int, one["times"])), packages, seen)


def write_records(file: Path, records: Mapping[str, Record]) -> None:
    """Replace the file of recorded interpreters, unless it cannot be written or another user could replace it."""
    import json

    document = {
        path: {
            "answer": dict(one.answer),
            "size": one.size,
            "time": one.time,
            "places": one.places,
            "times": one.times,
            "packages": dict(sorted(one.packages.items())),
            "seen": {name: sorted(versions) for name, versions in sorted(one.seen.items())},
        }
        for path, one in sorted(records.items())
    }
    with suppress(OSError):
        # Another user who can write to a folder on the way would decide which file is replaced.
        if shared_because(nearest(file.parent)) is not None:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, [json.dumps({"pythons": document}, indent=1).encode()])
