"""Every verb under every fault: what a command does when one of its calls fails, held against what it says.

``python tests/faults/sweep.py`` prints the table; ``--every 1`` tries each call, as the hazard tier does. The rules:

- no traceback; a failure is one line for each thing that failed, and status 1;
- status 0 means that the result is the one of a run without faults: in the cache, in what was printed, and in the file
  that was to be written;
- with status 1 a verb that reads names what it could not read. ``report`` gives no number that differs, but null, or a
  lower bound with ``complete: false`` and a problem. ``ls`` lists no other entry, each as it is or with null in place
  of what was not read, and has a failed problem for each layer that lacks some. ``verify`` and ``doctor`` have a
  finding ``unreadable`` for each layer that lacks a finding, and no new finding of another kind;
- a verb that removes counts exactly the entries that have gone, and the bytes that are off the disk; ``import`` counts
  exactly the entries that are there now;
- a file that was to be written is whole or not there. A bundle lacks entries only with status 1, and then a line
  names their layer;
- a damaged thing is in its place or in quarantine, and the number that was moved aside is the one in quarantine;
- no entry is half: every key that is there can be read, and a key is one that was there before or is there after;
- files that belong to nobody's cache are as they were;
- the next run without faults ends well and brings the result of a run without faults. It leaves no file of cachectl's
  beside caches; a stage in a cache may belong to a command that still runs, so ``report`` counts it until a purge
  removes it. A purge leaves nothing behind.

Two results may differ. Mesa's database is changed in place, as Mesa does it, and after an interrupted write the next
program drops every entry. A ``prune`` after an interrupted one finds fewer entries and removes others; its limit holds.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import sys
import tarfile
import tempfile
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

TESTS: Final = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]

from injector import KILL, LOCKS, READS, WRITES, Ended, Fault, Injector, compiled_shim  # noqa: E402

from cachectl.layers.base.environment import Environment  # noqa: E402
from cachectl.layers.base.errors import CachectlError  # noqa: E402
from cachectl.moving.bundle import Reader  # noqa: E402
from cachectl.stack import Stack  # noqa: E402

#: What can go wrong, by the kind of call.
FAULTS: Final = (
    *((WRITES, error, sticky) for error in (errno.EIO, errno.ENOSPC, errno.EACCES) for sticky in (False, True)),
    (WRITES, KILL, False),
    *((READS, error, False) for error in (errno.EIO, errno.EACCES, errno.EMFILE)),
    (READS, errno.EIO, True),
    (LOCKS, errno.EIO, True),
    (LOCKS, errno.ENOLCK, True),
)
#: Files that are written again when entries go, or that sqlite leaves: no removal counts their bytes.
_NOT_FREED: Final = ("index", "-shm")
#: The store in which an interrupted change loses every entry.
_STARTED_ANEW: Final = "mesa_shader_cache_db"
#: Moments: they differ from run to run.
_MOMENTS: Final = frozenset({"generated", "used", "created", "modified", "oldest", "newest", "written_before"})
#: What ``prune`` is to leave at most, in bytes.
_MOST: Final = 20_000
_BYSTANDERS: Final = (".cache/other/file", ".cache/pytools/notes.txt", ".cache/pocl/kcache/README", ".nv/notes")


def module(path: str) -> ModuleType:
    """Load a test module for the way it fills a layer."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@dataclass(frozen=True)
