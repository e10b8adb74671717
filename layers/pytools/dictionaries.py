"""The store of pytools' persistent dictionaries, which belong to three layers by their identifiers.

Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from cachectl.layers.base.environment import Environment, answered_once, python_release, release_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Entry, Found, Problem, Usage
from cachectl.layers.core.finding import FAILS, RISKS, Hazard
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import ENTRY, FOREIGN, OWN, Codec, Damage, sum_usage, usage_of
from cachectl.layers.disk import distributions, handles, locks
from cachectl.layers.formats import pdict, pickles
from cachectl.layers.formats.details import Details
from cachectl.layers.pytools import layer_of
from cachectl.layers.stores import database, files, row_store, rows
from cachectl.layers.stores import tree_read as tree

if TYPE_CHECKING:
    from cachectl.layers.host.pythons import Python
    from cachectl.layers.host.record import Staleness

#: The table of a dictionary since pytools 2024.1.4.
SCHEMA = rows.Schema(
    table="dict",
    create=("create table if not exists dict (keyhash text not null primary key, key_value text not null)",),
    key=("keyhash",),
    values=("key_value",),
    size="length(key_value)",
)

#: The longest that a release of pytools or PyOpenCL waits for a lock file, in seconds: 60 since 2024.
LOCK_WAITS = 180.0


class Dictionaries(row_store.Rows):
    """Rows of sqlite files, one for each dictionary, and folders of older generations."""

    tables: DictionaryTables

    def __init__(self, layer: str) -> None:
        tables = DictionaryTables(f"{layer}-pdict/5")
        super().__init__(tables, OlderDictionaries(f"{layer}-pdict/4", tables))

    def usage(self, root: Root) -> Usage:
        """Count the rows of each dictionary at once: sqlite sums them."""

        def summed(root: Root, file: str, template: Entry) -> Iterator[Usage]:
            count, size = self.tables.database(root, file).sum()
            if count:
                yield usage_of(template._replace(bytes=size), count)

        return sum_usage(chain(self.listed(root, summed), self.rest.scan(root)))


class DictionaryTables(row_store.TableFormat):
    """A database for each dictionary since pytools 2024.1.4."""

    schema = SCHEMA
    # Checking a pickle takes longer than reading it.
    checks_reads = False

    def __init__(self, form: str) -> None:
        self.codec = PickleCodec(form)

    def named(self, key: str) -> pdict.DictionaryName | None:
        """Return the dictionary of a key, or of a path below the root; ``None`` if it is not the layer's."""
        name = pdict.parse_name(key.partition("/")[0], self.environment.python)
        return name if name is not None and layer_of(name.identifier) == self.name else None

    def is_table(self, file: str) -> bool:
        """Return whether a name is that of a dictionary of rows."""
        name = self.named(file)
        return name is not None and name.generation == "v5"

    def has_any(self, root: Root) -> bool:
        """Return whether there is a dictionary of any generation. Raises :class:`OSError`."""
        return any(map(self.named, os.listdir(root.path)))

    def kind_of(self, root: Root, path: str) -> str:
        """Compare the identifier; the layer of all other dictionaries also has names without one."""
        file, _, digest = path.partition("/")
        # The key of a row may be any word.
        if self.is_table(file) and digest and "/" not in digest:
            return ENTRY
        name = pdict.parse_name(database.without_companion(file), self.environment.python)
        identifier = pdict.ANY_GENERATION.sub("", file) if name is None else name.identifier
        return OWN if layer_of(identifier) == self.name else FOREIGN

    def with_name(self, entry: Entry) -> Entry:
        """Add the versions in a dictionary's name, and whether a program can still hit its entries."""
        name = self.named(entry.key)
        if name is None:
            return entry
        packages = pdict.packages_of(name.identifier)
        known = {package: version for package, version in packages.items() if version != pdict.UNKNOWN}
        needs = Needs(name.python, known, (name.generation, name.dash))
        stale, because = staleness(self.environment, "written by", needs)
        versions = {"python": name.python, **packages}
        detail = {"dictionary": name.identifier}
        return entry._replace(details=Details(versions=versions, detail=detail), stale=stale, because=because)

    def list_rows(self, root: Root, file: str, template: Entry, *, part: bytes, contents: bool) -> Iterator[Entry]:
        """Yield the rows of a dictionary; rows without ``part`` are not read, since pickles store text verbatim."""
        opened = self.database(root, file)
        listing = opened.rows_with(part) if contents else ((row, ()) for row in opened.rows())
        for row, values in listing:
            kernels = pdict.kernel_names(rows.as_bytes(values[0])) if values else None
            # This takes half the time of _replace, which counts with many rows.
            yield Entry(
                *(self.name, f"{file}/{row.key}", root.path, row.bytes, 0),
                written_before=template.written_before,
                details=template.details._replace(kernels=kernels),
                stale=template.stale,
                because=template.because,
                stamp=(row.rowid, row.bytes),
            )

    def unexplained(self, key: str, data: bytes) -> str | None:
        """Return that no known Python of the dictionary's version has a module that the row names."""
        name = self.named(key)
        folders = () if name is None else _folders_by_version(self.environment).get(name.python, ())
        if name is None or not folders:
            return None
        tops = {module.partition(".")[0] for module in pickles.modules(data)} - sys.stdlib_module_names - {"__main__"}
        missing = next((top for top in sorted(tops) if not distributions.has_module(folders, top)), None)
        if missing is None:
            return None
        release = python_release(name.python)
        return (
            f"unknown: needs module {missing}, which no Python {release} here has; without it a read of the row fails"
        )

    def detail(self, key: str, data: object) -> Mapping[str, str]:
        """Return the name of the dictionary, and the version of Python in it."""
        name = self.named(key)
        return {} if name is None else {"dictionary": name.identifier, "python": name.python}


