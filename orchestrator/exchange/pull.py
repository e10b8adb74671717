"""Pull: place the entries of stores, isolated roots and database files that are missing here and can be hit.

A cache is code that programs run. So an index part of a store is used only if it is trusted, and everything that is
needed is downloaded into a file that no other process can reach and verified there before the first entry is placed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final, cast

from cachectl.exchange.bundle import lacks_room, unnamed_file
from cachectl.exchange.copying import (
    Counts,
    copy,
    exposed_folders,
    in_batches,
    keys_of,
    layers_with_file,
    place,
    place_of_file,
    require_own,
    root_of,
)
from cachectl.exchange.format import Item, Part, PartName, Stocked, StoreKey, are_twins, artifact_of
from cachectl.exchange.index import Gone, Index, place_of
from cachectl.exchange.memory import Remembered, forget, recall, remember
from cachectl.exchange.place import STREAM, TimelyPlace, TransferFailed, is_url, local_path
from cachectl.exchange.portability import Difference, differences, outlook, portability_key
from cachectl.exchange.trust import UNTRUSTED, Trust, Untrusted, judges
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.facts import Ability, Entry, Note
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import ALL, Selection, moment_text
from cachectl.layers.base.texts import printable

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.exchange.place import Deadline, Place
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

#: How often a pull starts again because ``gc`` removed an index part that it was about to read.
_AGAIN: Final = 5
#: Why something is trusted that nothing else shows to be.
_SAID: Final = "you said so"


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The number of entries of a layer with the same outlook."""

    outlook: Outlook
    entries: int
    as_json: ClassVar[AsJson] = AsJson(flat=("outlook",))


