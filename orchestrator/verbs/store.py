"""``cachectl store``: list, clean up or check a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl import table
from cachectl import table as tables
from cachectl.exchange import trust
from cachectl.exchange.format import INDEX, Item, PartName, is_name
from cachectl.exchange.place import FOLDERS, BadStore, Stored
from cachectl.exchange.store import Gone, StoreCollection, place_of
from cachectl.layers.base import errors
from cachectl.layers.base.facts import AsJson
from cachectl.layers.base.selection import moment_text
from cachectl.layers.disk import plain
from cachectl.options import JSON, STORES, Group, Option, Request

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl import layer_set

#: Seconds for which a pack that nothing lists stays: twice the time in which a push must list what it has uploaded.
GRACE: Final = 86400.0
#: Seconds by which the clocks of this machine and of the store may differ.
_SKEW: Final = GRACE / 4


class _Removing(Group):
    """The options of ``gc``."""

    __slots__ = ()
    title = "gc"


OPTIONS: Final = (
    Option(
        "action",
        metavar="ls|gc|verify",
        choices=("ls", "gc", "verify"),
        help="ls: what it holds, and its digest; gc: remove old entries, and what nothing lists; verify: check all",
    ),
    Option("target", metavar="TARGET", help=STORES),
    _Removing(
        (
            Option("--older-than", metavar="AGE", help="remove what was pushed more than 30d, 12h, 2w ago"),
            Option("--max-size", metavar="SIZE", help="then remove the oldest until at most 500M, 2GiB stay"),
            Option("-n", "--dry-run", action="store_true", help="list what would be removed, and touch nothing"),
        )
    ),
    Option("--allowed-signers", metavar="LIST", help="verify: all must be signed by a signer of this list"),
    JSON,
)


@dataclass(frozen=True, slots=True)
class ListedKey:
    """The entries of one portability key, in how many index parts.

    ``newest`` is when the newest part was made, in epoch seconds; ``None`` in a bundle, which has no times.
    ``unsigned`` counts parts without a signature.
    """

    key: str
    layer: str
    entries: int
    bytes: int
    parts: int
    unsigned: int
    newest: int | None
    fingerprint: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class StoreListing:
    """The content of a store; ``digest`` pins it."""

    url: str
    digest: str
    keys: tuple[ListedKey, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/store/1")


@dataclass(frozen=True, slots=True)
class Collection:
    """What ``store gc`` removed, or (``dry_run``) would remove.

    ``parts`` are the removed index parts with ``entries``; ``removed`` and ``freed`` are the number and bytes of packs
    and of what killed writers left, ``kept`` the bytes of packs that stay listed.
    """

    url: str
    dry_run: bool
    parts: tuple[str, ...]
    entries: int
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
    digest: str
    parts: int
    entries: int = 0
    packs: int = 0
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

    def __init__(self, stack: layer_set.LayerSet, url: str | Path) -> None:
        self._environment = stack.environment
        self._place = place_of(url, stack.environment)

    def ls(self) -> StoreListing:
        """Return what is in the store, by portability key. Raises :class:`BadStore` and :class:`Missing`."""
        index = StoreCollection(self._place, self._environment)
        index.require_store()
        groups: dict[str, list[PartName]] = {}
        for name in index.parts:
            groups.setdefault(name.key, []).append(name)
        keys = []
        for group, names in groups.items():
            key, parts = index.key(group), [index.part(name) for name in names]
            entries = [entry for part in parts for entry in part.entries]
            keys.append(
                ListedKey(
                    key=group,
                    layer=key.layer,
                    entries=len(entries),
                    bytes=sum(entry.bytes for entry in entries),
                    parts=len(parts),
                    unsigned=sum(not part.is_signed for part in parts),
                    newest=None if self._place.is_bundle else names[-1].made,
                    fingerprint=dict(key.facts),
                )
            )
        index.memory.save(index.files)
        keys.sort(key=lambda listed: (listed.layer, listed.key))
        return StoreListing(self._place.shown, index.digest, tuple(keys))

    def gc(self, *, older_than: float | None = None, max_size: int | None = None, dry_run: bool = False) -> Collection:
        """Remove index parts older than some seconds, then the oldest until the rest has at most ``max_size`` bytes.

        Packs that nothing lists are removed, too, if they were written more than a day ago: a push may be about to list
        them. A bundle has one writer, so that they are removed at once. Raises :class:`BadStore` if an index part is
        damaged: nothing is removed then, because what it lists is unknown.
        """
        if self._place.is_bundle and older_than is not None:
            raise errors.BadRequest("a bundle has no times; give --max-size, or gc without a limit")
        try:
            return self._collect(older_than, max_size, dry_run=dry_run)
        except Gone:
            # Another gc has removed a part after it was listed.
            return self._collect(older_than, max_size, dry_run=dry_run)

    def _collect(self, older_than: float | None, max_size: int | None, *, dry_run: bool) -> Collection:
        place, now = self._place, self._environment.clock()
        # Before the index: what is listed by then is not taken for unlisted.
        contents = {stored.name: stored for folder in FOLDERS for stored in place.names(folder)}
        index = StoreCollection(place, self._environment)
        index.require_store()
        parts = {name: index.part(name) for name in index.parts}
        uses = Counter(pack for part in parts.values() for pack in part.packs)
        sizes = {name: stored.bytes or 0 for name, stored in contents.items()}
        kept = sum(sizes.get(pack, 0) for pack in uses)
        old: list[PartName] = []
        # The oldest first.
        for name, part in parts.items():
            is_old = older_than is not None and name.made < now - older_than
            # Readers remember the parts of the newest second together.
            is_same = bool(old) and old[-1].made == name.made
            if is_old or is_same or (max_size is not None and kept > max_size):
                old.append(name)
                uses.subtract(list(part.packs))
                kept -= sum(sizes.get(pack, 0) for pack in part.packs if not uses[pack])
        unlisted = [name for name, stored in contents.items() if not uses[name] and self._is_left(stored, now)]
        if not dry_run and (old or unlisted):
            self._require_clock(now)
            # Readers find packs as long as they find the part.
            place.remove([f"{INDEX}{name}" for name in old])
            place.remove(unlisted)
            place.finish()
            index.memory.save(index.files)
        return Collection(
            url=place.shown,
            dry_run=dry_run,
            parts=tuple(map(str, old)),
            entries=sum(len(parts[name].entries) for name in old),
            removed=len(unlisted),
            freed=sum(sizes[name] for name in unlisted),
            kept=kept,
        )

    def _is_left(self, stored: Stored, now: float) -> bool:
        """Return whether a pack or a stage is one that no push can still be about to list."""
        folder, _, name = stored.name.partition("/")
        if name.startswith(plain.STAGE) or (folder == "packs" and is_name(stored.name)):
            return self._place.is_bundle or (stored.modified is not None and now - stored.modified > GRACE)
        return False

    def _require_clock(self, now: float) -> None:
        """Raise :class:`CachectlError` if this machine's clock is not that of the store: ages would be wrong.

        A file is written to see the time of the store.
        """
        if self._place.is_bundle:
            return
        probe = f"{INDEX}{plain.own_name()}"
        self._place.write(probe, b"")
        moments = [stored.modified for stored in self._place.names("index") if stored.name == probe]
        self._place.remove([probe])
        for moment in moments:
            if moment is not None and abs(moment - now) > _SKEW:
                there, here = moment_text(moment), moment_text(now)
                raise errors.CachectlError(
                    f"{self._place.shown}: its clock shows {there}, that of this machine {here}; set it"
                )

    def verify(self, *, allowed_signers: str | None = None) -> StoreCheck:
        """Check every index part, key document, pack and entry.

        With ``allowed_signers`` a part that no such signer has signed is a finding, and what it lists is not checked.
        Raises :class:`Missing` if there is no store.
        """
        # Before the index: a writer adds packs first.
        contents = set(filter(is_name, (stored.name for stored in self._place.names("packs"))))
        with trust.allowed_lists(self._environment, None, allowed_signers) as allowed:
            index = StoreCollection(self._place, self._environment, allowed)
            index.require_store()
            check = StoreCheck(self._place.shown, index.digest, len(index.parts))
            packs: dict[str, list[Item]] = {}
            for name in index.parts:
                for item in _checked(index, check, name):
                    check.entries += 1
                    packs.setdefault(item.pack.name if item.pack is not None else "", []).append(item)
            for pack, items in packs.items():
                _check_pack(index, check, pack, items)
        if not check.failed:
            for pack in sorted(contents - packs.keys()):
                check.add(pack, "unlisted", "no part of the index lists it; cachectl store gc removes it later", "note")
        check.packs = len(packs)
        return check


def _checked(index: StoreCollection, check: StoreCheck, name: PartName) -> tuple[Item, ...]:
    """Return the entries of an index part."""
    shown = f"{INDEX}{name}"
    try:
        index.key(name.key)
        return index.part(name).entries
    except trust.Untrusted as error:
        check.add(shown, "untrusted", error)
    except Gone as error:
        index.refresh()
        # Else gc has removed it meanwhile.
        if name in index.parts:
            check.add(shown, "missing", error)
    except BadStore as error:
        check.add(shown, "damaged", error)
    return ()


def _check_pack(index: StoreCollection, check: StoreCheck, pack: str, items: list[Item]) -> None:
    """Read the entries of a pack."""
    try:
        for _ in index.contents(items):
            pass
    except Gone as error:
        index.refresh()
        # Else gc has removed the part, too.
        if any(_lists(index, name, pack) for name in index.parts):
            check.add(pack, "missing", error)
    except BadStore as error:
        check.add(pack, "damaged", error)


def _lists(index: StoreCollection, name: PartName, pack: str) -> bool:
    # Parts that cannot be used are findings of their own.
    with suppress(BadStore, trust.Untrusted):
        return pack in index.part(name).packs
    return False


# ---------------------------------------------------------------------- the verb


def run(request: Request) -> StoreListing | Collection | StoreCheck:
    """Carry out ``cachectl store``."""
    from cachectl.layers.base.selection import parse_age, parse_size

    options = request.options
    if options.action != "gc" and (options.older_than, options.max_size, options.dry_run) != (None, None, False):
        request.misuse("--older-than, --max-size and --dry-run are for store gc")
    if options.action != "verify" and options.allowed_signers is not None:
        request.misuse("--allowed-signers is for store verify")
    store = SharedStore(request.stack, request.target(options.target))
    if options.action == "ls":
        with request.working("listing"):
            return store.ls()
    if options.action == "verify":
        with request.working("checking"):
            return store.verify(allowed_signers=options.allowed_signers)
    older_than = None if options.older_than is None else parse_age(options.older_than)
    max_size = None if options.max_size is None else parse_size(options.max_size)
    with request.working("cleaning up"):
        return store.gc(older_than=older_than, max_size=max_size, dry_run=options.dry_run)


def show(done: StoreListing | Collection | StoreCheck, request: Request) -> Iterator[object]:
    """Yield what the store holds, what was removed, or what is wrong with it."""
    if isinstance(done, StoreListing):
        yield _listing(done, request.now)
        yield ""
        yield table.Whole(f"digest {done.digest}")
    elif isinstance(done, Collection):
        would = "would be " if done.dry_run else ""
        entries = errors.plural(done.entries, "entry", "entries")
        yield table.Whole(f"{errors.plural(len(done.parts), 'part')} of the index with {entries} {would}removed")
        sizes = f"{tables.size(done.freed)}; {tables.size(done.kept)} stay"
        yield table.Whole(f"{errors.plural(done.removed, 'pack')} {would}removed: {sizes}")
    else:
        for finding in done.findings:
            yield f"{finding.severity}: {finding.name}: {finding.message}"
        index = f"{errors.plural(done.entries, 'entry', 'entries')} in {errors.plural(done.parts, 'part')} of the index"
        yield table.Whole(f"{index} and {errors.plural(done.packs, 'pack')} checked")
        yield table.Whole(f"digest {done.digest}")


def _listing(done: StoreListing, now: float) -> table.Table[ListedKey]:
    def facts(key: ListedKey) -> str:
        return ", ".join(f"{name} {fact or tables.DASH}" for name, fact in key.fingerprint.items())

    columns: tuple[table.Column[ListedKey], ...] = (
        table.Column("layer", lambda key: key.layer),
        tables.counts("entries", lambda key: key.entries),
        tables.sizes("size", lambda key: key.bytes),
        tables.counts("parts", lambda key: key.parts),
        tables.counts("unsigned", lambda key: key.unsigned),
        tables.ages("newest", lambda key: key.newest, now),
        table.Column("for", facts),
    )
    entries, size = sum(key.entries for key in done.keys), sum(key.bytes for key in done.keys)
    parts = sum(key.parts for key in done.keys)
    last = ("total", tables.count(entries), tables.size(size), tables.count(parts), "", "", "")
    return table.Table(columns, done.keys, last)
