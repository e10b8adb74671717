"""The Python interpreters of a user: which of them could have written an entry, and could still hit it.

An interpreter is asked once, in an isolated child, for its version and its folders of packages. The answer is kept with
path, size and time of the interpreter's file, together with every version of a package ever seen there. So the entries
of an interpreter that was removed, or of a package that was replaced, can be recognised later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.locks import node
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.host.distributions import normal, versions_in
from cachectl.layers.host.mounts import mount_of

if TYPE_CHECKING:
    from subprocess import Popen

#: The name of the file with the answers, in cachectl's folder for its own state.
RECORD: Final = "pythons.json"
_NAME: Final = regex(r"(?:python|pypy)(?:3(?:\.\d+)?)?(?:\.exe)?")
_BIN: Final = "Scripts" if sys.platform == "win32" else "bin"
#: Limits on an answer.
_SECONDS: Final = 10.0
_BYTES: Final = 1 << 20
_VERSION: Final = regex(r"\d+\.\d+\.\d+\.[a-z]+\.\d+")
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
    seen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    present: bool | None = True
    lookup: Callable[[str], str | None] | None = None

    def installed(self, distribution: str) -> str | None:
        """Return the version of a distribution that this interpreter imports, ``None`` if it has none."""
        return self.packages.get(normal(distribution)) if self.lookup is None else self.lookup(distribution)

    def has_had(self, distribution: str, version: str) -> bool:
        """Return whether a version of a distribution was ever seen there."""
        return version in self.seen.get(normal(distribution), ())


class PythonRecord(NamedTuple):
    """What is kept of one interpreter; ``version`` is empty for a program that did not answer as Python 3.

    ``size`` and ``time`` are those of its file, ``times`` those of the folders of packages when ``packages`` was read
    from them; ``seen`` adds earlier versions. ``places`` are the file systems of its folder and of the folder that it
    is a link into, by :func:`_place_of`. Times are in nanoseconds of the epoch.
    """

    version: str
    folders: Sequence[str]
    size: int
    time: int
    places: Sequence[str]
    times: Sequence[int]
    packages: Mapping[str, str]
    seen: Mapping[str, Sequence[str]]


# ---------------------------------------------------------------------- which interpreters


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


def _known_pythons(environment: Environment) -> tuple[Python, ...]:
    own = own_python(environment)
    if not environment.searches_pythons:
        return (own,)
    with _records_of(environment) as records:
        with suppress(OSError):
            folders = [str(folder) for folder in environment.site]
            record = records[str(own.path)] = _updated(own.path, own.version, folders, records.get(str(own.path)))
            own = replace(own, seen=record.seen)
        found = {identity(own.path): own}
        named = environment.python_paths
        places: tuple[Iterable[str | Path], ...] = (named, candidates(environment.variables), records)
        # Looking at one may add to the records.
        for path in (Path(place) for group in places for place in tuple(group)):
            key = identity(path)
            if key not in found and (python := look(path, records, named=path in named)) is not None:
                found[key] = python
    return tuple(found.values())


def note_own(environment: Environment) -> None:
    """Record the packages of the environment's own interpreter if they have changed since the record was written."""
    if environment.searches_pythons and not environment.memo.setdefault("noted", False):
        environment.memo["noted"] = True
        if _time_of(user_state_folder(environment) / RECORD) < max(_times(environment.site)):
            pythons_of(environment)


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
            if (key := identity(path)) not in met:
                met.add(key)
                yield path