class World:
    """A home full of caches, and the variables of its user."""

    path: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def stack(self, home: Path) -> Stack:
        """Return the layers of a copy, in which no other program is busy."""
        aside = home.parent / "processes"
        aside.mkdir(exist_ok=True)
        variables = {"HOME": str(home), **self.variables}
        return Stack(
            Environment(variables, home=home, cwd=home, temporary=home / "tmp", processes=aside), plugins=False
        )

    def keys(self, home: Path) -> dict[str, set[str]]:
        """Return the entries of each layer as ``ROOT KEY``, with the root below the home."""
        found: dict[str, set[str]] = {}
        with recovered(home) as whole:
            for entry in self.stack(whole).entries():
                found.setdefault(entry.layer, set()).add(f"{entry.root.relative_to(whole)} {entry.key}")
        return found

    def bytes(self, home: Path) -> int:
        """Return the bytes of all entries."""
        with recovered(home) as whole:
            return sum(entry.bytes for entry in self.stack(whole).entries())

    def unreadable(self, home: Path) -> list[str]:
        """Name the entries that cannot be read whole."""
        bad = []
        with recovered(home) as whole:
            for layer in self.stack(whole):
                try:
                    many = layer.get_many([entry.key for entry in layer.entries()])
                except CachectlError:
                    continue
                bad += [
                    f"{layer.name} {key}: {str(found).replace(str(whole), '')}"
                    for key, found in many.items()
                    if isinstance(found, Exception)
                ]
        return bad


@contextmanager
def recovered(home: Path) -> Iterator[Path]:
    """Yield the home, or a copy in which sqlite has rolled interrupted writes back, as the next program would."""
    if not any(home.rglob("*-journal")):
        yield home
        return
    copy = home.parent / "recovered"
    shutil.copytree(home, copy, symlinks=True)
    try:
        for journal in copy.rglob("*-journal"):
            with closing(sqlite3.connect(str(journal).removesuffix("-journal"))) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
        yield copy
    finally:
        shutil.rmtree(copy)


def disk_bytes(home: Path) -> int:
    """Return the bytes of all files, of those with several names once; of indexes, which keep their size, none."""
    sizes = {}
    for path in (home, *home.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and not path.name.endswith(_NOT_FREED):
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def bystanders(home: Path) -> dict[str, str]:
    """Hash the files that belong to nobody's cache."""
    return {name: hashlib.sha256((home / name).read_bytes()).hexdigest() for name in _BYSTANDERS}


def leftovers(home: Path) -> list[str]:
    """Name what cachectl must not leave behind."""
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.name.startswith(".cachectl-") or path.name.endswith("-journal") or path.name == "lock"
    ]


@dataclass(frozen=True)
class Case:
    """A command, what has to be there before it, and whether it changes caches."""

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[Injector, World, Path], object] = lambda _injector, _world, _home: None
    writes: bool = True
    #: Whether its document counts entries that it has removed, or placed.
    removes: bool = False
    places: bool = False
    #: The file in the home that it writes.
    output: str | None = None


def _first(world: World, home: Path, layer: str) -> str:
    return min(entry.key for entry in world.stack(home).entries(layers=[layer]))


def _quiet(injector: Injector, world: World, home: Path, *arguments: str) -> Ended:
    done = injector.run(*arguments, home=home, fault=Fault(0), variables=world.variables)
    assert done.status == 0, (arguments, done)
    return done


def _take_out(layer: str) -> Callable[[Injector, World, Path], object]:
    def prepare(injector: Injector, world: World, home: Path) -> None:
        key = _first(world, home, layer)
        _quiet(injector, world, home, "get", layer, key, "-o", str(home / "artifact"))
        _quiet(injector, world, home, "purge", layer, "--key", key)
        (home / "key").write_text(key)

    return prepare


def _bundle(injector: Injector, world: World, home: Path) -> None:
    _quiet(injector, world, home, "export", str(home / "bundle"))
    _quiet(injector, world, home, "purge", "--all")


#: What damaged things hold, so that each can be found wherever it lies.
_MARKS: Final = tuple(f"damaged by the sweep, number {number}".encode() for number in range(9))
#: Files of which one each is damaged, and tables with the column of which one row is.
_DAMAGED_FILES: Final = ("program.bc", "*.cl_cache", "llvmcache-*", ".nv/ComputeCache/?/?/*", "mesa_shader_cache/??/*")
_DAMAGED_ROWS: Final = (("*.sqlite", "dict", "key_value"), ("*.ukdb", "kern_db", "kernel_blob"))


