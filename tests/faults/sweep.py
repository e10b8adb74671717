"""Every verb under every fault: the effects of a command whose call fails, compared with its output.

``tests/test_faults.py`` runs it. The rules:

- no traceback; a failure is one line for each thing that failed, and status 1;
- status 0 means that the result is the one of a run without faults: in the cache, in what was printed, and in the file
  that was to be written;
- with status 1 a verb that reads names what it could not read. ``report`` gives no number that differs, but null, or a
  lower bound with ``complete: false`` and a problem. ``ls`` lists no other entry, each as it is or with null in place
  of what was not read, and has a failed problem for each layer that lacks some. ``verify`` and ``doctor`` have a
  finding ``unreadable`` for each layer that lacks a finding, and no new finding of another kind;
- a verb that removes counts exactly the entries that have gone, and the bytes that are off the disk; ``pull`` counts
  exactly the entries that are there now;
- a file that was to be written is whole or not there. A bundle lacks entries only with status 1, and then a line
  names their layer;
- no entry is half: every key that is there can be read, and a key is one that was there before or is there after;
- files that belong to nobody's cache are as they were;
- the next run without faults ends well and brings the result of a run without faults. It leaves no file of cachectl's
  beside caches; a stage in a cache may belong to a command that still runs, so ``report`` counts it until a purge
  removes it. A purge leaves nothing behind.

Four results may differ. If sqlite fails at the end of a commit, the rows may have gone, and the count is too low.
Mesa's database is changed in place, as Mesa does it, and its single file by an empty index, the new file and its index:
after an interrupted change the entries of such a file are gone. An entry of Mesa's files that a purge could not read
may stay: once the kernels beside it have gone, nothing shows whose it is. A ``prune`` after an interrupted one finds
fewer entries and removes others; its limit holds.
"""

import errno
import hashlib
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from injector import KILL, LOCKS, READS, WRITES, Ended, Fault, Injector
from worlds import World, bystanders, damage, disk_bytes, leftovers

from cachectl.exchange.bundle import BundlePlace
from cachectl.exchange.store import StoreCollection
from cachectl.layers.host.here import this_environment

#: What can go wrong, by the kind of call.
FAULTS = (
    *((WRITES, error, sticky) for error in (errno.EIO, errno.ENOSPC, errno.EACCES) for sticky in (False, True)),
    (WRITES, KILL, False),
    *((READS, error, False) for error in (errno.EIO, errno.EACCES, errno.EMFILE)),
    (READS, errno.EIO, True),
    (LOCKS, errno.EIO, True),
    (LOCKS, errno.ENOLCK, True),
)
_KINDS = {READS: "read", WRITES: "write", LOCKS: "lock"}
#: The stores in which an interrupted change loses every entry of a file.
_STARTED_ANEW = ("mesa_shader_cache_db", "mesa_shader_cache_sf")
#: Mesa's stores, in which kernels show whose the other entries are.
_OF_UNKNOWN = "/mesa_shader_cache"
#: What sqlite says of a commit that failed, whose rows may have gone.
_FAILED_COMMIT = (
    *("disk I/O error", "cannot be read: Input/output error"),
    "cannot open: No space left on device; make room and try again",
)
#: What ``prune`` is to leave at most, in bytes.
_MOST = 20_000


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


def _quiet(injector: Injector, world: World, home: Path, *arguments: str) -> None:
    done = injector.run(*arguments, home=home, fault=Fault(0), variables=world.variables)
    assert done.status == 0, (arguments, done)


def _take_out(layer: str) -> Callable[[Injector, World, Path], object]:
    def prepare(injector: Injector, world: World, home: Path) -> None:
        key = min(entry.key for entry in world.stack(home).entries(layers=[layer]))
        _quiet(injector, world, home, "get", layer, key, "-o", str(home / "artifact"))
        _quiet(injector, world, home, "purge", layer, "--key", key)
        (home / "key").write_text(key)

    return prepare


def _bundle(injector: Injector, world: World, home: Path) -> None:
    _quiet(injector, world, home, "push", str(home / "bundle.zip"))
    _quiet(injector, world, home, "purge", "--all")


