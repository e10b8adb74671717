"""The store of pytools' persistent dictionaries, which three layers share by the identifiers of dictionaries.

Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment, release_of
from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused, Unreachable, not_a_key
from cachectl.layers.base.facts import Entry, Found, Problem, Root, Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.store import each_part
from cachectl.layers.disk.presence import is_plain_file, means_absent
from cachectl.layers.formats import pdict
from cachectl.layers.formats.pickles import complaint as pickle_complaint
from cachectl.layers.formats.pickles import is_framed
from cachectl.layers.stores.row_store import Rows
from cachectl.layers.stores.rows import (
    Row,
    RowFile,
    Schema,
    disk_blocks,
    disk_usage,
    without_companion,
)
from cachectl.layers.stores.tree import Leaf, Shape, Tree, always, scan_each

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
#: What loopy writes for a package that does not say its version.
UNKNOWN: Final = "_UNKNOWN_"
_FOLDERS = (
    Shape(pdict.V4_LEVELS, folders=True, members=pdict.V4_MEMBERS),
    Shape(pdict.V2_LEVELS, folders=True, members=pdict.V4_MEMBERS),
)


class Staleness(NamedTuple):
    """Whether no program can hit an entry any more, ``None`` if unknown, with the reason."""

    stale: bool | None
    because: str | None = None


#: The rows of a dictionary, one by one or together.
_Rows = TypeVar("_Rows", Entry, facts.Bulk)
#: Takes root, name, time of the last change (epoch seconds) and staleness of a dictionary.
_Look = Callable[[Root, pdict.DictionaryName, float, "Staleness"], Iterator[_Rows]]


class Dictionaries(Rows):
    """Rows of sqlite files, one file for each dictionary, and folders of older generations.

    ``owns_identifier`` returns whether a dictionary of an identifier belongs to the layer.
    """

    separator = "/"

    def __init__(self, form: str, owns_identifier: Callable[[str], bool]) -> None:
        self.owns_identifier = owns_identifier
        self.forms = (f"{form}/5", f"{form}/4")

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield rows of v5 dictionaries and folders of older ones."""
        yield from self._scan_all(root, partial(self._list, contents=contents))

    def find(self, root: Root, selection: Selection) -> Iterator[Found]:
        """Read only rows whose bytes contain the kernel's name: pickles store text as it is."""
        # Text that cannot be encoded is in no row; the selection reports that.
        part = selection.kernel_part.encode() if selection.kernel_part.isprintable() else b""
        yield from self._scan_all(root, partial(self._list, contents=True, part=part))

    def iter_usage(self, root: Root) -> Iterator[facts.Counted]:
        """Yield the rows of each v5 dictionary together, summed by sqlite."""
        yield from self._scan_all(root, self._weigh)

    def _scan_all(self, root: Root, look: _Look[_Rows]) -> Iterator[_Rows | Found]:
        """Yield the rows that a look into each database gives, folders of older dictionaries, and cachectl's own."""
        for name in self._databases(root):
            yield from self._scan_file(root, name, look)
        for found in self._folders(root):
            if isinstance(found, Problem):
                yield found
            elif found.orphan_rule is not None:
                yield found.orphan(root.path)
            else:
                parsed = pdict.parse_name(found.key.split("/")[0], self.environment.python)
                if parsed is not None:
                    yield self._folder_entry(root, parsed, found)

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare the identifier; other names belong to the layer that takes all other dictionaries."""
        del root
        name = pdict.parse_name(without_companion(parts[0]), self.environment.python)
        return self.owns_identifier("" if name is None else name.identifier)

    def dictionaries(self, root: Root) -> Iterator[pdict.DictionaryName]:
        """Yield the names of the layer's dictionaries. Raises :class:`Unreachable`."""
        try:
            files = sorted(os.listdir(root.path))
        except OSError as error:
            if means_absent(error):
                return
            raise Unreachable(self.name, f"cannot be read: {error.strerror}", root.path) from error
        for file in files:
            name = pdict.parse_name(file, self.environment.python)
            if name is not None and self.owns_identifier(name.identifier):
                yield name

    def _databases(self, root: Root) -> Iterator[pdict.DictionaryName]:
        return (name for name in self.dictionaries(root) if name.generation == "v5")

    def _rows(self, path: Path) -> RowFile:
        return RowFile(self.name, path, SCHEMA, self.environment.lock_timeout)

    def _scan_file(self, root: Root, name: pdict.DictionaryName, look: _Look[_Rows]) -> Iterator[_Rows | Found]:
        """Yield the rows that a look into a dictionary gives, then the rest of its files."""
        path = root.path / name.file
        staleness = self._staleness(name)
        payload = 0
        try:
            if not is_plain_file(path):
                yield Problem(path, "link", "a link, or no file, under a dictionary's name is not followed")
                return
            modified = path.stat().st_mtime
            for found in look(root, name, modified, staleness):
                payload += found.bytes
                yield found
            files, total = disk_usage(path)
        except FileNotFoundError:
            yield Problem(path, "vanished", "vanished meanwhile")
            return
        except (LayerError, OSError) as error:
            yield self.unread(path, error)
            return
        yield facts.Housekeeping(
            name.file, root.path, total - payload, files, modified, staleness.stale, disk=disk_blocks(path)
        )

    def _list(
        self,
        root: Root,
        name: pdict.DictionaryName,
        modified: float,
        staleness: Staleness,
        *,
        contents: bool,
        part: bytes = b"",
    ) -> Iterator[Entry]:
        rows = self._rows(root.path / name.file)
        versions = {"python": name.python, **name.packages}
        listing = rows.rows_with("key_value", part=part) if contents else ((row, (None,)) for row in rows.rows())
        for row, (value,) in listing:
            yield Entry(
                layer=self.name,
                key=f"{name.file}/{row.key[0]}",
                root=root.path,
                bytes=row.bytes,
                files=0,
                written_before=modified,
                kernels=pdict.kernel_names(_as_bytes(value)) if contents else None,
                versions=versions,
                stale=staleness.stale,
                stale_because=staleness.because,
                detail={"dictionary": name.identifier},
                stamp=(row.rowid, row.bytes),
            )

    def _weigh(
        self, root: Root, name: pdict.DictionaryName, modified: float, staleness: Staleness
    ) -> Iterator[facts.Bulk]:
        weight = self._rows(root.path / name.file).sum()
        if weight.rows:
            yield facts.Bulk(weight.rows, 0, weight.bytes, modified, modified, staleness.stale)

    def _folders(self, root: Root) -> Iterator[Leaf | Problem]:
        """Yield the folders of older dictionaries, this layer's orphans, and problems of either."""
        for _, found in scan_each(Tree(self.name, root.path, shape) for shape in _FOLDERS):
            if isinstance(found, Leaf):
                name = pdict.parse_name(found.key.split("/")[0], self.environment.python)
                if self._is_own_orphan(found) if name is None else self.owns_identifier(name.identifier):
                    yield found
            elif self._concerns(root, found.path):
                yield found

    def _concerns(self, root: Root, path: Path) -> bool:
        """Return whether something unreadable may contain entries of this layer: the root, or a folder by its name."""
        parts = path.relative_to(root.path).parts
        return not parts or self.owns(root, parts)

    def _is_own_orphan(self, leaf: Leaf) -> bool:
        """Return whether an orphan is this layer's: one left by an interrupted cachectl, if it takes all others."""
        return leaf.orphan_rule is not None and self.owns_identifier("")

    def _folder_entry(self, root: Root, name: pdict.DictionaryName, leaf: Leaf) -> Entry:
        staleness = self._staleness(name)
        return Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            disk=leaf.disk,
            files=len(leaf.members),
            modified=leaf.modified,
            versions={"python": name.python, **name.packages},
            stale=staleness.stale,
            stale_because=staleness.because,
            detail={"dictionary": name.identifier},
            stamp=leaf.stamp,
        )

    def _staleness(self, name: pdict.DictionaryName) -> Staleness:
        """Return whether any known Python could still open the dictionary."""
        miss = partial(_miss, name, self.environment.searches_pythons)
        return staleness(self.environment, "written by", name.python, miss, partial(_has_made, name))

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Check the name of the dictionary and the form of the rest, which is any one word for a row."""
        file, _, digest = key.partition("/")
        name = pdict.parse_name(file, self.environment.python)
        if name is None or not self.owns_identifier(name.identifier):
            return False
        return bool(digest) and "/" not in digest if name.generation == "v5" else _shape_of(key) is not None

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read one row as its raw pickle, or one folder of an old dictionary as a tar."""
        file, _, digest = key.partition("/")
        name = pdict.parse_name(file, self.environment.python)
        if name is None or not self.owns_identifier(name.identifier):
            return None
        detail = {"dictionary": name.identifier, "python": name.python}
        if name.generation == "v5":
            values = self._rows(root.path / file).read((digest,))
            return (
                None if values is None else facts.Artifact(self.name, key, self.forms[0], _as_bytes(values[0]), detail)
            )
        for shape in _FOLDERS:
            data = Tree(self.name, root.path, shape).read(key)
            if data is not None:
                return facts.Artifact(self.name, key, self.forms[1], data, detail)
        return None

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError] | None:
        """Read rows of one dictionary."""
        name = pdict.parse_name(file, self.environment.python)
        if name is None or name.generation != "v5" or not self.owns_identifier(name.identifier):
            return None
        detail = {"dictionary": name.identifier, "python": name.python}
        rows = self._rows(root.path / file).read_many([(key.partition("/")[2],) for key in keys])
        return {
            key: facts.Artifact(self.name, key, self.forms[0], _as_bytes(values[0]), detail)
            for key, values in zip(keys, rows, strict=True)
            if values is not None
        }

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Insert a row as pytools would have stored it, or place the folder of an old dictionary."""
        name = self._fit(key, artifact)
        file, _, digest = key.partition("/")
        if name.generation != "v5":
            shape = _FOLDERS[name.generation == "v2"]
            Tree(self.name, root.path, shape).write(key, artifact.data, replace=replace)
            return
        rows = self._rows(root.path / file)
        rows.insert((digest,), (artifact.data,), replace=replace)

    def write_rows(self, root: Root, file: str, artifacts: Sequence[facts.Artifact]) -> Mapping[str, bool | LayerError]:
        """Insert rows into one dictionary."""
        fit = [artifact for artifact in artifacts if self._is_row(artifact)]
        if not fit:
            return {}
        rows = [((artifact.key.partition("/")[2],), (artifact.data,)) for artifact in fit]
        new = self._rows(root.path / file).insert_new(rows)
        exists = EntryExists(self.name, root.path / file)
        return {artifact.key: exists if one is None else one for artifact, one in zip(fit, new, strict=True)}

    def _is_row(self, artifact: facts.Artifact) -> bool:
        try:
            return self._fit(artifact.key, artifact).generation == "v5"
        except LayerError:
            return False

    def _fit(self, key: str, artifact: facts.Artifact) -> pdict.DictionaryName:
        """Return the dictionary of a key. Raises :class:`LayerError` where the artifact does not fit into it."""
        name = pdict.parse_name(key.partition("/")[0], self.environment.python)
        if name is None:
            raise not_a_key(self.name, key)
        if (name.generation == "v5") != (artifact.form == self.forms[0]):
            raise Damaged(self.name, f"form {artifact.form} does not go into a {name.generation} dictionary", key)
        if name.generation != "v5":
            return name
        # Whole frames show that nothing was cut off; verify looks closer.
        if not is_framed(artifact.data) and (complaint := pickle_complaint(artifact.data)):
            raise Damaged(self.name, complaint, key)
        return name

    # ------------------------------------------------------------------ clear

    def remove(self, root: Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Delete rows, then vacuum. Never unlink a file that a program may have open."""
        by_file = self._by_file((target.key, target) for target in targets).items()
        return each_part(
            self.name, ((file, planned, partial(self._remove_from, root, file, planned)) for file, planned in by_file)
        )

    def _remove_from(self, root: Root, file: str, planned: list[facts.Removable]) -> facts.Outcome:
        if file.endswith(".sqlite"):
            return self._remove_rows(root, file, planned)
        shape = _FOLDERS[file.startswith("pdict-v2-")]
        return Tree(self.name, root.path, shape).remove(planned, tidy=always)

    def row_files(self, root: Root) -> Iterator[RowFile]:
        """Return the dictionaries of rows."""
        for name in self._databases(root):
            yield self._rows(root.path / name.file)

    def row_file(self, root: Root, file: str) -> RowFile | None:
        """Return a dictionary of rows."""
        return self._rows(root.path / file) if file.endswith(".sqlite") else None

    def _remove_rows(self, root: Root, file: str, targets: list[facts.Removable]) -> facts.Outcome:
        rows = self._rows(root.path / file)
        damaged = next((target for target in targets if isinstance(target, facts.Orphan)), None)
        if damaged is not None:
            return self.remove_damaged(rows, damaged)
        planned = {_planned_row(target): target for target in targets}
        return self.remove_rows(rows, file, planned, lambda: rows.delete(list(planned)))

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every file with sqlite's own check, and every row as a pickle."""
        # Raises if the folder cannot be read, before anything is yielded.
        databases = list(self._databases(root))
        for found in self._folders(root):
            if isinstance(found, Problem):
                yield self.to_finding(root, found)
        for name in databases:
            yield from self.examined(partial(self._verify_file, root, name.file))

    def _verify_file(self, root: Root, file: str) -> Iterator[facts.Finding]:
        rows = self._rows(root.path / file)
        try:
            if complaint := rows.check():
                yield self._damaged_file(root, file, complaint)
            else:
                for row, (value,) in rows.rows_with("key_value"):
                    if complaint := pickle_complaint(_as_bytes(value)):
                        yield self._damaged_row(root, file, row, complaint)
        except Damaged as error:
            yield self._damaged_file(root, file, error.message)
        except LayerError as error:
            code, fix = "unreadable", "nothing: try again when no program is writing"
            if isinstance(error, Refused):
                code, fix = "foreign", "nothing: cachectl does not use it"
            yield facts.Finding(self.name, root.path, file, Severity.HARMLESS, code, error.message, fix)

    def _damaged_row(self, root: Root, file: str, row: Row, message: str) -> facts.Finding:
        key = f"{file}/{row.key[0]}"
        thing = Entry(self.name, key, root.path, row.bytes, 0, stamp=(row.rowid, row.bytes))
        fix = f"cachectl purge --damaged {self.name}"
        return facts.Finding(self.name, root.path, key, Severity.FAILS, "pickle", message, fix, thing)

    def _damaged_file(self, root: Root, file: str, message: str) -> facts.Finding:
        thing = self._rows(root.path / file).orphan(root.path, file, message)
        fix = f"end every program that has it open, then: cachectl purge --damaged {self.name}"
        return facts.Finding(self.name, root.path, file, Severity.FAILS, "sqlite", message, fix, thing)


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
    from cachectl.layers.host.pythons import note_own, own_python, pythons_of

    own = own_python(environment)
    if own.version == version and miss(own) is None:
        # Most entries are of this Python, and the others need not be looked for.
        note_own(environment)
        return Staleness(stale=False)
    known = [python for python in pythons_of(environment) if python.version == version]
    short = ".".join(version.split(".")[:3])
    if not known:
        return _unknown(f"{how} Python {short}, which was not looked for; --python PATH names it")
    if None in (reasons := [miss(python) for python in known if python.present]):
        return Staleness(stale=False)
    if away := next((python for python in known if python.present is None), None):
        return _unknown(f"{how} Python {short}, and {away.path} is not mounted here, or does not answer")
    maker = next(filter(has_made, known), None)
    if maker is not None and not maker.present:
        reasons = [f"{how} Python {short}, and {maker.path} was removed"]
    elif maker is not None:
        reasons = [miss(maker)]
    # The environment's own Python, often that of a tool, comes first.
    because = next(reversed(reasons), f"no Python {short} is left")
    if maker is not None or environment.python_paths or not environment.searches_pythons:
        return Staleness(stale=True, because=because)
    return _unknown(f"{because}; --python PATH names another Python")