def _damage(_injector: Injector, _world: World, home: Path) -> None:
    """Damage an entry of each kind that is there."""
    marks = iter(_MARKS)
    for pattern in _DAMAGED_FILES:
        for path in sorted(home.rglob(pattern))[:1]:
            path.write_bytes(next(marks))
            os.utime(path, (1.7e9, 1.7e9))
    for pattern, table, column in _DAMAGED_ROWS:
        for path in sorted(home.rglob(pattern))[-1:]:
            with closing(sqlite3.connect(path)) as connection, connection:
                first = f"(select min(rowid) from {table})"
                connection.execute(f"update {table} set {column} = ? where rowid = {first}", (next(marks),))
            os.utime(path, (1.7e9, 1.7e9))


def damaged(home: Path, *, held: bool = True) -> Counter[bytes]:
    """Find the damaged things that :data:`_MARKS` names, in their places or (``held``) in quarantine."""
    found: Counter[bytes] = Counter()
    with recovered(home) as whole:
        for path in whole.rglob("*"):
            if path.is_symlink() or not path.is_file() or (".cachectl-quarantine-" in str(path) and not held):
                continue
            data = path.read_bytes()
            if data.startswith(b"SQLite format 3\0"):
                # A row that was deleted can still be found in the bytes of its page.
                data = repr(_values(path)).encode()
            found.update(mark for mark in _MARKS if mark in data or b64encode(mark) in data)
    return found


def _values(database: Path) -> list[object]:
    # Sqlite keeps files beside a database that it reads.
    with tempfile.TemporaryDirectory() as aside:
        for path in database.parent.glob(f"{database.name}*"):
            shutil.copy(path, aside)
        connection = sqlite3.connect(Path(aside, database.name))
        with closing(connection):
            return _all_values(connection)


def _all_values(connection: sqlite3.Connection) -> list[object]:
    tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
    return [value for table in tables for row in connection.execute(f'select * from "{table}"') for value in row]


def _quarantine(injector: Injector, world: World, home: Path) -> None:
    _damage(injector, world, home)
    injector.run("verify", "--quarantine", home=home, fault=Fault(0), variables=world.variables)
    assert damaged(home, held=False) != damaged(home) or not damaged(home)


CASES: Final = {
    case.name: case
    for case in (
        Case("report", ("report", "--json"), writes=False),
        Case("ls", ("ls", "--json"), writes=False),
        Case("verify", ("verify", "--json"), writes=False),
        Case("doctor", ("doctor", "--json"), writes=False),
        Case("export", ("export", "{home}/bundle"), output="bundle"),
        Case("get", ("get", "{layer}", "{key}", "-o", "{home}/artifact"), output="artifact"),
        Case("purge", ("purge", "--all", "--wait", "0.2", "--json"), removes=True),
        Case("purge-key", ("purge", "{layer}", "--key", "{key}", "--wait", "0.2", "--json"), removes=True),
        Case("prune", ("prune", "--max-size", str(_MOST), "--wait", "0.2", "--json"), removes=True),
        Case("import", ("import", "{home}/bundle", "--trust", "--json"), _bundle, places=True),
        Case("quarantine", ("verify", "--quarantine", "--json"), _damage),
        Case("restore", ("restore", "--all", "--json"), _quarantine),
    )
}


def put_cases(world: World) -> Iterator[Case]:
    """Yield a ``put`` for each layer that has entries and takes them."""
    for layer in world.keys(world.path):
        if layer.endswith("tuning") or layer.startswith("miopen-system"):
            continue
        yield Case(f"put {layer}", ("put", layer, "{kept}", "{home}/artifact"), _take_out(layer))


@dataclass
class Row:
    """What one kind of fault did to one command."""

    case: str
    fault: str
    calls: int = 0
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """Format the row for a table."""
        outcomes = ", ".join(f"{count}x {status}" for status, count in sorted(self.outcomes.items()))
        held = "held" if not self.broken else f"BROKEN {len(self.broken)}"
        return f"{self.case:16} {self.fault:28} {self.tried:4} of {self.calls:5}  {outcomes:24} {held}"


