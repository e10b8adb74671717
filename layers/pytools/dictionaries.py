"""The store of pytools' persistent dictionaries, which three layers share by the identifiers of dictionaries.

Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import errors, facts, store
from cachectl.layers.base.environment import Environment, release_of
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk import plain
from cachectl.layers.formats import pdict, pickles
from cachectl.layers.stores import archive, database, row_store
from cachectl.layers.stores.rows import RowFile, Schema
from cachectl.layers.stores.tree import Leaf, Shape, Tree

if TYPE_CHECKING:
    from cachectl.layers.host.pythons import Python

#: The table of a dictionary since pytools 2024.1.4.
SCHEMA: Final = Schema(
    table="dict",
    create=("create table if not exists dict (keyhash text not null primary key, key_value text not null)",),
    key=("keyhash",),
    values=("key_value",),
    size="length(key_value)",
)
#: Entries of v3 and v4: a folder for each, below that of the dictionary, which stays, since programs lock files in it.
_FOLDERS: Final = Shape(pdict.V4_LEVELS, folders=True, members=pdict.V4_MEMBERS)


#: Whether no program can hit an entry any more, ``None`` if unknown, with the reason.
Staleness = tuple[bool | None, str | None]


#: Takes a dictionary, and what its entries have in common; yields its rows, one by one or together.
_RowsOf = Callable[[RowFile, facts.Entry], Iterator[facts.Entry]]


class Dictionaries(row_store.Rows):
    """Rows of sqlite files, one file for each dictionary, and folders of older generations.

    ``owns_identifier`` returns whether a dictionary of an identifier belongs to the layer.
    """

    separator = "/"

    def __init__(self, form: str, owns_identifier: Callable[[str], bool]) -> None:
        self.owns_identifier = owns_identifier
        self.forms = (f"{form}/5", f"{form}/4")

    # ------------------------------------------------------------------ names

    def named(self, key: str) -> pdict.DictionaryName | None:
        """Return the dictionary of a key, or of a path below the root; ``None`` if it is not the layer's."""
        name = pdict.parse_name(key.partition("/")[0], self.environment.python)
        return name if name is not None and self.owns_identifier(name.identifier) else None

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare the identifier; other names belong to the layer that takes all other dictionaries."""
        del root
        dictionary, _, digest = path.partition("/")
        if (name := self.named(dictionary)) is not None:
            # The key of a row is any one word.
            is_row = bool(digest) and "/" not in digest
            if is_row if name.generation == "v5" else _FOLDERS.accepts(path):
                return store.ENTRY
        name = pdict.parse_name(database.without_companion(dictionary), self.environment.python)
        return store.OWN if self.owns_identifier("" if name is None else name.identifier) else store.FOREIGN

    def dictionaries(self, root: facts.Root) -> Iterator[pdict.DictionaryName]:
        """Yield the names of the layer's dictionaries. Raises :class:`Unreachable`."""
        try:
            files = sorted(os.listdir(root.path))
        except OSError as error:
            if plain.means_absent(error):
                return
            raise errors.Unreachable(self.name, f"cannot be read: {error.strerror}", root.path) from error
        yield from filter(None, map(self.named, files))

    def row_file(self, root: facts.Root, file: str) -> RowFile | None:
        """Return a dictionary of rows."""
        return self.opened(root.path / file, SCHEMA) if file.endswith(".sqlite") else None

    def row_files(self, root: facts.Root) -> Iterator[RowFile]:
        """Return the dictionaries of rows."""
        names = (name.file for name in self.dictionaries(root) if name.generation == "v5")
        return (self.opened(root.path / file, SCHEMA) for file in names)

    def _tree(self, root: facts.Root) -> Tree:
        return Tree(self.name, root.path, _FOLDERS)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield rows of v5 dictionaries and folders of older ones.

        Only rows whose bytes contain the kernel's name are read: pickles store text as it is. Without contents no
        pickle is read.
        """
        # Text that cannot be encoded is in no row; the selection reports that.
        part = selection.kernel_part.encode() if selection.kernel_part.isprintable() else b""
        yield from self._scan(root, partial(_list, contents=contents, part=part))

    def usage(self, root: facts.Root) -> facts.Usage:
        """Count the rows of each v5 dictionary together, summed by sqlite."""
        return store.sum_usage(self._scan(root, _sum))

    def _scan(self, root: facts.Root, rows_of: _RowsOf) -> Iterator[facts.Found]:
        for name in self.dictionaries(root):
            if name.generation == "v5":
                yield from self._scan_file(root, name, rows_of)
        for leaf in self._folders(root):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif (dictionary := self.named(leaf.key)) is None:
                yield leaf.orphan(self.name, root.path)
            else:
                yield self._named(leaf.entry(self.name, root.path), dictionary)

    def _scan_file(self, root: facts.Root, name: pdict.DictionaryName, rows_of: _RowsOf) -> Iterator[facts.Found]:
        """Yield the rows of a dictionary, one by one or together, then the rest of its files."""
        path = root.path / name.file
        payload = 0
        try:
            if not plain.is_plain_file(path):
                yield facts.Problem(path, "link", "a link, or no file, under a dictionary's name is not followed")
                return
            modified = path.stat().st_mtime
            entry = facts.Entry(self.name, name.file, root.path, 0, 0, written_before=modified)
            template = self._named(entry, name)
            for found in rows_of(self.opened(path, SCHEMA), template):
                payload += found.bytes
                yield found
            files, total, disk = database.disk_usage(path)
        except FileNotFoundError:
            yield facts.Problem(path, "vanished", "vanished meanwhile")
        except (errors.LayerError, OSError) as error:
            yield self.unread(path, error)
        else:
            rest = max(0, total - payload)
            yield replace(template, bytes=rest, files=files, disk=disk, sums=0)

    def _named(self, entry: facts.Entry, name: pdict.DictionaryName) -> facts.Entry:
        """Add what a dictionary's name says of its entries."""
        miss = partial(_miss, name, self.environment.searches_pythons)
        stale, because = staleness(self.environment, "written by", name.python, miss, partial(_has_made, name))
        versions = {"python": name.python, **pdict.packages_of(name.identifier)}
        detail = {"dictionary": name.identifier}
        return replace(entry, versions=versions, stale=stale, stale_because=because, detail=detail)

    def _folders(self, root: facts.Root) -> Iterator[Leaf | facts.Problem]:
        """Yield the folders of older dictionaries, this layer's orphans, and problems of either."""
        for leaf in self._tree(root).scan():
            if isinstance(leaf, facts.Problem):
                path = os.path.relpath(leaf.path, root.path)
                if path == "." or self.kind_of(root, path) != store.FOREIGN:
                    yield leaf
            # What an interrupted cachectl left belongs to the layer that takes all other dictionaries.
            elif self.owns_identifier("") if leaf.orphan_rule is not None else self.named(leaf.key) is not None:
                yield leaf

    # ------------------------------------------------------------------ get and put

    def read(self, root: facts.Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read rows as their raw pickles, and folders of old dictionaries as tars."""
        folders = [key for key in keys if _FOLDERS.accepts(key)]
        tree = self._tree(root)
        read = store.read_each(lambda key: self._artifact(key, tree.read(key)), folders)
        return {**read, **super().read(root, [key for key in keys if key not in read])}

    def _artifact(self, key: str, data: bytes | None) -> facts.Artifact | None:
        name = self.named(key)
        if name is None or data is None:
            return None
        detail = {"dictionary": name.identifier, "python": name.python}
        return facts.Artifact(self.name, key, self.forms[_FOLDERS.accepts(key)], data, detail)

    def read_rows(
        self, root: facts.Root, file: str, keys: Sequence[str]
    ) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read rows of one dictionary."""
        rows = self.row_file(root, file)
        if self.named(file) is None or rows is None:
            return {}
        found = rows.read_many([(key.partition("/")[2],) for key in keys])
        read = (
            self._artifact(key, None if values is None else _as_bytes(values[0]))
            for key, values in zip(keys, found, strict=True)
        )
        return {artifact.key: artifact for artifact in read if artifact is not None}

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | store.EntryError]:
        """Insert rows as pytools would have stored them, and place folders of old dictionaries."""
        results: dict[str, bool | store.EntryError] = {}
        rows: list[facts.Artifact] = []
        for artifact in artifacts:
            key, is_folder = artifact.key, _FOLDERS.accepts(artifact.key)
            if artifact.form != self.forms[is_folder]:
                message = f"form {artifact.form} does not go into such a dictionary"
                results[key] = errors.Damaged(self.name, message, key)
            elif is_folder:
                results[key] = store.attempt(partial(self._place_folder, root, artifact, replace=replace))
            # Whole frames show that nothing was cut off; verify looks closer.
            elif not pickles.is_framed(artifact.data) and (reason := pickles.complaint(artifact.data)):
                results[key] = errors.Damaged(self.name, reason, key)
            else:
                rows.append(artifact)
        return {**results, **super().write(root, rows, replace=replace)}

    def _place_folder(self, root: facts.Root, artifact: facts.Artifact, *, replace: bool) -> bool | errors.LayerError:
        tree = self._tree(root)
        try:
            members = archive.unpack(artifact.data)
        except ValueError as error:
            raise errors.Damaged(self.name, str(error), artifact.key) from error
        if tree.is_same(artifact.key, members, replace=replace):
            return False
        return tree.write({artifact.key: members}, replace=replace)[artifact.key]

    def write_rows(
        self, root: facts.Root, file: str, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Mapping[str, bool | store.EntryError]:
        """Insert rows into one dictionary."""
        rows = self.row_file(root, file)
        if rows is None:
            return {artifact.key: errors.not_a_key(self.name, artifact.key) for artifact in artifacts}
        keys = [artifact.key for artifact in artifacts]
        pairs = [((artifact.key.partition("/")[2],), (artifact.data,)) for artifact in artifacts]
        return dict(zip(keys, rows.insert(pairs, replace=replace), strict=True))

    # ------------------------------------------------------------------ remove and verify

    def remove_others(self, root: facts.Root, targets: Sequence[facts.Entry]) -> Iterator[store.Part]:
        """Remove folders of old dictionaries, and what an interrupted cachectl left."""
        if targets:
            yield str(root.path), partial(self._tree(root).remove, targets)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every file with sqlite's own check, and every row as a pickle."""
        # Raises if the folder cannot be read, before anything is yielded.
        databases = list(self.row_files(root))
        for leaf in self._folders(root):
            if isinstance(leaf, facts.Problem):
                yield store.finding_of(self, root, leaf)
        for rows in databases:
            yield from self.twice(partial(self._verify_file, root, rows))

    def _verify_file(self, root: facts.Root, rows: RowFile) -> Iterator[facts.Finding]:
        try:
            rows.require_sound()
            for row, (value,) in rows.rows_with("key_value"):
                if complaint := pickles.complaint(_as_bytes(value)):
                    key, stamp = f"{rows.path.name}/{row.key[0]}", (row.rowid, row.bytes)
                    if pickles.is_foreign(_as_bytes(value)):
                        message = "is a pickle of a protocol that this Python does not know; left alone"
                        yield store.finding_of(self, root, facts.Problem(root.path / key, "foreign", message))
                        continue
                    entry = facts.Entry(self.name, key, root.path, row.bytes, 0, stamp=stamp)
                    yield self.row_finding(entry, "pickle", complaint)
        except errors.LayerError as error:
            yield self.file_finding(root, rows, error)


def _list(rows: RowFile, template: facts.Entry, *, contents: bool, part: bytes) -> Iterator[facts.Entry]:
    listing = rows.rows_with("key_value", part=part) if contents else ((row, ()) for row in rows.rows())
    for row, values in listing:
        kernels = pdict.kernel_names(_as_bytes(values[0])) if values else None
        key, stamp = f"{template.key}/{row.key[0]}", (row.rowid, row.bytes)
        yield replace(template, key=key, bytes=row.bytes, kernels=kernels, stamp=stamp)


def _sum(rows: RowFile, template: facts.Entry) -> Iterator[facts.Entry]:
    count, size = rows.sum()
    if count:
        yield replace(template, bytes=size, sums=count)


def staleness(
    environment: Environment,
    how: str,
    version: str,
    miss: Callable[[Python], str | None],
    has_made: Callable[[Python], bool],
) -> Staleness:
    """Return whether no known Python can hit what a Python of this version made.

    ``miss`` returns why a present Python of the version cannot hit it, ``None`` if it can; ``has_made`` returns whether
    the Python can have made it. It is stale only if its maker is known, or if the user named the Pythons.
    """
    from cachectl.layers.host import pythons

    own = pythons.own_python(environment)
    if own.version == version and miss(own) is None:
        # Most entries are of this Python, and the others need not be looked for.
        pythons.note_own(environment)
        return False, None
    known = [python for python in pythons.pythons_of(environment) if python.version == version]
    short = ".".join(version.split(".")[:3])
    if not known:
        return None, f"unknown: {how} Python {short}, which was not looked for; --python PATH names it"
    if None in (reasons := [miss(python) for python in known if python.present]):
        return False, None
    if away := next((python for python in known if python.present is None), None):
        return None, f"unknown: {how} Python {short}, and {away.path} is not mounted here, or does not answer"
    maker = next(filter(has_made, known), None)
    if maker is not None:
        reasons = [miss(maker) if maker.present else f"{how} Python {short}, and {maker.path} was removed"]
    # The environment's own Python, often that of a tool, comes first.
    because = next(reversed(reasons), f"no Python {short} is left")
    if maker is not None or environment.python_paths or not environment.searches_pythons:
        return True, because
    return None, f"unknown: {because}; --python PATH names another Python"


def _miss(name: pdict.DictionaryName, is_real: bool, python: Python) -> str | None:
    """Return why a Python of the dictionary's version opens another dictionary, ``None`` if it opens this one.

    A package that is not installed counts only in an environment that ``is_real``; in others it may be left unsaid.
    """
    pytools = python.installed("pytools")
    current = _generation(pytools)
    if current is not None and (name.generation, name.dash) != current:
        return f"pytools {pytools} names and stores its dictionaries differently"
    packages = _packages(name)
    for package, version in packages.items():
        installed = python.installed(package)
        if installed not in (None, version):
            return f"written with {package} {version}, {installed} is installed"
    absent = next((needed for needed in ("pytools", *packages) if python.installed(needed) is None), None)
    return f"{absent} is not installed for {python.path}" if absent and is_real else None


def _has_made(name: pdict.DictionaryName, python: Python) -> bool:
    """Return whether the versions of packages in a dictionary's name have been seen at a Python."""
    generations = {_generation(version) for version in python.seen.get("pytools", ())}
    return (name.generation, name.dash) in generations and all(starmap(python.has_had, _packages(name).items()))


def _packages(name: pdict.DictionaryName) -> dict[str, str]:
    """Return the versions of packages in a dictionary's name that are known."""
    packages = pdict.packages_of(name.identifier)
    return {package: version for package, version in packages.items() if version != pdict.UNKNOWN}


def _generation(pytools: str | None) -> tuple[str, bool] | None:
    """Return generation and dash of the dictionaries that a pytools version makes."""
    release = release_of(pytools)
    if release is None:
        return None
    if release >= (2026, 1):
        return "v5", True
    return ("v5", False) if release >= (2024, 1, 4) else ("v4", True)


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
