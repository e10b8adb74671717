"""``cachectl store``: list, clean up or check a store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cachectl import verbs
from cachectl.config import Limits
from cachectl.exchange import place, trust, wire
from cachectl.exchange.store import StoreCollection, place_of
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import plural
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.selection import moment_text
from cachectl.layers.disk import plain
from cachectl.show import units
from cachectl.show.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl import layer_set

#: Seconds for which an unlisted pack is kept: twice the time in which a push must list what it uploaded.
GRACE = 86400.0
#: The most seconds by which the clocks of this machine and of the store can differ.
_SKEW = GRACE / 4
_STAGE = regex(r"\.cachectl-stage-[0-9a-f]{32}")
#: How often a check is repeated because something vanished while the index changed.
_AGAIN = 5

EXAMPLE = "cachectl store gc /shared/kernels --older-than 30d"
OPTIONS = (
    (
        "action",
        "ls|gc|verify",
        "ls: show contents and digest; gc: remove old entries, and what nothing lists; verify: check everything",
        {"choices": ("ls", "gc", "verify")},
    ),
    ("target", "TARGET", verbs.STORES),
    [
        "gc",
        ("--older-than", "AGE", "remove what was pushed more than AGE ago, such as 30d, 12h or 2w", verbs.AGE),
        ("--max-size", "SIZE", "then remove the oldest until at most SIZE is left, such as 500M or 2GiB", verbs.SIZE),
        verbs.DRY_RUN,
    ],
    ("--allowed-signers", "LIST", "verify: require a signature by a signer in this list"),
    verbs.JSON,
)


class ListedKey(NamedTuple):
    """The entries of one portability key, and the number of index parts that list them.

    ``newest`` is the time of the newest part in epoch seconds; ``None`` in a bundle, which has no times. ``unsigned``
    counts parts without a signature.
    """

    key: str
    layer: str
    entries: int
    bytes: int
    parts: int
    unsigned: int
    newest: int | None
    fingerprint: Mapping[str, str | None]


@as_json("cachectl/store/1")
class StoreListing(NamedTuple):
    """The content of a store; ``digest`` pins it."""

    url: str
    digest: str
    keys: tuple[ListedKey, ...]


@as_json("cachectl/store-gc/1")
class Collection(NamedTuple):
    """What ``store gc`` removed, or (``dry_run``) would remove.

    ``parts`` are the removed index parts, with ``entries`` in all. ``removed`` and ``freed`` are the number and bytes
    of removed packs and leftovers of killed writers, ``kept`` are the bytes of packs that are still listed.
    """

    url: str
    dry_run: bool
    parts: tuple[str, ...]
    entries: int
    removed: int
    freed: int
    kept: int


class StoreFinding(NamedTuple):
    """A problem with a name in a store; one of severity ``note`` does not affect readers."""

    name: str
    severity: str
    code: str
    message: str


@as_json("cachectl/store-verify/1")
@dataclass(slots=True)
class StoreCheck:
    """The findings in a store, and how much was checked."""

    url: str
    digest: str
    parts: int
    entries: int = 0
    packs: int = 0
    findings: tuple[StoreFinding, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether anything is damaged, missing or untrusted."""
        return any(finding.severity == "error" for finding in self.findings)

    @contextmanager
    def reporting(self, name: str) -> Iterator[None]:
        """Turn the error that a block raises about an index part or a pack into a finding."""
        try:
            yield
        except (place.BadStore, trust.Untrusted) as error:
            codes = {place.Gone: "missing", trust.Untrusted: "untrusted"}
            self.findings += (StoreFinding(name, "error", codes.get(type(error), "damaged"), str(error)),)