class Sweep:
    """The faults of one world, tried in copies of it."""

    def __init__(
        self,
        injector: Injector,
        world: World,
        folder: Path,
        *,
        every: int | None,
        kinds: Collection[str] = (),
        faults: Collection[tuple[int, int, bool]] = FAULTS,
    ) -> None:
        """Prepare to try each ``every``-th call under some faults, and with ``None`` one call under each fault."""
        self._injector = injector
        self._world = world
        self._home = folder / "home"
        self._prepared = folder / "prepared"
        self._every = every
        self._calls: dict[int, int] = {}
        self._written: bytes | None = None
        self._damaged: Counter[bytes] = Counter()
        self._unreadable: set[str] = set()
        self._kinds = kinds or _KINDS.values()
        self._faults = faults

    def case(self, case: Case) -> Iterator[Row]:
        """Try one command under every kind of fault."""
        self._copy(self._world.path, self._prepared)
        # Paths in what is prepared are those of the copy that the command sees.
        self._copy(self._prepared, self._home)
        case.prepare(self._injector, self._world, self._home)
        self._copy(self._home, self._prepared)
        self._damaged = damaged(self._home)
        self._unreadable = set(self._world.unreadable(self._home))
        arguments = self._arguments(case)
        good, complete = self._run(arguments, Fault(0)), self._world.keys(self._home)
        # What is damaged comes back by `restore`.
        self._unreadable |= set(self._world.unreadable(self._home))
        assert good.status in (0, 1), good
        self._written = None if case.output is None else (self._home / case.output).read_bytes()
        self._calls.clear()
        for kinds, error, sticky in self._faults:
            if (case.writes or kinds != WRITES) and _KINDS[kinds] in self._kinds:
                yield self._row(case, arguments, (kinds, error, sticky), good, complete)

    def _arguments(self, case: Case) -> tuple[str, ...]:
        layer = max(keys := self._world.keys(self._home), key=lambda name: len(keys[name]), default="")
        key = min(keys.get(layer, {" "})).partition(" ")[2]
        kept = self._home / "key"
        words = {
            "home": str(self._home),
            "layer": layer,
            "key": key,
            "kept": kept.read_text() if kept.exists() else "",
        }
        # Keys may have braces of their own.
        return tuple(words.get(part[1:-1], part.replace("{home}", words["home"])) for part in case.arguments)

    def _row(
        self,
        case: Case,
        arguments: tuple[str, ...],
        kind: tuple[int, int, bool],
        good: Ended,
        complete: Mapping[str, set[str]],
    ) -> Row:
        kinds, error, sticky = kind
        if kinds not in self._calls:
            self._copy(self._prepared, self._home)
            self._calls[kinds] = self._run(arguments, Fault(kinds)).seen
        calls = self._calls[kinds]
        row = Row(case.name, f"{_KINDS[kinds]} {str(Fault(kinds, 0, error, sticky)).replace(' at 0', '')}", calls)
        every = self._every or calls or 1
        # Another fault, and another case, meets other calls.
        first = 1 + zlib.crc32(f"{case.name} {row.fault}".encode()) % min(every, calls or 1)
        for nth in range(first, calls + 1, every):
            self._copy(self._prepared, self._home)
            fault = Fault(kinds, nth, error, sticky)
            done = self._run(arguments, fault)
            row.tried += 1
            row.outcomes[str(done.status)] += 1
            for complaint in self._judge(case, arguments, done, good, complete):
                row.broken.append(f"{fault} ({done.where}): {complaint}")
        return row

    def _run(self, arguments: tuple[str, ...], fault: Fault) -> Ended:
        return self._injector.run(*arguments, home=self._home, fault=fault, variables=self._world.variables)

    @staticmethod
    def _copy(source: Path, to: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to, symlinks=True)

    def _judge(
        self,
        case: Case,
        arguments: tuple[str, ...],
        done: Ended,
        good: Ended,
        complete: Mapping[str, set[str]],
    ) -> Iterator[str]:
        """Yield each rule that the command broke."""
        killed = done.status < 0 and done.status != -9
        if killed or done.status not in (0, 1, -9) or "Traceback" in done.stderr:
            yield f"status {done.status}: {done.stderr[-300:]}"
        if not all(line.startswith("cachectl: ") for line in done.stderr.splitlines()):
            yield f"not one line: {done.stderr!r}"
        before, after = self._world.keys(self._prepared_as_home()), self._world.keys(self._home)
        if bystanders(self._home) != bystanders(self._prepared):
            yield "a file that is no entry was changed"
        for layer, keys in after.items():
            if strange := keys - before.get(layer, set()) - complete.get(layer, set()):
                yield f"{layer} has keys that were never there: {sorted(strange)[:2]}"
        if bad := set(self._world.unreadable(self._home)) - self._unreadable:
            yield f"half: {sorted(bad)[:2]}"
        if self._damaged and (lost := self._damaged - damaged(self._home)):
            yield f"neither in its place nor in quarantine: {list(lost)}"
        if done.status == 0 and after != complete:
            yield "status 0, and another result than without the fault"
        if case.output is not None:
            yield from self._miswritten(self._home / case.output, done)
        if done.status in (0, 1):
            yield from self._untrue(case, done, good, before, after)
        if case.writes:
            yield from self._again(case, arguments, good, complete)

    def _untrue(
        self, case: Case, done: Ended, good: Ended, before: Mapping[str, set[str]], after: Mapping[str, set[str]]
    ) -> Iterator[str]:
        """Yield what of its output is not so."""
        if case.removes:
            yield from _miscounted(done, "removed", before, after)
            yield from self._misweighed(done)
        elif case.places:
            yield from _miscounted(done, "placed", after, before)
        elif case.name in {"quarantine", "restore"} and done.stdout:
            yield from self._misheld(done)
            if case.name == "quarantine":
                yield from _false_findings(_without_moments(done.json), _without_moments(good.json))
        elif _timeless(done.stdout) == _timeless(good.stdout):
            return
        elif case.name in _TRUTHS and done.stdout:
            yield from _TRUTHS[case.name](_without_moments(done.json), _without_moments(good.json))
        elif done.status == 0:
            yield "status 0, and another output than without the fault"
        elif not done.stderr:
            yield "status 1, and not a word"

    def _miswritten(self, file: Path, done: Ended) -> Iterator[str]:
        """Yield what is wrong with the file that was to be written."""
        data = file.read_bytes() if file.exists() else None
        if data == self._written or (data is None and done.status != 0):
            return
        if data is None or self._written is None or file.name != "bundle":
            yield f"half a file: {file.name}, status {done.status}"
            return
        there, whole = _bundled(data), _bundled(self._written)
        if there.items() - whole.items():
            yield "the bundle holds entries that are not so"
        for layer in {layer for layer, _ in whole.keys() - there.keys()}:
            if done.status == 0 or f"cachectl: {layer}" not in done.stderr:
                yield f"the bundle lacks entries of {layer}, and nobody says so"

    def _misheld(self, done: Ended) -> Iterator[str]:
        """Yield where ``verify --quarantine`` or ``restore`` counts another number than has moved."""
        before, after = damaged(self._prepared, held=False), damaged(self._home, held=False)
        if "restored" in done.json:
            said = sum(thing["failed"] is None for thing in done.json["restored"])
            moved = sum((after - before).values())
        else:
            said = sum(layer["moved"] for layer in done.json["quarantine"])
            moved = sum((before - after).values())
        if said != moved:
            yield f"says {said} moved, and it is {moved}"

    def _misweighed(self, done: Ended) -> Iterator[str]:
        try:
            said = done.json["total"]["bytes_freed"]
        except ValueError:
            return
        before, after = disk_bytes(self._prepared), disk_bytes(self._home)
        staged = sum(disk_bytes(path) for path in self._home.rglob(".cachectl-stage-*"))
        # What is left of an interrupted write is larger than what was there.
        pending = [*self._home.rglob("*-journal"), *self._home.rglob("*-wal")]
        uncounted = "are not counted" in done.stdout or pending
        if said not in (before - after, before - after + staged) and not uncounted:
            yield f"says {said} bytes freed, {before - after} have gone"

    def _prepared_as_home(self) -> Path:
        return self._prepared

    def _again(
        self, case: Case, arguments: tuple[str, ...], good: Ended, complete: Mapping[str, set[str]]
    ) -> Iterator[str]:
        """Run the command once more, without a fault, and see what is left after a purge."""
        was_done = not self._lacking(self._world.keys(self._home), complete)
        again = self._run(arguments, Fault(0))
        if again.status not in {0, good.status} and not was_done:
            yield f"the next run ends with {again.status}: {again.stderr[-300:]}"
        found = self._world.keys(self._home)
        if case.name == "prune":
            if self._lacking(found, self._world.keys(self._prepared), fewer=True):
                yield "the next run has brought other entries"
            if (size := self._world.bytes(self._home)) > _MOST:
                yield f"the next run leaves {size} bytes"
        elif self._lacking(found, complete):
            yield "the next run does not bring the result"
        if case.output is not None and (self._home / case.output).read_bytes() != self._written:
            yield "the next run does not write the same file"
        yield from self._left()

    def _left(self) -> Iterator[str]:
        """Yield what has been left behind, and what a report does not count of it. Purge everything."""
        caches = [root.path for layer in self._world.stack(self._home) for root in layer.roots()]
        left = [self._home / name for name in leftovers(self._home)]
        if beside := [path for path in left if not any(path.is_relative_to(cache) for cache in caches)]:
            yield f"left behind beside caches: {beside[:3]}"
        if left:
            report = self._run(("report", "--json"), Fault(0)).json
            roots = [root for layer in report["layers"] for root in layer["roots"]]
            for path in left:
                counted = any(root["orphan_files"] for root in roots if path.is_relative_to(root["path"]))
                if ".cachectl-stage-" in path.name and path.is_dir() and any(path.iterdir()) and not counted:
                    yield f"left behind, and no report counts it: {path}"
        self._run(("purge", "--all"), Fault(0))
        if names := leftovers(self._home):
            yield f"left behind by a purge: {names[:3]}"

    def _lacking(self, found: Mapping[str, set[str]], complete: Mapping[str, set[str]], *, fewer: bool = False) -> bool:
        """Return whether a result differs; with ``fewer``, whether it has more than it may have."""
        if found.keys() - complete.keys() or any(found[layer] - complete[layer] for layer in found):
            return True
        lost = {key for layer in complete for key in complete[layer] - found.get(layer, set())}
        return not fewer and not all(_STARTED_ANEW in key for key in lost)


