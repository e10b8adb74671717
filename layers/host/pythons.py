"""The Python interpreters of a user: which of them could have written an entry, and could still hit it.

An interpreter is asked once, in an isolated child, for its version and its folders of packages. The answer is kept with
path, size and time of the interpreter's file, together with every version of a package ever seen there. So the entries
of an interpreter that was removed, or of a package that was replaced, can be recognised later.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers import core
from cachectl.layers.disk import atomic
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.host import distributions, processes

#: The name of the file with the answers, in cachectl's folder for its own state.
RECORD = "pythons.json"
_NAME = core.regex(r"(?:python|pypy)(?:3(?:\.\d+)?)?(?:\.exe)?")
_BIN = "Scripts" if sys.platform == "win32" else "bin"
#: Limits on an answer.
_SECONDS = 10.0
_BYTES = 1 << 20
_VERSION = core.regex(r"\d+\.\d+\.\d+\.[a-z]+\.\d+")
# Asked without ``site``, which runs what any package has written into a file ``.pth``: the folders that it would add,
# those that such a file only names included. Others may have made a pipe or a device of it. An isolated interpreter
# ignores the user's own packages, but programs that it runs later do not. Source: ``Lib/site.py`` (``venv``,
# ``addpackage``), which Debian changes.
_QUESTION = """
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


class Python(NamedTuple):
    """One interpreter: its five-part ``version``, and what returns the version of a distribution that it imports.

    ``seen`` has every version of each package seen there so far, by normal names. ``present`` is ``False`` if the
    interpreter has been removed, and ``None`` if that cannot be known: it is on a file system that is not mounted or on
    another machine, or it does not answer now.
    """

    path: Path
    version: str
    installed: Callable[[str], str | None]
    seen: Mapping[str, Sequence[str]] = {}
    present: bool | None = True

    def has_had(self, distribution: str, version: str) -> bool:
        """Return whether a version of a distribution was ever seen there."""
        return version in self.seen.get(distributions.normal(distribution), ())


class PythonRecord(NamedTuple):
    """What is kept of one interpreter; ``version`` is empty for a program that did not answer as Python 3.

    ``size`` and ``time`` (in nanoseconds of the epoch) are those of its file. ``places`` are the file systems of its
    folder and of the folder that it is a link into, by :func:`_places`. ``seen`` has the versions of its packages.
    """

    version: str
    folders: Sequence[str]
    size: int
    time: int
    places: Sequence[str]
    seen: Mapping[str, Sequence[str]]


_NEVER_ASKED = PythonRecord("", (), -1, -1, (), {})


# ---------------------------------------------------------------------- which interpreters


def own_python(environment: core.Environment) -> Python:
    """Return the interpreter of the environment, without a look at its record."""
    return Python(environment.executable, environment.python, environment.installed)


def pythons_of(environment: core.Environment) -> tuple[Python, ...]:
    """Return the known interpreters, that of the environment first; an interpreter that does not answer is left out.

    Known are those that ``environment`` names and, if it is that of a real user, those of :func:`candidates` and those
    that were known before. The answer is kept as long as the environment.
    """
    if not environment.searches_pythons:
        return (own_python(environment),)
    if "pythons" not in environment.memo:
        with _records_of(environment) as records:
            own, named = _noted(environment, records), environment.python_paths
            known = {identity(own.path): own}
            places: tuple[Iterable[str | Path], ...] = (named, candidates(environment.variables), records)
            # Looking at one may add to the records.
            for path in (Path(place) for group in places for place in tuple(group)):
                key = identity(path)
                if key not in known and (python := look(path, records, named=path in named)) is not None:
                    known[key] = python
        environment.memo["pythons"] = tuple(known.values())
    pythons: tuple[Python, ...] = environment.memo["pythons"]
    return pythons


def note_own(environment: core.Environment) -> None:
    """Record the packages of the environment's own interpreter if they have changed since the record was written."""
    if environment.searches_pythons and not environment.memo.setdefault("noted", False):
        environment.memo["noted"] = True
        newest = max(map(_time, environment.site), default=0)
        if _time(core.user_state_folder(environment) / RECORD) < newest:
            with _records_of(environment) as records:
                _noted(environment, records)


