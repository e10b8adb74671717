"""``cachectl store``: list, clean up or check a store."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.exchange.format import (
    INDEX,
    CondemnedName,
    Item,
    Part,
    PartName,
    condemned_file,
    is_content,
)
from cachectl.exchange.index import Gone, StoreIndex, place_of
from cachectl.exchange.place import BadStore, Stored, is_stage
from cachectl.exchange.trust import judges
from cachectl.layers.base.errors import BadRequest, CachectlError, plural
from cachectl.layers.base.facts import AsJson, total
from cachectl.layers.base.selection import moment_text
from cachectl.options import JSON, STORES, Group, Option, Request
from cachectl.table import DASH, Column, Table, Whole, ages, count, counts, size, sizes

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layer_set import LayerSet

#: Default grace period, in seconds.
GRACE: Final = 86400.0
#: Seconds by which the clocks of this machine and of the store may differ, beside a quarter of the grace period.
_SKEW: Final = 60.0
#: Names that one list condemns.
_MOST: Final = 10_000


class _Removing(Group):
    """The options of ``gc``."""

    __slots__ = ()
    title = "gc"


OPTIONS: Final = (
    Option(
        "action",
        metavar="ls|gc|verify",
        choices=("ls", "gc", "verify"),
        help="ls: what it holds, and its digest; gc: remove old entries, and later what nothing lists; verify: check "
        "all",
    ),
    Option("target", metavar="TARGET", help=STORES),
    _Removing(
        (
            Option("--older-than", metavar="AGE", help="remove what was pushed more than 30d, 12h, 2w ago"),
            Option("--max-size", metavar="SIZE", help="then remove the oldest until at most 500M, 2GiB stay"),
            Option(
                "--grace",
                metavar="AGE",
                help="leave what nothing lists to readers for AGE before it is removed (default: 1d)",
            ),
            Option("-n", "--dry-run", action="store_true", help="list what would be removed, and touch nothing"),
        )
    ),
    Option("--allowed-signers", metavar="LIST", help="verify: all must be signed by a signer of this list"),
    JSON,
)


@dataclass(frozen=True, slots=True)
class ListedKey:
    """The entries of one portability key, in how many index parts.

    ``oldest`` and ``newest`` are when the parts were made, in epoch seconds; ``None`` in a bundle, which has no times.
    ``unsigned`` counts those without a signature.
    """

    key: str
    layer: str
    entries: int
    bytes: int
    parts: int
    unsigned: int
    oldest: int | None
    newest: int | None
    portability_key: Mapping[str, str | None]
    as_json: ClassVar[AsJson] = AsJson(names={"portability_key": "fingerprint"})


@dataclass(frozen=True, slots=True)
class StoreTotal:
    """The sums over all portability keys."""

    entries: int
    bytes: int
    parts: int


@dataclass(frozen=True, slots=True)
class StoreListing:
    """The content of a store; ``digest`` pins it."""

    url: str
    store: str
    digest: str
    keys: tuple[ListedKey, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/store/1", also=("total",))

    @property
    def total(self) -> StoreTotal:
        """Return the sums over all portability keys."""
        return total(StoreTotal, self.keys)


@dataclass(frozen=True, slots=True)
class Collection:
    """What ``store gc`` removed, or (``dry_run``) would remove.

    ``parts`` are the removed index parts with ``entries``; ``condemned`` the packs and objects that a later ``gc`` may
    remove; ``removed`` and ``freed`` those removed now, with what killed writers left, and their bytes; ``kept`` the
    bytes of all packs and objects that stay listed.
    """

    url: str
    dry_run: bool
    parts: tuple[str, ...]
    entries: int
    condemned: int
    removed: int
    freed: int
    kept: int
    as_json: ClassVar[AsJson] = AsJson("cachectl/store-gc/1")


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """Something wrong with a name of a store; a note does not harm readers."""

    name: str
    severity: str
    code: str
    message: str


@dataclass(slots=True)
class StoreCheck:
    """The findings in a store, and how much was checked."""

    url: str
    store: str
    digest: str
    parts: int
    entries: int = 0
    packs: int = 0
    objects: int = 0
    findings: tuple[StoreFinding, ...] = ()
    as_json: ClassVar[AsJson] = AsJson("cachectl/store-verify/1")

    @property
    def failed(self) -> bool:
        """Return whether anything is damaged, missing or not trusted."""
        return any(finding.severity == "error" for finding in self.findings)

    def add(self, name: str, code: str, message: object, severity: str = "error") -> None:
        """Add a finding."""
        self.findings += (StoreFinding(name, severity, code, str(message)),)


class SharedStore:
    """The store at a path or a URL."""

    def __init__(self, stack: LayerSet, url: str | Path) -> None:
        self._environment = stack.environment
        self._place = place_of(url, stack.environment)

    def ls(self) -> StoreListing:
        """Return what is in the store, by portability key. Raises :class:`BadStore` and :class:`Missing`."""
        index = StoreIndex(self._place, self._environment)
        store = index.require_store()
        groups: dict[str, list[PartName]] = {}
        for name in index.names.parts:
            groups.setdefault(name.key, []).append(name)
        keys = []
        for group, names in groups.items():
            key, parts = index.key(group), [index.read(name) for name in names]
            entries = [entry for read in parts for entry in read.part.entries]
            keys.append(
                ListedKey(
                    key=group,
                    layer=key.layer,
                    entries=len(entries),
                    bytes=sum(entry.bytes for entry in entries),
                    parts=len(parts),
                    unsigned=sum(not read.signed for read in parts),
                    oldest=None if self._place.is_bundle else names[0].made,
                    newest=None if self._place.is_bundle else names[-1].made,
                    portability_key=dict(key.facts),
                )
            )
        index.save()
        keys.sort(key=lambda listed: (listed.layer, listed.key))
        return StoreListing(self._place.shown, store, index.digest, tuple(keys))

    def gc(
        self,
        *,
        older_than: float | None = None,
        max_size: int | None = None,
        grace: float | None = None,
        dry_run: bool = False,
    ) -> Collection:
        """Remove index parts older than an age, then the oldest until the rest has at most ``max_size`` bytes.

        Packs and objects that nothing lists are condemned, and removed if they were condemned longer ago than the grace
        period; ages are in seconds. A bundle has one writer, so that they are removed at once. Raises
        :class:`BadStore` if an index part is damaged: nothing is removed then, because what it lists is unknown.
        """
        if self._place.is_bundle and older_than is not None:
            raise BadRequest("a bundle has no times; give --max-size, or gc without a limit")

        def collect() -> Collection:
            collecting = _Collecting(StoreIndex(self._place, self._environment), GRACE if grace is None else grace)
            return collecting.run(older_than, max_size, dry_run=dry_run)

        try:
            return collect()
        except Gone:
            # Another gc has removed a part after it was listed.
            return collect()

    def verify(self, *, allowed_signers: str | None = None) -> StoreCheck:
        """Check every index part, key document, pack, object and entry.

        With ``allowed_signers`` a part that no such signer has signed is a finding, and what it lists is not checked.
        Raises :class:`Missing` if there is no store.
        """
        # Before the index: a writer adds packs first.
        contents = {stored.name for stored in self._place.contents() if is_content(stored.name)}
        with judges(self._environment, None, allowed_signers) as trusted:
            index = StoreIndex(self._place, self._environment, trusted)
            check = StoreCheck(self._place.shown, index.require_store(), index.digest, len(index.names.parts))
            _check_names(index, check)
            places: dict[str, list[tuple[Part, Item]]] = {}
            for name in index.names.parts:
                for part, entry in _checked_part(index, check, name):
                    check.entries += 1
                    places.setdefault(entry.place, []).append((part, entry))
            _check_contents(index, check, places)
        if all(finding.code not in ("untrusted", "damaged") for finding in check.findings):
            for unlisted in sorted(contents - places.keys()):
                check.add(
                    unlisted, "unlisted", "no part of the index lists it; cachectl store gc removes it later", "note"
                )
        check.packs = sum(name.startswith("packs/") for name in places)
        check.objects = len(places) - check.packs
        index.save()
        return check


# ---------------------------------------------------------------------- gc


class _Collecting:
    """One ``gc``.

    A reader that listed the index before may still need the packs and objects of a removed part, and a writer may be
    about to list an object that it has found in the index. So names that nothing lists are first condemned, in a list
    under ``index/``, and removed by a later ``gc``, after the grace period, if nothing lists them then. Writers rely on
    no object that is condemned.
    """

    def __init__(self, index: StoreIndex, grace: float) -> None:
        self._index = index
        self._place = index.place
        self._grace = grace
        self._now = index.environment.clock()

    def run(self, older_than: float | None, max_size: int | None, *, dry_run: bool) -> Collection:
        """Find what goes, and remove it."""
        index, place = self._index, self._place
        index.require_store()
        contents = place.contents()
        sizes = {stored.name: stored.bytes or 0 for stored in contents if is_content(stored.name)}
        stages = {stored.name: stored.bytes or 0 for stored in contents if self._is_abandoned(stored)}
        listed = {name: index.read(name).part for name in index.names.parts}
        uses = Counter(held for part in listed.values() for held in part.holds)
        kept = sum(sizes.get(name, 0) for name in uses)
        parts: list[PartName] = []
        # The oldest first.
        for name, part in listed.items():
            old = older_than is not None and name.made < self._now - older_than
            # Readers remember the parts of the newest second together.
            same = bool(parts) and parts[-1].made == name.made
            if not old and not same and (max_size is None or kept <= max_size):
                continue
            parts.append(name)
            for held in part.holds:
                uses[held] -= 1
                if not uses[held]:
                    kept -= sizes.get(held, 0)
        unlisted = sizes.keys() - {name for name, number in uses.items() if number}
        lists = {name: index.condemned(name) for name in index.names.condemned}
        ripe = frozenset(held for name, names in lists.items() if self._is_ripe(name) for held in names)
        remove = frozenset(unlisted if place.is_bundle else unlisted & ripe)
        condemn = frozenset(unlisted - remove).difference(*lists.values())
        if not dry_run:
            finished = [f"{INDEX}{name}" for name, names in lists.items() if not ((names & unlisted) - remove)]
            self._apply(parts, condemn, remove, [*finished, *sorted(stages)])
        return Collection(
            url=place.shown,
            dry_run=dry_run,
            parts=tuple(map(str, parts)),
            entries=sum(len(listed[name].entries) for name in parts),
            condemned=len(condemn),
            removed=len(remove) + len(stages),
            freed=sum(sizes[name] for name in remove) + sum(stages.values()),
            kept=kept,
        )

    def _is_abandoned(self, stored: Stored) -> bool:
        """Return whether this is a stage on which no writer can still be at work."""
        age = None if stored.modified is None else self._now - stored.modified
        return is_stage(stored.name) and age is not None and age > max(self._grace, GRACE)

    def _is_ripe(self, name: CondemnedName) -> bool:
        """Return whether the grace period of a list has passed, by the clock that says less."""
        modified = self._written(name)
        return self._now - max(name.moment, name.moment if modified is None else modified) > self._grace

    def _written(self, name: CondemnedName) -> float | None:
        """Return when a list was written, by the clock of the store."""
        stored = self._index.names.found.get(str(name))
        return None if stored is None else stored.modified

    def _apply(
        self, parts: list[PartName], condemn: frozenset[str], remove: frozenset[str], finished: list[str]
    ) -> None:
        index, place, names = self._index, self._place, sorted(condemn)
        written = []
        # An empty list tells the time of the store.
        needs_list = bool(parts or remove) and not place.is_bundle
        for at in range(0, len(names), _MOST) if names else range(needs_list):
            file = condemned_file(names[at : at + _MOST])
            written.append(CondemnedName(int(self._now), hashlib.sha256(file).hexdigest()))
            place.write(f"{INDEX}{written[-1]}", file)
        if parts or remove:
            index.refresh()
            self._require_clock(written)
        # Condemned before they are removed: a kill in between leaves nothing unknown.
        if parts:
            place.remove([f"{INDEX}{name}" for name in parts])
        if remove:
            # A writer may have listed some of it meanwhile.
            index.refresh()
            live = {held for name in index.names.parts for held in index.read(name).part.holds}
            place.remove(sorted(remove - live))
        if not names:
            finished += [f"{INDEX}{name}" for name in written]
        if finished:
            place.remove(finished)
        place.finish()
        index.save()

    def _require_clock(self, written: list[CondemnedName]) -> None:
        """Raise :class:`CachectlError` if this machine's clock is not that of the store: ages would be wrong.

        What was just condemned is then forgotten: it bears the wrong time.
        """
        for name in written:
            modified = self._written(name)
            if modified is not None and abs(modified - self._now) > max(_SKEW, self._grace / 4):
                self._place.remove([f"{INDEX}{condemned}" for condemned in written])
                there, here = moment_text(modified), moment_text(self._now)
                message = f"{self._place.shown}: its clock shows {there}, that of this machine {here}; set it"
                raise CachectlError(message)


# ---------------------------------------------------------------------- verify


def _check_names(index: StoreIndex, check: StoreCheck) -> None:
    """Check the key documents, and the lists of condemned names."""
    for store in index.names.stores[1:]:
        check.add(f"index/store-{store}", "two-stores", "two first pushes met; the oldest identity counts", "note")
    documents: list[tuple[str, Callable[[], object], str]] = [
        (f"key-{key}", partial(index.key, key), "") for key in sorted(index.names.keys)
    ]
    documents += [(str(name), partial(index.condemned, name), "; remove it") for name in index.names.condemned]
    for name, read, advice in documents:
        try:
            read()
        except BadStore as error:  # noqa: PERF203
            check.add(f"index/{name}", "damaged", f"{error}{advice}")


def _checked_part(index: StoreIndex, check: StoreCheck, name: PartName) -> Iterator[tuple[Part, Item]]:
    """Yield the entries of an index part, each with the part."""
    shown = f"index/{name}"
    try:
        read = index.read(name)
        index.key(name.key)
    except Gone as error:
        index.refresh()
        if name in index.names.parts:
            check.add(shown, "missing", error)
        return
    except BadStore as error:
        check.add(shown, "damaged", error)
        return
    if read.untrusted is not None:
        check.add(shown, "untrusted", read.untrusted)
        return
    if read.part.store != index.names.store:
        check.add(shown, "other-identity", "no reader takes it, because another identity counts", "note")
    for entry in read.part.entries:
        yield read.part, entry


def _check_contents(index: StoreIndex, check: StoreCheck, places: Mapping[str, list[tuple[Part, Item]]]) -> None:
    """Read every pack and object."""
    for place, group in places.items():
        try:
            for _ in index.contents(group):
                pass
        except Gone as error:  # noqa: PERF203
            before = {part.made for part, _ in group}
            index.refresh()
            # Else gc has removed the parts meanwhile.
            if any(name.made in before for name in index.names.parts):
                check.add(place, "missing", error)
        except BadStore as error:
            check.add(place, "damaged", error)


# ---------------------------------------------------------------------- the verb


def run(request: Request) -> StoreListing | Collection | StoreCheck:
    """Carry out ``cachectl store``."""
    from cachectl.layers.base.selection import parse_age, parse_size

    options = request.options
    removing = (options.older_than, options.max_size, options.grace, options.dry_run)
    if options.action != "gc" and removing != (None, None, None, False):
        request.misuse("--older-than, --max-size, --grace and --dry-run are for store gc")
    if options.action != "verify" and options.allowed_signers is not None:
        request.misuse("--allowed-signers is for store verify")
    store = SharedStore(request.stack, request.target(options.target))
    if options.action == "ls":
        with request.working("listing"):
            return store.ls()
    if options.action == "verify":
        with request.working("checking"):
            return store.verify(allowed_signers=options.allowed_signers)
    with request.working("cleaning up"):
        return store.gc(
            older_than=None if options.older_than is None else parse_age(options.older_than),
            max_size=None if options.max_size is None else parse_size(options.max_size),
            grace=None if options.grace is None else parse_age(options.grace),
            dry_run=options.dry_run,
        )


def show(done: StoreListing | Collection | StoreCheck, request: Request) -> Iterator[object]:
    """Yield what the store holds, what was removed, or what is wrong with it."""
    if isinstance(done, StoreListing):
        yield _listing(done, request.now)
        yield ""
        yield Whole(f"digest {done.digest}")
    elif isinstance(done, Collection):
        yield from _collected(done)
    else:
        for finding in done.findings:
            yield f"{finding.severity}: {finding.name}: {finding.message}"
        index = f"{plural(done.entries, 'entry', 'entries')} in {plural(done.parts, 'part')} of the index"
        yield Whole(f"{index}, {plural(done.packs, 'pack')} and {plural(done.objects, 'object')} checked")
        yield Whole(f"digest {done.digest}")


def _listing(done: StoreListing, now: float) -> Table[ListedKey]:
    columns: tuple[Column[ListedKey], ...] = (
        Column("layer", lambda key: key.layer),
        counts("entries", lambda key: key.entries),
        sizes("size", lambda key: key.bytes),
        counts("parts", lambda key: key.parts),
        counts("unsigned", lambda key: key.unsigned),
        ages("newest", lambda key: key.newest, now),
        Column("for", lambda key: ", ".join(f"{name} {fact or DASH}" for name, fact in key.portability_key.items())),
    )
    last = ("total", count(done.total.entries), size(done.total.bytes), count(done.total.parts), "", "", "")
    return Table(columns, done.keys, last)


def _collected(done: Collection) -> Iterator[Whole]:
    would = "would be " if done.dry_run else ""
    condemned, removed = (
        plural(number, "pack or object", "packs and objects") for number in (done.condemned, done.removed)
    )
    parts = f"{plural(len(done.parts), 'part')} of the index with {plural(done.entries, 'entry', 'entries')}"
    yield Whole(f"{parts} {would}removed")
    yield Whole(f"{condemned} {would}condemned: gc removes them after the grace period")
    yield Whole(f"{removed} {would}removed: {size(done.freed)}; {size(done.kept)} stay")
