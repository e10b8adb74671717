"""MIOpen's places, variables and files.

Sources: ``src/db_path.cpp.in``, ``src/binary_cache.cpp``, ``src/expanduser.cpp`` (places),
``src/include/miopen/env.hpp`` (variables), ``src/lock_file.cpp`` (locks).
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Refused
from cachectl.layers.base.facts import Ability, Condition, Problem, Root, Scope, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import UNFORESEEN, Facts, Outlook, Portability
from cachectl.layers.base.store import Store
from cachectl.layers.base.switches import misread, off
from cachectl.layers.disk.presence import is_there, means_absent, status_at
from cachectl.layers.host.listings import lines_of, names_in
from cachectl.layers.miopen.names import VERSION_FOLDER, DatabaseName, newest, parse_name, version_numbers
from cachectl.layers.stores.rows import without_companion

#: MIOpen reads each variable once, when it first needs it.
LIBRARIES: Final = ("libMIOpen",)
#: The role of roots in a temporary folder, which other users write to as well.
TEMPORARY: Final = "temporary"
#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR: Final = "::"
#: The code of a problem: a folder, pipe or the like has a database's name.
NO_FILE: Final = "no-file"
PACKAGED: Final = "these files belong to the package that MIOpen came with"

_TRUE: Final = frozenset({"1", "enable", "enabled", "yes", "on", "true"})
_FALSE: Final = frozenset({"0", "disable", "disabled", "no", "off", "false"})
# Before ROCm 6.1 only these were known, in lower case; other values counted as not set.
_ALWAYS_KNOWN: Final = (_TRUE | _FALSE) - {"on", "off"}
# ``/opt/rocm-6.2.0/lib``, ``libMIOpen.so.1.0.60200``
_ROCM_FOLDER: Final = regex(r"/rocm-(\d+)\.(\d+)")
_ROCM_LIBRARY: Final = regex(r"\.so\.\d+\.\d+\.(\d+)(\d\d)\d\d$")
_DATABASES: Final = Path("share", "miopen", "db")
_LINKER_FOLDERS: Final = "/etc/ld.so.conf.d"
_LIBRARY_FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


#: A root for checks of names alone.
ANY_ROOT: Final = Root(Path("/"), Scope.USER, "")


def read_flag(value: str) -> bool | None:
    """Read a boolean as MIOpen does since ROCm 6.1; ``None`` where that throws (also for the empty string)."""
    lowered = value.lower()
    return True if lowered in _TRUE else False if lowered in _FALSE else None


def judge(environment: Environment, variable: str, *, present: bool) -> State:
    """Return the state by a variable that turns MIOpen's databases off; ``present`` says whether there are any."""
    value = environment.get(variable)
    verdict = None if value is None else read_flag(value)
    if value is not None and verdict is None:
        why = f"{variable}={value!r} is not a boolean: MIOpen throws (ignores it before ROCm 6.1); use 1, or unset it"
        return State(Condition.DISABLED, why)
    if verdict:
        hint = "" if value in _ALWAYS_KNOWN else " (MIOpen before ROCm 6.1 ignores this value; use 1)"
        return State(Condition.DISABLED, f"{variable}={value}{hint}")
    if not present and not libraries(environment):
        return State(Condition.ABSENT, "no libMIOpen is found here, and none has left a file")
    return State(Condition.ENABLED, "on by default" if value is None else f"{variable}={value}")


def diagnosed_flag(layer: Layer, variable: str, what: str | None = None) -> Iterator[facts.Finding]:
    """Yield problems with the variable of :func:`judge`, for the installed MIOpen."""
    value = layer.environment.get(variable)
    verdict = None if value is None else read_flag(value)
    ignored = _is_before_6_1(layer.environment)
    if value is None or (verdict is False and not (ignored and value not in _ALWAYS_KNOWN)):
        return
    if value in _ALWAYS_KNOWN or (verdict and ignored is False):
        yield off(layer, variable, what)
    elif ignored:
        outcome = "is ignored: MIOpen before ROCm 6.1 does not know this value"
        yield misread(layer, variable, Severity.HARMLESS, outcome, f"export {variable}=1" if verdict else None)
    elif verdict:
        outcome = f"switches {what or layer.title} off, but is ignored by MIOpen before ROCm 6.1"
        yield misread(layer, variable, Severity.RECOMPILES, outcome)
    else:
        outcome = "is not a boolean: MIOpen throws" + (" (ignores it before ROCm 6.1)" if ignored is None else "")
        yield misread(layer, variable, Severity.FAILS, outcome)