def _programs(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for path in (folder / name for name in sorted(filter(_NAME.fullmatch, os.listdir(folder)))):
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
    return not is_script and not any(map(shared_because, (path, *filter(os.path.exists, decisive))))


def identity(path: Path) -> tuple[str, str]:
    """Return what makes two paths one interpreter: the real program, and the virtual environment that it starts in."""
    folder = path.parent
    environment = next((str(one) for one in (folder, folder.parent) if (one / "pyvenv.cfg").is_file()), "")
    return os.path.realpath(path), environment and os.path.realpath(environment)


# ---------------------------------------------------------------------- one interpreter


def look(path: Path, records: dict[str, PythonRecord], *, named: bool = False) -> Python | None:
    """Return the interpreter of a path, asked unless its record is fresh; ``None`` if it does not answer.

    Only an interpreter that the user ``named`` may be a script, or a program that another user could replace.
    """
    record = records.get(str(path))
    try:
        status = path.stat()
        fresh = record is not None and (record.size, record.time) == (status.st_size, status.st_mtime_ns)
        if record is not None and fresh and (record.version or not named):
            version, folders = record.version, record.folders
        elif named or _is_safe(path):
            version, folders = _ask(path)
        else:
            return _away(path, record)
        if record is not None and record.version not in ("", version):
            if not version:
                # It may be slow today.
                return _away(path, record)
            # What an earlier Python at this path wrote is known too. Another machine may still have it.
            here = record.places == _places(path)
            places = [record.places[0]] * 2 if here else record.places
            records[f"{path} {record.version}"] = record._replace(places=places)
        now = records[str(path)] = _updated(path, version, folders, record)
    except OSError:
        return _away(path, record, None if record is None or _places(path) != record.places else False)
    return Python(path, version, now.packages, now.seen) if version else None


def _away(path: Path, record: PythonRecord | None, present: bool | None = None) -> Python | None:
    """Return an interpreter that answered once and cannot be asked now.

    It was removed, so not ``present``, if the file systems that had it are still mounted, on this machine.
    """
    return None if record is None or not record.version else Python(path, record.version, {}, record.seen, present)


def _updated(path: Path, version: str, folders: Sequence[str], before: PythonRecord | None) -> PythonRecord:
    """Return the record of an interpreter with its packages as they are now. Raises :class:`OSError`."""
    status, times, places = path.stat(), _times(folders), _places(path)
    # Another machine that has the same home may have another interpreter of this path.
    same = before is not None and before.version == version and before.places == places
    if before is not None and same and (before.folders, before.times) == (folders, times):
        return before._replace(size=status.st_size, time=status.st_mtime_ns)
    packages: dict[str, str] = {}
    for folder in folders:
        for name, number in versions_in(folder).items():
            packages.setdefault(name, number)
    # Another version of Python at the same path reads other dictionaries.
    seen = dict(before.seen) if before is not None and same else {}
    for name, number in packages.items():
        seen[name] = sorted({*seen.get(name, ()), number})
    return PythonRecord(version, folders, status.st_size, status.st_mtime_ns, places, times, packages, seen)


def _times(folders: Iterable[str | Path]) -> list[int]:
    return [0, *map(_time_of, folders)]


def _time_of(path: str | Path) -> int:
    """Return the time of the last change in nanoseconds of the epoch, 0 for a path that does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _places(path: Path) -> list[str]:
    return [_place_of(one.parent) for one in (path, Path(os.path.realpath(path)))]


def _place_of(folder: Path) -> str:
    """Return a name of the file system of a folder, or of the nearest one above it.

    Only a file system of the network has the same name on all machines: those that share a home share the record.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    device = there.stat().st_dev
    # A file system of the network has no major number.
    mount = None if os.name != "posix" or os.major(device) else mount_of(there)
    return mount.source if mount is not None and mount.is_network else f"{node()}:{device}"


def _ask(path: Path) -> tuple[str, list[str]]:
    """Start an interpreter, isolated from this process's folder and variables and from packages.

    Returns its version and its folders of packages; nothing if it does not answer as Python 3.
    """
    import json
    import subprocess
    from threading import Timer

    with subprocess.Popen(  # noqa: S603 - looked up by candidates, or named by the user
        (path, "-I", "-S", "-c", _QUESTION),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/" if os.name == "posix" else None,
        start_new_session=True,
    ) as child:
        timer = Timer(_SECONDS, _stop, (child,))
        timer.start()
        try:
            printed = child.stdout.read(_BYTES) if child.stdout else b""
        finally:
            timer.cancel()
            _stop(child)
    try:
        # A script that starts it may print before it.
        answer = json.loads(printed.splitlines()[-1])
        version, folders = str(answer["version"]), list(map(str, answer["folders"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "", []
    return (version, folders) if _VERSION.fullmatch(version) else ("", [])


def _stop(child: Popen[bytes]) -> None:
    """End a program and those that it started, which may keep its output open."""
    if sys.platform == "win32":
        child.kill()
        return
    import signal

    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


# ---------------------------------------------------------------------- the record


@contextmanager
def _records_of(environment: Environment) -> Iterator[dict[str, PythonRecord]]:
    """Yield the recorded interpreters by path; if the block succeeds and has changed them, write them."""
    import json

    file = user_state_folder(environment) / RECORD
    records = _read_records(file)
    before = dict(records)
    yield records
    if records != before:
        document = {path: record._asdict() for path, record in sorted(records.items())}
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, [json.dumps({"pythons": document}, indent=1).encode()])


def _read_records(file: Path) -> dict[str, PythonRecord]:
    """Return the recorded interpreters; none if the file is missing, damaged, or open to other users."""
    import json

    try:
        # What is named there is started.
        if shared_because(file.parent, (file.name,)):
            return {}
        found: Mapping[str, Mapping[str, Any]] = json.loads(file.read_bytes())["pythons"]
        return {path: PythonRecord(**record) for path, record in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
