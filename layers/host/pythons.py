"""The Python interpreters of a user: which of them could have written an entry, and could still hit it.

An interpreter is asked once, in an isolated child, for its version and its folders of packages. The answer is kept with
path, size and time of the interpreter's file, together with every version of a package ever seen there. So the entries
of an interpreter that was removed, or of a package that was replaced, can be recognised later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.host.distributions import normal, versions_in

#: The name of the file with the answers, in cachectl's folder for its own state.
RECORD: Final = "pythons.json"
_NAME: Final = regex(r"(?:python|pypy)(?:3(?:\.\d+)?)?(?:\.exe)?")
_SECONDS: Final = 10.0
#: Recorded for a program that is no Python 3, so that it is not started by every command.
_NO_ANSWER: Final[Mapping[str, Any]] = {"version": "", "folders": []}
#: Largest record that is read, in bytes.
_LARGEST: Final = 1 << 22
# An isolated interpreter ignores the user's own packages, but programs that it runs later do not.
_QUESTION: Final = """
import json, os, site, sys
alone = False
try:
    with open(os.path.join(sys.prefix, "pyvenv.cfg")) as file:
        alone = "true" not in [line.split("=")[1].strip().lower() for line in file if line.startswith("include-system")]
except (OSError, IndexError):
    pass
own = [] if alone else [site.getusersitepackages()]
folders = own + [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
print(json.dumps({"version": ".".join(map(str, sys.version_info)), "folders": folders}))
"""


@dataclass(frozen=True)
class Python:
    """One interpreter: its five-part ``version``, and the versions of its packages by their normal names.

    ``seen`` has every version of each package seen there so far. ``present`` is ``False`` if the interpreter has been
    removed, and ``None`` if that cannot be known, as on a file system that is not mounted. ``lookup`` replaces
    ``packages``.
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


@dataclass(frozen=True)
class Record:
    """What is kept of one interpreter: its answer, size and time of its file, and the device of its folder.

    ``times`` are the times of the folders of packages when ``packages`` was read from them; ``seen`` adds earlier
    versions. Times are in nanoseconds of the epoch.
    """

    answer: Mapping[str, Any]
    size: int
    time: int
    device: int
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
    """Return whether a path is a program, no script, that no other user could replace. Raises :class:`OSError`."""
    real = Path(os.path.realpath(path))
    if not real.is_file() or not os.access(real, os.X_OK):
        return False
    with open(real, "rb") as file:
        is_script = file.read(2) == b"#!"
    return not (is_script or any(shared_because(one.parent, (one.name,)) for one in (path, real)))


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

    file = _record_file(environment)
    records = read_records(file)
    before = dict(records)
    paths = []
    for name in names:
        found = which(name, path=environment.get("PATH")) if os.path.basename(name) == name else None
        path = Path(os.path.abspath(environment.expand(found or name)))
        if look(path, records, named=True) is None:
            message = f"--python {name}: {path} did not answer as Python 3; name an interpreter, such as bin/python"
            raise BadRequest(message)
        paths.append(path)
    if records != before:
        write_records(file, records)
    return tuple(paths)


def _known_pythons(environment: Environment) -> tuple[Python, ...]:
    own = own_python(environment)
    if not environment.searches_pythons:
        return (own,)
    file = _record_file(environment)
    records = read_records(file)
    before = dict(records)
    answer = {"version": own.version, "folders": [str(folder) for folder in environment.site]}
    with suppress(OSError):
        record = records[str(own.path)] = _updated(own.path, answer, records)
        own = replace(own, seen=record.seen)
    found = {identity(own.path): own}
    named = environment.python_paths
    for path in _paths(environment, records):
        one = identity(path)
        if one not in found and (python := look(path, records, named=path in named)) is not None:
            found[one] = python
    if records != before:
        write_records(file, records)
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
        if record is not None and record.fits(path.stat()):
            answer = record.answer
        elif named or _is_safe(path):
            answer = _ask(path)
            if record is not None and record.version != answer["version"]:
                # What an earlier Python at this path wrote is known too.
                records[f"{path} {record.version}"] = record
        else:
            return None
        now = records[str(path)] = _updated(path, answer, records)
        return Python(path, now.version, now.packages, now.seen) if now.version else None
    except OSError:
        if record is None:
            return None
        present = False if _is_removed(path, record) else None
        return Python(path, record.version, {}, record.seen, present)


def _updated(path: Path, answer: Mapping[str, Any], records: Mapping[str, Record]) -> Record:
    """Return the record of an interpreter with its packages as they are now. Raises :class:`OSError`."""
    before, status, times = records.get(str(path)), path.stat(), _times(answer["folders"])
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
    return Record(answer, status.st_size, status.st_mtime_ns, path.parent.stat().st_dev, times, packages, seen)


def _times(folders: Iterable[str | Path]) -> tuple[int, ...]:
    return (0, *map(_time_of, folders))


def _time_of(path: str | Path) -> int:
    """Return the time of the last change in nanoseconds of the epoch, 0 for a path that does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _is_removed(path: Path, record: Record) -> bool:
    """Return whether a missing file was removed: the file system that had it is still mounted."""
    for folder in path.parents:
        with suppress(OSError):
            return folder.stat().st_dev == record.device
    return False


def _ask(path: Path) -> Mapping[str, Any]:
    """Start an interpreter, isolated from the folder and the variables of this process, and return its answer."""
    import json
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - looked up by candidates, or named by the user
            [path, "-I", "-c", _QUESTION],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd="/" if os.name == "posix" else None,
            timeout=_SECONDS,
            check=True,
        )
        # A sitecustomize may print before it.
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        answer = None
    return answer if _is_answer(answer) else _NO_ANSWER


def _is_answer(answer: object) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("version"), str)
        and isinstance(answer.get("folders"), list)
        and all(isinstance(folder, str) for folder in answer["folders"])
    )


def read_records(file: Path) -> dict[str, Record]:
    """Return the recorded interpreters by path; none if the file is missing, unreadable, or open to other users."""
    import json

    try:
        if not file.is_file() or file.stat().st_size > _LARGEST or shared_because(file.parent, (file.name,)):
            return {}
        document = json.loads(file.read_bytes())
        return {path: _record(one) for path, one in document["pythons"].items() if _is_answer(one["answer"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _record(one: Mapping[str, Any]) -> Record:
    seen = {str(name): frozenset(map(str, versions)) for name, versions in one["seen"].items()}
    packages = {str(name): str(version) for name, version in one["packages"].items()}
    size, time, device = (int(one[name]) for name in ("size", "time", "device"))
    return Record(one["answer"], size, time, device, tuple(map(int, one["times"])), packages, seen)


def write_records(file: Path, records: Mapping[str, Record]) -> None:
    """Replace the file of recorded interpreters, unless it cannot be written or another user could replace it."""
    import json

    document = {
        path: {
            "answer": dict(one.answer),
            "size": one.size,
            "time": one.time,
            "device": one.device,
            "times": one.times,
            "packages": dict(sorted(one.packages.items())),
            "seen": {name: sorted(versions) for name, versions in sorted(one.seen.items())},
        }
        for path, one in sorted(records.items())
    }
    with suppress(OSError, StopIteration):
        # Another user who can write to a folder on the way would decide which file is replaced.
        if shared_because(next(folder for folder in file.parents if folder.exists())) is not None:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, [json.dumps({"pythons": document}, indent=1).encode()])
