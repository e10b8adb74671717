"""The layers ``pytools``, ``loopy`` and ``pyopencl-invoker`` share one folder of persistent dictionaries.

:class:`PytoolsDictionaries` is the layer ``pytools`` (sumpy, pytato, user code) and the base of the other two,
which own the dictionaries whose identifier starts with theirs. Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from cachectl.layers.base.environment import Environment, release_of, user_cache_folder
from cachectl.layers.base.errors import Busy, Damaged, EntryExists, LayerError, Refused, Unreachable, not_a_key
from cachectl.layers.base.facts import (
    Artifact,
    Bulk,
    ClearPlan,
    Condition,
    Counted,
    Entry,
    Finding,
    Found,
    Hazard,
    Housekeeping,
    Note,
    Outcome,
    Patch,
    Problem,
    Quarantined,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
    When,
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.store import each_part
from cachectl.layers.base.switches import misread, off, relative_cache_home, strtobool, switched_off
from cachectl.layers.disk.presence import is_plain_file, means_absent
from cachectl.layers.formats import pdict
from cachectl.layers.formats.pickles import is_framed, walk
from cachectl.layers.host.open_files import open_elsewhere
from cachectl.layers.stores.quarantine import folder_pattern
from cachectl.layers.stores.row_store import Rows
from cachectl.layers.stores.rows import Deleted, Row, RowFile, Schema, Weight, disk_usage, without_companion
from cachectl.layers.stores.tree import LEFTOVER, Leaf, Shape, Tree, scan_each

#: The table of a dictionary since pytools 2024.1.4.
SCHEMA: Final = Schema(
    table="dict",
    create=("create table if not exists dict (keyhash text not null primary key, key_value text not null)",),
    key=("keyhash",),
    values=("key_value",),
    size="length(key_value)",
)
_FOLDERS = (
    Shape(pdict.V4_LEVELS, folders=True, members=pdict.V4_MEMBERS),
    Shape(pdict.V2_LEVELS, folders=True, members=pdict.V4_MEMBERS),
)


class Staleness(NamedTuple):
    """Whether nothing can hit an entry any more, with the reason; ``None`` is unknown."""

    stale: bool | None
    because: str | None = None


#: What a look into a dictionary gives: its rows one by one, or together.
_Rows = TypeVar("_Rows", Entry, Bulk)


class Dictionaries(Rows):
    """Rows of sqlite files, one file for each dictionary, and folders of older generations."""

    separator = "/"

    def __init__(self, form: str, owns: Callable[[str], bool]) -> None:
        #: Whether a dictionary of this identifier belongs to the layer.
        self.owns = owns
        self.forms = (f"{form}/5", f"{form}/4")

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield rows of v5 dictionaries and folders of older ones."""
        for name in self.dictionaries(root):
            if name.generation == "v5":
                yield from self._scan_file(root, name, partial(self._list, root, name, contents=contents))
        yield from self._scan_others(root)

    def searched(self, root: Root, selection: Selection) -> Iterator[Found]:
        """Look into those rows alone whose bytes hold the kernel's name: a pickle spells it as it is."""
        # What cannot be spelled is in no row; the selection itself says so.
        part = selection.kernel_part.encode() if selection.kernel_part.isprintable() else b""
        for name in self.dictionaries(root):
            if name.generation == "v5":
                yield from self._scan_file(root, name, partial(self._list, root, name, contents=True, part=part))
        yield from self._scan_others(root)

    def counted(self, root: Root) -> Iterator[Counted]:
        """Yield the rows of a v5 dictionary together, as sqlite sums them."""
        for name in self.dictionaries(root):
            if name.generation == "v5":
                yield from self._scan_file(root, name, partial(self._weigh, root, name))
        yield from self._scan_others(root)

    def _scan_others(self, root: Root) -> Iterator[Found]:
        """Yield the folders of older dictionaries, and what cachectl left or moved aside."""
        for found in self._folders(root):
            if isinstance(found, Problem):
                yield found
            elif found.stray is not None:
                yield found.orphan(root.path)
            else:
                name = pdict.parse_name(found.key.split("/")[0], self.environment.python)
                if name is not None:
                    yield self._folder_entry(root, name, found)

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the identifier; what is no dictionary belongs to the layer that takes every other one."""
        del root
        name = pdict.parse_name(without_companion(parts[0]), self.environment.python)
        return self.owns("" if name is None else name.identifier)

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
            if name is not None and self.owns(name.identifier):
                yield name

    def _rows(self, path: Path) -> RowFile:
        return RowFile(self.name, path, SCHEMA, self.environment.patience)

    def _scan_file(
        self, root: Root, name: pdict.DictionaryName, look: Callable[[float, Staleness], Iterator[_Rows]]
    ) -> Iterator[_Rows | Found]:
        """Yield what a look into a dictionary gives, and then what else there is of it."""
        path = root.path / name.file
        staleness = self._staleness(name)
        payload = 0
        try:
            if not is_plain_file(path):
                yield Problem(path, "link", "a link, or no file, under a dictionary's name is not followed")
                return
            modified = path.stat().st_mtime
            for found in look(modified, staleness):
                payload += found.bytes
                yield found
            files, total = disk_usage(path)
        except FileNotFoundError:
            yield Problem(path, "vanished", "vanished meanwhile")
            return
        except (LayerError, OSError) as error:
            yield self.unread(path, error)
            return
        yield Housekeeping(name.file, root.path, total - payload, files, modified, staleness.stale)

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
                mark=(row.rowid, row.bytes),
            )

    def _weigh(self, root: Root, name: pdict.DictionaryName, modified: float, staleness: Staleness) -> Iterator[Bulk]:
        weight = self._rows(root.path / name.file).sum()
        if weight.rows:
            yield Bulk(weight.rows, 0, weight.bytes, modified, modified, staleness.stale)

    def _folders(self, root: Root) -> Iterator[Leaf | Problem]:
        """Yield the folders of older dictionaries, this layer's strays, and what could not be read of either."""
        for _, found in scan_each(Tree(self.name, root.path, shape) for shape in _FOLDERS):
            if isinstance(found, Leaf):
                name = pdict.parse_name(found.key.split("/")[0], self.environment.python)
                if self._is_own_stray(found) if name is None else self.owns(name.identifier):
                    yield found
            elif self._concerns(root, found.path):
                yield found

    def _concerns(self, root: Root, path: Path) -> bool:
        """Return whether something unreadable may hold entries of this layer: the root, or a folder by its name."""
        parts = path.relative_to(root.path).parts
        return not parts or folder_pattern(self.name).fullmatch(parts[0]) is not None or self.claims(root, parts)

    def _is_own_stray(self, leaf: Leaf) -> bool:
        """Return whether a stray is this layer's: what it has in quarantine, or what an interrupted cachectl left.

        The latter belongs to the layer that takes every other dictionary.
        """
        return leaf.stray is not None and (not LEFTOVER.fullmatch(leaf.key) or self.owns(""))

    def _folder_entry(self, root: Root, name: pdict.DictionaryName, leaf: Leaf) -> Entry:
        staleness = self._staleness(name)
        return Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=len(leaf.members),
            modified=leaf.modified,
            versions={"python": name.python, **name.packages},
            stale=staleness.stale,
            stale_because=staleness.because,
            detail={"dictionary": name.identifier},
            mark=leaf.mark,
        )

    def _staleness(self, name: pdict.DictionaryName) -> Staleness:
        """Judge whether a program started in this environment could still open the dictionary.

        Only this Python and its packages are examined; the dictionaries of another Python are unknown.
        """
        if name.python != self.environment.python:
            return unexamined_python("written by", name.python, self.environment)
        pytools = self.environment.installed("pytools")
        current = _generation(pytools)
        if current is not None and (name.generation, name.dash) != current:
            return Staleness(stale=True, because=f"pytools {pytools} names and stores its dictionaries differently")
        for package, version in name.packages.items():
            installed = self.environment.installed(package)
            if installed is not None and version not in (installed, "_UNKNOWN_"):
                return Staleness(stale=True, because=f"written with {package} {version}, {installed} is installed")
        return Staleness(stale=False)

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the name of a dictionary of this layer, and the form of what follows; a row may have any one word."""
        file, _, digest = key.partition("/")
        name = pdict.parse_name(file, self.environment.python)
        if name is None or not self.owns(name.identifier):
            return False
        return bool(digest) and "/" not in digest if name.generation == "v5" else _shape_of(key) is not None

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read one row as its raw pickle, or one folder of an old dictionary as a tar."""
        file, _, digest = key.partition("/")
        name = pdict.parse_name(file, self.environment.python)
        if name is None or not self.owns(name.identifier):
            return None
        detail = {"dictionary": name.identifier, "python": name.python}
        if name.generation == "v5":
            values = self._rows(root.path / file).read((digest,))
            return None if values is None else Artifact(self.name, key, self.forms[0], _as_bytes(values[0]), detail)
        for shape in _FOLDERS:
            data = Tree(self.name, root.path, shape).read(key)
            if data is not None:
                return Artifact(self.name, key, self.forms[1], data, detail)
        return None

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, Artifact | LayerError] | None:
        """Read rows of one dictionary."""
        name = pdict.parse_name(file, self.environment.python)
        if name is None or name.generation != "v5" or not self.owns(name.identifier):
            return None
        detail = {"dictionary": name.identifier, "python": name.python}
        rows = self._rows(root.path / file).read_many([(key.partition("/")[2],) for key in keys])
        return {
            key: Artifact(self.name, key, self.forms[0], _as_bytes(values[0]), detail)
            for key, values in zip(keys, rows, strict=True)
            if values is not None
        }

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Insert a row, exactly as pytools would have stored it."""
        name = self._fit(key, artifact)
        file, _, digest = key.partition("/")
        if name.generation != "v5":
            shape = _FOLDERS[name.generation == "v2"]
            Tree(self.name, root.path, shape).write(key, artifact.data, replace=replace)
            return
        rows = self._rows(root.path / file)
        rows.insert((digest,), (artifact.data,), replace=replace)

    def write_rows(self, root: Root, file: str, artifacts: Sequence[Artifact]) -> Mapping[str, bool | LayerError]:
        """Insert rows into one dictionary."""
        fit = [artifact for artifact in artifacts if self._is_row(artifact)]
        if not fit:
            return {}
        rows = [((artifact.key.partition("/")[2],), (artifact.data,)) for artifact in fit]
        new = self._rows(root.path / file).insert_new(rows)
        exists = EntryExists(self.name, root.path / file)
        return {artifact.key: exists if one is None else one for artifact, one in zip(fit, new, strict=True)}

    def _is_row(self, artifact: Artifact) -> bool:
        try:
            return self._fit(artifact.key, artifact).generation == "v5"
        except LayerError:
            return False

    def _fit(self, key: str, artifact: Artifact) -> pdict.DictionaryName:
        """Return the dictionary of a key. Raises :class:`LayerError` where the artifact does not go into it."""
        name = pdict.parse_name(key.partition("/")[0], self.environment.python)
        if name is None:
            raise not_a_key(self.name, key)
        if (name.generation == "v5") != (artifact.form == self.forms[0]):
            raise Damaged(self.name, f"form {artifact.form} does not go into a {name.generation} dictionary", key)
        if name.generation != "v5":
            return name
        # What is framed has not been cut; verify looks closer.
        if not is_framed(artifact.data) and (complaint := _pickle_complaint(artifact.data)):
            raise Damaged(self.name, complaint, key)
        return name

    # ------------------------------------------------------------------ clear

    def plan_everything(self, root: Root) -> ClearPlan | None:
        """Plan whole dictionaries by row count and last row id, without listing their rows."""
        targets: list[Target] = []
        failed: list[Note] = []
        for name in self.dictionaries(root):
            path = root.path / name.file
            if name.generation != "v5":
                return None
            try:
                weight = self._rows(path).sum() if is_plain_file(path) else Weight(0, 0, 0)
            except (LayerError, OSError) as error:
                failed.append(Note(name.file, self.unread(path, error).message))
                continue
            if weight.rows:
                targets.append(Target(root.path, name.file, weight.bytes, weight.rows, (weight.last,)))
        for found in self._folders(root):
            if isinstance(found, Problem):
                failed += [Note(str(found.path), found.message)] if found.hides else []
            else:
                targets.append(Target(root.path, found.key, found.bytes, 0, found.mark))
        return ClearPlan(self.name, tuple(targets), failed=tuple(failed))

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Delete rows, then vacuum; a file that somebody may have open is never unlinked."""
        by_file: dict[str, list[Target]] = {}
        for target in targets:
            by_file.setdefault(target.key.partition("/")[0], []).append(target)
        return each_part(
            self.name,
            ((file, partial(self._remove_from, root, file, planned)) for file, planned in by_file.items()),
        )

    def _remove_from(self, root: Root, file: str, planned: list[Target]) -> Outcome:
        if file.endswith(".sqlite"):
            return self._remove_rows(root, file, planned)
        shape = _FOLDERS[file.startswith("pdict-v2-")]
        return Tree(self.name, root.path, shape).remove(planned, tidy=True)

    def foresee_rows(self, root: Root, file: str, targets: Sequence[Target]) -> int | None:
        """Delete the rows from a copy of their dictionary."""
        rows = self.row_file(root, file)
        whole = any(self.separator not in target.key for target in targets)
        return None if rows is None else rows.foresee_delete(None if whole else list(map(_planned_row, targets)))

    def row_files(self, root: Root) -> Iterator[RowFile]:
        """Return the dictionaries of rows."""
        for name in self.dictionaries(root):
            if name.generation == "v5":
                yield self._rows(root.path / name.file)

    def row_file(self, root: Root, file: str) -> RowFile | None:
        """Return a dictionary of rows."""
        return self._rows(root.path / file) if file.endswith(".sqlite") else None

    def _remove_rows(self, root: Root, file: str, targets: list[Target]) -> Outcome:
        rows = self._rows(root.path / file)
        planned = {target: _planned_row(target) if self.separator in target.key else None for target in targets}
        return self.remove_rows(rows, file, planned, partial(_delete_rows, rows, targets))

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Move a row into quarantine, or a file that is no database any more and that nobody has open."""
        file, _, digest = target.key.partition("/")
        rows = self._rows(root.path / file)
        if digest:
            return rows.set_row_aside(Row(target.mark[0], (digest,), target.mark[1]), thing)
        return rows.set_file_aside(target, thing, partial(open_elsewhere, self.environment))

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Insert a row again, or move a file back."""
        file, _, digest = thing.key.partition("/")
        name = pdict.parse_name(file, self.environment.python)
        if name is None or not self.owns(name.identifier):
            raise not_a_key(self.name, thing.key)
        rows = self._rows(root.path / file)
        if digest:
            rows.bring_row_back(thing, replace=replace)
            return
        if (because := open_elsewhere(self.environment, rows.path)) is not None:
            raise Busy(self.name, because, rows.path)
        rows.bring_file_back(thing, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every file with sqlite's own check, and the framing of every pickled row."""
        # Raises where the folder itself cannot be read.
        dictionaries = list(self.dictionaries(root))
        for found in self._folders(root):
            if isinstance(found, Problem):
                yield self.told(root, found)
        for name in dictionaries:
            if name.generation == "v5":
                yield from self.examined(partial(self._verify_file, root, name.file))

    def _verify_file(self, root: Root, file: str) -> Iterator[Finding]:
        rows = self._rows(root.path / file)
        try:
            if complaint := rows.check():
                yield self._damaged_file(root, file, complaint)
            else:
                for row, (value,) in rows.rows_with("key_value"):
                    if complaint := _pickle_complaint(_as_bytes(value)):
                        yield self._damaged_row(root, file, row, complaint)
        except Damaged as error:
            yield self._damaged_file(root, file, error.message)
        except LayerError as error:
            code, fix = "unreadable", "nothing: try again when no program is writing"
            if isinstance(error, Refused):
                code, fix = "foreign", "nothing: cachectl does not use it"
            yield Finding(self.name, root.path, file, Severity.HARMLESS, code, error.message, fix)

    def _damaged_row(self, root: Root, file: str, row: Row, message: str) -> Finding:
        key = f"{file}/{row.key[0]}"
        thing = Entry(self.name, key, root.path, row.bytes, 0, mark=(row.rowid, row.bytes))
        fix = f"cachectl purge {self.name} --key {shlex.quote(key)}"
        return Finding(self.name, root.path, key, Severity.FAILS, "pickle", message, fix, thing)

    def _damaged_file(self, root: Root, file: str, message: str) -> Finding:
        thing = self._rows(root.path / file).orphan(root.path, file, message)
        fix = f"end every program that has it open, then: cachectl verify --quarantine {self.name}"
        return Finding(self.name, root.path, file, Severity.FAILS, "sqlite", message, fix, thing)


class PytoolsDictionaries(Layer):
    """Persistent dictionaries that belong to neither loopy nor PyOpenCL."""

    name = "pytools"
    title = "other pytools persistent dictionaries"
    #: Modules that open the layer's dictionaries when they are imported.
    opened_by: ClassVar[tuple[str, ...]] = ()
    on_network = Hazard(
        Severity.RISKS,
        "the locks of sqlite may not hold there, so programs of several nodes may stall, or damage a dictionary",
    )
    among_ranks = Hazard(Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait")
    when_closed = Hazard(Severity.FAILS, "no dictionary can be made or added to, and whoever tries fails")
    # Dictionaries of loopy and PyOpenCL have a layer of their own.
    store = Dictionaries("pytools-pdict", lambda identifier: not identifier.startswith(("loopy-", "pyopencl-")))

    def roots(self) -> tuple[Root, ...]:
        """Return the pytools folder; the environment is read anew whenever a dictionary is opened."""
        path, source = user_cache_folder(self.environment, "pytools")
        return (Root(path, Scope.USER, source),)

    def state(self) -> State:
        """Say that nothing but its users' own switches turns such a dictionary off."""
        if self.environment.get("SUMPY_NO_CACHE") is not None:
            return State(Condition.ENABLED, "off for sumpy alone (SUMPY_NO_CACHE is set, its value is not read)")
        return self._presence("pytools", "pytools has no switch")

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with sumpy's variables, of which it asks only whether they are set."""
        for variable in ("SUMPY_NO_CACHE", "CG_NO_CACHE"):
            value = self.environment.get(variable)
            if value is None or (variable == "CG_NO_CACHE" and self.environment.installed("sumpy") is None):
                continue
            if strtobool(value):
                yield off(self, variable, "sumpy's dictionaries")
            else:
                outcome = "switches sumpy's dictionaries off all the same: sumpy asks only whether it is set"
                yield misread(self, variable, Severity.RECOMPILES, outcome)
        yield from relative_cache_home(self)

    def switched(self, *, on: bool) -> Switch:
        """Give sumpy's variable, and for this process a stand-in for the switch that pytools lacks."""
        if on:
            return Switch(self.name, unset=frozenset({"SUMPY_NO_CACHE"}), takes_effect=When.NEXT_IMPORT)
        module = "pytools.persistent_dict"
        patches = tuple(
            Patch(module, owner, method, partial(stand_in, self.store.owns))
            for owner in ("PersistentDict", "WriteOncePersistentDict")
            for method, stand_in in (("fetch", _missing), ("store", _forgetting), ("store_if_not_present", _forgetting))
        )
        return Switch(self.name, {"SUMPY_NO_CACHE": "1"}, patches=patches, takes_effect=When.NOW)

    def refresher(self) -> Switch:
        """Let every lookup miss, and every store replace what is there."""
        module = "pytools.persistent_dict"
        patches = tuple(
            Patch(module, owner, method, partial(stand_in, self.store.owns))
            for owner in ("PersistentDict", "WriteOncePersistentDict")
            for method, stand_in in (("fetch", _missing), ("store", _replacing), ("store_if_not_present", _replacing))
        )
        off = self.switched(on=False)
        return Switch(self.name, patches=patches, memos=off.memos, drops=off.drops, takes_effect=When.NOW)

    def relocate(self, folder: Path) -> Switch:
        """Move the user cache folder; dictionaries already open stay where they are."""
        return relocate_user_cache(self, folder, self.opened_by)

    def judged(self, distribution: str, variables: tuple[str, ...]) -> State:
        """Judge the variables that switch a library's dictionaries off, then whether there are any."""
        off = switched_off(self.environment, distribution, variables)
        return off or self._presence(distribution, "not switched off by " + " or ".join(variables))

    def _presence(self, distribution: str, why: str) -> State:
        root = self.roots()[0]
        if self.environment.installed(distribution) is None and next(self.store.dictionaries(root), None) is None:
            return State(Condition.ABSENT, f"{distribution} is not installed here and has left no dictionary")
        return State(Condition.ENABLED, why)


def unexamined_python(how: str, python: str, environment: Environment) -> Staleness:
    """Return the staleness of what another Python wrote: unknown, since its packages were not examined."""
    return Staleness(
        stale=None, because=f"unknown: {how} Python {python}, and cachectl examined only {environment.python}"
    )


def relocate_user_cache(layer: Layer, folder: Path, opened_by: tuple[str, ...] = ()) -> Switch:
    """Point the user cache folder itself elsewhere: what pytools and PyOpenCL follow."""
    variable = "WIN_PD_OVERRIDE_LOCAL_APPDATA" if layer.environment.platform == "win32" else "XDG_CACHE_HOME"
    return Switch(
        layer.name, {variable: str(folder / "xdg")}, latching_modules=opened_by, takes_effect=When.NEXT_IMPORT
    )


def _generation(pytools: str | None) -> tuple[str, bool] | None:
    """Return generation and dash of the dictionaries that a pytools version makes."""
    release = release_of(pytools)
    if release is None:
        return None
    if release >= (2026, 1):
        return "v5", True
    return ("v5", False) if release >= (2024, 1, 4) else ("v4", True)


def _planned_row(target: Target) -> Row:
    return Row(target.mark[0], (target.key.partition("/")[2],), target.mark[1])


def _delete_rows(rows: RowFile, targets: list[Target]) -> Deleted | None:
    whole = next((target for target in targets if "/" not in target.key), None)
    if whole is not None:
        return rows.delete_up_to(Weight(whole.entries, whole.bytes, whole.mark[0]))
    return rows.delete(list(map(_planned_row, targets)))


def _pickle_complaint(data: bytes) -> str | None:
    try:
        _, length = walk(data)
    except ValueError as error:
        return str(error)
    return None if length == len(data) else f"{len(data) - length} bytes follow the end of the pickle"


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _missing(owns: Callable[[str], bool], fetch: Callable[..., object]) -> Callable[..., object]:
    """Make a ``fetch`` that finds nothing in dictionaries of ours, and elsewhere what there is."""

    @wraps(fetch)
    def fetch_elsewhere(dictionary: Any, key: object) -> object:  # noqa: ANN401 - a class of pytools
        if not owns(dictionary.identifier):
            return fetch(dictionary, key)
        from pytools.persistent_dict import NoSuchEntryError

        raise NoSuchEntryError(key)

    return fetch_elsewhere


def _forgetting(owns: Callable[[str], bool], store: Callable[..., object]) -> Callable[..., object]:
    """Make a ``store`` that stores nothing in dictionaries of ours."""

    @wraps(store)
    def store_elsewhere(dictionary: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401
        return None if owns(dictionary.identifier) else store(dictionary, *arguments, **options)

    return store_elsewhere


def _replacing(owns: Callable[[str], bool], store: Callable[..., object]) -> Callable[..., object]:
    """Make a ``store`` that replaces what there is in dictionaries of ours, also in those that are written once."""

    @wraps(store)
    def store_anew(dictionary: Any, key: object, value: object, **options: object) -> object:  # noqa: ANN401 - as above
        if not owns(dictionary.identifier):
            return store(dictionary, key, value, **options)
        from inspect import unwrap

        from pytools.persistent_dict import PersistentDict

        unwrap(PersistentDict.store)(dictionary, key, value)
        # A value that was read before stays in memory otherwise.
        forget = getattr(dictionary, "clear_in_mem_cache", None)
        if forget is not None:
            forget()
        return None

    return store_anew


def _shape_of(key: str) -> Shape | None:
    """Return the form of an old dictionary's entry that a key has."""
    return next((shape for shape in _FOLDERS if shape.accepts(key)), None)
