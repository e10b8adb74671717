"""Pull: place the entries of a shared store that are missing here and can be hit.

A cache is code that programs run. So an index part is used only if it is trusted, and everything that is needed is
downloaded into a file that no other process can reach and verified there before the first entry is placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final, cast

from cachectl.inspecting.entries import listed
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.facts import Ability, Entry, Note
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import ALL, Selection, moment_text
from cachectl.moving.bundle import Item, Manifest, in_batches
from cachectl.moving.exporting import unseen
from cachectl.moving.importing import Foreseen, ImportedLayer, ImportTotal, Placing, Trust, lacks_room
from cachectl.moving.portability import Difference, differences, outlook, portability_key
from cachectl.moving.signing import Untrusted
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.deadline import TimelyPlace
from cachectl.sharing.format import PartName, Stocked, StoreKey, are_twins, cut, most_object, open_object, open_pack
from cachectl.sharing.index import Gone, Index, Judge, ReadPart
from cachectl.sharing.memory import Remembered, forget, recall, remember
from cachectl.sharing.place import BadStore, Missing
from cachectl.sharing.places import is_pinned, place_of

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.sharing.deadline import Deadline
    from cachectl.sharing.place import Place

#: How often a pull begins anew because ``gc`` removed an index part that it was about to read.
_AGAIN: Final = 5


@dataclass(frozen=True, slots=True)
class UnreadKey:
    """A portability key whose index parts were not read, and why."""

    key: str
    layer: str
    because: str
    parts: int
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """What a pull did with each layer, or (``dry_run``) would do.

    ``digest`` pins the content of the store. ``trusted`` says why entries were taken. ``read`` is the number of bytes
    of packs and objects that were downloaded. ``unread`` lists what cannot be hit here, ``left_out`` the index parts
    that nothing shows to be trusted.
    """

    url: str
    store: str
    digest: str
    trusted: tuple[str, ...]
    dry_run: bool
    read: int
    layers: tuple[ImportedLayer, ...]
    unread: tuple[UnreadKey, ...] = ()
    left_out: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson("cachectl/pull/1", also=("total",))

    @property
    def total(self) -> ImportTotal:
        """Return the sums over all layers."""
        return total(ImportTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether a layer refused an entry."""
        return any(layer.failed for layer in self.layers)


def pull(
    stack: LayerSet,
    url: str | Path,
    trust: Trust,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    dry_run: bool = False,
    accept_older: bool = False,
    own: Environment | None = None,
    deadline: Deadline | None = None,
) -> Pull:
    """Place the selected entries of the named layers, or of every clearable one, that are missing here.

    ``besides`` are keys, by layer, that are left out. ``trust`` is as for a bundle; its checksum is the store's digest.
    With ``accept_older`` the store may be another one, or an older one, than this machine has read from that address;
    ``own`` is the environment that remembers that, by default that of ``stack``. What the store has not sent by
    ``deadline`` is :class:`TransferFailed`; entries that are not placed by then are failures. Raises :class:`Untrusted`
    if nothing new can be trusted, :class:`BadStore` if something needed is damaged or missing, :class:`Missing` if
    there is no store, and :class:`TransferFailed` or :class:`OSError`; then nothing was written.
    """
    chosen = {layer.name: layer for layer in stack.chosen(layers)}
    here = own or stack.environment
    reach = partial(place_of, url, here)
    index = Index(reach() if deadline is None else cast("Place", TimelyPlace(reach, deadline)), here)
    for _ in range(_AGAIN):
        try:
            pulling = _Pulling(
                *(stack, index, trust, chosen, selection),
                besides=besides,
                accept_older=accept_older,
                deadline=deadline,
            )
            return pulling.pull(dry_run=dry_run)
        except Gone:  # noqa: PERF203
            before = index.names
            index.list()
            if index.names == before:
                raise
    message = f"cannot read {index.place.shown}: its index changes all the time; try again"
    raise TransferFailed(message)


@dataclass
class _Wanted:
    """The entries of one portability key that are to be placed, and what is known of the others."""

    key: StoreKey
    differences: tuple[Difference, ...]
    there: int = 0
    cannot_hit: int = 0
    exposed: bool = False
    foreseen: Counter[Outlook] = field(default_factory=Counter)
    new: list[tuple[ReadPart, Stocked]] = field(default_factory=list)