def _is_before_6_1(environment: Environment) -> bool | None:
    """Return whether every libMIOpen here is of a ROCm before 6.1, by its path; ``None`` if unknown or mixed."""
    old: set[bool | None] = set()
    for library in libraries(environment):
        match = _ROCM_FOLDER.search(str(library)) or _ROCM_LIBRARY.search(library.name)
        old.add(None if match is None else (int(match[1]), int(match[2])) < (6, 1))
    return next(iter(old)) if len(old) == 1 else None


def kernel_key(name: str, args: str) -> str:
    """Return the part of a kernel's key that follows the file: ``NAME::ARGS``.

    A name may contain ``::`` (``ns::kernel.cl.o``), so its ``%`` and ``:`` are written ``%25`` and ``%3A``. Arguments
    are never changed.
    """
    return SEPARATOR.join((name.replace("%", "%25").replace(":", "%3A"), args))


def split_kernel_key(text: str) -> tuple[str, str]:
    """Return name and arguments from the result of :func:`kernel_key`."""
    name, _, args = text.partition(SEPARATOR)
    return name.replace("%3A", ":").replace("%25", "%"), args


def to_finding(store: Store, root: Root, problem: Problem, blocked: Severity) -> facts.Finding:
    """Return the finding of a problem; ``blocked`` is the severity if a database cannot be opened at all."""
    finding = store.to_finding(root, problem)
    if problem.code != NO_FILE:
        return finding
    path = shlex.quote(str(problem.path))
    packaged = root.scope is Scope.SYSTEM
    fix = f"reinstall the package that {path} belongs to" if packaged else f"mv {path} {path}.moved"
    return replace(finding, severity=blocked, fix=fix)


def user_cache_roots(environment: Environment) -> tuple[Root, ...]:
    """Resolve where MIOpen keeps kernels that it has compiled.

    Up to MIOpen 3.3 the variable names the folder itself; MIOpen 3.5 makes its version folder in it.
    """
    return _user_roots(environment, "MIOPEN_CUSTOM_CACHE_DIR", Path(".cache", "miopen"), "cache")


def user_database_roots(environment: Environment) -> tuple[Root, ...]:
    """Resolve where MIOpen keeps results of its tuning."""
    return _user_roots(environment, "MIOPEN_USER_DB_PATH", Path(".config", "miopen"), "db")


def _user_roots(environment: Environment, variable: str, default: Path, windows: str) -> tuple[Root, ...]:
    named = environment.get(variable)
    if named:
        return (Root(expand(environment, named), Scope.USER, variable),)
    if environment.platform == "win32":
        profile = environment.get("USERPROFILE")
        home = Path(profile) if profile else environment.home
        return (Root(home / ".miopen" / windows, Scope.USER, "default (USERPROFILE)"),)
    temporary = temporary_folder(environment)
    home_variable = environment.get("HOME") or "/"
    why = "HOME is not set, empty or /" if home_variable == "/" else "where the home is on a network file system"
    fallbacks = [
        Root(temporary / default, Scope.USER, f"MIOpen 3.5's fallback ({why})", TEMPORARY),
        Root(temporary, Scope.USER, f"the fallback of MIOpen up to 3.3 ({why})", TEMPORARY),
    ]
    if home_variable == "/":
        return tuple(fallbacks)
    first = Root(environment.absolute(home_variable) / default, Scope.USER, "default")
    return (first, *(root for root in fallbacks if root.path != first.path))