@dataclass(frozen=True, slots=True)
class PulledLayer:
    """What a pull did with a layer, or (``dry_run``) would do.

    ``there`` counts entries of keys that were present already; ``kept`` lists different ones that were met while
    placing, which stay; ``cannot_hit`` counts entries that cannot be hit here and were not placed. ``exposed``: others
    could write where the entries were pushed. ``foreseen`` counts the entries that are new here, and those that cannot
    be hit, by outlook. ``entries`` are those that a dry run would place; ``None`` otherwise.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    cannot_hit: int = 0
    kept: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    foreseen: tuple[Foreseen, ...] = ()
    differences: tuple[Difference, ...] = ()
    exposed: bool = False
    entries: tuple[Entry, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        optional=("entries",), names={"foreseen": "outlook", "exposed": "writable_by_others"}
    )

    def plus(self, other: PulledLayer) -> PulledLayer:
        """Return the sum of both."""
        foreseen: Counter[Outlook] = Counter()
        for seen in (*self.foreseen, *other.foreseen):
            foreseen[seen.outlook] += seen.entries
        return replace(
            self,
            placed=self.placed + other.placed,
            bytes=self.bytes + other.bytes,
            there=self.there + other.there,
            cannot_hit=self.cannot_hit + other.cannot_hit,
            kept=self.kept + other.kept,
            failed=self.failed + other.failed,
            foreseen=_foreseen(foreseen),
            differences=tuple(dict.fromkeys(self.differences + other.differences)),
            exposed=self.exposed or other.exposed,
            entries=None if self.entries is None or other.entries is None else self.entries + other.entries,
        )


@dataclass(frozen=True, slots=True)
class PullTotal:
    """The sums over all layers."""

    placed: int
    bytes: int
    there: int
    cannot_hit: int
    kept: int
    failed: int


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

    ``url`` names the sources. ``store`` and ``digest`` are those of a store; ``None`` for other and for several
    sources. ``trusted`` says why entries were taken. ``read`` is the number of bytes of packs and objects that were
    downloaded. ``unread`` lists what cannot be hit here, ``left_out`` the index parts that nothing shows to be trusted.
    """

    url: str
    store: str | None
    digest: str | None
    trusted: tuple[str, ...]
    dry_run: bool
    read: int
    layers: tuple[PulledLayer, ...]
    unread: tuple[UnreadKey, ...] = ()
    left_out: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson("cachectl/pull/1", also=("total",))

    @property
    def total(self) -> PullTotal:
        """Return the sums over all layers."""
        return total(PullTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether a layer refused an entry, or could not be read."""
        return any(layer.failed for layer in self.layers)

    def plus(self, other: Pull) -> Pull:
        """Return the sum of the pulls from two sources."""
        return Pull(
            *(f"{self.url} {other.url}", None, None),
            tuple(dict.fromkeys((*self.trusted, *other.trusted))),
            *(self.dry_run, self.read + other.read, _together((*self.layers, *other.layers))),
            *(self.unread + other.unread, self.left_out + other.left_out),
        )


def pull(
    stack: LayerSet,
    sources: str | Path | Sequence[str],
    trust: Trust | None = None,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    dry_run: bool = False,
    own: Environment | None = None,
    deadline: Deadline | None = None,
) -> Pull:
    """Place the selected entries of the named layers, or of every clearable one, that are missing here.

    A source is a store, an isolated root, or a database file of a product. ``besides`` are keys, by layer, that are
    left out. A store needs ``trust``; a root or file of this user that no other user can write does not. ``own`` is the
    environment that remembers the newest state of each store, by default that of ``stack``. What a store has not sent
    by ``deadline`` is :class:`TransferFailed`; entries that are not placed by then are failures. Raises
    :class:`Untrusted` if nothing new can be trusted, :class:`BadStore` if something needed is damaged or missing,
    :class:`Missing` if there is no store, and :class:`TransferFailed` or :class:`OSError`; then nothing of that source
    was written.
    """
    named = tuple(layers)
    chosen = {layer.name: layer for layer in stack.chosen(named)}
    here = own or stack.environment
    names = [os.fspath(sources)] if isinstance(sources, (str, os.PathLike)) else list(sources)
    done: Pull | None = None
    for name in names:
        layers_of = _layers_of(stack, here, name, chosen, trust, named=bool(named))
        if layers_of is not None:
            one = _from_layers(stack, name, layers_of, chosen, selection, trust=trust, dry_run=dry_run)
        else:
            if trust is None:
                raise BadRequest(UNTRUSTED)
            one = _from_store(
                stack, name, trust, chosen, selection, besides=besides, dry_run=dry_run, own=here, deadline=deadline
            )
        done = one if done is None else done.plus(one)
    if done is None:
        raise BadRequest("name a SOURCE: a bundle FILE, a folder, a URL, or an isolated root")
    return done


def _together(layers: Iterable[PulledLayer]) -> tuple[PulledLayer, ...]:
    """Add up the results for each layer."""
    found: dict[str, PulledLayer] = {}
    for one in layers:
        found[one.layer] = found[one.layer].plus(one) if one.layer in found else one
    return tuple(found.values())


def _foreseen(counted: Mapping[Outlook, int]) -> tuple[Foreseen, ...]:
    return tuple(Foreseen(seen, number) for seen, number in counted.items())


# ---------------------------------------------------------------------- from roots and database files

#: Runs a function with the layers of a source.
_Source = tuple["LayerSet", "Layer | None", "Path | None", "Path"]


def _layers_of(
    stack: LayerSet, here: Environment, name: str, chosen: Mapping[str, Layer], trust: Trust | None, *, named: bool
) -> _Source | None:
    """Return what an isolated root or a database file holds; ``None`` for a store."""
    if is_url(name) or name == STREAM or not name:
        return None
    path = here.expand(local_path(name))
    found = root_of(here, path) if path.is_dir() and not (path / "index").is_dir() else None
    of_file = place_of_file(chosen.values() if named else stack, path) if path.is_file() else None
    if found is None and of_file is None:
        return None
    if trust is not None and not trust.blindly:
        raise BadRequest(f"{printable(path)} is not a store, so it has neither signature nor digest; --trust takes it")
    if trust is None:
        layers = () if found is None else (found[one] for one in chosen if one in found)
        folders = (root.path for layer in layers for root in layer.roots())
        require_own(path, (one for one in folders if one.is_relative_to(path)))
    if of_file is not None:
        return stack, *of_file, path
    return cast("LayerSet", found), None, None, path


def _from_layers(
    stack: LayerSet,
    name: str,
    source: _Source,
    chosen: Mapping[str, Layer],
    selection: Selection,
    *,
    trust: Trust | None,
    dry_run: bool,
) -> Pull:
    found, layer, place_in_root, path = source
    if layer is not None and place_in_root is not None:
        with layers_with_file(stack.environment, layer, path, place_in_root) as (within, _):
            layers = [_copied(within[layer.name], layer, selection, dry_run=dry_run)]
    else:
        layers = [
            _copied(found[one], chosen[one], selection, below=path, dry_run=dry_run) for one in chosen if one in found
        ]
    layers = [one for one in layers if one.placed or one.there or one.failed]
    trusted = ("no other user can write to it" if trust is None else _SAID,)
    return Pull(printable(name), None, None, trusted, dry_run, 0, tuple(layers))


def _copied(
    source: Layer, target: Layer, selection: Selection, *, below: Path | None = None, dry_run: bool
) -> PulledLayer:
    counts = Counts()
    reason = source.abilities()[Ability.GET] or target.abilities()[Ability.PUT]
    new = [] if reason is not None else copy(source, target, selection, counts, below=below, dry_run=dry_run)
    return PulledLayer(
        *(target.name, counts.placed, counts.bytes, counts.there, 0, tuple(counts.kept), tuple(counts.failed)),
        exposed=bool(exposed_folders(source)),
        entries=tuple(new) if dry_run else None,
    )


# ---------------------------------------------------------------------- from a store


def _from_store(
    stack: LayerSet,
    name: str,
    trust: Trust,
    chosen: Mapping[str, Layer],
    selection: Selection,
    *,
    besides: Mapping[str, Collection[str]],
    dry_run: bool,
    own: Environment,
    deadline: Deadline | None,
) -> Pull:
    reach = partial(place_of, name, own)
    reached = reach() if deadline is None else cast("Place", TimelyPlace(reach, deadline))
    with judges(own, None, trust.allowed_signers) as trusted:
        index = Index(reached, own, trusted)
        for _ in range(_AGAIN):
            try:
                pulling = _Pulling(stack, index, trust, chosen, selection, besides=besides, deadline=deadline)
                return pulling.pull(dry_run=dry_run)
            except Gone:  # noqa: PERF203
                before = index.names
                index.refresh()
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
    #: The outlook of each new entry, and of those that cannot be hit.
    outlooks: dict[str, Outlook] = field(default_factory=dict)
    new: list[tuple[Part, Stocked]] = field(default_factory=list)


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
        deadline: Deadline | None,
    ) -> None:
        self._stack = stack
        self._besides = besides
        self._index = index
        self._trust = trust
        self._chosen = chosen
        self._selection = selection
        self._deadline = deadline
        self._store = index.require_store()
        self._shown = index.place.shown
        self._remembered = None if index.place.is_bundle else recall(index.environment, self._shown)
        self._left_out: dict[PartName, str] = {}
        self._trusted: dict[PartName, str] = {}
        self._here: dict[str, frozenset[str]] = {}
        #: Whether a first push writes its parts again, because another one met it and is older.
        self._is_settling = False

    def pull(self, *, dry_run: bool) -> Pull:
        """Pull; see :func:`pull`."""
        digest = self._index.digest
        if self._trust.sha256 is not None and digest != self._trust.sha256.lower():
            message = f"{self._shown}: its digest is {digest}, not the given one; somebody has pushed, or changed it"
            raise Untrusted(message)
        self._require_new()
        unread, wanted = self._keys()
        for one in wanted:
            self._choose(one)
        if self._left_out and not self._trusted and not self._is_settling:
            what = "; ".join(f"{name}: {why}" for name, why in list(self._left_out.items())[:3])
            message = f"{self._shown}: no part of its index that is needed here is trusted ({what})"
            raise Untrusted(message)
        layers = tuple(self._planned(one) for one in wanted) if dry_run else self._place(wanted)
        if not dry_run:
            self._remember(self._index.save())
        return Pull(
            *(self._shown, self._store, digest, tuple(sorted(set(self._trusted.values())))),
            *(dry_run, self._index.fetched, _together(layers), unread),
            tuple(Note(str(name), why) for name, why in self._left_out.items()),
        )

    # ------------------------------------------------------------------ what is trusted

    def _require_new(self) -> None:
        """Raise :class:`Untrusted` if another store is at the address, or an older state of the same one."""
        known = self._remembered
        if known is None or self._trust.sha256 is not None:
            return
        names = self._index.names
        accepting = f"cachectl pull {self._shown} --digest {self._index.digest} accepts it"
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
        is_gone = self._remembered is not None and str(name) in self._remembered.gone and self._trust.sha256 is None
        if read.untrusted is not None:
            self._left_out[name] = read.untrusted
        elif read.part.store != self._store:
            self._is_settling |= self._is_twin(read.part.store)
            self._left_out[name] = "made for an identity of the store that does not count"
        elif is_gone:
            self._left_out[name] = "it was removed from the store before, and has come back"
        else:
            signed = None if read.signer is None else f"signed by {read.signer}"
            given = _SAID if self._trust.sha256 is None else "its digest is the given one"
            self._trusted[name] = signed or given
        return name in self._trusted

    def _remember(self, vanished: Sequence[str]) -> None:
        if self._index.place.is_bundle:
            return
        if self._trust.sha256 is not None:
            forget(self._index.environment, self._shown)
        made = max((name.made for name in self._trusted), default=0)
        newest = tuple(sorted(str(name) for name in self._trusted if name.made == made))
        remember(self._index.environment, self._shown, Remembered(self._store, made, newest, tuple(vanished)))

    # ------------------------------------------------------------------ what is wanted

    def _keys(self) -> tuple[tuple[UnreadKey, ...], list[_Wanted]]:
        """Divide the portability keys of the store into those that are left alone, and those that can be hit here."""
        unread, wanted = [], []
        parts = Counter(name.key for name in self._index.names.parts)
        for name, number in sorted(parts.items()):
            key = self._index.key(name)
            reason, differing = self._reason_not_to_read(key)
            if reason is None:
                wanted.append(_Wanted(key, differing))
            else:
                unread.append(UnreadKey(name, key.layer, reason, number, differing))
        return tuple(unread), sorted(wanted, key=lambda one: (one.key.layer, one.key.name))

    def _reason_not_to_read(self, key: StoreKey) -> tuple[str | None, tuple[Difference, ...]]:
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
        if layer.name not in self._here:
            self._here[layer.name] = keys_of(layer).union(self._besides.get(layer.name, ()))
        here, met = self._here[layer.name], set()
        root = layer.roots()[0].path
        known: dict[tuple[object, ...], Outlook] = {}
        # The newest first: if two parts have an entry, that of the newer one is taken.
        for name in reversed(self._index.names.parts):
            if name.key != wanted.key.name or not self._is_trusted(name):
                continue
            part = self._index.read(name).part
            for one in part.entries:
                item = one.item
                if item.key in met or not self._selection.matches(one.to_entry(root)):
                    continue
                met.add(item.key)
                if item.key in here:
                    wanted.there += 1
                    continue
                seen = self._outlook(wanted, item, known)
                wanted.outlooks[item.key] = seen
                if seen.hits is False:
                    wanted.cannot_hit += 1
                else:
                    wanted.exposed = wanted.exposed or part.exposed
                    wanted.new.append((part, one))
        self._here[layer.name] = here | met

    def _outlook(self, wanted: _Wanted, item: Item, known: dict[tuple[object, ...], Outlook]) -> Outlook:
        """Return the outlook of an entry, cached by device and versions: looking up what is installed takes long."""
        about = (item.device, *sorted(item.versions.items()))
        if about not in known:
            portability, environment = self._stack.portability(item.layer), self._stack.environment
            known[about] = outlook(portability, item, wanted.key.facts, environment, wanted.differences)
        return known[about]

    def _planned(self, wanted: _Wanted) -> PulledLayer:
        root = self._stack[wanted.key.layer].roots()[0].path
        counts = Counts(len(wanted.new), sum(one.item.bytes for _, one in wanted.new))
        entries = tuple(one.to_entry(root) for _, one in wanted.new)
        return self._result(wanted, counts, [entry.key for entry in entries], entries)

    def _result(
        self, wanted: _Wanted, counts: Counts, present: Collection[str], entries: tuple[Entry, ...] | None = None
    ) -> PulledLayer:
        arrived = set(present)
        seen = Counter(one for key, one in wanted.outlooks.items() if one.hits is False or key in arrived)
        return PulledLayer(
            *(wanted.key.layer, counts.placed, counts.bytes, wanted.there + counts.there, wanted.cannot_hit),
            *(tuple(counts.kept), tuple(counts.failed), _foreseen(seen), wanted.differences, wanted.exposed),
            entries,
        )

    # ------------------------------------------------------------------ what is placed

    def _place(self, wanted: Iterable[_Wanted]) -> tuple[PulledLayer, ...]:
        """Download and verify everything, then place it."""
        with unnamed_file(self._stack.environment) as spool:
            chosen = [(one, self._download(one, spool)) for one in wanted]
            return tuple(self._placed(one, items, spool) for one, items in chosen)

    def _download(self, wanted: _Wanted, spool: BinaryIO) -> list[tuple[Item, int]]:
        """Write the verified bytes of the new entries into an open file; return each with its offset there."""
        found: list[tuple[Item, int]] = []
        for one, data in self._index.contents(wanted.new):
            if lacks_room(spool):
                folder = self._stack.environment.temporary
                message = f"cannot pull: {folder} has no room for more; set TMPDIR to a folder with more"
                raise TransferFailed(message)
            found.append((one.item, spool.tell()))
            spool.write(data)
        return sorted(found, key=lambda pair: pair[0].key)

    def _placed(self, wanted: _Wanted, items: list[tuple[Item, int]], spool: BinaryIO) -> PulledLayer:
        layer, counts = self._stack[wanted.key.layer], Counts()
        present: list[str] = []
        taken = 0
        for batch in in_batches(items, lambda pair: pair[0].bytes):
            if self._deadline is not None and not self._deadline.left:
                break
            taken += len(batch)
            artifacts = []
            for item, offset in batch:
                spool.seek(offset)
                artifacts.append(artifact_of(item, spool.read(item.bytes)))
            present += place(layer, artifacts, counts)
        counts.failed += [Note(item.key, "the time for the store was up") for item, _ in items[taken:]]
        return self._result(wanted, counts, present)
