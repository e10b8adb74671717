"""Pull: place the entries of stores, isolated roots and database files that are missing here and can be hit.

A cache is code that programs run. So an index part of a store is used only if it is trusted, and everything that is
needed is downloaded into a file that no other process can reach and verified there before the first entry is placed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, Final

from cachectl.exchange import bundle, copying, portability
from cachectl.exchange.format import Item, PartName, StoreKey
from cachectl.exchange.index import Gone, StoreIndex, place_of
from cachectl.exchange.memory import Newest
from cachectl.exchange.place import STREAM, TransferFailed, is_url, timely
from cachectl.exchange.trust import UNTRUSTED, Trust, Untrusted, judges
from cachectl.layers.base import errors
from cachectl.layers.base.facts import Ability, Note
from cachectl.layers.base.selection import ALL, Selection, moment_text
from cachectl.transfer import Moved, Transfer

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.exchange.place import Deadline
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.parts import Outlook

#: How often a pull starts again because ``gc`` removed an index part or a pack that it was about to read.
_AGAIN: Final = 5
#: Why something is trusted that nothing else shows to be.
_SAID: Final = "you said so"


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
) -> Transfer:
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
        raise errors.BadRequest("name a SOURCE: a bundle FILE, a folder, a URL, or an isolated root")
    chosen = {layer.name: layer for layer in stack.chosen(named)}
    here = own or stack.environment
    pulling = _Pulling(stack, chosen, bool(named), trust, selection, besides, dry_run, here, deadline)
    done = [pulling.take(name) for name in names]
    return Transfer(
        url=" ".join(part.url for part in done),
        digest=done[0].digest if len(done) == 1 else None,
        moved=sum(part.moved for part in done),
        layers=tuple(pulling.done.values()),
        dry_run=dry_run,
        trusted=tuple(dict.fromkeys(why for part in done for why in part.trusted)),
        unread=tuple(note for part in done for note in part.unread),
        left_out=tuple(note for part in done for note in part.left_out),
    )


@dataclass
class _Pulling:
    """One pull: what was asked for, and what was ``done`` with each layer so far."""

    stack: LayerSet
    chosen: Mapping[str, Layer]
    named: bool
    trust: Trust | None
    selection: Selection
    besides: Mapping[str, Collection[str]]
    dry_run: bool
    own: Environment
    deadline: Deadline | None
    done: dict[str, Moved] = field(default_factory=dict)

    def new(self, name: str) -> Moved:
        """Return the result for a layer, to be added to."""
        return self.done.get(name) or Moved(name, entries=[] if self.dry_run else None)

    def take(self, name: str) -> Transfer:
        """Pull from one source; return the result without its layers."""
        if is_url(name) or name == STREAM or not name:
            return self._from_store(name)
        path = self.own.expand(name)
        if path.is_file():
            layers = self.chosen.values() if self.named else self.stack
            if (of_file := copying.place_of_file(layers, path)) is None:
                return self._from_store(name)
            self._require_trusted(path)
            with copying.layers_with_file(self.stack.environment, of_file[0], path, of_file[1]) as (copied, _):
                self._copy(copied[of_file[0].name], of_file[0])
        else:
            within = copying.root_of(self.own, path) if path.is_dir() and not (path / "index").is_dir() else None
            if within is None:
                return self._from_store(name)
            pairs = [(within[name], target) for name, target in self.chosen.items() if name in within]
            self._require_trusted(path, [root.path for source, _ in pairs for root in source.roots()])
            for source, target in pairs:
                self._copy(source, target, path)
        trusted = "no other user can write to it" if self.trust is None else _SAID
        return Transfer(errors.printable(name), None, 0, trusted=(trusted,))

    def _require_trusted(self, path: Path, folders: Iterable[Path] = ()) -> None:
        if self.trust is None:
            copying.require_own(path, (folder for folder in folders if folder.is_relative_to(path)))
        elif not self.trust.blindly:
            message = (
                f"{errors.printable(path)} is not a store, so it has neither signature nor digest; --trust takes it"
            )
            raise errors.BadRequest(message)

    def _copy(self, source: Layer, target: Layer, below: Path | None = None) -> None:
        if (source.abilities()[Ability.GET] or target.abilities()[Ability.PUT]) is None:
            done = self.new(target.name)
            copying.copy_layer(source, target, done, self.selection, below=below)
            if done.placed or done.there or done.failed:
                self.done[target.name] = done

    def _from_store(self, name: str) -> Transfer:
        if self.trust is None:
            raise errors.BadRequest(UNTRUSTED)
        place = timely(partial(place_of, name, self.own), self.deadline)
        with judges(self.own, None, self.trust.allowed_signers) as trusted:
            index = StoreIndex(place, self.own, trusted)
            for _ in range(_AGAIN):
                try:
                    return _FromStore(self, index, self.trust).pull()
                except Gone:  # noqa: PERF203
                    if not index.refresh():
                        raise
        message = f"cannot read {index.place.shown}: its index changes all the time; try again"
        raise TransferFailed(message)


# ---------------------------------------------------------------------- from a store


@dataclass
class _Wanted:
    """The entries of one portability key that are to be placed, and the outlook of those that are missing here."""

    layer: Layer
    there: int
    new: list[Item]
    outlooks: dict[str, Outlook]


class _FromStore:
    """One pull from a store, from the listing to the placed entries."""

    def __init__(self, pulling: _Pulling, index: StoreIndex, trust: Trust) -> None:
        self._pulling = pulling
        self._stack = pulling.stack
        self._index = index
        self._trust = trust
        self._shown = index.place.shown
        self._seen = Newest()
        self._left_out: dict[PartName, str] = {}
        self._trusted: dict[PartName, str] = {}
        self._here: dict[str, set[str]] = {}

    def pull(self) -> Transfer:
        """Pull; see :func:`pull`."""
        index = self._index
        index.require_store()
        digest = index.digest
        if self._trust.sha256 is not None and digest != self._trust.sha256.lower():
            message = f"{self._shown}: its digest is {digest}, not the given one; somebody has pushed, or changed it"
            raise Untrusted(message)
        if index.memory is not None and self._trust.sha256 is None:
            self._seen = index.memory.seen()
        self._require_new(digest)
        wanted, unread = self._wanted()
        if self._left_out and not self._trusted:
            what = "; ".join(f"{name}: {why}" for name, why in list(self._left_out.items())[:3])
            message = f"{self._shown}: no part of its index that is needed here is trusted ({what})"
            raise Untrusted(message)
        with bundle.unnamed_file(self._stack.environment) as file:
            # Everything is verified before anything is placed.
            offsets = {} if self._pulling.dry_run else self._download(wanted, file)
            for one in wanted:
                self._place(one, offsets, file)
        if not self._pulling.dry_run and index.memory is not None:
            made = max((name.made for name in self._trusted), default=0)
            newest = Newest(made, tuple(str(name) for name in self._trusted if name.made == made))
            index.memory.save(index.names.files, newest, afresh=self._trust.sha256 is not None)
        return Transfer(
            self._shown,
            digest,
            index.fetched,
            trusted=tuple(sorted(set(self._trusted.values()))),
            unread=unread,
            left_out=tuple(Note(str(name), why) for name, why in self._left_out.items()),
        )

    # ------------------------------------------------------------------ what is trusted

    def _require_new(self, digest: str) -> None:
        """Raise :class:`Untrusted` if the store is older than what this machine has read from it, or another one."""
        names = self._index.names
        newer = (name for name in reversed(names.parts) if name.made > self._seen.made)
        if not names.parts or names.files.issuperset(self._seen.parts) or any(map(self._is_trusted, newer)):
            return
        message = (
            f"{self._shown} is older than what this machine has read from it, of {moment_text(self._seen.made)}, or "
            f"another store; cachectl pull {self._shown} --digest {digest} accepts it"
        )
        raise Untrusted(message)

    def _is_trusted(self, name: PartName) -> bool:
        """Return whether the entries of a part may be used. Raises :class:`BadStore` for a wrong signature."""
        if name not in self._trusted and name not in self._left_out:
            try:
                signer = self._index.part(name).signer
            except Untrusted as error:
                self._left_out[name] = str(error)
                return False
            if str(name) in self._seen.gone:
                self._left_out[name] = "it was removed from the store before, and has come back"
            elif signer is not None:
                self._trusted[name] = f"signed by {signer}"
            else:
                self._trusted[name] = _SAID if self._trust.sha256 is None else "its digest is the given one"
        return name in self._trusted

    # ------------------------------------------------------------------ what is wanted

    def _wanted(self) -> tuple[list[_Wanted], tuple[Note, ...]]:
        """Return what is missing here, by portability key, and why other keys are left alone."""
        parts: dict[str, list[PartName]] = {}
        for name in self._index.names.parts:
            parts.setdefault(name.key, []).append(name)
        keys = sorted(((self._index.key(name), names) for name, names in parts.items()), key=lambda pair: pair[0].layer)
        wanted: list[_Wanted] = []
        unread = []
        for key, names in keys:
            layer = self._pulling.chosen.get(key.layer)
            reason: str | None
            if layer is None:
                is_here = key.layer in self._stack
                reason = "this layer is pulled only if it is named" if is_here else "no layer of this name exists here"
            else:
                knows, environment = self._stack.portability(layer.name), self._stack.environment
                here = portability.portability_key(knows, environment)
                differing = portability.differences(knows, key.facts, here)
                reason = portability.why_not(differing) or layer.abilities()[Ability.PUT]
            if layer is None or reason is not None:
                unread.append(Note(key.layer, f"{errors.plural(len(names), 'part')} of the index left alone: {reason}"))
            else:
                wanted.append(self._choose(layer, key, names, differing))
        return wanted, tuple(unread)

    def _choose(
        self, layer: Layer, key: StoreKey, names: Sequence[PartName], differing: Sequence[portability.Difference]
    ) -> _Wanted:
        """Find the entries that are missing here, and can be hit, in the parts of a key that are trusted."""
        if layer.name not in self._here:
            self._here[layer.name] = {*copying.keys_of(layer), *self._pulling.besides.get(layer.name, ())}
        here, counted = self._here[layer.name], Moved(layer.name)
        root = layer.roots()[0].path
        # The newest first: if two parts have an entry, that of the newer one is taken.
        parts = (self._index.part(name) for name in reversed(names) if self._is_trusted(name))
        items = (item for part in parts for item in part.entries)
        selected = (item for item in items if self._pulling.selection.matches(item.to_entry(root)))
        new = copying.missing(selected, here, counted)
        here.update(item.key for item in new)
        knows, environment = self._stack.portability(layer.name), self._stack.environment
        # Looking up what is installed takes long.
        known: dict[tuple[object, ...], Outlook] = {}
        outlooks = {}
        for item in new:
            about = (item.device, *sorted(item.versions.items()))
            if about not in known:
                known[about] = portability.outlook(knows, item, key.facts, environment, differing)
            outlooks[item.key] = known[about]
        new = [item for item in new if outlooks[item.key].hits is not False]
        return _Wanted(layer, counted.there, new, outlooks)

    # ------------------------------------------------------------------ what is placed

    def _download(self, wanted: Iterable[_Wanted], file: BinaryIO) -> dict[tuple[str, str], int]:
        """Write the verified bytes of the new entries into an open file; return their offsets there."""
        offsets: dict[tuple[str, str], int] = {}
        for one in wanted:
            for item, data in self._index.contents(one.new):
                offsets[one.layer.name, item.key] = file.tell()
                bundle.spool(file, data, self._stack.environment, self._shown)
        return offsets

    def _place(self, wanted: _Wanted, offsets: Mapping[tuple[str, str], int], file: BinaryIO) -> None:
        """Place the new entries of a key, or list them, and count those that can be hit now."""
        layer, done = wanted.layer, self._pulling.new(wanted.layer.name)
        deadline = self._pulling.deadline

        def read(batch: list[Item]) -> Iterator[tuple[Item, bytes]]:
            for item in batch:
                if deadline is not None and not deadline.left:
                    done.failed.append(Note(item.key, "the time for the store was up"))
                    continue
                file.seek(offsets[layer.name, item.key])
                yield item, file.read(item.bytes)

        self._pulling.done[layer.name] = done
        if done.entries is not None:
            root = layer.roots()[0].path
            done.plan(item.to_entry(root) for item in wanted.new)
            present = [item.key for item in wanted.new]
        else:
            present = copying.copy(wanted.new, read, layer, done)
        arrived = set(present)
        done.there += wanted.there
        done.cannot_hit += sum(seen.hits is False for seen in wanted.outlooks.values())
        done.outlooks.update(seen for key, seen in wanted.outlooks.items() if seen.hits is False or key in arrived)
