"""The Python interpreters of a user: which of them could have written an entry, and could still hit it.

No interpreter is started, because that may run code of others. The version is in the bytes of the program or of its
library; metadata in the folders of packages lists the packages. An interpreter that another user could change, or that
cannot be read, is unknown. The record of this host keeps what was seen.

Sources: ``Modules/getpath.py`` (the base of a virtual environment), ``Lib/site.py`` (folders of packages, ``.pth``),
which Debian and Fedora change.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.environment import Environment, answered_once
from cachectl.layers.base.errors import BadRequest, reason_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk import distributions, plain
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.host.record import record_of

#: What the record calls interpreters, and files whose bytes contain the version of one.
PRODUCT, _LIBRARY = "Python", "Python library"
_PROGRAM = regex(r"(?:python|pypy)(?:[23](?:\.\d+)?t?)?(?:\.exe)?")
#: The name of a real program, or of a folder of modules; free-threaded builds have a ``t``, old builds other letters.
_RELEASE = regex(r"(?P<name>(?:python|pypy)(?P<minor>[23]\.\d+)t?)[a-z]*")
#: What follows the minor version in C's ``PY_VERSION``, which a linker may store as the end of a longer string.
_PATCH = regex(rb'(\d+)(?:(a|b|rc)(\d+))?\+?(?:\0|"\r?\n)')
_LEVELS = {None: "final", b"a": "alpha", b"b": "beta", b"rc": "candidate"}
_BIN = "Scripts" if sys.platform == "win32" else "bin"
_CONFIGURATION, _INCLUDES = "pyvenv.cfg", "include-system-site-packages"
#: The installations of pyenv, and of asdf and mise, next to a folder of shims.
_BEHIND_SHIMS = ("versions/*/bin", "installs/python/*/bin")
#: Where an installation has its library.
_LIBRARIES = ("lib", "lib64", "lib/*-linux-gnu*")
#: The prefixes of lines in a ``.pth`` file that name no folder.
_NO_FOLDER = ("#", "import ", "import\t")
#: The most bytes of a program or library, and of a text; the most virtual environments that are made from one another.
_LARGEST, _LONGEST, _NESTED = 1 << 28, 1 << 16, 10


class Python(NamedTuple):
    """An interpreter: its five-part ``version``, and a function that returns the version of an installed distribution.

    ``reason`` says why it, or its packages, cannot be read now; then ``version`` may be unknown, which is empty.
    ``folders`` are those of its packages, none if its files were not examined.
    """

    path: Path
    version: str
    installed: Callable[[str], str | None] = lambda _: None
    reason: str | None = None
    folders: tuple[str, ...] = ()

    @property
    def present(self) -> bool | None:
        """Return ``True`` if it can be read, else ``None``: other programs may be able to start it."""
        return True if self.reason is None else None


class _Parts(NamedTuple):
    """The files of an interpreter: its real ``program``, the prefix of its ``base``, and its ``virtual`` environment.

    ``name`` is that of its folder of modules. ``decisive`` are the files that say where the others are.
    """

    program: Path
    name: str
    minor: str
    base: Path
    virtual: Path | None
    decisive: tuple[Path, ...]


# ---------------------------------------------------------------------- which interpreters


def own_python(environment: Environment) -> Python:
    """Return the interpreter of the environment, without examining its files."""
    return Python(environment.executable, environment.python, environment.installed)


@answered_once
def pythons_of(environment: Environment) -> tuple[Python, ...]:
    """Return the known interpreters, the environment's first, including those that cannot be read.

    An environment that searches for more also has those that the user named, :func:`candidates`, and those seen before.
    """
    own = own_python(environment)
    if not environment.searches_pythons:
        return (own,)
    record = record_of(environment)
    pythons: dict[tuple[str, str], Python | None] = {}
    earlier = [Path(sighting.path) for sighting in record.here(PRODUCT) if sighting.gone is None]
    paths = (own.path, *environment.python_paths, *candidates(environment.variables), *earlier)
    for path in dict.fromkeys(paths):
        key = identity(path)
        if key not in pythons:
            pythons[key] = look(path, environment)
        if (python := pythons[key]) is not None and python.present:
            record.note(PRODUCT, path, python.version)
    record.save()
    # The own one is listed with the packages that variables add, and by its files for a run without these variables.
    is_own = identity(own.path)
    return (own, *(python for key, python in pythons.items() if python and (python.present or key != is_own)))


@answered_once
def note_own(environment: Environment) -> None:
    """Record the environment's own interpreter, so that a later command in another interpreter knows it."""
    record = record_of(environment)
    if environment.searches_pythons and record.version_at(PRODUCT, environment.executable) != environment.python:
        record.note(PRODUCT, environment.executable, environment.python)
        record.save()


