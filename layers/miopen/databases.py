"""MIOpen's database files: where they lie in a root, and what their stores and layers have in common."""

from __future__ import annotations

import os
import shlex
import stat
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, Damaged, EntryExists, LayerError, Refused, not_a_key, printable
from cachectl.layers.base.facts import Ability, Entry, Found, Problem, Root, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import UNFORESEEN, About, EntryFiles, Facts, Lookups, Outlook, Portability
from cachectl.layers.disk.presence import means_absent, status_at
from cachectl.layers.miopen.names import (
    VERSION_FOLDER,
    DatabaseName,
    installed_names,
    newest,
    parse_name,
    version_numbers,
)
from cachectl.layers.miopen.places import PACKAGED, TEMPORARY, SystemPlace, UserPlace, diagnosed_flag, judge, libraries
from cachectl.layers.stores.database import disk_usage, without_companion
from cachectl.layers.stores.row_store import Rows
from cachectl.layers.stores.rows import RowFile
from cachectl.layers.stores.tree import REFUSALS

#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR: Final = "::"
#: The code of a problem: a folder, pipe or the like has a database's name.
_NO_FILE: Final = "no-file"


class DatabaseFile(NamedTuple):
    """A database file of a root, with its path there and its version folder."""

    relative: str
    path: Path
    name: DatabaseName
    folder: str

    @property
    def version(self) -> str | None:
        """The version of MIOpen, from folder or name; ``None`` if neither has one."""
        return self.folder or self.name.version

    @property
    def detail(self) -> dict[str, str]:
        """The other facts in the name."""
        known = {"base": self.name.base, "compute_units": self.name.units, "backend": self.name.backend}
        return {name: str(value) for name, value in known.items() if value is not None}

    def modified(self) -> float | None:
        """Return the last write to the file or its log in epoch seconds; ``None`` where it does not exist."""
        status = (status_at(path) for path in (self.path, self.path.with_name(self.path.name + "-wal")))
        return max((found.st_mtime for found in status if found is not None), default=None)


class MIOpenDatabases(Rows):
    """Entries of database files, whose names say for which device and which MIOpen they are.

    No link is followed, and in a temporary folder only the user's own files count.
    """

    separator = SEPARATOR
    #: Endings of the layer's databases, and whether they may lie in version folders.
    kinds: ClassVar[tuple[str, ...]]
    folders: ClassVar[bool] = False
    #: The number of parts of a key that follow the file.
    parts: ClassVar[int]
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

    @abstractmethod
    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError]:
        """Read entries of a file that exists; missing ones are left out."""

    @abstractmethod
    def is_usable(self, artifact: facts.Artifact) -> bool:
        """Return whether MIOpen could use an entry under its key."""

    @abstractmethod
    def insert_new(
        self, root: Root, file: DatabaseFile, artifacts: Sequence[facts.Artifact]
    ) -> Sequence[bool | LayerError | None]:
        """Insert entries at once where they are new: ``False`` for the same one there, ``None`` for a different one."""

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

    # ------------------------------------------------------------------ files

    def named(self, root: Path, relative: str) -> DatabaseFile | None:
        """Return the file of a relative path, whether or not it exists; ``None`` for other names."""
        folder, _, file = relative.rpartition("/")
        name = parse_name(file)
        if name is None or name.kind not in self.kinds:
            return None
        if folder and not (self.folders and VERSION_FOLDER.fullmatch(folder)):
            return None
        return DatabaseFile(relative, root / relative, name, folder)

    def is_key(self, key: str) -> bool:
        """Check the name of the database, and that the parts of an entry follow."""
        file, *parts = key.split(SEPARATOR, self.parts)
        return len(parts) == self.parts and any(parts) and self.named(Path(), file) is not None

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases, of sqlite's files beside one, and of version folders."""
        if self.folders and len(parts) == 1 and VERSION_FOLDER.fullmatch(parts[0]):
            return True
        return self.named(root.path, "/".join((*parts[:-1], without_companion(parts[-1])))) is not None

    def files(self, root: Root) -> Iterator[DatabaseFile | Problem]:
        """Yield each file, and a problem for each link and each unreadable file or folder."""
        for folder in ("", *self._version_folders(root)):
            place = root.path / folder
            try:
                names = sorted(os.listdir(place))
            except OSError as error:
                if not means_absent(error):
                    yield _unreadable(place, error)
                continue
            named = (self.named(root.path, os.path.join(folder, name)) for name in names)
            yield from filter(None, (self._judged(root, file) for file in named if file is not None))

    def _judged(self, root: Root, file: DatabaseFile) -> DatabaseFile | Problem | None:
        try:
            status = status_at(file.path)
        except OSError as error:
            return _unreadable(file.path, error)
        if status is None or not _is_own(root, status):
            return None
        if stat.S_ISREG(status.st_mode):
            return file
        if not stat.S_ISLNK(status.st_mode):
            return Problem(file.path, _NO_FILE, "a folder, or something else that is no file, has a database's name")
        if root.role == TEMPORARY:
            return None
        return Problem(file.path, "link", "a link under a database's name is not followed")

    def present(self, root: Root) -> list[DatabaseFile]:
        """Return each file that may be used."""
        return [file for file in self.files(root) if isinstance(file, DatabaseFile)]

    def locate(self, root: Root, relative: str) -> DatabaseFile | None:
        """Return a file that exists and may be used. Raises :class:`OSError` where that cannot be determined."""
        file = self.named(root.path, relative)
        if file is None or _is_linked(root, file):
            return None
        return file if is_own_file(root, file.path) else None

    def newest(self, root: Root) -> str | None:
        """Return the newest version with a folder, or files, in the root."""
        if self.folders:
            return newest(self._version_folders(root))
        return newest(file.version for file in self.present(root) if file.version is not None)

    def _version_folders(self, root: Root) -> list[str]:
        if not self.folders:
            return []
        try:
            with os.scandir(root.path) as items:
                return sorted(
                    item.name
                    for item in items
                    if VERSION_FOLDER.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
                )
        except OSError:
            return []

    def writable(self, root: Root, key: str) -> DatabaseFile:
        """Return the file of a key. Raises :class:`LayerError` where there can be none."""
        file = self.named(root.path, key.partition(SEPARATOR)[0])
        if file is None or not self.is_key(key):
            raise not_a_key(self.name, key)
        if self.locate(root, file.relative) is None and (_is_linked(root, file) or status_at(file.path) is not None):
            raise Refused(self.name, "cannot put: a link, a folder, or somebody else's file stands there", file.path)
        return file

    # ------------------------------------------------------------------ scan and verify

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield the entries of each database. Their keys say everything, so no content is read."""
        del contents
        # Of several MIOpens that are installed, each has files of its own version.
        has_several = len({library.parent for library in libraries(self.environment)}) > 1
        latest = None if has_several else self.newest(root)
        named = set()
        for file in self.files(root):
            if isinstance(file, Problem):
                named.add(file.path)
                yield file
            else:
                yield from self._scan_file(root, file, latest)
        for other in self.scan_others(root, latest):
            if not isinstance(other, Problem) or other.path not in named:
                yield other

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
                device=file.name.arch or file.name.base,
                versions=versions_of(file.version),
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
        for file in list(self.files(root)):
            if isinstance(file, DatabaseFile):
                yield from self.twice(lambda file=file: self.verify_file(root, file))  # type: ignore[misc]
                continue
            finding = self.to_finding(root, file)
            if file.code == _NO_FILE:
                quoted = shlex.quote(str(file.path))
                fix = self.fix(file.path, f"mv {quoted} {quoted}.moved")
                finding = replace(finding, severity=self.when_blocked, fix=fix)
            yield finding

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

    # ------------------------------------------------------------------ get and put

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read one entry as :meth:`load` does."""
        return self.read_row(root, key)

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError] | None:
        """Read entries of one database."""
        located = self.locate(root, file)
        return None if located is None else self.load(located, keys)

    def write_rows(self, root: Root, file: str, artifacts: Sequence[facts.Artifact]) -> Mapping[str, bool | LayerError]:
        """Insert entries into one database; leave existing ones."""
        del file
        fit = [artifact for artifact in artifacts if self.is_key(artifact.key) and self.is_usable(artifact)]
        if not fit:
            return {}
        located = self.writable(root, fit[0].key)
        exists = EntryExists(self.name, located.path)
        results = zip(fit, self.insert_new(root, located, fit), strict=True)
        return {artifact.key: exists if result is None else result for artifact, result in results}


