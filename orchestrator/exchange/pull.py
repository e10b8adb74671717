"""Pull: place the entries of stores, isolated roots and database files that are missing here and can be hit.

A cache is code that programs run. So an index part of a store is used only if it is trusted, and everything that is
needed is downloaded into a file that no other process can reach and verified there before the first entry is placed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from cachectl.exchange import bundle, copying, portability
from cachectl.exchange.format import StoreKey
from cachectl.exchange.place import STREAM, Deadline, in_time, is_url
from cachectl.exchange.store import Newest, StoreCollection, place_of
from cachectl.exchange.trust import UNTRUSTED, Trust, Untrusted, allowed_lists
from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import ALL, Selection, moment_text
from cachectl.transfer import Transfer

#: Why something is trusted that nothing else shows to be.
_SAID: Final = "you said so"
#: How often a pull starts again because ``gc`` removed what it was about to read: each time it downloads all of it.
_AGAIN: Final = 5


def pull(
    stack: LayerSet,
    sources: str | Path | Sequence[str],
    trust: Trust | None = None,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] | None = None,
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
    here = own or stack.environment
    pulling = _Pull(stack, stack.chosen(named), bool(named), trust, selection, besides, dry_run, here, deadline)
    result = pulling.take(names[0])
    for name in names[1:]:
        result.add(pulling.take(name))
    return result


@dataclass(frozen=True)
class _Pull:
    """What was asked for."""

    stack: LayerSet
    chosen: Sequence[Layer]
    named: bool
    trust: Trust | None
    selection: Selection
    besides: Mapping[str, Collection[str]] | None
    dry_run: bool
    own: Environment
    deadline: Deadline | None

    def take(self, name: str) -> Transfer:
        """Pull from one source."""
        path = self.own.expand(name) if name and name != STREAM and not is_url(name) else None
        if path is not None and path.is_file():
            of_file = copying.place_of_file(self.chosen if self.named else self.stack, path)
            if of_file is not None:
                self._require_trusted(path)
                with copying.layers_with_file(self.stack.environment, of_file[0], path, of_file[1]) as (copied, _):
                    return self._from_layers(name, copying.LayerCollection([copied[of_file[0].name]]))
        is_root = path is not None and path.is_dir() and not (path / "index").is_dir()
        if path is not None and is_root and (within := copying.root_of(self.own, path)) is not None:
            sources = [within[layer.name] for layer in self.chosen if layer.name in within]
            self._require_trusted(path, [root.path for source in sources for root in source.roots()])
            return self._from_layers(name, copying.LayerCollection(sources, below=path))
        if self.trust is None:
            raise errors.BadRequest(UNTRUSTED)
        with (
            allowed_lists(self.own, None, self.trust.allowed_signers) as allowed,
            bundle.unnamed_file(self.stack.environment.temporary) as file,
        ):
            return self._from_store(name, self.trust, allowed, file)

    def _require_trusted(self, path: Path, folders: Iterable[Path] = ()) -> None:
        if self.trust is None:
            copying.require_own(path, (folder for folder in folders if folder.is_relative_to(path)))
        elif not self.trust.blindly:
            message = (
                f"{errors.printable(path)} is not a store, so it has neither signature nor digest; --trust takes it"
            )
            raise errors.BadRequest(message)

    def _from_layers(self, name: str, source: copying.LayerCollection) -> Transfer:
        trusted = "no other user can write to it" if self.trust is None else _SAID
        result = Transfer(errors.printable(name), dry_run=self.dry_run, trusted=(trusted,))
        here = copying.LayerCollection(self.stack[layer] for layer in source.layers)
        keys = [
            StoreKey(layer, {})
            for layer in source.layers
            if source.layers[layer].abilities()[facts.Ability.GET] is None
            and here.layers[layer].abilities()[facts.Ability.PUT] is None
        ]
        plan = copying.missing(source, here, keys, self.selection, result)
        (copying.list_plan if self.dry_run else copying.copy)(source, here, plan)
        result.layers = tuple(done for done in result.layers if done.placed or done.there or done.failed)
        return result

    def _from_store(self, name: str, trust: Trust, allowed: Sequence[str], file: BinaryIO) -> Transfer:
        """Place what is missing here, after all of it was verified and lies in ``file``."""
        by_digest, here = trust.sha256 is not None, copying.LayerCollection(self.chosen)

        def download() -> tuple[StoreCollection, list[copying.CopyPlan], Transfer]:
            store = StoreCollection(place_of(name, self.own), self.own, allowed, deadline=self.deadline)
            return store.settled(partial(self._downloaded, store, trust, file), attempts=_AGAIN)

        store, plan, result = in_time(self.deadline, download)
        (copying.list_plan if self.dry_run else copying.copy)(store, here, plan)
        if not self.dry_run:
            made = max((name.made for name in store.trusted), default=0)
            newest = Newest(made, tuple(str(name) for name in store.trusted if name.made == made))
            store.memory.save(store.files, newest, afresh=by_digest)
        said = "its digest is the given one" if by_digest else _SAID
        why = {said if signer is None else f"signed by {signer}" for signer in store.trusted.values()}
        result.trusted, result.moved = tuple(sorted(why)), store.fetched
        result.left_out = tuple(facts.Note(str(name), why) for name, why in store.left_out.items())
        return result

    def _downloaded(
        self, store: StoreCollection, trust: Trust, file: BinaryIO
    ) -> tuple[StoreCollection, list[copying.CopyPlan], Transfer]:
        """Return what to place from a store, downloaded unless this is a dry run, and the result to be added to."""
        store.require_store()
        shown, digest = store.place.shown, store.digest
        if trust.sha256 is not None and digest != trust.sha256.lower():
            message = f"{shown}: its digest is {digest}, not the given one; somebody has pushed, or changed it"
            raise Untrusted(message)
        if trust.sha256 is None:
            self._require_new(store, store.memory.seen())
        result = Transfer(shown, digest, dry_run=self.dry_run)
        keys, here = self._keys(store, result), copying.LayerCollection(self.chosen)
        plan = copying.missing(store, here, keys, self.selection, result, besides=self.besides)
        if store.left_out and not store.trusted:
            what = "; ".join(f"{name}: {why}" for name, why in list(store.left_out.items())[:3])
            message = f"{shown}: no part of its index that is needed here is trusted ({what})"
            raise Untrusted(message)
        for group in plan:
            self._foresee(group)
        if not self.dry_run:
            store.download((group.entries for group in plan), file, self.stack.environment.temporary)
        return store, plan, result

    def _require_new(self, store: StoreCollection, seen: Newest) -> None:
        """Raise :class:`Untrusted` if the store is older than what this machine has read from it, or another one."""
        store.gone = seen.gone
        newer = (name for name in reversed(store.parts) if name.made > seen.made)
        if not store.parts or store.files.issuperset(seen.parts) or any(map(store.usable, newer)):
            return
        shown = store.place.shown
        message = (
            f"{shown} is older than what this machine has read from it, of {moment_text(seen.made)}, or another store; "
            f"cachectl pull {shown} --digest {store.digest} accepts it"
        )
        raise Untrusted(message)

    def _keys(self, store: StoreCollection, result: Transfer) -> Iterator[StoreKey]:
        """Yield the portability keys whose entries may be hit here, and note why others are left alone."""
        chosen = {layer.name: layer for layer in self.chosen}
        for key in store.portability_keys():
            reason: str | None
            if (layer := chosen.get(key.layer)) is None:
                is_here = key.layer in self.stack
                reason = "this layer is pulled only if it is named" if is_here else "no layer of this name exists here"
            else:
                reason = portability.why_not(self._differences(key)) or layer.abilities()[facts.Ability.PUT]
            if reason is None:
                yield key
                continue
            parts = errors.plural(sum(name.key == key.name for name in store.parts), "part")
            result.unread += (facts.Note(key.layer, f"{parts} of the index left alone: {reason}"),)

    def _differences(self, key: StoreKey) -> Sequence[portability.Difference]:
        knows = self.stack.portability(key.layer)
        here = portability.portability_key(knows, self.stack.environment)
        return portability.differences(knows, key.facts, here)

    def _foresee(self, group: copying.CopyPlan) -> None:
        """Note the outlook of each entry; those that cannot be hit are counted, and taken off the plan."""
        knows, differing = self.stack.portability(group.key.layer), self._differences(group.key)
        # Looking up what is installed takes long.
        known: dict[tuple[object, ...], Outlook] = {}
        for item in group.entries:
            about = (item.device, *sorted(item.versions.items()))
            if about not in known:
                known[about] = portability.outlook(knows, item, group.key.facts, self.stack.environment, differing)
            group.outlooks[item.key] = known[about]
        group.done.cannot_hit += sum(seen.hits is False for seen in group.outlooks.values())
        group.entries[:] = [item for item in group.entries if group.outlooks[item.key].hits is not False]