class _Pulling:
    """One pull, from the listing to the placed entries."""

    def __init__(
        self,
        stack: LayerSet,
        index: Index,
        trust: Trust,
        chosen: Mapping[str, Layer],
        selection: Selection,
        *,
        besides: Mapping[str, Collection[str]],
        accept_older: bool,
        deadline: Deadline | None,
    ) -> None:
        self._stack = stack
        self._besides = besides
        self._index = index
        self._trust = trust
        self._chosen = chosen
        self._selection = selection
        self._accept_older = accept_older
        self._deadline = deadline
        self._store = index.demand()
        self._shown = index.place.shown
        self._judge = None if trust.allowed_signers is None else Judge(stack.environment, trust.allowed_signers)
        self._left_out: dict[PartName, str] = {}
        self._trusted: dict[PartName, str] = {}
        self._here: dict[str, frozenset[str]] = {}
        #: Whether a first push writes its parts again, because another one met it and is older.
        self._is_settling = False
        self._read = 0

    def pull(self, *, dry_run: bool) -> Pull:
        """Pull; see :func:`pull`."""
        self._demand_digest()
        self._demand_not_older()
        unread, wanted = self._keys()
        for one in wanted:
            self._choose(one)
        if self._left_out and not self._trusted and not self._is_settling:
            what = "; ".join(f"{name}: {why}" for name, why in list(self._left_out.items())[:3])
            message = f"{self._shown}: no part of its index that is needed here is trusted ({what})"
            raise Untrusted(message)
        layers = tuple(self._foreseen(one) for one in wanted) if dry_run else self._place(wanted)
        if not dry_run:
            self._remember()
            self._index.save()
        return Pull(
            *(self._shown, self._store, self._index.names.digest, tuple(sorted(set(self._trusted.values())))),
            *(dry_run, self._read, _together(layers), unread),
            tuple(Note(str(name), why) for name, why in self._left_out.items()),
        )

    # ------------------------------------------------------------------ what is trusted

    def _demand_digest(self) -> None:
        digest = self._index.names.digest
        if self._trust.sha256 is not None and digest != self._trust.sha256.lower():
            message = f"{self._shown}: its digest is {digest}, not the given one; somebody has pushed, or changed it"
            raise Untrusted(message)

    def _demand_not_older(self) -> None:
        """Raise :class:`Untrusted` if another store is at the address, or an older state of the same one."""
        known = recall(self._index.environment, self._shown)
        if known is None or self._accept_older or self._trust.sha256 is not None:
            return
        names = self._index.names
        accepting = f"cachectl pull {self._shown} --accept-older accepts it"
        if known.store != self._store and not self._is_twin(known.store):
            message = f"{self._shown} is another store than this machine has read from it; {accepting}"
            raise Untrusted(message)
        if not names.parts or all(part in names.found for part in known.parts):
            return
        for name in reversed(names.parts):
            if name.made <= known.made:
                break
            if self._is_trusted(name):
                return
        message = (
            f"{self._shown} is older than what this machine has read from it, of {moment_text(known.made)}; {accepting}"
        )
        raise Untrusted(message)

    def _is_twin(self, store: str) -> bool:
        """Return whether an identity was given to this store by a first push that met another one."""
        return store in self._index.names.stores and are_twins(store, self._store)

    def _is_trusted(self, name: PartName) -> bool:
        """Return whether the entries of a part may be used. Raises :class:`BadStore` for a wrong signature."""
        if name in self._trusted or name in self._left_out:
            return name in self._trusted
        read = self._index.read(name)
        try:
            if read.part.store != self._store:
                self._is_settling |= self._is_twin(read.part.store)
                raise Untrusted("made for an identity of the store that does not count")
            if self._trust.after is not None and name.made <= self._trust.after:
                raise Untrusted(f"made {moment_text(name.made)}")
            self._trusted[name] = self._because(read)
        except Untrusted as error:
            self._left_out[name] = str(error)
        return name in self._trusted

    def _because(self, read: ReadPart) -> str:
        if self._judge is not None:
            return f"signed by {self._judge.signer(read)}"
        given = self._trust.sha256 is not None or is_pinned(self._shown)
        return "its digest is the given one" if given else "you said so"

    def _remember(self) -> None:
        if self._accept_older:
            forget(self._index.environment, self._shown)
        made = max((name.made for name in self._trusted), default=0)
        newest = tuple(sorted(str(name) for name in self._trusted if name.made == made))
        remember(self._index.environment, self._shown, Remembered(self._store, made, newest))

    # ------------------------------------------------------------------ what is wanted

    def _keys(self) -> tuple[tuple[UnreadKey, ...], list[_Wanted]]:
        """Divide the portability keys of the store into those that are left alone, and those that can be hit here."""
        unread, wanted = [], []
        parts = Counter(name.key for name in self._index.names.parts)
        for name, number in sorted(parts.items()):
            key = self._index.key(name)
            why, differing = self._why_not(key)
            if why is None:
                wanted.append(_Wanted(key, differing))
            else:
                unread.append(UnreadKey(name, key.layer, why, number, differing))
        return tuple(unread), sorted(wanted, key=lambda one: (one.key.layer, one.key.name))

    def _why_not(self, key: StoreKey) -> tuple[str | None, tuple[Difference, ...]]:
        if key.layer not in self._stack:
            return "no layer of this name exists here", ()
        layer = self._chosen.get(key.layer)
        if layer is None:
            return "this layer is pulled only if it is named", ()
        portability, environment = self._stack.portability(layer.name), self._stack.environment
        differing = differences(portability, key.facts, portability_key(portability, environment))
        deciding = [one for one in differing if one.decides]
        if deciding:
            there = ", ".join(f"{one.name} {one.there}, here {one.here}" for one in deciding)
            return f"cannot hit: {there}", differing
        reason = layer.abilities()[Ability.PUT]
        return (None if reason is None else f"cannot put: {reason}"), differing

    def _choose(self, wanted: _Wanted) -> None:
        """Find the entries of a portability key that are missing here, and can be hit, in parts that are trusted."""
        layer = self._stack[wanted.key.layer]
        here = self._keys_here(layer)
        root = layer.roots()[0].path
        portability = self._stack.portability(layer.name)
        outlooks: dict[tuple[object, ...], Outlook] = {}
        met: set[str] = set()
        # The newest first: if two parts have an entry, that of the newer one is taken.
        for name in reversed(self._index.names.parts):
            if name.key != wanted.key.name:
                continue
            read = self._index.read(name)
            for one in read.part.entries:
                item = one.item
                if item.key in met or not self._selection.matches(one.to_entry(root)):
                    continue
                if item.key in here:
                    wanted.there += 1
                    met.add(item.key)
                    continue
                if not self._is_trusted(name):
                    break
                met.add(item.key)
                known = (item.device, *sorted(item.versions.items()))
                if known not in outlooks:
                    facts, environment = wanted.key.facts, self._stack.environment
                    outlooks[known] = outlook(portability, item, facts, environment, wanted.differences)
                seen = outlooks[known]
                wanted.foreseen[seen] += 1
                if seen.hits is False:
                    wanted.cannot_hit += 1
                else:
                    wanted.exposed = wanted.exposed or read.part.exposed
                    wanted.new.append((read, one))
        self._here[layer.name] = here | met

    def _keys_here(self, layer: Layer) -> frozenset[str]:
        if layer.name not in self._here:
            found = listed((layer,), ALL, lambda _: None, contents=False)
            self._here[layer.name] = frozenset(entry.key for entry in found).union(self._besides.get(layer.name, ()))
        return self._here[layer.name]

    def _foreseen(self, wanted: _Wanted) -> ImportedLayer:
        root = self._stack[wanted.key.layer].roots()[0].path
        return self._result(
            wanted,
            placed=len(wanted.new),
            bytes=sum(one.item.bytes for _, one in wanted.new),
            entries=tuple(one.to_entry(root) for _, one in wanted.new),
        )

    def _result(self, wanted: _Wanted, **more: object) -> ImportedLayer:
        seen = tuple(Foreseen(one, number) for one, number in wanted.foreseen.items())
        known = {"there": wanted.there, "cannot_hit": wanted.cannot_hit, "foreseen": seen, **more}
        return ImportedLayer(wanted.key.layer, differences=wanted.differences, exposed=wanted.exposed, **known)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ what is placed

    def _place(self, wanted: Iterable[_Wanted]) -> tuple[ImportedLayer, ...]:
        """Download and verify everything, then place it."""
        with unseen(self._stack.environment) as spool:
            chosen = [(one, self._download(one, spool)) for one in wanted]
            return tuple(self._placed(one, items, spool) for one, items in chosen)

    def _download(self, wanted: _Wanted, spool: BinaryIO) -> list[tuple[Item, int]]:
        """Write the verified bytes of the new entries into an open file; return each with its offset there."""
        groups: dict[str, list[tuple[ReadPart, Stocked]]] = {}
        for read, one in wanted.new:
            groups.setdefault(one.place, []).append((read, one))
        found: list[tuple[Item, int]] = []
        for place, group in groups.items():
            for one, data in self._contents(place, group):
                if lacks_room(spool):
                    folder = self._stack.environment.temporary
                    message = f"cannot pull: {folder} has no room for more; set TMPDIR to a folder with more"
                    raise TransferFailed(message)
                found.append((one.item, spool.tell()))
                spool.write(data)
        return sorted(found, key=lambda pair: pair[0].key)

    def _contents(self, place: str, group: list[tuple[ReadPart, Stocked]]) -> Iterator[tuple[Stocked, bytes]]:
        read, first = group[0]
        name = place.rpartition("/")[2]
        if first.pack is None:
            size = first.item.bytes
            with self._index.naming():
                content = open_object(name, self._fetch(place, most_object(size)), size)
            for _, one in group:
                if one.item.bytes != size:
                    raise BadStore(f"{self._shown}: {place} has another size than the index says")
                yield one, content
            return
        packed, size = read.part.packs[first.pack]
        with self._index.naming():
            content = open_pack(name, self._fetch(place, packed), size)
            found = [(one, cut(one, content)) for _, one in group]
        yield from found

    def _fetch(self, name: str, most: int) -> bytes:
        try:
            data = self._index.place.read(name, most)
        except Missing as error:
            # It may have been condemned a grace period ago, and its part with it.
            raise Gone(str(error)) from error
        self._read += len(data)
        return data

    def _placed(self, wanted: _Wanted, items: list[tuple[Item, int]], spool: BinaryIO) -> ImportedLayer:
        name = wanted.key.layer
        manifest = Manifest((), {name: wanted.key.facts}, (name,) if wanted.exposed else ())
        placing = Placing(self._stack, manifest, dry_run=False)

        def contents() -> Iterator[tuple[Item, bytes]]:
            for item, offset in items:
                spool.seek(offset)
                yield item, spool.read(item.bytes)

        taken = 0
        for batch in in_batches(contents(), lambda pair: pair[0].layer, lambda pair: pair[0].bytes):
            if self._deadline is not None and not self._deadline.left:
                break
            taken += len(batch)
            placing.take(batch)
        late = tuple(Note(item.key, "the time for the store was up") for item, _ in items[taken:])
        done = placing.results()[0]
        counted = Counter({one.outlook: one.entries for one in done.foreseen})
        wanted.foreseen = Counter({seen: n for seen, n in wanted.foreseen.items() if seen.hits is False}) + counted
        return self._result(
            wanted,
            placed=done.placed,
            bytes=done.bytes,
            there=wanted.there + done.there,
            kept=done.kept,
            failed=done.failed + late,
        )


def _together(layers: Iterable[ImportedLayer]) -> tuple[ImportedLayer, ...]:
    """Add up the results for the portability keys of each layer."""
    found: dict[str, ImportedLayer] = {}
    for one in layers:
        before = found.get(one.layer)
        found[one.layer] = one if before is None else _sum(before, one)
    return tuple(found.values())


def _sum(one: ImportedLayer, other: ImportedLayer) -> ImportedLayer:
    entries: tuple[Entry, ...] | None = None
    if one.entries is not None and other.entries is not None:
        entries = one.entries + other.entries
    foreseen: Counter[Outlook] = Counter()
    for seen in (*one.foreseen, *other.foreseen):
        foreseen[seen.outlook] += seen.entries
    return replace(
        one,
        placed=one.placed + other.placed,
        bytes=one.bytes + other.bytes,
        there=one.there + other.there,
        cannot_hit=one.cannot_hit + other.cannot_hit,
        kept=one.kept + other.kept,
        failed=one.failed + other.failed,
        foreseen=tuple(Foreseen(seen, number) for seen, number in foreseen.items()),
        differences=tuple(dict.fromkeys(one.differences + other.differences)),
        exposed=one.exposed or other.exposed,
        entries=entries,
    )
