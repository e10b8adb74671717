"""MIOpen's database files: where they lie in a root, and what their stores have in common."""

from __future__ import annotations

import os
import shlex
import stat
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from cachectl.layers.base import errors, facts, store
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.plain import means_absent, status_at
from cachectl.layers.miopen import places
from cachectl.layers.miopen.places import DatabaseFile
from cachectl.layers.stores import database, row_store, tree
from cachectl.layers.stores.rows import RowFile

#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR: Final = "::"


class MIOpenDatabases(row_store.Rows):
    """Entries of database files, whose names say for which device and which MIOpen they are.

    No link is followed, and in a temporary folder only the user's own files count. ``asked_first`` is set for the files
    of a package, which are only read: it is the layer that MIOpen asks before them.
    """

    separator = SEPARATOR
    #: Endings of the layer's databases, of files that are only counted, and whether they may lie in version folders.
    kinds: tuple[str, ...]
    counted: tuple[str, ...] = ()
    folders: ClassVar[bool] = False
    #: The number of parts of a key that follow the file.
    parts: ClassVar[int]
    #: The effect of something that stands in the place of a database.
    when_blocked: ClassVar[facts.Severity]

    def __init__(self, asked_first: str = "") -> None:
        self.asked_first = asked_first
        self.refusals = tree.REFUSALS
        if asked_first:
            self.kinds = tuple(places.INSTALLED[kind] for kind in self.kinds)
            into = f"{places.PACKAGED}; put into the layer {asked_first}, which MIOpen asks first"
            clear = f"{places.PACKAGED}; its package manager removes them"
            self.refusals = {**tree.REFUSALS, facts.Ability.PUT: into, facts.Ability.CLEAR: clear}

    @abstractmethod
    def list_file(self, file: DatabaseFile, template: facts.Entry) -> Iterator[facts.Found]:
        """Yield the entries of a file, made from what all of them have in common, and its problems."""

    @abstractmethod
    def verify_file(self, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every entry of a file as MIOpen does."""

    @abstractmethod
    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | errors.LayerError]:
        """Read entries of a file that exists; missing ones are left out."""

    @abstractmethod
    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Return why MIOpen could not use an entry under its key; ``None`` if it could."""

    @abstractmethod
    def insert(
        self, file: DatabaseFile, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Sequence[bool | errors.LayerError]:
        """Insert entries at once; return the result of each, as :meth:`write` does."""

    def scan_others(self, root: facts.Root, latest: str | None) -> Iterator[facts.Found]:
        """Yield what is not in a database; ``latest`` is the newest version there."""
        del root, latest
        yield from ()

    # ------------------------------------------------------------------ files

    def named(self, root: facts.Root, relative: str) -> DatabaseFile | None:
        """Return the file of a relative path, whether or not it exists; ``None`` for other names."""
        folder, _, name = relative.rpartition("/")
        file = places.parse_name(name, root, folder)
        if file is None or file.kind not in (*self.kinds, *self.counted):
            return None
        return file if not folder or (self.folders and places.VERSION_FOLDER.fullmatch(folder)) else None

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of databases, which the parts of an entry follow, of files beside, and of folders."""
        relative, *parts = path.split(SEPARATOR, self.parts)
        if parts:
            file = self.named(root, relative)
            is_entry = len(parts) == self.parts and any(parts) and file is not None and file.kind in self.kinds
            return store.ENTRY if is_entry else store.FOREIGN
        is_folder = self.folders and places.VERSION_FOLDER.fullmatch(path) is not None
        return store.OWN if is_folder or self.named(root, database.without_companion(path)) else store.FOREIGN

    def files(self, root: facts.Root) -> Iterator[DatabaseFile | facts.Problem]:
        """Yield each file, and a problem for each link and each unreadable file or folder."""
        place = root.path
        try:
            folders = ["", *self._version_folders(root)]
        except OSError as error:
            yield facts.Problem(place, "unreadable", f"cannot be read: {error.strerror}")
            return
        for folder in folders:
            place = root.path / folder
            try:
                paths = [os.path.join(folder, name) for name in sorted(os.listdir(place))]
                for file in filter(None, (self.named(root, path) for path in paths)):
                    place = file.path
                    status = status_at(place)
                    if status is None or not _counts(root, status):
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield file
                    elif stat.S_ISLNK(status.st_mode):
                        yield facts.Problem(place, "link", "a link under a database's name is not followed")
                    else:
                        message = "a folder, or something else that is no file, has a database's name"
                        yield facts.Problem(place, "no-file", message)
            except OSError as error:
                if not means_absent(error):
                    yield facts.Problem(place, "unreadable", f"cannot be read: {error.strerror}")

    def present(self, root: facts.Root) -> list[DatabaseFile]:
        """Return each file that may be used."""
        return [file for file in self.files(root) if isinstance(file, DatabaseFile)]

    def locate(self, root: facts.Root, relative: str) -> DatabaseFile | None:
        """Return a file that exists and may be used. Raises :class:`OSError` where that cannot be determined."""
        file = self.named(root, relative)
        if file is None or (file.folder and _is_link(root.path / file.folder)):
            return None
        return file if is_own_file(root, file.path) else None

    def newest(self, root: facts.Root) -> str | None:
        """Return the newest version with a folder, or files, in the root."""
        # An unreadable root has a problem of its own; which version is the newest is then unknown.
        with suppress(OSError):
            if self.folders:
                return places.newest(self._version_folders(root))
            return places.newest(file.version for file in self.present(root) if file.version is not None)
        return None

    def _version_folders(self, root: facts.Root) -> list[str]:
        """Return the folders of MIOpen's versions, none of a missing root. Raises :class:`OSError`."""
        try:
            found = sorted(filter(places.VERSION_FOLDER.fullmatch, os.listdir(root.path) if self.folders else ()))
        except OSError as error:
            if means_absent(error):
                return []
            raise
        statuses = ((name, status_at(root.path / name)) for name in found)
        return [name for name, status in statuses if status is not None and stat.S_ISDIR(status.st_mode)]

    # ------------------------------------------------------------------ scan and verify

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield the entries of each database. Their keys say everything, so no content is read."""
        del selection, contents
        # Of several MIOpens that are installed, each has files of its own version.
        has_several = len({library.parent for library in places.libraries(self.environment)}) > 1
        latest = None if has_several else self.newest(root)
        named = set()
        for file in self.files(root):
            if isinstance(file, facts.Problem):
                named.add(file.path)
                yield file
            else:
                yield from self._scan_file(file, latest)
        for other in () if root.path in named else self.scan_others(root, latest):
            if not isinstance(other, facts.Problem) or other.path not in named:
                yield other

    def _scan_file(self, file: DatabaseFile, latest: str | None) -> Iterator[facts.Found]:
        root, payload = file.root.path, 0
        template = facts.Entry(self.name, file.relative, root, 0, 0, device=file.arch or file.base, detail=file.detail)
        try:
            template = with_version(replace(template, written_before=_modified(file)), file.version, latest)
            for found in self.list_file(file, template) if file.kind in self.kinds else ():
                payload += found.bytes if isinstance(found, facts.Entry) and found.is_listed else 0
                yield found
        except (errors.LayerError, OSError) as error:
            yield self.unread(file.path, error)
        with suppress(OSError):
            files, total, disk = database.disk_usage(file.path)
            rest = max(0, total - payload)
            yield replace(template, bytes=rest, files=files, disk=disk, sums=0)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every entry as MIOpen does when it loads it."""
        for file in list(self.files(root)):
            if isinstance(file, DatabaseFile):
                if file.kind in self.kinds:
                    yield from self.twice(partial(self.verify_file, file))
                continue
            finding = store.finding_of(self, root, file)
            if file.code == "no-file":
                quoted = shlex.quote(str(file.path))
                fix = self.fix(file.path, f"mv {quoted} {quoted}.moved")
                finding = replace(finding, severity=self.when_blocked, fix=fix)
            yield finding

    def fix(self, path: Path, own: str) -> str:
        """Return the fix of a user's file; a package's file has another."""
        return f"reinstall the package that {path} belongs to" if self.asked_first else own

    def file_finding(self, root: facts.Root, rows: RowFile, error: errors.LayerError) -> facts.Finding:
        """Return the finding of a file that could not be read; a package's file is never removed."""
        finding = super().file_finding(root, rows, error)
        if not isinstance(error, errors.Damaged):
            return finding
        thing = None if self.asked_first else finding.thing
        return replace(finding, code="damaged", fix=self.fix(rows.path, finding.fix), thing=thing)

    # ------------------------------------------------------------------ get and put

    def read_rows(
        self, root: facts.Root, file: str, keys: Sequence[str]
    ) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read entries of one database."""
        located = self.locate(root, file)
        if located is None or located.kind not in self.kinds:
            return {}
        return self.load(located, [key for key in keys if SEPARATOR in key])

    def write_rows(
        self, root: facts.Root, file: str, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Mapping[str, bool | store.EntryError]:
        """Check and insert entries of one database."""
        first, named = artifacts[0].key, self.named(root, file)
        if named is None or self.kind_of(root, first) != store.ENTRY:
            raise errors.not_a_key(self.name, first)
        is_blocked = _is_link(root.path / named.folder) or status_at(named.path) is not None
        if is_blocked and self.locate(root, file) is None:
            message = "cannot put: a link, a folder, or somebody else's file stands there"
            raise errors.Refused(self.name, message, named.path)
        results: dict[str, bool | store.EntryError] = {}
        for artifact in artifacts:
            if (complaint := self.complaint(artifact)) is not None:
                results[artifact.key] = errors.Damaged(self.name, complaint, artifact.key)
        whole = [artifact for artifact in artifacts if artifact.key not in results]
        inserted = self.insert(named, whole, replace=replace) if whole else ()
        return {**results, **dict(zip((artifact.key for artifact in whole), inserted, strict=True))}


def is_own_file(root: facts.Root, path: Path) -> bool:
    """Return whether a plain file counts that may exist. Raises :class:`OSError` where that cannot be determined."""
    status = status_at(path)
    return status is not None and stat.S_ISREG(status.st_mode) and _counts(root, status)


def _counts(root: facts.Root, status: os.stat_result) -> bool:
    """Return whether a file counts: in a temporary folder other users have theirs, and links lead anywhere."""
    return root.role != places.TEMPORARY or (status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode))


def _is_link(path: Path) -> bool:
    status = status_at(path)
    return status is not None and stat.S_ISLNK(status.st_mode)


def _modified(file: DatabaseFile) -> float | None:
    """Return the last write to a file or its log in epoch seconds; ``None`` where it does not exist."""
    status = (status_at(path) for path in (file.path, database.companion(file.path, "-wal")))
    return max((found.st_mtime for found in status if found is not None), default=None)


def with_version(entry: facts.Entry, version: str | None, latest: str | None) -> facts.Entry:
    """Return an entry of a version of MIOpen; it is stale if no installed MIOpen opens files of that version."""
    if version is None:
        return entry
    is_old = latest is not None and places.version_numbers(version) < places.version_numbers(latest)
    because = f"a newer MIOpen ({latest}) has its own files" if is_old else None
    return replace(entry, versions={"miopen": version}, stale=True if is_old else None, stale_because=because)