def _unknown(why: str) -> Staleness:
    return Staleness(stale=None, because=f"unknown: {why}")


def _miss(name: pdict.DictionaryName, is_real: bool, python: Python) -> str | None:
    """Return why a Python of the dictionary's version opens another dictionary, ``None`` if it opens this one.

    A package that is not installed counts only in an environment that ``is_real``; in others it may be left unsaid.
    """
    pytools = python.installed("pytools")
    current = _generation(pytools)
    if current is not None and (name.generation, name.dash) != current:
        return f"pytools {pytools} names and stores its dictionaries differently"
    for package, version in name.packages.items():
        installed = python.installed(package)
        if installed is not None and version not in (installed, UNKNOWN):
            return f"written with {package} {version}, {installed} is installed"
    needed = ("pytools", *(package for package, version in name.packages.items() if version != UNKNOWN))
    absent = next((one for one in needed if python.installed(one) is None), None)
    return f"{absent} is not installed for {python.path}" if absent and is_real else None


def _has_made(name: pdict.DictionaryName, python: Python) -> bool:
    """Return whether the versions of packages in a dictionary's name have been seen at a Python."""
    packages = {package: version for package, version in name.packages.items() if version != UNKNOWN}
    generations = {_generation(version) for version in python.seen.get("pytools", ())}
    return (name.generation, name.dash) in generations and all(starmap(python.has_had, packages.items()))


def _generation(pytools: str | None) -> tuple[str, bool] | None:
    """Return generation and dash of the dictionaries that a pytools version makes."""
    release = release_of(pytools)
    if release is None:
        return None
    if release >= (2026, 1):
        return "v5", True
    return ("v5", False) if release >= (2024, 1, 4) else ("v4", True)


def _planned_row(target: facts.Removable) -> Row:
    return Row(target.stamp[0], (target.key.partition("/")[2],), target.stamp[1])


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _shape_of(key: str) -> Shape | None:
    """Return the form of an old dictionary's entry that a key has."""
    return next((shape for shape in _FOLDERS if shape.accepts(key)), None)