def named_pythons(environment: Environment, names: Iterable[str]) -> tuple[Path, ...]:
    """Return the paths of interpreters that a user named. Raises :class:`BadRequest` for an unknown unreadable one."""
    from shutil import which

    paths, seen = [], {sighting.path for sighting in record_of(environment).here(PRODUCT)}
    for name in names:
        command = which(name, path=environment.get("PATH")) if os.path.basename(name) == name else None
        path = Path(os.path.abspath(environment.expand(command or name)))
        python = look(path, environment)
        if (python is None or not python.present) and str(path) not in seen:
            reason = "no such file" if python is None else python.reason
            raise BadRequest(f"--python {name}: {path}: {reason}; name an interpreter, such as bin/python")
        paths.append(path)
    return tuple(paths)


def candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the interpreters of the activated environments and on ``PATH``, including those that cannot be read.

    Instead of the shims of pyenv, asdf or mise, it yields the interpreters that they start.
    """
    prefixes = (variables.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    folders = [Path(prefix, _BIN) for prefix in prefixes if prefix]
    for folder in map(Path, variables.get("PATH", "").split(os.pathsep)):
        behind: list[Path] = []
        with suppress(OSError):
            if folder.name == "shims" and not shared_because(folder):
                behind = [path for place in _BEHIND_SHIMS for path in sorted(folder.parent.glob(place))]
        folders += behind or [folder]
    met = set()
    for folder in folders:
        with suppress(OSError):
            names = filter(_PROGRAM.fullmatch, os.listdir(folder) if folder.is_absolute() else ())
            for path in map(folder.joinpath, sorted(names)):
                if (key := identity(path)) not in met and os.path.isfile(path) and os.access(path, os.X_OK):
                    met.add(key)
                    yield path


def identity(path: Path) -> tuple[str, str]:
    """Return what two paths of the same interpreter share: the real program, and its virtual environment."""
    file = _configuration_file(path)
    return os.path.realpath(path), "" if file is None else os.path.realpath(file.parent)


# ---------------------------------------------------------------------- one interpreter


def look(path: Path, environment: Environment) -> Python | None:
    """Return the interpreter at a path according to its files; ``None`` if there is none."""
    if not os.path.exists(path):
        sightings = record_of(environment).here(PRODUCT)
        before = (sighting for sighting in sightings if sighting.path == str(path) and sighting.gone is None)
        return next((Python(path, seen.version, reason="it is not mounted here") for seen in before), None)
    version = ""
    try:
        if plain.read_plain(path, limit=2, follow=True) == b"#!":
            raise ValueError("it is a script, which can start any Python")
        parts = _parts_of(path)
        _require_own(environment, path, *parts.decisive)
        version = _version_of(parts, environment)
        folders = tuple(dict.fromkeys(map(str, _package_folders(parts, environment))))
        _require_own(environment, *(Path(folder) for folder in folders if os.path.isdir(folder)))
    except (OSError, ValueError) as error:
        return Python(path, version, reason=reason_of(error) if isinstance(error, OSError) else str(error))
    return Python(path, version, lambda name: distributions.version_in(folders, name), folders=folders)


def _require_own(environment: Environment, *paths: Path) -> None:
    """Raise :class:`ValueError` with the reason if another user could change what is at one of these paths."""
    reasons = environment.answers
    for path in paths:
        if (shared_because, path) not in reasons:
            reasons[shared_because, path] = shared_because(path)
        if (reason := reasons[shared_because, path]) is not None:
            raise ValueError(reason)


def _parts_of(path: Path) -> _Parts:
    """Return where the parts of an interpreter are. Raises :class:`OSError`, and :class:`ValueError` with a reason."""
    program, file = Path(os.path.realpath(path)), _configuration_file(path)
    virtual, match = None if file is None else file.parent, _RELEASE.fullmatch(program.name)
    if match is None:
        if _PROGRAM.fullmatch(program.name) is None:
            raise ValueError(f"{program} does not have the name of a Python")
        # In a virtual environment made of copies, the program may have any of its names.
        modules = sorted(folder.name for folder in (virtual or program.parent.parent).glob("lib/*/"))
        matches = list(filter(None, map(_RELEASE.fullmatch, modules)))
        if len(matches) != 1:
            raise ValueError("neither its name nor a folder of modules shows its version")
        match = matches[0]
    base, decisive = program, [] if file is None else [file]
    # A link leads to the base. A copy is in a virtual environment whose file names the base's folder.
    while (inner := _configuration_file(base)) is not None:
        home = Path(_configuration(inner).get("home", ""))
        names = (match[0], match["name"], "python3", "python")
        linked = next(filter(os.path.isfile, map(home.joinpath, names)), None)
        if linked is None or not home.is_absolute() or len(decisive) > 2 * _NESTED:
            raise ValueError(f"{inner} does not lead to the base installation")
        decisive += [inner, linked]
        base = Path(os.path.realpath(linked))
    return _Parts(program, match["name"], match["minor"], base.parent.parent, virtual, tuple(decisive))


def _configuration_file(program: Path) -> Path | None:
    """Return the configuration file of a program's virtual environment, if it is in one."""
    files = (folder / _CONFIGURATION for folder in (program.parent, program.parent.parent))
    return next(filter(os.path.isfile, files), None)