def _time(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _noted(environment: core.Environment, records: dict[str, PythonRecord]) -> Python:
    own, folders = own_python(environment), [str(folder) for folder in environment.site]
    with suppress(OSError):
        before, packages = records.get(str(own.path), _NEVER_ASKED), distributions.versions_in(folders)
        record = records[str(own.path)] = _updated(own.path, own.version, folders, packages, before)
        return own._replace(seen=record.seen)
    return own


def named_pythons(environment: core.Environment, names: Iterable[str]) -> tuple[Path, ...]:
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
                raise core.BadRequest(message)
            paths.append(path)
    return tuple(paths)


def candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the interpreters of the activated environments and those on ``PATH``.

    A script is left out, because what it starts may change without it. So is a program that another user could
    replace: looking for interpreters must not run somebody else's program.
    """
    prefixes = (variables.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    folders = [Path(prefix, _BIN) for prefix in prefixes if prefix]
    folders += map(Path, variables.get("PATH", "").split(os.pathsep))
    met = set()
    for folder in folders:
        with suppress(OSError):
            names = filter(_NAME.fullmatch, os.listdir(folder) if folder.is_absolute() else ())
            for path in map(folder.joinpath, sorted(names)):
                if (key := identity(path)) not in met and _is_safe(path):
                    met.add(key)
                    yield path


def _is_safe(path: Path) -> bool:
    """Return whether a path is a program, no script, that no other user could replace or give other modules."""
    real = Path(os.path.realpath(path))
    # What it loads before it can answer: its standard library, which the file of a virtual environment places.
    loaded = (real.parent.parent / folder / real.name for folder in ("lib", "lib64"))
    decisive = (*loaded, *(folder / "pyvenv.cfg" for folder in (path.parent, path.parent.parent)))
    with suppress(OSError):
        if real.is_file() and os.access(real, os.X_OK):
            with open(real, "rb") as file:
                is_script = file.read(2) == b"#!"
            # Another user may own a link in the middle of the way.
            return not is_script and not any(map(shared_because, (path, *filter(os.path.exists, decisive))))
    return False


def identity(path: Path) -> tuple[str, str]:
    """Return what makes two paths one interpreter: the real program, and the virtual environment that it starts in."""
    folders = (folder for folder in (path.parent, path.parent.parent) if (folder / "pyvenv.cfg").is_file())
    return os.path.realpath(path), next(map(os.path.realpath, folders), "")


# ---------------------------------------------------------------------- one interpreter


def look(path: Path, records: dict[str, PythonRecord], *, named: bool = False) -> Python | None:
    """Return the interpreter of a path, asked unless its record is fresh; ``None`` if it does not answer.

    Only an interpreter that the user ``named`` may be a script, or a program that another user could replace.
    """
    record = records.get(str(path), _NEVER_ASKED)
    # It answered once, if it cannot be asked now.
    away = Python(path, record.version, lambda _: None, record.seen, None) if record.version else None
    try:
        status = path.stat()
        is_fresh = (record.size, record.time) == (status.st_size, status.st_mtime_ns)
        if is_fresh and (record.version or not named):
            version, folders = record.version, record.folders
        elif named or _is_safe(path):
            version, folders = _ask(path)
        else:
            return away
        if record.version not in ("", version):
            if not version:
                # It may be slow today.
                return away
            # What an earlier Python at this path wrote is known too. Another machine may still have it.
            here = record.places == _places(path)
            places = [record.places[0]] * 2 if here else record.places
            records[f"{path} {record.version}"] = record._replace(places=places)
        packages = distributions.versions_in(folders)
        updated = records[str(path)] = _updated(path, version, folders, packages, record)
    except OSError:
        # It was removed if the file systems that had it are still mounted, on this machine.
        return away._replace(present=False) if away is not None and _places(path) == record.places else away
    if not version:
        return None
    return Python(path, version, lambda name: packages.get(distributions.normal(name)), updated.seen)


def _updated(
    path: Path, version: str, folders: Sequence[str], packages: Mapping[str, str], before: PythonRecord
) -> PythonRecord:
    """Return the record of an interpreter with its packages as they are now. Raises :class:`OSError`."""
    status, places = path.stat(), _places(path)
    # Another version of Python at the same path reads other dictionaries, and another machine that has the same home
    # may have another interpreter there.
    seen = dict(before.seen) if (before.version, before.places) == (version, places) else {}
    for name, number in packages.items():
        seen[name] = sorted({*seen.get(name, ()), number})
    return PythonRecord(version, folders, status.st_size, status.st_mtime_ns, places, seen)


def _places(path: Path) -> list[str]:
    """Return names of the file systems of a path's folder, or the nearest above it, and of that which it leads to.

    Only a file system of the network has the same name on all machines: those that share a home share the record.
    """
    places = []
    for place in (path, Path(os.path.realpath(path))):
        folder = next(filter(os.path.exists, place.parents))
        device = folder.stat().st_dev
        # A file system of the network has no major number.
        kind, source = ("", "") if os.name != "posix" or os.major(device) else processes.mount_of(folder)
        places.append(source if kind in processes.NETWORK else f"{core.node()}:{device}")
    return places


def _ask(path: Path) -> tuple[str, list[str]]:
    """Start an interpreter, isolated from this process's folder and variables and from packages.

    Returns its version and its folders of packages; nothing if it does not answer as Python 3.
    """
    import signal
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

        def stop() -> None:
            """End it and those that it started, which may keep its output open."""
            if sys.platform == "win32":
                child.kill()
                return
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = Timer(_SECONDS, stop)
        timer.start()
        try:
            printed = child.stdout.read(_BYTES) if child.stdout else b""
        finally:
            timer.cancel()
            stop()
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        # A script that starts it may print before it.
        answer = json.loads(printed.splitlines()[-1])
        version, folders = str(answer["version"]), list(map(str, answer["folders"]))
        if _VERSION.fullmatch(version):
            return version, folders
    return "", []


# ---------------------------------------------------------------------- the record


@contextmanager
def _records_of(environment: core.Environment) -> Iterator[dict[str, PythonRecord]]:
    """Yield the recorded interpreters by path; if the block succeeds and has changed them, write them.

    A record that is missing, damaged, or open to other users has none.
    """
    file = core.user_state_folder(environment) / RECORD
    records: dict[str, PythonRecord] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # What is named there is started.
        if not shared_because(file.parent, (file.name,)):
            document = json.loads(file.read_bytes())["pythons"]
            records = {path: PythonRecord(**record) for path, record in document.items()}
    before = dict(records)
    yield records
    if records != before:
        document = {path: record._asdict() for path, record in sorted(records.items())}
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.replace_file(file, [json.dumps({"pythons": document}, indent=1).encode()])