CASES = {
    case.name: case
    for case in (
        Case("report", ("report", "--json"), writes=False),
        Case("ls", ("ls", "--json"), writes=False),
        Case("verify", ("verify", "--json"), writes=False),
        Case("doctor", ("doctor", "--json"), writes=False),
        Case("push", ("push", "{home}/bundle.zip"), output="bundle.zip"),
        Case("get", ("get", "{layer}", "{key}", "-o", "{home}/artifact"), output="artifact"),
        Case("purge", ("purge", "--all", "--wait", "0.2", "--json"), removes=True),
        Case("purge-key", ("purge", "{layer}", "--key", "{key}", "--wait", "0.2", "--json"), removes=True),
        Case("prune", ("prune", "--max-size", f"{_MOST}B", "--wait", "0.2", "--json"), removes=True),
        Case("pull", ("pull", "{home}/bundle.zip", "--trust", "--wait", "0.2", "--json"), _bundle, places=True),
        Case("purge-damaged", ("purge", "--damaged", "--all", "--wait", "0.2", "--json"), damage, removes=True),
    )
}


def put_cases(world: World) -> Iterator[Case]:
    """Yield a ``put`` for each layer that has entries and takes them."""
    for layer in world.keys(world.path):
        if layer.endswith("tuning") or layer.startswith("miopen-system"):
            continue
        yield Case(f"put {layer}", ("put", layer, "{kept}", "{home}/artifact"), _take_out(layer))


# ---------------------------------------------------------------------- the rules for what is printed

#: Moments: they differ from run to run.
_MOMENTS = frozenset({"generated", "used", "created", "modified", "oldest", "newest", "written_before"})


def without_moments(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: without_moments(part) for name, part in value.items() if name not in _MOMENTS}
    return [without_moments(part) for part in value] if isinstance(value, list) else value


