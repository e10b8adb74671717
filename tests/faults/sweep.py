"""Every verb under every fault: what a command does when one of its calls fails, held against what it says.

``python tests/faults/sweep.py`` prints the table; ``--every 1`` tries each call, as the hazard tier does. The rules:

- no traceback; a failure is one line for each thing that failed, and status 1;
- status 0 means that the result is the one of a run without faults, in the cache and in what was printed;
- a verb that removes counts exactly what has gone;
- no entry is half: every key that is there can be read, and a key is one that was there before or is there after;
- files that belong to nobody's cache are as they were;
- the next run without faults ends well, brings the result of a run without faults, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

TESTS: Final = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]

from injector import KILL, LOCKS, READS, WRITES, Ended, Fault, Injector, compiled_shim  # noqa: E402

from cachectl.layers.environment import Environment  # noqa: E402
from cachectl.layers.errors import CachectlError  # noqa: E402
from cachectl.stack import Stack  # noqa: E402

#: What can go wrong, by the kind of call.
FAULTS: Final = (
    *((WRITES, error, sticky) for error in (errno.EIO, errno.ENOSPC, errno.EACCES) for sticky in (False, True)),
    (WRITES, KILL, False),
    *((READS, error, False) for error in (errno.EIO, errno.EACCES, errno.EMFILE)),
    (READS, errno.EIO, True),
    (LOCKS, errno.ENOLCK, True),
)
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
        """Return the keys of each layer."""
        found: dict[str, set[str]] = {}
        for entry in self.stack(home).entries():
            found.setdefault(entry.layer, set()).add(entry.key)
        return found

    def unreadable(self, home: Path) -> list[str]:
        """Name the entries that cannot be read whole."""
        bad = []
        for layer in self.stack(home):
            try:
                many = layer.get_many([entry.key for entry in layer.entries()])
            except CachectlError:
                continue
            bad += [f"{layer.name} {key}: {found}" for key, found in many.items() if isinstance(found, Exception)]
        return bad


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
    #: The number of entries that a document of this command claims to have removed from a layer.
    removes: bool = False


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


def _damage(_injector: Injector, _world: World, home: Path) -> None:
    for path in sorted(home.rglob("program.bc"))[:2]:
        path.write_bytes(b"")


def _quarantine(injector: Injector, world: World, home: Path) -> None:
    _damage(injector, world, home)
    _quiet(injector, world, home, "verify", "--quarantine")


CASES: Final = {
    case.name: case
    for case in (
        Case("report", ("report", "--json"), writes=False),
        Case("ls", ("ls", "--json"), writes=False),
        Case("verify", ("verify", "--json"), writes=False),
        Case("doctor", ("doctor", "--json"), writes=False),
        Case("export", ("export", "{home}/bundle")),
        Case("get", ("get", "{layer}", "{key}", "-o", "{home}/artifact"), writes=False),
        Case("purge", ("purge", "--all", "--wait", "0.2", "--json"), removes=True),
        Case("purge-key", ("purge", "{layer}", "--key", "{key}", "--wait", "0.2", "--json"), removes=True),
        Case("prune", ("prune", "--max-size", "20K", "--wait", "0.2", "--json"), removes=True),
        Case("import", ("import", "{home}/bundle", "--trust"), _bundle),
        Case("quarantine", ("verify", "--quarantine"), _damage),
        Case("restore", ("restore", "--all"), _quarantine),
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


class Sweep:
    """The faults of one world, tried in copies of it."""

    def __init__(self, injector: Injector, world: World, folder: Path, *, every: int) -> None:
        self._injector = injector
        self._world = world
        self._home = folder / "home"
        self._prepared = folder / "prepared"
        self._every = every

    def case(self, case: Case) -> Iterator[Row]:
        """Try one command under every kind of fault."""
        self._copy(self._world.path, self._prepared)
        # Paths in what is prepared are those of the copy that the command sees.
        self._copy(self._prepared, self._home)
        case.prepare(self._injector, self._world, self._home)
        self._copy(self._home, self._prepared)
        arguments = self._arguments(case)
        good, complete = self._run(arguments, Fault(0)), self._world.keys(self._home)
        assert good.status in (0, 1), good
        for kinds, error, sticky in FAULTS:
            if case.writes or kinds != WRITES:
                yield self._row(case, arguments, (kinds, error, sticky), good, complete)

    def _arguments(self, case: Case) -> tuple[str, ...]:
        layer = max(keys := self._world.keys(self._home), key=lambda name: len(keys[name]), default="")
        key = min(keys.get(layer, {""}))
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
        self._copy(self._prepared, self._home)
        calls = self._run(arguments, Fault(kinds)).seen
        row = Row(case.name, f"{_KINDS[kinds]} {str(Fault(kinds, 0, error, sticky)).replace(' at 0', '')}", calls)
        for nth in range(1, calls + 1, self._every):
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
        if bad := self._world.unreadable(self._home):
            yield f"half: {bad[:2]}"
        if done.status == 0:
            if after != complete:
                yield "status 0, and another result than without the fault"
            if not case.removes and _timeless(done.stdout) != _timeless(good.stdout):
                yield "status 0, and another output than without the fault"
        if case.removes and done.status in (0, 1):
            yield from _miscounted(done, before, after)
        if case.writes:
            yield from self._again(arguments, good, complete)

    def _prepared_as_home(self) -> Path:
        return self._prepared

    def _again(self, arguments: tuple[str, ...], good: Ended, complete: Mapping[str, set[str]]) -> Iterator[str]:
        """Run the command once more, without a fault."""
        again = self._run(arguments, Fault(0))
        if again.status != good.status:
            yield f"the next run ends with {again.status}: {again.stderr[-300:]}"
        if self._world.keys(self._home) != complete:
            yield "the next run does not bring the result"
        if left := leftovers(self._home):
            yield f"left behind: {left[:3]}"


_KINDS: Final = {READS: "read", WRITES: "write", LOCKS: "lock"}


def _timeless(text: str) -> object:
    """Return a document without the moments in it, or other text as it is."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    return _without(document, {"generated", "used", "created", "modified", "oldest", "newest"})


