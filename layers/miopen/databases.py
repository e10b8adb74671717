"""MIOpen's database files: where they lie in a root, and what their stores have in common."""

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

from cachectl.layers.base import errors, facts, store
from cachectl.layers.base.facts import Ability, Entry, Found, Problem, Root
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.presence import means_absent, status_at
from cachectl.layers.miopen import names, places
from cachectl.layers.stores import database, row_store
from cachectl.layers.stores.rows import RowFile
from cachectl.layers.stores.tree import REFUSALS

#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR: Final = "::"


class DatabaseFile(NamedTuple):
    """A database file of a root, with its path there and its version folder."""

    relative: str
    path: Path
    name: names.DatabaseName
    folder: str

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
        known = {"base": self.name.base, "compute_units": self.name.units, "backend": self.name.backend}
        return {name: str(value) for name, value in known.items() if value is not None}

    def modified(self) -> float | None:
        """Return the last write to the file or its log in epoch seconds; ``None`` where it does not exist."""
        status = (status_at(path) for path in (self.path, self.path.with_name(self.path.name + "-wal")))
        return max((found.st_mtime for found in status if found is not None), default=None)


class MIOpenDatabases(row_store.Rows):
    """Entries of database files, whose names say for which device and which MIOpen they are.

    No link is followed, and in a temporary folder only the user's own files count.
    """

    separator = SEPARATOR
    #: Endings of the layer's databases, of files that are only counted, and whether they may lie in version folders.
    kinds: ClassVar[tuple[str, ...]]
    counted: ClassVar[tuple[str, ...]] = ()
    folders: ClassVar[bool] = False
    #: The number of parts of a key that follow the file.
    parts: ClassVar[int]
    #: For files of a package: the layer that MIOpen asks first.
    asked_first: ClassVar[str] = ""
    #: The effect of something that stands in the place of a database.
    when_blocked: ClassVar[facts.Severity]

    @abstractmethod
    def list_file(self, file: DatabaseFile, template: Entry) -> Iterator[Found]:
        """Yield the entries of a file, made from what all of them have in common, and its problems."""

    @abstractmethod
    def verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every entry of a file as MIOpen does."""

    @abstractmethod
    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | errors.LayerError]:
        """Read entries of a file that exists; missing ones are left out."""

    @abstractmethod
    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Return why MIOpen could not use an entry under its key; ``None`` if it could."""

    @abstractmethod
    def insert(
        self, root: Root, file: DatabaseFile, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Sequence[bool | errors.LayerError]:
        """Insert entries at once where they are new, or in the places of others.

        Returns for each: ``False`` for the same one there, ``None`` for a different one that stays.
        """

    def scan_others(self, root: Root, latest: str | None) -> Iterator[Found]:
        """Yield what is not in a database; ``latest`` is the newest version there."""
        del root, latest
        yield from ()

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse every change of a package's files, and on platforms without directory handles."""
        if not self.asked_first:
            return REFUSALS
        packaged = places.PACKAGED
        into = f"{packaged}; put into the layer {self.asked_first}, which MIOpen asks first"
        return {**REFUSALS, Ability.PUT: into, Ability.CLEAR: f"{packaged}; its package manager removes them"}

    # ------------------------------------------------------------------ files

    def named(self, root: Path, relative: str) -> DatabaseFile | None:
        """Return the file of a relative path, whether or not it exists; ``None`` for other names."""
        folder, _, file = relative.rpartition("/")
        name = names.parse_name(file)
        if name is None or name.kind not in (*self.kinds, *self.counted):
            return None
        if folder and not (self.folders and names.VERSION_FOLDER.fullmatch(folder)):
            return None
        return DatabaseFile(relative, root / relative, name, folder)

    def is_key(self, key: str) -> bool:
        """Check the name of the database, and that the parts of an entry follow."""
        relative, *parts = key.split(SEPARATOR, self.parts)
        file = self.named(Path(), relative)
        return len(parts) == self.parts and any(parts) and file is not None and file.name.kind in self.kinds

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases, of sqlite's files beside one, and of version folders."""
        if self.folders and len(parts) == 1 and names.VERSION_FOLDER.fullmatch(parts[0]):
            return True
        return self.named(root.path, "/".join((*parts[:-1], database.without_companion(parts[-1])))) is not None

    def files(self, root: Root) -> Iterator[DatabaseFile | Problem]:
        """Yield each file, and a problem for each link and each unreadable file or folder."""
        try:
            folders = ["", *self._version_folders(root)]
        except OSError as error:
            yield Problem(root.path, "unreadable", f"cannot be read: {error.strerror}")
            return
        for folder in folders:
            place = root.path / folder
            try:
                paths = [os.path.join(folder, name) for name in sorted(os.listdir(place))]
                for file in filter(None, (self.named(root.path, path) for path in paths)):
                    place = file.path
                    if (status := status_at(place)) is not None and _counts(root, status):
                        yield file if stat.S_ISREG(status.st_mode) else _blocked(file, status)
            except OSError as error:
                if not means_absent(error):
                    yield Problem(place, "unreadable", f"cannot be read: {error.strerror}")

    def present(self, root: Root) -> list[DatabaseFile]:
        """Return each file that may be used."""
        return [file for file in self.files(root) if isinstance(file, DatabaseFile)]

    def locate(self, root: Root, relative: str) -> DatabaseFile | None:
        """Return a file that exists and may be used. Raises :class:`OSError` where that cannot be determined."""
        file = self.named(root.path, relative)
        if file is None or (file.folder and _is_link(root.path / file.folder)):
            return None
        return file if is_own_file(root, file.path) else None

    def newest(self, root: Root) -> str | None:
        """Return the newest version with a folder, or files, in the root."""
        if self.folders:
            # An unreadable root has a problem of its own; which version is the newest is then unknown.
            with suppress(OSError):
                return names.newest(self._version_folders(root))
            return None
        return names.newest(file.version for file in self.present(root) if file.version is not None)

    def _version_folders(self, root: Root) -> list[str]:
        """Return the folders of MIOpen's versions, none of a missing root. Raises :class:`OSError`."""
        try:
            found = sorted(filter(names.VERSION_FOLDER.fullmatch, os.listdir(root.path) if self.folders else ()))
        except OSError as error:
            if means_absent(error):
                return []
            raise
        statuses = ((name, status_at(root.path / name)) for name in found)
        return [name for name, status in statuses if status is not None and stat.S_ISDIR(status.st_mode)]

    def writable(self, root: Root, key: str) -> DatabaseFile:
        """Return the file of a key. Raises :class:`LayerError` where there can be none."""
        file = self.named(root.path, key.partition(SEPARATOR)[0])
        if file is None or not self.is_key(key):
            raise errors.not_a_key(self.name, key)
        folder = root.path / file.folder
        if self.locate(root, file.relative) is None and (_is_link(folder) or status_at(file.path) is not None):
            raise errors.Refused(
                self.name, "cannot put: a link, a folder, or somebody else's file stands there", file.path
            )
        return file

    # ------------------------------------------------------------------ scan and verify

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield the entries of each database. Their keys say everything, so no content is read."""
        del selection, contents
        # Of several MIOpens that are installed, each has files of its own version.
        has_several = len({library.parent for library in places.libraries(self.environment)}) > 1
        latest = None if has_several else self.newest(root)
        named = set()
        for file in self.files(root):
            if isinstance(file, Problem):
                named.add(file.path)
                yield file
            else:
                yield from self._scan_file(root, file, latest)
        for other in () if root.path in named else self.scan_others(root, latest):
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
                versions=file.versions,
                stale=stale,
                stale_because=because,
                detail=file.detail,
            )
            for found in self.list_file(file, template) if file.name.kind in self.kinds else ():
                payload += found.bytes if isinstance(found, Entry) else 0
                yield found
        except (errors.LayerError, OSError) as error:
            yield self.unread(file.path, error)
        with suppress(OSError):
            files, total, disk = database.disk_usage(file.path)
            rest = max(0, total - payload)
            yield facts.Housekeeping(file.relative, root.path, rest, files, file.modified(), stale, disk=disk)

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every entry as MIOpen does when it loads it."""
        for file in list(self.files(root)):
            if isinstance(file, Problem):
                quoted = shlex.quote(str(file.path))
                finding = store.finding_of(self, root, file)
                is_blocked = file.code == "no-file"
                fix = self.fix(file.path, f"mv {quoted} {quoted}.moved")
                yield (replace(finding, severity=self.when_blocked, fix=fix) if is_blocked else finding)
            elif file.name.kind in self.kinds:
                yield from self.twice(lambda file=file: self.verify_file(root, file))  # type: ignore[misc]

    def fix(self, path: Path, own: str) -> str:
        """Return the fix of a user's file; a package's file has another."""
        return f"reinstall the package that {path} belongs to" if self.asked_first else own

    def file_finding(self, root: Root, rows: RowFile, error: errors.LayerError) -> facts.Finding:
        """Return the finding of a file that could not be read; a package's file is never removed."""
        finding = super().file_finding(root, rows, error)
        if not isinstance(error, errors.Damaged):
            return finding
        thing = None if self.asked_first else finding.thing
        return replace(finding, code="damaged", fix=self.fix(rows.path, finding.fix), thing=thing)

    # ------------------------------------------------------------------ get and put

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read entries of one database."""
        located = self.locate(root, file)
        if located is None or located.name.kind not in self.kinds:
            return {}
        return self.load(located, [key for key in keys if SEPARATOR in key])

    def write_rows(
        self, root: Root, file: str, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Mapping[str, bool | store.EntryError]:
        """Check and insert entries of one database."""
        del file
        results: dict[str, bool | store.EntryError] = {}
        located = self.writable(root, artifacts[0].key)
        for artifact in artifacts:
            if (complaint := self.complaint(artifact)) is not None:
                results[artifact.key] = errors.Damaged(self.name, complaint, artifact.key)
        whole = [artifact for artifact in artifacts if artifact.key not in results]
        inserted = self.insert(root, located, whole, replace=replace) if whole else ()
        keys = [artifact.key for artifact in whole]
        return {**results, **dict(zip(keys, inserted, strict=True))}


def is_own_file(root: Root, path: Path) -> bool:
    """Return whether a plain file counts that may exist. Raises :class:`OSError` where that cannot be determined."""
    status = status_at(path)
    return status is not None and stat.S_ISREG(status.st_mode) and _counts(root, status)


def _counts(root: Root, status: os.stat_result) -> bool:
    """Return whether a file counts: in a temporary folder other users have theirs, and links lead anywhere."""
    return root.role != places.TEMPORARY or (status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode))


def _blocked(file: DatabaseFile, status: os.stat_result) -> Problem:
    if stat.S_ISLNK(status.st_mode):
        return Problem(file.path, "link", "a link under a database's name is not followed")
    return Problem(file.path, "no-file", "a folder, or something else that is no file, has a database's name")


def _is_link(path: Path) -> bool:
    status = status_at(path)
    return status is not None and stat.S_ISLNK(status.st_mode)


def stale_because(version: str | None, latest: str | None) -> str | None:
    """Return why no installed MIOpen opens the files of a version; ``None`` where one may."""
    if version is None or latest is None or names.version_numbers(version) >= names.version_numbers(latest):
        return None
    return f"a newer MIOpen ({latest}) has its own files"
