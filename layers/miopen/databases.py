"""Shared code of MIOpen's stores and layers: database files, their entries, and a switch."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from pathlib import Path

from cachectl.layers.base import facts
from cachectl.layers.base.errors import BadRequest, Busy, Refused, not_a_key
from cachectl.layers.base.facts import Entry, Root
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import EntryFiles, Lookups, Portability
from cachectl.layers.base.texts import printable
from cachectl.layers.host.open_files import open_elsewhere
from cachectl.layers.miopen import places
from cachectl.layers.miopen.names import VERSION_FOLDER, installed_names, parse_name, version_numbers
from cachectl.layers.miopen.places import SEPARATOR, TEMPORARY, DatabaseFile, Databases
from cachectl.layers.stores.row_store import Rows
from cachectl.layers.stores.rows import RowFile


class MIOpenDatabases(Rows):
    """Entries of database files, whose names say for which device and which MIOpen they are."""

    separator = SEPARATOR

    @abstractmethod
    def databases(self, root: Root) -> Databases:
        """Return the database files of a root."""

    @abstractmethod
    def file_of(self, file: DatabaseFile) -> RowFile:
        """Return an sqlite database as a file."""

    @abstractmethod
    def entry_aside(self, root: Root, file: DatabaseFile, target: facts.Target, thing: facts.Quarantined) -> str | None:
        """Move an entry of a file into quarantine; return why it was left, or ``None``."""

    @abstractmethod
    def entry_back(self, root: Root, file: DatabaseFile, thing: facts.Quarantined, *, replace: bool) -> None:
        """Put an entry back into its file."""

    def latest(self, databases: Databases) -> str | None:
        """Return the newest version in a root, which makes older ones stale; ``None`` if several MIOpens use it."""
        return None if places.several_installed(self.environment) else databases.newest()

    def entry_of(
        self, root: Root, file: DatabaseFile, key: str, size: int, *, stamp: tuple[int, ...], because: str | None
    ) -> Entry:
        """Return an entry of a file, as its name describes it; ``because`` is why it is stale."""
        return Entry(
            layer=self.name,
            key=SEPARATOR.join((file.relative, key)),
            root=root.path,
            bytes=size,
            files=0,
            device=file.device,
            versions=file.versions,
            stale=True if because else None,
            stale_because=because,
            detail=file.detail,
            stamp=stamp,
        )

    def demand_place(self, databases: Databases, file: DatabaseFile) -> None:
        """Raise :class:`Refused` where something stands in the place of a file that does not exist."""
        if databases.find(file.relative) is None and databases.blocked(file):
            raise Refused(self.name, "cannot put: a link, a folder, or somebody else's file stands there", file.path)

    def quarantine(self, root: Root, target: facts.Target, thing: facts.Quarantined) -> str | None:
        """Move an entry into quarantine, or an sqlite file that MIOpen cannot use and no program has open."""
        relative, separator, _ = target.key.partition(SEPARATOR)
        file = self.databases(root).find(relative)
        if file is None:
            return "already gone"
        if separator:
            return self.entry_aside(root, file, target, thing)
        return self.file_of(file).set_file_aside(target, thing, partial(open_elsewhere, self.environment))

    def restore(self, root: Root, thing: facts.Quarantined, *, replace: bool) -> None:
        """Put an entry back unchanged, or move an sqlite file back."""
        relative, separator, _ = thing.key.partition(SEPARATOR)
        databases = self.databases(root)
        file = databases.name(relative)
        if file is None or (databases.find(relative) is None and databases.blocked(file)):
            raise not_a_key(self.name, thing.key)
        if separator:
            self.entry_back(root, file, thing, replace=replace)
            return
        if (because := open_elsewhere(self.environment, file.path)) is not None:
            raise Busy(self.name, because, file.path)
        self.file_of(file).bring_file_back(thing, replace=replace)


class MIOpenLookups(Lookups):
    """Old versions have a file for each kernel. Databases hold many entries."""

    files = EntryFiles(
        regex(r".*\.(?:u?kdb|u?db|txt)"), "no event says which records are read, or whether a lookup found one"
    )


class MIOpenLayer(Layer):
    """A layer of MIOpen's user databases."""

    store: MIOpenDatabases

    @property
    def portability(self) -> Portability:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return places.MIOpenPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return MIOpenLookups()

    def place_of_file(self, file: Path) -> Path | None:
        """Return the place of a database by its name: that of the newest file of the user for the same device.

        Without one, kernels belong to the version of MIOpen that the file's folder names, or to the newest known one.
        """
        name, roots = parse_name(file.name), self.roots()
        if name is None or not roots:
            return None
        databases = self.store.databases(roots[0])
        is_own_kind = name.kind in databases.kinds
        own = [found for found in databases.files() if isinstance(found, DatabaseFile)]
        own.sort(key=lambda found: version_numbers(found.version or "0"), reverse=True)
        installed = installed_names(name)[0]
        alike = [found.relative for found in own if installed in installed_names(found.name)]
        version = file.parent.name if VERSION_FOLDER.fullmatch(file.parent.name) else databases.newest()
        if is_own_kind and not databases.folders:
            return Path(file.name)
        if alike and (version is None or not VERSION_FOLDER.fullmatch(file.parent.name)):
            return Path(alike[0])
        if not databases.folders or not installed.endswith(".kdb"):
            return None
        if version is None:
            why = "name the version of MIOpen by the file's folder, such as 3.3.0.a85ca8a54"
            raise BadRequest(f"{printable(file)}: no MIOpen has kept kernels here; {why}")
        return Path(version, f"{installed.removesuffix('kdb')}ukdb")

    def present(self) -> bool:
        """Return whether MIOpen has left anything: a root, or in a temporary folder a database."""
        for root in self.roots():
            if any(True for _ in self.store.databases(root).files()) if root.role == TEMPORARY else root.exists:
                return True
        return False
