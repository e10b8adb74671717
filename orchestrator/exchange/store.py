"""``store ls``, ``gc`` and ``verify``: what a store holds, what may go, and whether all of it is whole."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.exchange.format import (
    INDEX,
    CondemnedName,
    Part,
    PartName,
    Stocked,
    condemned_file,
    is_content,
)
from cachectl.exchange.index import Gone, Index, place_of
from cachectl.exchange.place import BadStore, is_stage
from cachectl.exchange.trust import judges
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.selection import moment_text

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.exchange.place import Place, Stored
    from cachectl.layer_set import LayerSet

#: Default grace period, in seconds.
GRACE: Final = 86400.0
#: Seconds by which the clocks of this machine and of the store may differ, beside a quarter of the grace period.
_SKEW: Final = 60.0
#: Names that one list condemns.
_MOST: Final = 10_000


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

    @property
    def failed(self) -> bool:
        """Return ``False``: a store that cannot be read raises an error."""
        return False


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

    @property
    def failed(self) -> bool:
        """Return ``False``: a failure is an error."""
        return False


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """Something wrong with a name of a store; a note does not harm readers."""

    name: str
    severity: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """The findings in a store, and how much was checked."""

    url: str
    store: str
    digest: str
    parts: int
    entries: int
    packs: int
    objects: int
    findings: tuple[StoreFinding, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/store-verify/1")

    @property
    def failed(self) -> bool:
        """Return whether anything is damaged, missing or not trusted."""
        return any(one.severity == "error" for one in self.findings)


class SharedStore:
    """The store at a path or a URL."""

    def __init__(self, stack: LayerSet, url: str | Path) -> None:
        self._environment = stack.environment
        self._place = place_of(url, stack.environment)

    def ls(self) -> StoreListing:
        """Return what is in the store, by portability key. Raises :class:`BadStore` and :class:`Missing`."""
        index = Index(self._place, self._environment)
        store = index.require_store()
        groups: dict[str, list[tuple[int, int, int, bool]]] = {}
        for name in index.names.parts:
            read = index.read(name)
            weight = sum(one.item.bytes for one in read.part.entries)
            groups.setdefault(name.key, []).append((len(read.part.entries), weight, name.made, not read.signed))
        keys = []
        for group, parts in groups.items():
            key = index.key(group)
            entries, sizes, made, unsigned = zip(*parts, strict=True)
            oldest, newest = (None, None) if self._place.is_bundle else (min(made), max(made))
            sums = (sum(entries), sum(sizes), len(parts), sum(unsigned), oldest, newest)
            keys.append(ListedKey(group, key.layer, *sums, dict(key.facts)))
        index.save()
        keys.sort(key=lambda one: (one.layer, one.key))
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
        limits = _Limits(older_than, max_size, GRACE if grace is None else grace)
        collecting = _Collecting(Index(self._place, self._environment), limits)
        try:
            return collecting.run(dry_run=dry_run)
        except Gone:
            # Another gc has removed a part after it was listed.
            return _Collecting(Index(self._place, self._environment), limits).run(dry_run=dry_run)

    def verify(self, *, allowed_signers: str | None = None) -> StoreCheck:
        """Check every index part, key document, pack, object and entry.

        With ``allowed_signers`` a part that no such signer has signed is a finding, and what it lists is not checked.
        Raises :class:`Missing` if there is no store.
        """
        # Before the index: a writer adds packs first.
        contents = {one.name for one in self._place.contents() if is_content(one.name)}
        with judges(self._environment, None, allowed_signers) as trusted:
            index = Index(self._place, self._environment, trusted)
            store = index.require_store()
            checking = _Checking(index)
            checking.check()
        if all(one.code not in ("untrusted", "damaged") for one in checking.findings):
            for name in sorted(contents - checking.places.keys()):
                message = "no part of the index lists it; cachectl store gc removes it later"
                checking.add(name, "note", "unlisted", message)
        packs = sum(name.startswith("packs/") for name in checking.places)
        index.save()
        return StoreCheck(
            *(self._place.shown, store, index.digest, len(index.names.parts), checking.entries),
            *(packs, len(checking.places) - packs, tuple(checking.findings)),
        )


# ---------------------------------------------------------------------- gc


@dataclass(frozen=True, slots=True)
class _Limits:
    """What ``gc`` keeps: ages are in seconds, the size in bytes; ``None`` is no limit."""

    older_than: float | None
    max_size: int | None
    grace: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """Index parts to remove, names to condemn, names to remove, and lists of condemned names that are done."""

    parts: tuple[PartName, ...]
    entries: int
    condemn: frozenset[str]
    remove: frozenset[str]
    stages: tuple[str, ...]
    done: tuple[CondemnedName, ...]
    freed: int
    kept: int


class _Collecting:
    """One ``gc``.

    A reader that listed the index before may still need the packs and objects of a removed part, and a writer may be
    about to list an object that it has found in the index. So names that nothing lists are first condemned, in a list
    under ``index/``, and removed by a later ``gc``, after the grace period, if nothing lists them then. Writers rely on
    no object that is condemned.
    """

    def __init__(self, index: Index, limits: _Limits) -> None:
        self._index = index
        self._place: Place = index.place
        self._limits = limits
        self._now = index.environment.clock()

    def run(self, *, dry_run: bool) -> Collection:
        """Plan, and carry the plan out."""
        self._index.require_store()
        plan = self._plan(self._place.contents())
        if not dry_run:
            self._apply(plan)
            self._index.save()
        return Collection(
            *(self._place.shown, dry_run, tuple(map(str, plan.parts)), plan.entries, len(plan.condemn)),
            *(len(plan.remove) + len(plan.stages), plan.freed, plan.kept),
        )

    def _plan(self, contents: Sequence[Stored]) -> _Plan:
        index, limits = self._index, self._limits
        sizes = {one.name: one.bytes or 0 for one in contents if is_content(one.name)}
        stages = {one.name: one.bytes or 0 for one in contents if is_stage(one.name) and self._is_old(one)}
        listed = {name: index.read(name).part for name in index.names.parts}
        uses = Counter(held for part in listed.values() for held in part.holds)
        weight = sum(sizes.get(name, 0) for name in uses)
        removed: list[PartName] = []
        # The oldest first.
        for name, part in listed.items():
            old = limits.older_than is not None and name.made < self._now - limits.older_than
            # Readers remember the parts of the newest second together.
            same = bool(removed) and removed[-1].made == name.made
            if not old and not same and (limits.max_size is None or weight <= limits.max_size):
                continue
            removed.append(name)
            for held in part.holds:
                uses[held] -= 1
                if not uses[held]:
                    weight -= sizes.get(held, 0)
        unlisted = sizes.keys() - {name for name, number in uses.items() if number}
        condemned = {name: index.condemned(name) for name in index.names.condemned}
        ripe = frozenset(held for name, names in condemned.items() if self._is_ripe(name) for held in names)
        known = frozenset(held for names in condemned.values() for held in names)
        remove = frozenset(unlisted if self._place.is_bundle else unlisted & ripe)
        return _Plan(
            parts=tuple(removed),
            entries=sum(len(listed[name].entries) for name in removed),
            condemn=frozenset(unlisted - known - remove),
            remove=remove,
            stages=tuple(sorted(stages)),
            done=tuple(name for name, names in condemned.items() if not ((names & unlisted) - remove)),
            freed=sum(sizes[name] for name in remove) + sum(stages.values()),
            kept=weight,
        )

    def _is_old(self, stage: Stored) -> bool:
        """Return whether no writer can still be at work on a stage."""
        return stage.modified is not None and self._now - stage.modified > max(self._limits.grace, GRACE)

    def _is_ripe(self, name: CondemnedName) -> bool:
        """Return whether the grace period of a list has passed, by the clock that says less."""
        stored = self._index.names.found.get(str(name))
        modified = None if stored is None else stored.modified
        return self._now - max(name.moment, name.moment if modified is None else modified) > self._limits.grace

    def _apply(self, plan: _Plan) -> None:
        index, place = self._index, self._place
        condemn = sorted(plan.condemn)
        written = []
        needs_list = bool(plan.remove or plan.parts) and not place.is_bundle
        for at in range(0, len(condemn), _MOST) if condemn else range(needs_list):
            file = condemned_file(condemn[at : at + _MOST])
            written.append(CondemnedName(int(self._now), hashlib.sha256(file).hexdigest()))
            place.write(f"{INDEX}{written[-1]}", file)
        if plan.parts or plan.remove:
            index.refresh()
            self._require_clock(written)
        # Condemned before they are removed: a kill in between leaves nothing unknown.
        if plan.parts:
            place.remove([f"{INDEX}{name}" for name in plan.parts])
        if plan.remove:
            # A writer may have listed some of it meanwhile.
            index.refresh()
            live = {held for name in index.names.parts for held in index.read(name).part.holds}
            place.remove(sorted(plan.remove - live))
        finished = [f"{INDEX}{name}" for name in (*plan.done, *(() if condemn else written))]
        if finished or plan.stages:
            place.remove([*finished, *plan.stages])
        place.finish()

    def _require_clock(self, written: list[CondemnedName]) -> None:
        """Raise :class:`CachectlError` if this machine's clock is not that of the store: ages would be wrong.

        What was just condemned is then forgotten: it bears the wrong time.
        """
        for name in written:
            stored = self._index.names.found.get(str(name))
            if stored is None or stored.modified is None:
                continue
            if abs(stored.modified - self._now) > max(_SKEW, self._limits.grace / 4):
                self._place.remove([f"{INDEX}{one}" for one in written])
                there, here = moment_text(stored.modified), moment_text(self._now)
                message = f"{self._place.shown}: its clock shows {there}, that of this machine {here}; set it"
                raise CachectlError(message)


# ---------------------------------------------------------------------- verify


class _Checking:
    """One check: its findings, and by pack or object what the index says of it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.findings: list[StoreFinding] = []
        self.places: dict[str, list[tuple[Part, Stocked]]] = {}
        self.entries = 0

    def check(self) -> None:
        """Check the index, then what it lists."""
        self._check_names()
        for part in self._index.names.parts:
            self._check_part(part)
        for place, group in self.places.items():
            try:
                for _ in self._index.contents(group):
                    pass
            except Gone as error:  # noqa: PERF203
                if self._are_listed(group):
                    self.add(place, "error", "missing", str(error))
            except BadStore as error:
                self.add(place, "error", "damaged", str(error))

    def _check_names(self) -> None:
        names = self._index.names
        for store in names.stores[1:]:
            message = "two first pushes met; the oldest identity counts"
            self.add(f"index/store-{store}", "note", "two-stores", message)
        for key in sorted(names.keys):
            try:
                self._index.key(key)
            except BadStore as error:  # noqa: PERF203
                self.add(f"index/key-{key}", "error", "damaged", str(error))
        for condemned in names.condemned:
            try:
                self._index.condemned(condemned)
            except BadStore as error:  # noqa: PERF203
                self.add(f"index/{condemned}", "error", "damaged", f"{error}; remove it")

    def add(self, name: str, severity: str, code: str, message: str) -> None:
        """Add a finding."""
        self.findings.append(StoreFinding(name, severity, code, message))

    def _check_part(self, name: PartName) -> None:
        shown = f"index/{name}"
        try:
            read = self._index.read(name)
            self._index.key(name.key)
        except Gone as error:
            self._index.refresh()
            if name in self._index.names.parts:
                self.add(shown, "error", "missing", str(error))
            return
        except BadStore as error:
            self.add(shown, "error", "damaged", str(error))
            return
        if read.untrusted is not None:
            self.add(shown, "error", "untrusted", read.untrusted)
            return
        if read.part.store != self._index.names.store:
            self.add(shown, "note", "other-identity", "no reader takes it, because another identity counts")
        self.entries += len(read.part.entries)
        for one in read.part.entries:
            self.places.setdefault(one.place, []).append((read.part, one))

    def _are_listed(self, group: list[tuple[Part, Stocked]]) -> bool:
        """Return whether what is missing is still listed: ``gc`` may have removed the parts meanwhile."""
        before = {part.made for part, _ in group}
        self._index.refresh()
        return any(name.made in before for name in self._index.names.parts)