def _bundled(data: bytes) -> dict[tuple[str, str], str]:
    """Read a bundle to its end; return the digest of each entry."""
    reader = Reader(io.BytesIO(data), len(data))
    return {(item.layer, item.key): hashlib.sha256(content).hexdigest() for item, content in reader.contents()}


_KINDS: Final = {READS: "read", WRITES: "write", LOCKS: "lock"}


def _timeless(text: str) -> object:
    """Return a document without the moments in it, or other text as it is."""
    try:
        return _without_moments(json.loads(text))
    except ValueError:
        return text


def _without_moments(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: _without_moments(part) for name, part in value.items() if name not in _MOMENTS}
    return [_without_moments(part) for part in value] if isinstance(value, list) else value


def _miscounted(done: Ended, word: str, more: Mapping[str, set[str]], less: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        said = {layer["layer"]: layer[word] for layer in done.json["layers"]}
    except ValueError:
        return
    for layer in more.keys() | said.keys():
        changed = len(more.get(layer, set()) - less.get(layer, set()))
        if said.get(layer, 0) != changed:
            yield f"{layer}: says {said.get(layer, 0)} {word}, and it is {changed}"


# ---------------------------------------------------------------------- what a verb that reads may say


def _false_report(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    numbers = ("entries", "files", "bytes", "orphan_files", "orphan_bytes", "stale_entries", "stale_bytes")
    places = [("total", said["total"], true["total"], True)]
    for layer, whole in zip(said["layers"], true["layers"], strict=True):
        named = bool(layer["failures"]) or any(root["problems"] for root in layer["roots"])
        places.append((layer["layer"], layer, whole, named))
        places += [
            (root["path"], root, good, bool(root["problems"]))
            for root, good in zip(layer["roots"], whole["roots"], strict=True)
        ]
    for name, part, whole, named in places:
        for number in numbers:
            value = part.get(number)
            if value == whole.get(number) or (value is None and not part["complete"]):
                continue
            if value is None or part["complete"] or not named or value > whole[number]:
                yield f"{name}: {value} {number} instead of {whole[number]}, and nobody says so"


#: What stands for what was not read.
_UNKNOWN: Final[tuple[object, ...]] = (None, {}, [], {"of": "unknown"})


def _false_listing(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    known = {(entry["layer"], entry["root"], entry["key"]): entry for entry in true["entries"]}
    listed = {(entry["layer"], entry["root"], entry["key"]): entry for entry in said["entries"]}
    failed = {problem["layer"] for problem in said["problems"] if problem["failed"]}
    for name, entry in listed.items():
        other = {field for field, value in entry.items() if value != known.get(name, {}).get(field)}
        if lies := [field for field in other - {"stale_because"} if entry[field] not in _UNKNOWN]:
            yield f"{name}: another {lies}"
        elif other and name[0] not in failed:
            yield f"{name}: {other} not read, and nobody says so"
    if lacking := {name[0] for name in known.keys() - listed.keys()} - failed:
        yield f"lacks entries of {lacking}, and nobody says so"


def _false_findings(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    def names(document: Any) -> set[tuple[str, ...]]:  # noqa: ANN401 - JSON
        return {
            (found["layer"], found["root"], str(found["key"]), found["code"])
            for found in document["findings"]
            if found["code"] != "unreadable"
        }

    unread = {found["layer"] for found in said["findings"] if found["code"] == "unreadable"}
    if new := names(said) - names(true):
        yield f"found what is not so: {sorted(new)[:2]}"
    if lacking := {name[0] for name in names(true) - names(said)} - unread:
        yield f"lacks findings of {lacking}, and nobody says so"


_TRUTHS: Final = {
    "report": _false_report,
    "ls": _false_listing,
    "verify": _false_findings,
    "doctor": _false_findings,
}


# ---------------------------------------------------------------------- worlds


def synthetic_world(folder: Path) -> World:
    """Fill a home with what no library here can make: CUDA, NEO, comgr, Mesa, MIOpen."""
    home = folder / "home"
    home.mkdir(parents=True)
    neo, comgr = module("layers/test_neo.py"), module("layers/test_comgr.py")
    mesa = module("support/mesa.py")
    kernels, tuning = module("layers/miopen/test_miopen_kernels.py"), module("layers/miopen/test_miopen_tuning.py")
    neo.unpack(home / ".cache" / "neo_compiler_cache")
    comgr.fill(home / ".cache" / "comgr")
    mesa.fill(home / ".cache", "multi-file", mesa.contents())
    kernels.fill(home)
    tuning.fill(home)
    _compute_cache(home / ".nv" / "ComputeCache", 6)
    return settled(World(home))


def _compute_cache(folder: Path, entries: int) -> None:
    """Unpack some entries that a CUDA driver wrote, with an index that lists them."""
    with tarfile.open(TESTS / "data" / "computecache-h200-opencl.tar.gz") as tar:
        names = sorted(member.name for member in tar if member.isfile() and not member.name.endswith("index"))
        for name in names[:entries]:
            tar.extract(name, folder, set_attrs=False)
    (folder / "index").touch()
    layer = Stack(Environment({"HOME": str(folder.parent.parent)}, home=folder.parent.parent), plugins=False)["cuda"]
    # Whatever is put, the index is written again.
    entry = next(iter(layer.entries()))
    artifact = layer.get(entry.key)
    assert artifact is not None
    layer.put(entry.key, artifact)


def mesa_world(folder: Path, store: str) -> World:
    """Fill one of Mesa's stores that keep many entries in one file, for a user who has chosen it."""
    home = folder / "home"
    home.mkdir(parents=True)
    mesa = module("support/mesa.py")
    mesa.fill(home / ".cache", store, mesa.contents())
    return settled(World(home, mesa.STORES[store]))


#: Homes that are made here, by name.
WORLDS: Final[Mapping[str, Callable[[Path], World]]] = {
    "synthetic": synthetic_world,
    "mesa-single-file": lambda folder: mesa_world(folder, "single-file"),
    "mesa-database": lambda folder: mesa_world(folder, "database"),
}


def filled_world(folder: Path, home: Path) -> World:
    """Copy a home that real programs have filled."""
    shutil.copytree(home, folder / "home", symlinks=True)
    return settled(World(folder / "home"))


def settled(world: World) -> World:
    """Add files that belong to nobody's cache, and make everything old."""
    for name in _BYSTANDERS:
        path = world.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    (world.path / "tmp").mkdir(exist_ok=True)
    for path in (*world.path.rglob("*"), world.path):
        os.utime(path, (1.7e9, 1.7e9), follow_symlinks=False)
    return world


#: A printed row: home, case, kind and error, "and after", tried, calls, outcomes, broken.
_LINE: Final = re.compile(
    r"(\S+) +(\S+(?: \S+)?) +(read|write|lock) (\w+)(?: and after)? +(\d+) of +(\d+) .*?(?:held|BROKEN (\d+))"
)


def table(lines: Iterable[str]) -> str:
    """Sum printed rows up as Markdown: verb by fault, how often it was tried, and how often a rule was broken."""
    tried: Counter[tuple[str, str]] = Counter()
    broken: Counter[tuple[str, str]] = Counter()
    calls: dict[tuple[str, str, str], int] = {}
    for found in filter(None, map(_LINE.match, lines)):
        home, case, kind, error, count, seen, bad = found.groups()
        place = case.split()[0].removesuffix("-key"), f"{kind} {error}"
        tried[place] += int(count)
        broken[place] += int(bad or 0)
        # Every fault of a kind can meet the same calls.
        calls[f"{home} {case}", place[0], kind] = int(seen)
    verbs = dict.fromkeys(verb for verb, _ in tried)
    errors = dict.fromkeys(f"{_KINDS[kinds]} {str(Fault(kinds, 0, error)).split()[0]}" for kinds, error, _ in FAULTS)
    rows = [["verb", "calls", *errors], ["---"] * (2 + len(errors))]
    for verb in verbs:
        cells = [
            f"{tried[verb, error]:,}" + (f" ({broken[verb, error]} broken)" if broken[verb, error] else "")
            for error in errors
        ]
        seen_by_verb = sum(seen for (_, name, _), seen in calls.items() if name == verb)
        rows.append([f"`{verb}`", f"{seen_by_verb:,}", *cells])
    total = [f"{sum(tried[verb, error] for verb in verbs):,}" for error in errors]
    rows.append(["all", f"{sum(calls.values()):,}", *total])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Print the table of a sweep over homes; status 1 where a rule was broken."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("home", type=Path, nargs="?", help="a home full of caches (default: synthetic ones)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="try each Nth call")
    parser.add_argument("--case", action="append", default=[], help="only these")
    parser.add_argument("--world", action="append", default=[], choices=WORLDS, help="only these synthetic homes")
    parser.add_argument("--kind", action="append", default=[], choices=_KINDS.values(), help="only faults of these")
    parser.add_argument("--table", action="store_true", help="sum up the rows on standard input, and try nothing")
    options = parser.parse_args()
    if options.table:
        print(table(sys.stdin))
        return 0
    broken = 0
    with tempfile.TemporaryDirectory() as name, closing(Injector(compiled_shim(Path(name)), Path(name))) as injector:
        worlds = {"filled": lambda folder: filled_world(folder, options.home)} if options.home else WORLDS
        for called, make in worlds.items():
            if options.world and called not in options.world:
                continue
            folder = Path(name, called)
            world = make(folder / "world")
            for case in (*CASES.values(), *put_cases(world)):
                if options.case and case.name not in options.case:
                    continue
                for row in Sweep(injector, world, folder, every=options.every, kinds=options.kind).case(case):
                    broken += len(row.broken)
                    print(f"{called:16} {row.line}", flush=True)
                    for line in row.broken[:3]:
                        print(f"    {line}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