class SharedStore:
    """The store at a path or a URL."""

    def __init__(self, stack: layer_set.LayerSet, url: str | Path) -> None:
        self._environment = stack.environment
        self._place = place_of(url, stack.environment)

    def _index(self, allowed: str | None = None) -> StoreCollection:
        index = StoreCollection(self._place, self._environment, allowed)
        index.require_store()
        return index

    def ls(self) -> StoreListing:
        """Return the content by portability key. Raises :class:`BadStore` for a damaged index, and :class:`Missing`."""
        index, is_bundle = self._index(), self._place.is_bundle

        def list_keys() -> Iterator[ListedKey]:
            for group in set(map(wire.key_of, index.parts)):
                names = [name for name in index.parts if wire.key_of(name) == group]
                key, parts = index.key(group), [index.part(name) for name in names]
                sizes = [stored.entry.bytes for part in parts for stored in part.entries]
                counts = (len(sizes), sum(sizes), len(parts), sum(not part.is_signed for part in parts))
                newest = None if is_bundle else wire.made_of(names[-1])
                yield ListedKey(group, key.layer, *counts, newest, dict(key.facts))

        keys = index.settled(lambda: sorted(list_keys(), key=lambda listed: (listed.layer, listed.key)))
        index.memory.save(index.files)
        return StoreListing(self._place.shown, index.digest, tuple(keys))

    def gc(
        self, *, older_than: str | float | None = None, max_size: str | int | None = None, dry_run: bool = False
    ) -> Collection:
        """Remove old index parts, and packs that no part lists.

        Unlisted packs are kept for a day, because a push may be about to list them. In a bundle, which has one writer,
        they are removed at once.

        :param older_than: the age of parts to remove, in seconds or as ``"30d"``; a bundle has no times
        :param max_size: the most bytes of packs to keep, or ``"2G"``; the oldest parts are removed first
        :param dry_run: remove nothing
        :raises BadStore: if an index part is damaged: then nothing is removed, because what it lists is unknown
        """
        if self._place.is_bundle and older_than is not None:
            raise BadRequest("a bundle has no times, so --older-than does not work; use --max-size, or no limit")
        limits = Limits(older_than=older_than, max_size=max_size, now=self._environment.clock())
        try:
            return self._collect(limits, dry_run=dry_run)
        except place.Gone:
            # Another gc removed a part after it was listed.
            return self._collect(limits, dry_run=dry_run)

    def _collect(self, limits: Limits, *, dry_run: bool) -> Collection:
        store, now = self._place, self._environment.clock()
        # Before reading the index, so that no pack that is listed meanwhile counts as unlisted.
        contents = {name: written for folder in place.FOLDERS for name, written in store.names(folder).items()}
        index = self._index()
        parts = {name: index.part(name) for name in index.parts}
        uses = Counter(pack for part in parts.values() for pack in part.packs)
        sizes = {name: size or 0 for name, (size, _) in contents.items()}
        kept = sum(sizes.get(pack, 0) for pack in uses)
        old: list[str] = []
        # The oldest first.
        for name, part in parts.items():
            is_old = limits.before is not None and wire.made_of(name) < limits.before
            # Readers remember all parts of the newest second, so these are removed together.
            is_same = bool(old) and wire.made_of(old[-1]) == wire.made_of(name)
            if is_old or is_same or (limits.bytes is not None and kept > limits.bytes):
                old.append(name)
                uses.subtract(list(part.packs))
                kept -= sum(sizes.get(pack, 0) for pack in part.packs if not uses[pack])
        leftovers = (name for name, (_, modified) in contents.items() if self._is_leftover(name, modified, now))
        unlisted = [name for name in leftovers if not uses[name]]
        if not dry_run and (old or unlisted):
            self._require_clock(now)
            # Parts first: readers that find a part must find its packs.
            store.remove([f"{wire.INDEX}{name}" for name in old])
            store.remove(unlisted)
            store.finish()
            index.memory.save(index.files)
        entries, freed = sum(len(parts[name].entries) for name in old), sum(sizes[name] for name in unlisted)
        return Collection(store.shown, dry_run, tuple(old), entries, len(unlisted), freed, kept)

    def _is_leftover(self, path: str, modified: float | None, now: float) -> bool:
        """Return whether no push can still be about to list this pack or rename this temporary file."""
        folder, _, name = path.partition("/")
        if _STAGE.fullmatch(name) or (folder == "packs" and wire.is_name(path)):
            return self._place.is_bundle or (modified is not None and now - modified > GRACE)
        return False

    def _require_clock(self, now: float) -> None:
        """Raise :class:`CachectlError` if this machine's clock differs from the store's: ages would be wrong.

        Writes a file to learn the time of the store.
        """
        if self._place.is_bundle:
            return
        probe = f"{wire.INDEX}{plain.own_name()}"
        self._place.write(probe, b"")
        _, moment = self._place.names("index").get(probe, (None, None))
        self._place.remove([probe])
        if moment is not None and abs(moment - now) > _SKEW:
            store_time, own_time = moment_text(moment), moment_text(now)
            difference = f"its clock shows {store_time}, but this machine's clock {own_time}"
            raise CachectlError(f"{self._place.shown}: {difference}; set the clock")

    def verify(self, *, allowed_signers: str | None = None) -> StoreCheck:
        """Check every index part, key document, pack and entry.

        :param allowed_signers: a part that no signer in this file has signed is a finding; what it lists is not checked
        :raises Missing: if there is no store
        """
        with trust.allowed_list(self._environment, None, allowed_signers) as allowed:
            for _ in range(_AGAIN):
                # Before reading the index, because writers add packs first.
                contents = set(filter(wire.is_name, self._place.names("packs")))
                index = self._index(allowed)
                check = self._check(index, contents)
                # What is missing may have been removed by a gc meanwhile.
                if not any(finding.code == "missing" for finding in check.findings) or not index.refresh():
                    break
        return check

    def _check(self, index: StoreCollection, contents: set[str]) -> StoreCheck:
        check = StoreCheck(self._place.shown, index.digest, len(index.parts))
        packs: dict[str, list[wire.StoredEntry]] = {}
        for name in index.parts:
            with check.reporting(f"{wire.INDEX}{name}"):
                index.key(wire.key_of(name))
                for item in index.part(name).entries:
                    check.entries += 1
                    packs.setdefault(item.pack.name, []).append(item)
        for pack, items in packs.items():
            with check.reporting(pack):
                # Each entry is checked as it is read.
                deque(index.contents(items), maxlen=0)
        check.packs = len(packs)
        if not check.failed:
            reason = "no part of the index lists it; cachectl store gc removes it after a day"
            unlisted = sorted(contents - packs.keys())
            check.findings += tuple(StoreFinding(pack, "note", "unlisted", reason) for pack in unlisted)
        return check