class PickleCodec(Codec):
    """A pickle, which is never executed."""

    def check(self, data: bytes) -> Damage | None:
        """Return the damage of the pickle."""
        return Damage(FAILS, complaint) if (complaint := pickles.complaint(data)) else None

    def foreign(self, data: bytes) -> str | None:
        """Return that its protocol is that of a later Python."""
        reason = "is a pickle of a protocol that this Python does not know; left alone"
        return reason if pickles.is_foreign(data) else None


class OlderDictionaries(files.Files):
    """Entries of v3 and v4: a folder each, below that of the dictionary, which is kept: programs lock files in it."""

    shapes = (
        tree.Shape(pdict.V4_LEVELS, folders=True, members=pdict.V4_MEMBERS),
        tree.resembling(rf"{pdict.ANY_GENERATION.pattern}.+"),
        *(tree.resembling(pdict.V4_LEVELS[0], *["[0-9a-f]{1,8}"] * depth, "[0-9a-f]{9,}") for depth in range(4)),
    )

    # ``HASH.lock``, for the entry of that hash.
    lock_shape = tree.Shape((pdict.V4_LEVELS[0], regex(r"[0-9a-f]{16,64}\.lock")), because="an abandoned lock")
    lock_waits = LOCK_WAITS
    lock_effect = Hazard(RISKS, "a program with pytools before 2024.1.4 that looks up its key waits for it, and fails")

    def __init__(self, form: str, tables: DictionaryTables) -> None:
        super().__init__()
        self.codec, self.forms = Codec(form), (form,)
        self.tables = tables

    def kind_of(self, root: Root, path: str) -> str:
        """Compare the identifier, and the names of folders below that of a dictionary."""
        if self.tables.named(path) is None:
            return FOREIGN
        is_other = OWN if self.lock_shape.accepts(path) else FOREIGN
        return is_other if tree.entry_shape(self.shapes, path) is None else ENTRY

    def described(self, tree: tree.Tree, leaf: tree.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield an entry of an older dictionary, with the kernels that its key names."""
        entry = self.tables.with_name(leaf.entry)
        if contents:
            pickled = (tree.read_members(entry.key, {"key", "contents"}.__contains__) or {}).values()
            names = (kernels for data in pickled if (kernels := pdict.kernel_names(data)) is not None)
            entry = entry._replace(details=entry.details._replace(kernels=next(names, None)))
        yield entry

    def leaves(self, root: Root) -> Iterator[tree.Leaf | Problem]:
        """Yield the folders of older dictionaries, this layer's orphans, and problems of either."""
        for leaf in super().leaves(root):
            path = os.path.relpath(leaf.path, root.path) if isinstance(leaf, Problem) else leaf.entry.key
            is_own, is_inside = self.tables.kind_of(root, path) != FOREIGN, "/" in path
            if isinstance(leaf, Problem):
                if path == "." or is_own:
                    yield leaf
            elif leaf.entry.is_orphan and leaf.shape is not self.lock_shape:
                # What an interrupted cachectl left belongs to the layer of all other dictionaries.
                if self.name == layer_of(""):
                    yield leaf
            elif self.tables.named(database.without_companion(path)) is not None:
                # Those at the top are databases.
                if is_inside:
                    yield leaf
            elif is_own and (is_inside or leaf.entry.is_unknown):
                yield leaf.as_unknown(tree.STRANGE_NAME)

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Skip also the entry of a lock that is not abandoned: a program that writes it would fail."""
        for target, reason in super().in_use(targets):
            dictionary, *levels = target.key.split("/")
            lock = target.root / dictionary / f"{''.join(levels)}.lock"
            custody = locks.ABANDONED
            if levels and lock.is_file():
                with handles.opened(str(lock.parent)) as folder:
                    custody = locks.custody_of(self.environment, lock, self.lock_waits, folder=folder)
            is_held = custody != locks.ABANDONED
            yield target, reason or (f"a program may be writing it: {lock} exists" if is_held else None)

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the name of the dictionary, and the version of Python in it."""
        return self.tables.detail(key, files)

    def is_checked(self, path: str) -> bool:
        """Return ``False``: the folders of older dictionaries are not checked."""
        return False


class Needs(NamedTuple):
    """What a Python must have to open a dictionary: a five-part version, versions of packages, and a pytools.

    ``generation`` is that of the dictionaries that this pytools makes, ``None`` if any Python of the version will do.
    """

    python: str
    packages: Mapping[str, str] = {}
    generation: tuple[str, bool] | None = None

    def __str__(self) -> str:
        """Return the needs as a phrase."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return f"Python {python_release(self.python)}" + (f" with {packages}" if packages else "")

    def are_met(self, python: Python, *, unsaid: bool = False) -> bool:
        """Return whether an interpreter meets them; if ``unsaid``, packages that it lacks are ignored."""
        pytools = python.installed("pytools")
        opens = self.generation is None or (unsaid if pytools is None else _generation(pytools) == self.generation)
        versions = ((python.installed(name), version) for name, version in self.packages.items())
        fits = all(unsaid if here is None else here == version for here, version in versions)
        return python.version == self.python and opens and fits


def staleness(environment: Environment, how: str, needs: Needs) -> Staleness:
    """Return that a known Python can hit an entry, or why that is unknown.

    A hit leaves no trace, and a Python that is started by its path may be unknown. So no entry is known to be stale.
    ``how`` says what the Python did to the entry.
    """
    from cachectl.layers.host import pythons

    if needs.are_met(pythons.own_python(environment), unsaid=not environment.searches_pythons):
        # Most entries are of this Python, so that others need not be searched for.
        pythons.note_own(environment)
        return False, None
    known = pythons.pythons_of(environment)
    if any(python.present and needs.are_met(python) for python in known):
        return False, None
    reason = "which no known Python has; --python PATH names one"
    if not environment.searches_pythons:
        reason = "and other Pythons were not looked for"
    for python in known:
        if not python.present and python.version in ("", needs.python):
            reason = f"and {python.path} cannot be examined: {python.reason}"
            break
    return None, f"unknown: {how} {needs}, {reason}"


@answered_once
def _folders_by_version(environment: Environment) -> dict[str, tuple[str, ...]]:
    from cachectl.layers.host import pythons

    folders: dict[str, tuple[str, ...]] = {}
    named = (environment.get("PYTHONPATH") or "").split(os.pathsep)
    for python in pythons.pythons_of(environment):
        looked_at = python if python.folders else pythons.look(python.path, environment)
        if looked_at is not None and looked_at.folders:
            folders[python.version] = (*folders.get(python.version, named), *looked_at.folders)
    return folders


def _generation(pytools: str | None) -> tuple[str, bool] | None:
    """Return generation and dash of the dictionaries that a version of pytools makes."""
    release = release_of(pytools)
    if release is None:
        return None
    if release >= (2026, 1):
        return "v5", True
    return ("v5", False) if release >= (2024, 1, 4) else ("v4", True)