def _configuration(file: Path) -> dict[str, str]:
    lines = plain.read_plain(file, most=_LONGEST, follow=True).decode(errors="replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


# ---------------------------------------------------------------------- its version and its packages


def _version_of(parts: _Parts, environment: Environment) -> str:
    """Return an interpreter's five-part version. Raises :class:`OSError`, and :class:`ValueError` with a reason."""
    files = [parts.program]
    if parts.name.startswith("pypy"):
        # PyPy has it as text only in its header.
        files = [parts.base / "include" / parts.name / "patchlevel.h"]
    elif record_of(environment).version_at(_LIBRARY, parts.program) is None:
        content = plain.read_plain(parts.program, most=_LARGEST, follow=True)
        library = re.search(rb"lib%b[a-z]*\.(so[.\d]*|dylib)" % re.escape(parts.name.encode()), content)
        if library is not None:
            patterns = (f"{folder}/{library[0].decode()}" for folder in _LIBRARIES)
            files = [file for pattern in patterns for file in parts.base.glob(pattern)]
    versions = {_version_in(file, parts.minor, environment) for file in files}
    if len(versions) != 1 or (version := versions.pop()) is None:
        raise ValueError("its bytes do not show its version")
    return version


def _version_in(file: Path, minor: str, environment: Environment) -> str | None:
    """Return the version in the bytes of a file, which the record keeps; ``None`` if they do not show it."""
    _require_own(environment, file)
    record = record_of(environment)
    if (known := record.version_at(_LIBRARY, file)) is not None:
        return known
    versions: dict[str, bool] = {}
    pieces = plain.read_plain(file, most=_LARGEST, follow=True).split(f"{minor}.".encode())
    for before, after in pairwise(pieces):
        match, last = _PATCH.match(after), before[-1:]
        if match is not None and not last.isdigit() and last != b".":
            version = f"{minor}.{match[1].decode()}.{_LEVELS[match[2]]}.{int(match[3] or 0)}"
            versions[version] = versions.get(version, False) or last == b"\0"
    # The version itself is preceded by a zero; a path of the installation may end in another one.
    single = [version for version in versions if versions[version] or len(versions) == 1]
    if len(single) != 1:
        return None
    record.note(_LIBRARY, file, single[0])
    return single[0]


def _package_folders(parts: _Parts, environment: Environment) -> Iterator[Path]:
    """Yield the folders of packages that an interpreter searches, in its order. Raises :class:`OSError`."""
    sites = [] if parts.virtual is None else list(_sites_of(parts.virtual, parts.name))
    includes = "true" if parts.virtual is None else _configuration(parts.decisive[0]).get(_INCLUDES, "")
    if includes.lower() == "true":
        # Later programs may use the user's own packages even if this one does not.
        user = environment.expand(environment.get("PYTHONUSERBASE") or "~/.local")
        mac = environment.home_folder / "Library" / "Python" / parts.minor / "lib" / "python" / "site-packages"
        sites += [user / "lib" / parts.name / "site-packages", mac, *_sites_of(parts.base, parts.name)]
    for site in filter(os.path.isdir, sites):
        yield site
        for name in sorted(os.listdir(site)):
            if name.endswith(".pth") and not name.startswith("."):
                _require_own(environment, site / name)
                text = plain.read_plain(site / name, most=_LONGEST, follow=True).decode(errors="replace")
                lines = filter(None, (line.strip() for line in text.splitlines() if not line.startswith(_NO_FOLDER)))
                yield from (site / line for line in lines if os.path.isabs(line) or os.path.isdir(site / line))


def _sites_of(prefix: Path, name: str) -> Iterator[Path]:
    """Yield the folders in which installers put packages, existing or not.

    Debian has folders of other names, even if the usual one exists too; Fedora has two more in ``local``.
    """
    debian = prefix / "lib/python3/dist-packages"
    if debian.is_dir():
        yield from (prefix / "local/lib" / name / "dist-packages", debian, prefix / "lib" / name / "dist-packages")
        return
    wide, site = (prefix / folder / name / "site-packages" for folder in ("lib64", "lib"))
    if wide.is_dir() and not os.path.islink(prefix / "lib64"):
        yield from (prefix / "local" / folder / name / "site-packages" for folder in ("lib64", "lib"))
        yield wide
    yield site
