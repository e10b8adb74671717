"""Pull: place the entries of stores, isolated roots and database files that are missing here and can be hit.

A cache is code that programs run. So an index part of a store is used only if it is trusted, and everything that is
needed is downloaded into a file that no other process can reach and verified there before the first entry is placed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final

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
from cachectl.exchange.format import Item, Part, PartName, StoreKey, are_twins, artifact_of
from cachectl.exchange.index import Gone, StoreIndex, place_of
from cachectl.exchange.memory import Remembered, forget, recall, remember
from cachectl.exchange.place import STREAM, TransferFailed, is_url, local_path, timely
from cachectl.exchange.portability import Difference, differences, outlook, portability_key
from cachectl.exchange.trust import UNTRUSTED, Trust, Untrusted, judges
from cachectl.layers.base.errors import BadRequest, printable
from cachectl.layers.base.facts import Ability, AsJson, Entry, Note, total
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import ALL, Selection, moment_text

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.exchange.place import Deadline
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


@dataclass
class PulledLayer(Counts):
    """What a pull did with a layer, or (``dry_run``) would do.

    ``kept`` lists different entries that were met while placing, which stay; ``cannot_hit`` counts entries that cannot
    be hit here and were not placed. ``exposed``: others could write where the entries were pushed. ``outlooks`` counts
    the entries that are new here, and those that cannot be hit. ``entries`` are those that a dry run would place;
    ``None`` otherwise.
    """

    cannot_hit: int = 0
    outlooks: Counter[Outlook] = field(default_factory=Counter)
    differences: tuple[Difference, ...] = ()
    exposed: bool = False
    entries: list[Entry] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        also=("foreseen",),
        hidden=("skipped", "outlooks"),
        optional=("entries",),
        names={"foreseen": "outlook", "exposed": "writable_by_others"},
    )

    @property
    def foreseen(self) -> tuple[Foreseen, ...]:
        """Return the outlooks, each with its number of entries."""
        return tuple(Foreseen(seen, number) for seen, number in self.outlooks.items())


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
    names = [os.fspath(sources)] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not names:
        raise BadRequest("name a SOURCE: a bundle FILE, a folder, a URL, or an isolated root")
    chosen = {layer.name: layer for layer in stack.chosen(named)}
    pulling = _Pulling(stack, chosen, trust, selection, besides, dry_run, own or stack.environment, deadline)
    done = [pulling.take(name, named=bool(named)) for name in names]
    only = done[0] if len(done) == 1 else None
    return Pull(
        url=" ".join(part.url for part in done),
        store=None if only is None else only.store,
        digest=None if only is None else only.digest,
        trusted=tuple(dict.fromkeys(why for part in done for why in part.trusted)),
        dry_run=dry_run,
        read=sum(part.read for part in done),
        layers=tuple(pulling.done.values()),
        unread=tuple(key for part in done for key in part.unread),
        left_out=tuple(note for part in done for note in part.left_out),
    )


@dataclass
class _Pulling:
    """One pull: what was asked for, and what was ``done`` with each layer so far."""

    stack: LayerSet
    chosen: Mapping[str, Layer]
    trust: Trust | None
    selection: Selection
    besides: Mapping[str, Collection[str]]
    dry_run: bool
    own: Environment
    deadline: Deadline | None
    done: dict[str, PulledLayer] = field(default_factory=dict)

    def layer(self, name: str) -> PulledLayer:
        """Return the result for a layer, to be added to."""
        if name not in self.done:
            self.done[name] = PulledLayer(name, entries=[] if self.dry_run else None)
        return self.done[name]

    def take(self, name: str, *, named: bool) -> Pull:
        """Pull from one source; return the result without its layers."""
        if is_url(name) or name == STREAM or not name:
            return self._from_store(name)
        path = self.own.expand(local_path(name))
        layers = root_of(self.own, path) if path.is_dir() and not (path / "index").is_dir() else None
        of_file = place_of_file(self.chosen.values() if named else self.stack, path) if path.is_file() else None
        if layers is None and of_file is None:
            return self._from_store(name)
        inside = [] if layers is None else [(layers[one], to) for one, to in self.chosen.items() if one in layers]
        if self.trust is None:
            folders = (root.path for source, _ in inside for root in source.roots())
            require_own(path, (folder for folder in folders if folder.is_relative_to(path)))
        elif not self.trust.blindly:
            message = f"{printable(path)} is not a store, so it has neither signature nor digest; --trust takes it"
            raise BadRequest(message)
        if of_file is not None:
            with layers_with_file(self.stack.environment, of_file[0], path, of_file[1]) as (within, _):
                self._copy(within[of_file[0].name], of_file[0])
        for source, target in inside:
            self._copy(source, target, path)
        trusted = ("no other user can write to it" if self.trust is None else _SAID,)
        return Pull(printable(name), None, None, trusted, self.dry_run, 0, ())

    def _copy(self, source: Layer, target: Layer, below: Path | None = None) -> None:
        if (source.abilities()[Ability.GET] or target.abilities()[Ability.PUT]) is not None:
            return
        done = self.done.get(target.name) or PulledLayer(target.name, entries=[] if self.dry_run else None)
        before = (done.placed, done.there, len(done.failed))
        new = copy(source, target, self.selection, done, below=below, dry_run=self.dry_run)
        if (done.placed, done.there, len(done.failed)) == before:
            return
        if done.entries is not None:
            done.entries += new
        done.exposed |= bool(exposed_folders(source))
        self.done[target.name] = done

    def _from_store(self, name: str) -> Pull:
        if self.trust is None:
            raise BadRequest(UNTRUSTED)
        place = timely(partial(place_of, name, self.own), self.deadline)
        with judges(self.own, None, self.trust.allowed_signers) as trusted:
            index = StoreIndex(place, self.own, trusted)
            for _ in range(_AGAIN):
                try:
                    return _FromStore(self, index, self.trust).pull()
                except Gone:  # noqa: PERF203
                    before = index.names
                    index.refresh()
                    if index.names == before:
                        raise
        message = f"cannot read {index.place.shown}: its index changes all the time; try again"
        raise TransferFailed(message)


# ---------------------------------------------------------------------- from a store


@dataclass
class _Wanted:
    """The entries of one portability key that are to be placed, and what is known of the others."""

    key: StoreKey
    differences: tuple[Difference, ...]
    there: int = 0
    exposed: bool = False
    #: The outlook of each new entry, and of those that cannot be hit.
    outlooks: dict[str, Outlook] = field(default_factory=dict)
    new: list[tuple[Part, Item]] = field(default_factory=list)


class _FromStore:
    """One pull from a store, from the listing to the placed entries."""

    def __init__(self, pulling: _Pulling, index: StoreIndex, trust: Trust) -> None:
        self._pulling = pulling
        self._stack = pulling.stack
        self._index = index
        self._trust = trust
        self._store = index.require_store()
        self._shown = index.place.shown
        self._remembered = None if index.place.is_bundle else recall(index.environment, self._shown)
        self._left_out: dict[PartName, str] = {}
        self._trusted: dict[PartName, str] = {}
        self._here: dict[str, frozenset[str]] = {}
        #: Whether a first push writes its parts again, because another one met it and is older.
        self._is_settling = False

    def pull(self) -> Pull:
        """Pull; see :func:`pull`."""
        digest = self._index.digest
        if self._trust.sha256 is not None and digest != self._trust.sha256.lower():
            message = f"{self._shown}: its digest is {digest}, not the given one; somebody has pushed, or changed it"
            raise Untrusted(message)
        self._require_new()
        unread, wanted = self._keys()
        for key in wanted:
            self._choose(key)
        if self._left_out and not self._trusted and not self._is_settling:
            what = "; ".join(f"{name}: {why}" for name, why in list(self._left_out.items())[:3])
            message = f"{self._shown}: no part of its index that is needed here is trusted ({what})"
            raise Untrusted(message)
        if self._pulling.dry_run:
            for key in wanted:
                self._plan(key)
        else:
            with unnamed_file(self._stack.environment) as spool:
                # Everything is verified before anything is placed.
                for key, items in [(key, self._download(key, spool)) for key in wanted]:
                    self._place(key, items, spool)
            self._remember(self._index.save())
        return Pull(
            *(self._shown, self._store, digest, tuple(sorted(set(self._trusted.values())))),
            *(self._pulling.dry_run, self._index.fetched, (), unread),
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
        newer = (name for name in reversed(names.parts) if name.made > known.made)
        if not names.parts or all(part in names.found for part in known.parts) or any(map(self._is_trusted, newer)):
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
        elif read.signer is not None:
            self._trusted[name] = f"signed by {read.signer}"
        else:
            self._trusted[name] = _SAID if self._trust.sha256 is None else "its digest is the given one"
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
        layer = self._pulling.chosen.get(key.layer)
        if layer is None:
            return "this layer is pulled only if it is named", ()
        portability, environment = self._stack.portability(layer.name), self._stack.environment
        differing = differences(portability, key.facts, portability_key(portability, environment))
        if deciding := [f"{one.name} {one.there}, here {one.here}" for one in differing if one.decides]:
            return f"cannot hit: {', '.join(deciding)}", differing
        reason = layer.abilities()[Ability.PUT]
        return (None if reason is None else f"cannot put: {reason}"), differing

    def _choose(self, wanted: _Wanted) -> None:
        """Find the entries of a portability key that are missing here, and can be hit, in parts that are trusted."""
        layer = self._stack[wanted.key.layer]
        if layer.name not in self._here:
            self._here[layer.name] = keys_of(layer).union(self._pulling.besides.get(layer.name, ()))
        here, met = self._here[layer.name], set()
        root = layer.roots()[0].path
        known: dict[tuple[object, ...], Outlook] = {}
        # The newest first: if two parts have an entry, that of the newer one is taken.
        for name in reversed(self._index.names.parts):
            if name.key != wanted.key.name or not self._is_trusted(name):
                continue
            part = self._index.read(name).part
            for item in part.entries:
                if item.key in met or not self._pulling.selection.matches(item.to_entry(root)):
                    continue
                met.add(item.key)
                if item.key in here:
                    wanted.there += 1
                    continue
                seen = self._outlook(wanted, item, known)
                wanted.outlooks[item.key] = seen
                if seen.hits is not False:
                    wanted.exposed = wanted.exposed or part.exposed
                    wanted.new.append((part, item))
        self._here[layer.name] = here | met

    def _outlook(self, wanted: _Wanted, item: Item, known: dict[tuple[object, ...], Outlook]) -> Outlook:
        """Return the outlook of an entry, cached by device and versions: looking up what is installed takes long."""
        about = (item.device, *sorted(item.versions.items()))
        if about not in known:
            portability, environment = self._stack.portability(item.layer), self._stack.environment
            known[about] = outlook(portability, item, wanted.key.facts, environment, wanted.differences)
        return known[about]

    # ------------------------------------------------------------------ what is placed

    def _plan(self, wanted: _Wanted) -> None:
        done = self._count(wanted, [item.key for _, item in wanted.new])
        root = self._stack[wanted.key.layer].roots()[0].path
        done.placed += len(wanted.new)
        done.bytes += sum(item.bytes for _, item in wanted.new)
        done.entries = [*(done.entries or ()), *(item.to_entry(root) for _, item in wanted.new)]

    def _count(self, wanted: _Wanted, present: Collection[str]) -> PulledLayer:
        """Add to the result of the layer what is known of the entries; those that are ``present`` can be hit now."""
        done, arrived = self._pulling.layer(wanted.key.layer), set(present)
        done.there += wanted.there
        done.cannot_hit += sum(seen.hits is False for seen in wanted.outlooks.values())
        done.outlooks.update(seen for key, seen in wanted.outlooks.items() if seen.hits is False or key in arrived)
        done.differences = tuple(dict.fromkeys((*done.differences, *wanted.differences)))
        done.exposed |= wanted.exposed
        return done

    def _download(self, wanted: _Wanted, spool: BinaryIO) -> list[tuple[Item, int]]:
        """Write the verified bytes of the new entries into an open file; return each with its offset there."""
        offsets: list[tuple[Item, int]] = []
        for item, data in self._index.contents(wanted.new):
            if lacks_room(spool):
                folder = self._stack.environment.temporary
                message = f"cannot pull: {folder} has no room for more; set TMPDIR to a folder with more"
                raise TransferFailed(message)
            offsets.append((item, spool.tell()))
            spool.write(data)
        return sorted(offsets, key=lambda pair: pair[0].key)

    def _place(self, wanted: _Wanted, items: list[tuple[Item, int]], spool: BinaryIO) -> None:
        layer, done = self._stack[wanted.key.layer], self._pulling.layer(wanted.key.layer)
        deadline = self._pulling.deadline
        present: list[str] = []
        taken = 0
        for batch in in_batches(items, lambda pair: pair[0].bytes):
            if deadline is not None and not deadline.left:
                break
            taken += len(batch)
            artifacts = []
            for item, offset in batch:
                spool.seek(offset)
                artifacts.append(artifact_of(item, spool.read(item.bytes)))
            present += place(layer, artifacts, done)
        done.failed += [Note(item.key, "the time for the store was up") for item, _ in items[taken:]]
        self._count(wanted, present)
