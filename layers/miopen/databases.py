"""Shared code of MIOpen's stores and layers: database files, their entries, and a switch."""

from __future__ import annotations

from abc import abstractmethod

from cachectl.layers.base.errors import Refused
from cachectl.layers.base.facts import Entry, Root
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import EntryFiles, Lookups, Portability
from cachectl.layers.miopen import places
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


class MIOpenLookups(Lookups):
    """Old versions have a file for each kernel. Databases hold many entries."""

    mapped = places.LIBRARIES
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

    def present(self) -> bool:
        """Return whether MIOpen has left anything: a root, or in a temporary folder a database."""
        for root in self.roots():
            if any(True for _ in self.store.databases(root).files()) if root.role == TEMPORARY else root.exists:
                return True
        return False
