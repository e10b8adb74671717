"""MIOpen's database files: where they lie in a root, and what their stores and layers have in common."""

from __future__ import annotations

import os
import shlex
import stat
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, Damaged, LayerError, Refused, not_a_key
from cachectl.layers.base.facts import Ability, Entry, Found, Problem, Root, Scope, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import UNFORESEEN, EntryFiles, Facts, Lookups, Outlook, Portability
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.presence import means_absent, status_at
from cachectl.layers.miopen.names import (
    VERSION_FOLDER,
    DatabaseName,
    installed_names,
    newest,
    parse_name,
    version_numbers,
)
from cachectl.layers.miopen.places import LIBRARIES, TEMPORARY, Place, judge, libraries, system_roots, user_roots
from cachectl.layers.stores.database import disk_usage, without_companion
from cachectl.layers.stores.row_store import Rows
from cachectl.layers.stores.rows import RowFile
from cachectl.layers.stores.tree import REFUSALS

#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR: Final = "::"
#: The code of a problem: a folder, pipe or the like has a database's name.
NO_FILE: Final = "no-file"
#: A root for checks of names.
_ANY_ROOT: Final = Root(Path("/"), Scope.USER, "")
PACKAGED: Final = "these files belong to the package that MIOpen came with"


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
        for folder in ("", *self._version_folders()):
            place = self.root.path / folder
            try:
                names = sorted(os.listdir(place))
            except OSError as error:
                if not means_absent(error):
                    yield _unreadable(place, error)
                continue
            for name in names:
                file = self.name(f"{folder}/{name}" if folder else name)
                if file is not None:
                    yield from self._judged(file)

    def present(self) -> Iterator[DatabaseFile]:
        """Yield each file that may be used."""
        return (file for file in self.files() if isinstance(file, DatabaseFile))

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
        if file is None or self._is_linked(file.folder):
            return None
        return file if owned_file(self.root, file.path) else None

    def require_free(self, layer: str, file: DatabaseFile) -> None:
        """Raise :class:`Refused` where something that is no database of this user stands in the place of a file."""
        if self.find(file.relative) is None and (self._is_linked(file.folder) or status_at(file.path) is not None):
            raise Refused(layer, "cannot put: a link, a folder, or somebody else's file stands there", file.path)

    def newest(self) -> str | None:
        """Return the newest version with a folder, or files, in the root."""
        if self.folders:
            return newest(self._version_folders())
        return newest(file.version for file in self.present() if file.version is not None)

    def _version_folders(self) -> list[str]:
        names: list[str] = []
        with suppress(OSError):
            names += sorted(os.listdir(self.root.path)) if self.folders else []
        return [name for name in names if VERSION_FOLDER.fullmatch(name) and self._is_folder(name)]

    def _is_folder(self, name: str) -> bool:
        with suppress(OSError):
            return stat.S_ISDIR(os.lstat(self.root.path / name).st_mode)
        return False

    def _is_linked(self, folder: str) -> bool:
        status = status_at(self.root.path / folder) if folder else None
        return status is not None and stat.S_ISLNK(status.st_mode)

    def _judged(self, file: DatabaseFile) -> Iterator[DatabaseFile | Problem]:
        try:
            status = status_at(file.path)
        except OSError as error:
            yield _unreadable(file.path, error)
            return
        if status is None or (self.root.role == TEMPORARY and status.st_uid != os.getuid()):
            return
        if stat.S_ISREG(status.st_mode):
            yield file
        elif not stat.S_ISLNK(status.st_mode):
            yield Problem(file.path, NO_FILE, "a folder, or something else that is no file, has a database's name")
        elif self.root.role != TEMPORARY:
            yield Problem(file.path, "link", "a link under a database's name is not followed")


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(path, "unreadable", f"cannot be read: {error.strerror}")