def run(request: verbs.Request) -> StoreListing | Collection | StoreCheck:
    """Carry out ``cachectl store``."""
    options = request.options
    if options.action != "gc" and (options.older_than, options.max_size, options.dry_run) != (None, None, False):
        request.misuse("--older-than, --max-size and --dry-run work only with store gc")
    if options.action != "verify" and options.allowed_signers is not None:
        request.misuse("--allowed-signers works only with store verify")
    store = SharedStore(request.stack, request.target(options.target))
    doing = {"ls": "listing", "verify": "checking", "gc": "cleaning up"}
    with request.output.progress(doing[options.action]):
        if options.action == "ls":
            return store.ls()
        if options.action == "verify":
            return store.verify(allowed_signers=options.allowed_signers)
        return store.gc(older_than=options.older_than, max_size=options.max_size, dry_run=options.dry_run)


def show(result: StoreListing | Collection | StoreCheck, request: verbs.Request) -> Iterator[object]:
    """Yield what the store holds, what was removed, or what is wrong with it."""
    if isinstance(result, Collection):
        would = "would be " if result.dry_run else ""
        entries = plural(result.entries, "entry", "entries")
        sizes = f"{units.size(result.freed)}; {units.size(result.kept)} left"
        yield [
            f"{plural(len(result.parts), 'part')} of the index with {entries} {would}removed",
            f"{plural(result.removed, 'pack')} {would}removed: {sizes}",
        ]
        return
    if isinstance(result, StoreListing):
        numbers = {"entries": units.count, "size": units.size, "parts": units.count, "unsigned": units.count}
        rows = []
        for key in result.keys:
            facts = ", ".join(f"{name} {fact or units.DASH}" for name, fact in key.fingerprint.items())
            age = units.since(key.newest, request.environment.clock())
            rows.append((key.layer, key.entries, key.bytes, key.parts, key.unsigned, age, facts))
        sums = [sum(getattr(key, name) for key in result.keys) for name in ("entries", "bytes", "parts")]
        yield Table({"layer": str, **numbers, "newest": units.age, "for": str}, rows, ("total", *sums, "", "", ""))
        yield ""
    else:
        for finding in result.findings:
            yield f"{finding.severity}: {finding.name}: {finding.message}"
        entries, parts = plural(result.entries, "entry", "entries"), plural(result.parts, "part")
        yield [f"{entries} in {parts} of the index and {plural(result.packs, 'pack')} checked"]
    yield [f"digest {result.digest}"]