def _without(value: Any, names: set[str]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: _without(part, names) for name, part in value.items() if name not in names}
    return [_without(part, names) for part in value] if isinstance(value, list) else value


def _miscounted(done: Ended, before: Mapping[str, set[str]], after: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        said = {layer["layer"]: layer["removed"] for layer in done.json["layers"]}
    except ValueError:
        return
    for layer in before.keys() | said.keys():
        gone = len(before.get(layer, set()) - after.get(layer, set()))
        if said.get(layer, 0) != gone:
            yield f"{layer}: says {said.get(layer, 0)} removed, {gone} have gone"


# ---------------------------------------------------------------------- worlds


def synthetic_world(folder: Path) -> World:
    """Fill a home with what no library here can make: NEO, comgr, Mesa's stores, MIOpen."""
    home = folder / "home"
    home.mkdir(parents=True)
    neo, comgr = module("layers/test_neo.py"), module("layers/test_comgr.py")
    mesa = module("layers/test_mesa.py")
    kernels, tuning = module("layers/test_miopen_kernels.py"), module("layers/test_miopen_tuning.py")
    neo.unpack(home / ".cache" / "neo_compiler_cache")
    comgr.fill(home / ".cache" / "comgr")
    mesa.fill(home / ".cache", "multi-file", mesa.contents())
    mesa.fill(home / ".cache", "database", mesa.contents())
    kernels.fill(home)
    tuning.fill(home)
    return settled(World(home))


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


def main() -> int:
    """Print the table of a sweep over a home; status 1 where a rule was broken."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("home", type=Path, nargs="?", help="a home full of caches (default: synthetic ones)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="try each Nth call")
    parser.add_argument("--case", action="append", default=[], help="only these")
    options = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.home is None:
            world = synthetic_world(folder / "world")
        else:
            shutil.copytree(options.home, folder / "world" / "home", symlinks=True)
            world = settled(World(folder / "world" / "home"))
        with closing(Injector(compiled_shim(folder), folder)) as injector:
            for case in (*CASES.values(), *put_cases(world)):
                if options.case and case.name not in options.case:
                    continue
                for row in Sweep(injector, world, folder, every=options.every).case(case):
                    broken += len(row.broken)
                    outcomes = ", ".join(f"{count}x {status}" for status, count in sorted(row.outcomes.items()))
                    held = "held" if not row.broken else f"BROKEN {len(row.broken)}"
                    print(
                        f"{row.case:16} {row.fault:28} {row.tried:4} of {row.calls:5}  {outcomes:24} {held}", flush=True
                    )
                    for line in row.broken[:3]:
                        print(f"    {line}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