def is_own_file(root: Root, path: Path) -> bool:
    """Return whether a plain file counts that may exist. Raises :class:`OSError` where that cannot be determined."""
    status = status_at(path)
    return status is not None and stat.S_ISREG(status.st_mode) and _is_own(root, status)


def _is_own(root: Root, status: os.stat_result) -> bool:
    """Return whether a file counts: in a temporary folder, other users have theirs."""
    return root.role != TEMPORARY or status.st_uid == os.getuid()


def _is_linked(root: Root, file: DatabaseFile) -> bool:
    status = status_at(root.path / file.folder) if file.folder else None
    return status is not None and stat.S_ISLNK(status.st_mode)


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(path, "unreadable", f"cannot be read: {error.strerror}")


def versions_of(version: str | None) -> dict[str, str]:
    """Return a version as entries have it."""
    return {} if version is None else {"miopen": version}


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
    places: ClassVar[UserPlace | SystemPlace]
    switch: ClassVar[EnvSwitch]
    #: What the switch turns off, if it is not the whole layer.
    switched_part: ClassVar[str | None] = None
    about = About(portability=MIOpenPortability(), lookups=MIOpenLookups())

    def state(self) -> facts.State:
        """Read the switch. In a temporary folder only a database shows that MIOpen was there."""
        present = any(
            root.exists if root.role != TEMPORARY else any(True for _ in self.store.files(root))
            for root in self.roots()
        )
        return judge(self.environment, self.switch.variable, present=present)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        yield from diagnosed_flag(self, self.switch.variable, self.switched_part)

    def place_of_file(self, file: Path) -> Path | None:
        """Return the place of a database by its name: that of the newest file of the user for the same device.

        Without one, kernels belong to the version of MIOpen that the file's folder names, or to the newest known one.
        """
        name, roots, store = parse_name(file.name), self.roots(), self.store
        if name is None or not roots:
            return None
        if name.kind in store.kinds and not store.folders:
            return Path(file.name)
        installed = installed_names(name)[0]
        own = sorted(store.present(roots[0]), key=lambda found: version_numbers(found.version or "0"), reverse=True)
        alike = [found.relative for found in own if installed in installed_names(found.name)]
        has_version = VERSION_FOLDER.fullmatch(file.parent.name) is not None
        if alike and not has_version:
            return Path(alike[0])
        if not store.folders or not installed.endswith(".kdb"):
            return None
        version = file.parent.name if has_version else store.newest(roots[0])
        if version is None:
            why = "name the version of MIOpen by the file's folder, such as 3.3.0.a85ca8a54"
            raise BadRequest(f"{printable(file)}: no MIOpen has kept kernels here; {why}")
        return Path(version, f"{installed.removesuffix('kdb')}ukdb")

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse to move a package's files, beside what the store refuses."""
        if isinstance(self.places, SystemPlace):
            return {**super().refusals(), Ability.RELOCATE: self.places.reason}
        return super().refusals()