def owned_file(root: Root, path: Path) -> bool:
    """Return whether a plain file is there; in a temporary folder, whether it is the user's.

    Raises :class:`OSError` where that cannot be determined.
    """
    status = status_at(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return root.role != TEMPORARY or status.st_uid == os.getuid()


# ---------------------------------------------------------------------- stores


class MIOpenDatabases(Rows):
    """Entries of database files, whose names say for which device and which MIOpen they are."""

    separator = SEPARATOR
    #: Endings of the layer's databases, and whether they may lie in version folders.
    kinds: ClassVar[tuple[str, ...]]
    folders: ClassVar[bool] = False
    #: For files of a package: the layer that MIOpen asks first.
    asked_first: ClassVar[str] = ""
    #: The effect of something that stands in the place of a database.
    when_blocked: ClassVar[Severity]

    @abstractmethod
    def list_file(self, file: DatabaseFile, template: Entry) -> Iterator[Found]:
        """Yield the entries of a file, made from what all of them have in common, and its problems."""

    @abstractmethod
    def verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every entry of a file as MIOpen does."""

    def scan_others(self, root: Root, latest: str | None) -> Iterator[Found]:
        """Yield what is not in a database; ``latest`` is the newest version there."""
        del root, latest
        yield from ()

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse every change of a package's files, and on platforms without directory handles."""
        if not self.asked_first:
            return REFUSALS
        into = f"{PACKAGED}; put into the layer {self.asked_first}, which MIOpen asks first"
        return {**REFUSALS, Ability.PUT: into, Ability.CLEAR: f"{PACKAGED}; its package manager removes them"}

    def databases(self, root: Root) -> Databases:
        """Return the database files of a root."""
        return Databases(root, self.kinds, self.folders)

    def names_file(self, relative: str) -> bool:
        """Return whether a path below a root has the name of a database."""
        return self.databases(_ANY_ROOT).name(relative) is not None

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases and version folders."""
        return self.databases(root).owns(parts)

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield the entries of each database. Their keys say everything, so no content is read."""
        del contents
        databases = self.databases(root)
        latest = None if _has_several(self.environment) else databases.newest()
        for file in databases.files():
            if isinstance(file, Problem):
                yield file
            else:
                yield from self._scan_file(root, file, latest)
        yield from self.scan_others(root, latest)

    def _scan_file(self, root: Root, file: DatabaseFile, latest: str | None) -> Iterator[Found]:
        because = stale_because(file.version, latest)
        stale = True if because else None
        payload = 0
        try:
            template = Entry(
                layer=self.name,
                key=file.relative,
                root=root.path,
                bytes=0,
                files=0,
                written_before=file.modified(),
                device=file.name.base.arch or file.name.base.raw,
                versions=file.versions,
                stale=stale,
                stale_because=because,
                detail=file.detail,
            )
            for found in self.list_file(file, template):
                payload += found.bytes if isinstance(found, Entry) else 0
                yield found
        except (LayerError, OSError) as error:
            yield self.unread(file.path, error)
        with suppress(OSError):
            files, total, disk = disk_usage(file.path)
            rest = max(0, total - payload)
            yield facts.Housekeeping(file.relative, root.path, rest, files, file.modified(), stale, disk=disk)

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every entry as MIOpen does when it loads it."""
        files = list(self.databases(root).files())
        for file in files:
            if isinstance(file, Problem):
                yield self._finding_of(root, file)
            else:
                yield from self.twice(lambda file=file: self.verify_file(root, file))  # type: ignore[misc]

    def _finding_of(self, root: Root, problem: Problem) -> facts.Finding:
        finding = self.to_finding(root, problem)
        if problem.code != NO_FILE:
            return finding
        fix = self.fix(problem.path, moved_away(problem.path))
        return replace(finding, severity=self.when_blocked, fix=fix)

    def fix(self, path: Path, own: str) -> str:
        """Return the fix of a user's file; a package's file has another."""
        return f"reinstall the package that {path} belongs to" if self.asked_first else own

    def file_finding(self, root: Root, rows: RowFile, error: LayerError) -> facts.Finding:
        """Return the finding of a file that could not be read; a package's file is never removed."""
        finding = super().file_finding(root, rows, error)
        if not isinstance(error, Damaged):
            return finding
        thing = None if self.asked_first else finding.thing
        return replace(finding, code="damaged", fix=self.fix(rows.path, finding.fix), thing=thing)

    def writable(self, root: Root, key: str) -> DatabaseFile:
        """Return the file of a key. Raises :class:`LayerError` where there can be none."""
        databases = self.databases(root)
        file = databases.name(key.partition(SEPARATOR)[0])
        if file is None or not self.is_key(key):
            raise not_a_key(self.name, key)
        databases.require_free(self.name, file)
        return file


def moved_away(path: Path) -> str:
    """Return the command that moves a file out of MIOpen's way."""
    quoted = shlex.quote(str(path))
    return f"mv {quoted} {quoted}.moved"


def _has_several(environment: Environment) -> bool:
    """Return whether several MIOpens are installed, each with files of its own version."""
    return len({library.parent for library in libraries(environment)}) > 1


def stale_because(version: str | None, latest: str | None) -> str | None:
    """Return why no installed MIOpen opens the files of a version; ``None`` where one may."""
    if version is None or latest is None or version_numbers(version) >= version_numbers(latest):
        return None
    return f"a newer MIOpen ({latest}) has its own files"


# ---------------------------------------------------------------------- layers


class MIOpenLookups(Lookups):
    """Old versions have a file for each kernel. Databases hold many entries."""

    files = EntryFiles(
        regex(r".*\.(?:u?kdb|u?db|txt)"), "no event says which records are read, or whether a lookup found one"
    )


class MIOpenPortability(Portability):
    """Keys hold no version: the names of databases do, with the backend, the architecture and its units."""

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook:
        """Return that it is unknown: only MIOpen itself sees which device it would name."""
        del versions, there, environment
        return UNFORESEEN


class MIOpenLayer(Layer):
    """A layer of MIOpen's databases: its place and its variable are declared."""

    store: MIOpenDatabases
    place: ClassVar[Place]
    #: The variable that turns the layer off, and what else than the whole layer it turns off.
    variable: ClassVar[str]
    portability = MIOpenPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return MIOpenLookups()

    def roots(self) -> tuple[Root, ...]:
        """Resolve as MIOpen does when it first needs a database."""
        if self.scope is Scope.SYSTEM:
            return system_roots(self.environment, self.place)
        return user_roots(self.environment, self.place)

    def state(self) -> facts.State:
        """Read the switch."""
        return judge(self.environment, self.variable, present=self.is_present())

    def is_present(self) -> bool:
        """Return whether MIOpen has left anything: a root, or in a temporary folder a database."""
        return any(
            root.exists if root.role != TEMPORARY else any(True for _ in self.store.databases(root).files())
            for root in self.roots()
        )

    def place_of_file(self, file: Path) -> Path | None:
        """Return the place of a database by its name: that of the newest file of the user for the same device.

        Without one, kernels belong to the version of MIOpen that the file's folder names, or to the newest known one.
        """
        name, roots = parse_name(file.name), self.roots()
        if name is None or not roots:
            return None
        databases = self.store.databases(roots[0])
        if name.kind in databases.kinds and not databases.folders:
            return Path(file.name)
        installed = installed_names(name)[0]
        own = sorted(databases.present(), key=lambda found: version_numbers(found.version or "0"), reverse=True)
        alike = [found.relative for found in own if installed in installed_names(found.name)]
        has_version = VERSION_FOLDER.fullmatch(file.parent.name) is not None
        if alike and not has_version:
            return Path(alike[0])
        if not databases.folders or not installed.endswith(".kdb"):
            return None
        version = file.parent.name if has_version else databases.newest()
        if version is None:
            why = "name the version of MIOpen by the file's folder, such as 3.3.0.a85ca8a54"
            raise BadRequest(f"{printable(file)}: no MIOpen has kept kernels here; {why}")
        return Path(version, f"{installed.removesuffix('kdb')}ukdb")

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse to move a package's files, beside what the store refuses."""
        if self.scope is Scope.USER:
            return super().refusals()
        where = f"{PACKAGED}; MIOpen finds them beside its library, or through {self.place.variable}"
        return {**super().refusals(), Ability.RELOCATE: where}

    def relocate(self, folder: Path) -> facts.Switch:
        """Return MIOpen's own variable; MIOpen makes the folder."""
        if Ability.RELOCATE in (refusals := self.refusals()):
            raise Refused(self.name, f"cannot relocate: {refusals[Ability.RELOCATE]}", folder)
        return facts.Switch(self.name, {self.place.variable: str(folder / self.place.moved)}, read_at_load=LIBRARIES)