def expand(environment: Environment, text: str) -> Path:
    """Expand a path as MIOpen does: every ``~`` in it means the home folder, except on Windows."""
    if environment.platform == "win32":
        return environment.absolute(text)
    home = environment.get("HOME") or "/"
    return environment.absolute(text.replace("~", str(temporary_folder(environment)) if home == "/" else home))


def temporary_folder(environment: Environment) -> Path:
    """Return C++'s ``temp_directory_path``."""
    named = (environment.get(variable) for variable in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return environment.absolute(next(filter(None, named), environment.temporary))


def system_roots(environment: Environment, *, tilde: bool) -> tuple[Root, ...]:
    """Resolve the databases that came with MIOpen, relative to each library that is found.

    ``tilde`` says whether a ``~`` in ``MIOPEN_SYSTEM_DB_PATH`` is expanded: it is for kernels, but not for find-db and
    perf-db.
    """
    named = environment.get("MIOPEN_SYSTEM_DB_PATH")
    if named:
        path = expand(environment, named) if tilde else environment.absolute(named)
        literal = " (its ~ is taken as it stands)" if "~" in named and not tilde else ""
        return (Root(path, Scope.SYSTEM, f"MIOPEN_SYSTEM_DB_PATH{literal}"),)
    sources: dict[str, str] = {}
    for library in libraries(environment):
        sources.setdefault(os.path.realpath(library.parent.parent / _DATABASES), f"beside {library}")
    for folder in _well_known_folders(environment):
        if folder.is_dir():
            sources.setdefault(os.path.realpath(folder), "a usual place, without a library beside it")
    return tuple(Root(Path(path), Scope.SYSTEM, source) for path, source in sources.items())


def libraries(environment: Environment) -> tuple[Path, ...]:
    """Return every libMIOpen that a program could load, once, with links resolved."""
    found = (
        os.path.realpath(os.path.join(folder, name))
        for folder in dict.fromkeys(_library_folders(environment))
        for name in names_in(folder, "libMIOpen.so", "MIOpen.dll")
    )
    return tuple(Path(path) for path in dict.fromkeys(found))


def several_installed(environment: Environment) -> bool:
    """Return whether several MIOpens are installed, each with files of its own version."""
    return len({library.parent for library in libraries(environment)}) > 1


def _prefixes(environment: Environment) -> Iterator[str]:
    for site in map(os.fspath, environment.site):
        yield f"{site}/torch"
        yield from (f"{site}/{name}" for name in names_in(site, "_rocm_sdk_"))
    rocm = environment.get("ROCM_PATH")
    if rocm:
        yield os.fspath(environment.absolute(rocm))
    yield "/opt/rocm"
    yield from (f"/opt/{name}" for name in names_in("/opt", "rocm-"))


def _library_folders(environment: Environment) -> Iterator[str]:
    for named in (environment.get("LD_LIBRARY_PATH") or "").split(":"):
        if named:
            yield os.fspath(environment.absolute(named))
    yield from (f"{prefix}/lib" for prefix in _prefixes(environment))
    for name in names_in(_LINKER_FOLDERS):
        if name.endswith(".conf"):
            yield from (line.strip() for line in lines_of(f"{_LINKER_FOLDERS}/{name}") if line.startswith("/"))
    yield from _LIBRARY_FOLDERS


def _well_known_folders(environment: Environment) -> Iterator[Path]:
    for prefix in map(Path, _prefixes(environment)):
        yield prefix / _DATABASES
        # ROCm up to 5.1 gave each library a folder.
        yield prefix / "miopen" / _DATABASES
    yield Path("/usr") / _DATABASES


def lock_files(environment: Environment, path: Path) -> tuple[Path, ...]:
    """Return the lock files of a text database, for every version and every path of its folder.

    Up to 3.3 they lie in the temporary folder, named by the md5 of the folder's path as it was given; later they lie
    beside the database.
    """
    paths = {str(path.parent), os.path.realpath(path.parent)}
    named = environment.get("MIOPEN_USER_DB_PATH")
    if named and expand(environment, named) == path.parent:
        paths.add(named.rstrip("/"))
    import hashlib

    temporary = temporary_folder(environment) / "miopen-lockfiles"
    digests = (hashlib.md5(os.fsencode(one), usedforsecurity=False).hexdigest() for one in paths)
    beside = path.parent / "miopen-lockfiles" / f"{path.name}.lock"
    return (beside, *sorted(temporary / f"{digest}_{path.name}.lock" for digest in digests))


class DatabaseFile(NamedTuple):
    """A database file of a root, with its path there and its version folder."""

    relative: str
    path: Path
    name: DatabaseName
    folder: str = ""

    @property
    def version(self) -> str | None:
        """The version of MIOpen, from folder or name; ``None`` if neither has one."""
        return self.folder or self.name.version

    @property
    def versions(self) -> dict[str, str]:
        """The version as entries have it."""
        return {} if self.version is None else {"miopen": self.version}

    @property
    def detail(self) -> dict[str, str]:
        """The other facts in the name."""
        base = self.name.base
        known = {"base": base.raw, "compute_units": base.units, "backend": self.name.backend}
        return {name: str(value) for name, value in known.items() if value is not None}

    @property
    def device(self) -> str:
        """The architecture, or the whole base name where the architecture is not known."""
        return self.name.base.arch or self.name.base.raw

    def modified(self) -> float | None:
        """Return the last write to the file or its log in epoch seconds; ``None`` where it does not exist."""
        status = (status_at(path) for path in (self.path, self.path.with_name(self.path.name + "-wal")))
        return max((found.st_mtime for found in status if found is not None), default=None)


class Databases(NamedTuple):
    """The database files of certain kinds in one root: no links, and in a temporary folder only the user's own.

    ``folders`` says whether they may also lie in version folders.
    """

    root: Root
    kinds: tuple[str, ...]
    folders: bool = False

    def files(self) -> Iterator[DatabaseFile | Problem]:
        """Yield each file, and a problem for each link and each unreadable file or folder."""
        names = self._names("")
        yield from self._files_in("", names)
        for folder in [name for name in names if self.folders and isinstance(name, str)]:
            try:
                if self._is_version_folder(folder):
                    yield from self._files_in(folder, self._names(folder))
            except OSError as error:  # noqa: PERF203 - one must not end the rest
                yield self._unreadable(self.root.path / folder, error)

    def name(self, relative: str) -> DatabaseFile | None:
        """Return the file of a relative path, whether or not it exists; ``None`` for other names."""
        folder, _, file = relative.rpartition("/")
        name = parse_name(file)
        if name is None or name.kind not in self.kinds:
            return None
        if folder and not (self.folders and VERSION_FOLDER.fullmatch(folder)):
            return None
        return DatabaseFile(relative, self.root.path / relative, name, folder)

    def owns(self, parts: tuple[str, ...]) -> bool:
        """Return whether a path has the name of a database, of sqlite's file beside one, or of a version folder."""
        if self.folders and len(parts) == 1 and VERSION_FOLDER.fullmatch(parts[0]):
            return True
        return self.name("/".join((*parts[:-1], without_companion(parts[-1])))) is not None

    def find(self, relative: str) -> DatabaseFile | None:
        """Return a file that exists and may be used. Raises :class:`OSError` where that cannot be determined."""
        file = self.name(relative)
        if file is None or self._linked(file.folder):
            return None
        return file if owned_file(self.root, file.path) else None

    def blocked(self, file: DatabaseFile) -> bool:
        """Return whether something in a file's place, or on the way to it, must not be written to."""
        return self._linked(file.folder) or is_there(file.path)

    def newest(self) -> str | None:
        """Return the newest version with a folder, or files, in the root."""
        if self.folders:
            return newest(self._version_folders())
        files = (file for file in self.files() if isinstance(file, DatabaseFile))
        return newest(file.version for file in files if file.version is not None)

    def _version_folders(self) -> list[str]:
        names = self._names("")
        for name in names:
            if isinstance(name, Problem):
                # Staleness is unknown without the newest version.
                raise OSError(errno.EIO, name.message, str(name.path))
        return [name for name in names if isinstance(name, str) and self._is_version_folder(name)]

    def _is_version_folder(self, name: str) -> bool:
        if not self.folders or not VERSION_FOLDER.fullmatch(name):
            return False
        status = status_at(self.root.path / name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _linked(self, folder: str) -> bool:
        status = status_at(self.root.path / folder) if folder else None
        return status is not None and stat.S_ISLNK(status.st_mode)

    def _files_in(self, folder: str, names: Sequence[str | Problem]) -> Iterator[DatabaseFile | Problem]:
        for name in names:
            if isinstance(name, Problem):
                yield name
                continue
            file = self.name(f"{folder}/{name}" if folder else name)
            if file is None:
                continue
            try:
                yield from self._file(file)
            except OSError as error:
                yield self._unreadable(file.path, error)

    def _file(self, file: DatabaseFile) -> Iterator[DatabaseFile | Problem]:
        status = status_at(file.path)
        if status is not None and stat.S_ISLNK(status.st_mode) and self.root.role != TEMPORARY:
            yield Problem(file.path, "link", "a link under a database's name is not followed")
        elif owned_file(self.root, file.path):
            yield file
        elif self._in_the_way(file.path):
            yield Problem(file.path, NO_FILE, "a folder, or something else that is no file, has a database's name")

    def _in_the_way(self, path: Path) -> bool:
        """Return whether a folder, pipe or the like is there; in a temporary folder, whether it is the user's."""
        status = status_at(path)
        if status is None or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            return False
        return self.root.role != TEMPORARY or status.st_uid == os.getuid()

    def _names(self, folder: str) -> Sequence[str | Problem]:
        path = self.root.path / folder
        try:
            return sorted(os.listdir(path))
        except OSError as error:
            return [] if means_absent(error) else [self._unreadable(path, error)]

    def _unreadable(self, path: Path, error: OSError) -> Problem:
        return Problem(path, "unreadable", f"cannot be read: {error.strerror}")


def owned_file(root: Root, path: Path) -> bool:
    """Return whether a plain file is there; in a temporary folder, whether it is the user's.

    Raises :class:`OSError` where that cannot be determined.
    """
    status = status_at(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return root.role != TEMPORARY or status.st_uid == os.getuid()


def stale_because(version: str | None, latest: str | None, what: str = "folder") -> str | None:
    """Return why no installed MIOpen opens the files of a version; ``None`` where one may."""
    if version is None or latest is None or version_numbers(version) >= version_numbers(latest):
        return None
    return f"a newer MIOpen ({latest}) has its own {what}"


class Packaged(Layer):
    """A layer whose files belong to a package: they are read, never changed."""

    scope = Scope.SYSTEM

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse to move the files, beside what the store refuses."""
        where = f"{PACKAGED}; MIOpen finds them beside its library, or through MIOPEN_SYSTEM_DB_PATH"
        return {**super().refusals(), Ability.RELOCATE: where}

    def relocate(self, folder: Path) -> facts.Switch:
        """Refuse."""
        raise Refused(self.name, f"cannot relocate: {self.refusals()[Ability.RELOCATE]}", folder)


def read_only(instead: str) -> Mapping[Ability, str]:
    """Return the refusals of all changes of a package's files; ``instead`` is the layer that MIOpen asks first."""
    return {
        Ability.PUT: f"{PACKAGED}; put into the layer {instead}, which MIOpen asks first",
        Ability.CLEAR: f"{PACKAGED}; its package manager removes them",
        Ability.QUARANTINE: f"{PACKAGED}; its package manager puts whole ones there",
    }


class MIOpenPortability(Portability):
    """Keys hold no version: the names of databases do, with the backend, the architecture and its units."""

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook:
        """Return that it is unknown: only MIOpen itself sees which device it would name."""
        del versions, there, environment
        return UNFORESEEN