def miscounted(done: Ended, word: str, more: Mapping[str, set[str]], less: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        said = {layer["layer"]: layer for layer in done.json["layers"]}
    except ValueError:
        return
    for name in more.keys() | said.keys():
        changed, layer = len(more.get(name, set()) - less.get(name, set())), said.get(name, {word: 0, "failed": []})
        is_unknown = layer[word] < changed and any(note["because"].endswith(_FAILED_COMMIT) for note in layer["failed"])
        if layer[word] != changed and not is_unknown:
            yield f"{name}: says {layer[word]} {word}, and it is {changed}"


# ---------------------------------------------------------------------- what a verb that reads may say


def _false_report(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    numbers = ("entries", "files", "bytes", "orphan_files", "orphan_bytes", "stale_entries", "stale_bytes")
    places = [("total", said["total"], true["total"], True)]
    for layer, whole in zip(said["layers"], true["layers"], strict=True):
        named = bool(layer["failures"]) or any(root["problems"] for root in layer["roots"])
        places.append((layer["layer"], layer, whole, named))
        roots = {root["path"]: root for root in layer["roots"]}
        for good in whole["roots"]:
            if (root := roots.get(good["path"])) is not None:
                places.append((root["path"], root, good, bool(root["problems"])))
            elif not layer["failures"]:
                yield f"lacks the root {good['path']} of {layer['layer']}, and nobody says so"
    for name, part, whole, named in places:
        for number in numbers:
            value = part.get(number)
            if value == whole.get(number) or (value is None and not part["complete"]):
                continue
            if value is None or part["complete"] or not named or value > whole[number]:
                yield f"{name}: {value} {number} instead of {whole[number]}, and nobody says so"


#: What stands for what was not read.
_UNKNOWN: tuple[object, ...] = (None, {}, [], {"of": "unknown"})


def _false_listing(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    known = {(entry["layer"], entry["root"], entry["key"]): entry for entry in true["entries"]}
    listed = {(entry["layer"], entry["root"], entry["key"]): entry for entry in said["entries"]}
    failed = {problem["layer"] for problem in said["problems"] if problem["failed"]}
    for name, entry in listed.items():
        other = {field for field, value in entry.items() if value != known.get(name, {}).get(field)}
        # The state says what is known: an entry of which it is unknown whether it is stale is live.
        derived = {"stale_because"} | ({"state"} if entry["stale"] is None else set())
        if lies := [field for field in other - derived if entry[field] not in _UNKNOWN]:
            yield f"{name}: another {lies}"
        elif other and name[0] not in failed:
            yield f"{name}: {other} not read, and nobody says so"
    if layers := {name[0] for name in known.keys() - listed.keys()} - failed:
        yield f"lacks entries of {layers}, and nobody says so"


def _false_findings(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    found, expected = (
        {(finding["layer"], finding["root"], str(finding["key"]), finding["code"]) for finding in document["findings"]}
        for document in (said, true)
    )
    closed = [finding for finding in said["findings"] if finding["code"] == "unreadable"]
    unread = {layer for finding in closed for layer in finding.get("layers", [finding["layer"]])}
    if new := [name for name in found - expected if name[3] != "unreadable"]:
        yield f"found what is not so: {sorted(new)[:2]}"
    if layers := {name[0] for name in expected - found if name[3] != "unreadable"} - unread:
        yield f"lacks findings of {layers}, and nobody says so"


TRUTHS = {"report": _false_report, "ls": _false_listing, "verify": _false_findings, "doctor": _false_findings}


class Sweep:
    """The faults of one world, tried in copies of it."""

    def __init__(self, injector: Injector, world: World, folder: Path) -> None:
        self._injector, self._world = injector, world
        self._home, self._prepared = folder / "home", folder / "prepared"

    def case(self, case: Case, faults: Collection[tuple[int, int, bool]], every: int | None) -> Iterator[str]:
        """Try each ``every``-th call of a command, or one call, under some faults; yield each rule that it broke."""
        # Paths in what is prepared are those of the copy that the command sees.
        self._copy(self._world.path, self._home)
        case.prepare(self._injector, self._world, self._home)
        self._copy(self._home, self._prepared)
        self._every = every
        self._unreadable = set(self._world.unreadable(self._home))
        self._case, self._arguments = case, self._arguments_of(case)
        #: The result of a run without faults.
        self._good, self._complete = self._run(self._arguments, Fault(0)), self._world.keys(self._home)
        assert self._good.status in (0, 1), self._good
        self._written = None if case.output is None else (self._home / case.output).read_bytes()
        if case.output == "bundle.zip":
            self._listed = _bundled(self._home / case.output)
        self._calls: dict[int, int] = {}
        for kinds, error, sticky in faults:
            if case.writes or kinds != WRITES:
                yield from self._under(kinds, error, sticky=sticky)

    def _arguments_of(self, case: Case) -> tuple[str, ...]:
        layer = max(keys := self._world.keys(self._home), key=lambda name: len(keys[name]), default="")
        key = min(keys.get(layer, {" "})).partition(" ")[2]
        kept = self._home / "key"
        words = {"home": str(self._home), "layer": layer, "key": key}
        words["kept"] = kept.read_text() if kept.exists() else ""
        # Keys may have braces of their own.
        return tuple(words.get(part[1:-1], part.replace("{home}", words["home"])) for part in case.arguments)

    def _under(self, kinds: int, error: int, *, sticky: bool) -> Iterator[str]:
        if kinds not in self._calls:
            self._copy(self._prepared, self._home)
            self._calls[kinds] = self._run(self._arguments, Fault(kinds)).seen
        calls = self._calls[kinds]
        every = self._every or calls or 1
        # Another fault, and another case, meets other calls.
        named = str(Fault(kinds, 0, error, sticky)).replace(" at 0", "")
        first = 1 + zlib.crc32(f"{self._case.name} {_KINDS[kinds]} {named}".encode()) % min(every, calls or 1)
        tried = range(first, calls + 1, every)
        assert tried or not calls
        for nth in tried:
            self._copy(self._prepared, self._home)
            fault = Fault(kinds, nth, error, sticky)
            done = self._run(self._arguments, fault)
            for complaint in self._judge(done):
                yield f"{self._case.name}: {fault} ({done.where}): {complaint}"

    def _run(self, arguments: tuple[str, ...], fault: Fault) -> Ended:
        return self._injector.run(*arguments, home=self._home, fault=fault, variables=self._world.variables)

    @staticmethod
    def _copy(source: Path, to: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to, symlinks=True)

    def _judge(self, done: Ended) -> Iterator[str]:
        """Yield each rule that the command broke."""
        case, complete = self._case, self._complete
        killed = done.status < 0 and done.status != -9
        if killed or done.status not in (0, 1, -9) or "Traceback" in done.stderr:
            yield f"status {done.status}: {done.stderr[-300:]}"
        if not all(line.startswith("cachectl: ") for line in done.stderr.splitlines()):
            yield f"not one line: {done.stderr!r}"
        before, after = self._world.keys(self._prepared), self._world.keys(self._home)
        if bystanders(self._home) != bystanders(self._prepared):
            yield "a file that is no entry was changed"
        for layer, keys in after.items():
            if strange := keys - before.get(layer, set()) - complete.get(layer, set()):
                yield f"{layer} has keys that were never there: {sorted(strange)[:2]}"
        if bad := set(self._world.unreadable(self._home)) - self._unreadable:
            yield f"half: {sorted(bad)[:2]}"
        if done.status == 0 and after != complete:
            yield "status 0, and another result than without the fault"
        if case.output is not None:
            yield from self._miswritten(self._home / case.output, done)
        if done.status in (0, 1):
            yield from self._untrue(done, before, after)
        if case.writes:
            yield from self._again()

    def _untrue(self, done: Ended, before: Mapping[str, set[str]], after: Mapping[str, set[str]]) -> Iterator[str]:
        """Yield what of its output is not so."""
        case, good = self._case, self._good
        if case.removes:
            yield from miscounted(done, "removed", before, after)
            yield from self._misweighed(done)
        elif case.places:
            yield from miscounted(done, "placed", after, before)
        elif case.name in TRUTHS and done.stdout:
            said, true = without_moments(done.json), without_moments(good.json)
            if said != true:
                yield from TRUTHS[case.name](said, true)
        elif done.stdout == good.stdout:
            return
        elif done.status == 0:
            yield "status 0, and another output than without the fault"
        elif not done.stderr:
            yield "status 1, and not a word"

    def _miswritten(self, file: Path, done: Ended) -> Iterator[str]:
        """Yield what is wrong with the file that was to be written."""
        data = file.read_bytes() if file.exists() else None
        if data == self._written or (data is None and done.status != 0):
            return
        if data is None or self._written is None or file.name != "bundle.zip":
            yield f"half a file: {file.name}, status {done.status}"
            return
        there, whole = _bundled(file), self._listed
        if there.items() - whole.items():
            yield "the bundle holds entries that are not so"
        for layer in {layer for layer, _ in whole.keys() - there.keys()}:
            if done.status == 0 or f"cachectl: {layer}" not in done.stderr:
                yield f"the bundle lacks entries of {layer}, and nobody says so"

    def _misweighed(self, done: Ended) -> Iterator[str]:
        try:
            said = done.json["total"]["bytes_freed"]
        except ValueError:
            return
        before, after = disk_bytes(self._prepared), disk_bytes(self._home)
        staged = sum(disk_bytes(path) for path in self._home.rglob(".cachectl-stage-*"))
        # A lock of its own that it could not remove; the next command does.
        staged += sum(disk_bytes(path) for path in self._home.rglob("lock") if path.read_bytes()[:9] == b"cachectl ")
        # What is left of an interrupted write is larger than what was there.
        pending = [*self._home.rglob("*-journal"), *self._home.rglob("*-wal")]
        unknown_usage = "are not counted" in done.stdout or pending
        if said not in (before - after, before - after + staged) and not unknown_usage:
            yield f"says {said} bytes freed, {before - after} have gone"

    def _again(self) -> Iterator[str]:
        """Run the command once more, without a fault, and see what is left after a purge."""
        case, complete = self._case, self._complete
        was_done = not self._lacking(self._world.keys(self._home), complete)
        again = self._run(self._arguments, Fault(0))
        if again.status not in {0, self._good.status} and not was_done:
            yield f"the next run ends with {again.status}: {again.stderr[-300:]}"
        found = self._world.keys(self._home)
        if case.name == "prune":
            if self._lacking(found, self._world.keys(self._prepared), fewer=True):
                yield "the next run has brought other entries"
            if (size := self._world.bytes(self._home)) > _MOST:
                yield f"the next run leaves {size} bytes"
        elif self._lacking(found, complete):
            yield "the next run does not bring the result"
        if case.output == "bundle.zip":
            # What the first run pushed stays as it is, and what it lacked comes behind it.
            if _bundled(self._home / case.output) != self._listed:
                yield "the next run does not write the same entries"
        elif case.output is not None and (self._home / case.output).read_bytes() != self._written:
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
                holds_files = path.is_dir() and any(one.is_file() for one in path.rglob("*"))
                if ".cachectl-stage-" in path.name and holds_files and not counted:
                    yield f"left behind, and no report counts it: {path}"
        self._run(("purge", "--all"), Fault(0))
        if names := leftovers(self._home):
            yield f"left behind by a purge: {names[:3]}"

    def _lacking(self, found: Mapping[str, set[str]], complete: Mapping[str, set[str]], *, fewer: bool = False) -> bool:
        """Return whether a result differs; with ``fewer``, whether it has more than it may have."""
        more = {key for layer in found for key in found[layer] - complete.get(layer, set())}
        if any(_OF_UNKNOWN not in key for key in more):
            return True
        lost = {key for layer in complete for key in complete[layer] - found.get(layer, set())}
        return not fewer and not all(any(store in key for store in _STARTED_ANEW) for key in lost)


def _bundled(file: Path) -> dict[tuple[str, str], str]:
    """Read a bundle to its end; return the digest of each entry."""
    here = this_environment()
    index = StoreCollection(BundlePlace(file, here), here)
    found = index.contents(one for name in index.parts for one in index.part(name).entries)
    return {(one.entry.layer, one.key): hashlib.sha256(artifact.data).hexdigest() for one, artifact in found}
