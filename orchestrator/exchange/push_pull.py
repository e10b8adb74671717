"""Push and pull: copy what a store, a product's database file or this machine lacks; and both around a command.

A cache is code that programs run. So an index part of a store is used only if it is trusted, and everything needed is
downloaded into a file that no other process can open, and verified there, before the first entry is placed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cachectl.exchange import bundle, copying, place, portability, wire
from cachectl.exchange import trust as trusting
from cachectl.exchange.store import StoreCollection, place_of
from cachectl.layer_set import LayerSet
from cachectl.layers.base.errors import BadRequest, CachectlError, reason_of
from cachectl.layers.base.text import plural, printable
from cachectl.layers.core.entry import Note
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import Outlook
from cachectl.layers.core.selection import ALL, Selection, moment_text
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import atomic
from cachectl.layers.stores import database
from cachectl.transfer import Transfer
from cachectl.watching import ledger

#: How often a push starts again because another command wrote the bundle meanwhile.
_PUSHES = 100
#: How often a pull starts again because ``gc`` removed what it was about to read: each time it downloads all of it.
_PULLS = 5
#: How many kernels that are not portable are named.
_FEW = 3
#: The reason for trust that is only the user's word.
_SAID = "because of --trust"


def push(
    stack: LayerSet,
    target: str | Path,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: copying.Keys | None = None,
    sign: str | None = None,
    allowed_signers: str | None = None,
    force: bool = False,
    deadline: float | None = None,
) -> Transfer:
    """Add the selected entries that the store at a target lacks.

    An entry counts as present if an index part lists it that was signed with ``sign`` or by a signer in
    ``allowed_signers``; without both, if any part lists it.

    :param layers: names; none means every clearable layer
    :param besides: keys to exclude, by layer
    :param sign: an OpenSSH key
    :param allowed_signers: a file in the format of ssh-keygen(1)
    :param force: replace a file that is not a bundle
    :param deadline: a moment of :func:`time.monotonic`
    :raises BadStore: if the store is damaged
    :raises TransferFailed: if it cannot be reached or written, also by the deadline
    :raises OSError: as :class:`TransferFailed`, for a folder or a file
    :raises BadRequest: for an unknown layer, and if the key cannot sign
    """
    named = tuple(layers)
    chosen, here, name = stack.chosen(named), stack.environment, os.fspath(target)
    of_file = None if place.is_url(name) else copying.place_of_file(chosen, here.expand(name))
    with trusting.allowed_list(here, sign, allowed_signers) as allowed:
        for _ in range(_PUSHES):
            # Another command may have written the file meanwhile.
            with contextlib.suppress(place.Changed):
                if of_file is not None:
                    return _push_to_file(stack, here.expand(name), of_file, selection, besides)
                with contextlib.closing(place_of(name, here, writes=True, force=force, deadline=deadline)) as where:
                    store = StoreCollection(where, here, allowed, key=sign)
                    result = push_layers(stack, store, chosen, selection, besides, named=bool(named))
                    store.finish()
                    result.digest = store.digest if store.written or store.parts else None
                    result.moved = store.written
                    return result
    raise place.Changed(printable(place.without_secrets(name)))


def push_layers(
    stack: LayerSet,
    store: StoreCollection,
    chosen: Iterable[Layer],
    selection: Selection = ALL,
    besides: copying.Keys | None = None,
    *,
    named: bool = False,
) -> Transfer:
    """Write the selected entries of layers that a store lacks; a layer that cannot be read fails only if ``named``."""
    result = Transfer(store.place.shown)
    in_order = sorted(chosen, key=lambda layer: layer.name)
    source = copying.LayerCollection(in_order, describes=not selection.needs_contents)
    keys = []
    for layer in in_order:
        outcome = result.layer(layer.name)
        if (reason := layer.abilities()[Ability.GET]) is None:
            facts = portability.portability_key(layer.about.portability, stack.environment)
            keys.append(wire.StoreKey(layer.name, facts))
        elif named:
            outcome.failed.append(Note("*", f"cannot get: {reason}"))
    plan = copying.missing(source, store, keys, result, selection, besides=besides)
    remembered = ledger.empty()
    with contextlib.suppress(CachectlError):
        remembered = ledger.read(stack.environment)
    for key, entries in plan[:]:
        about = source.layers[key.layer].about.portability
        if about is None or (place_there := key.facts.get(about.bound)) is None:
            continue
        # Entries of portable builds have a separate key.
        portable = [entry for entry in entries if remembered.portable and remembered.is_of_portable(entry)]
        entries[:] = [entry for entry in entries if entry not in portable]
        if portable:
            anywhere = wire.StoreKey(key.layer, {name: key.facts[name] for name in key.facts if name != about.bound})
            stored = store.known(anywhere)
            plan.append((anywhere, [entry for entry in portable if entry.key not in stored]))
            result.layer(key.layer).there += len(portable) - len(plan[-1][1])
        if entries:
            bound = f"{plural(len(entries), 'entry', 'entries')} may need the {about.bound} {place_there}"
            bound = f"{bound}; those of {portability.COMMAND} do not"
            needs = [f"not portable: {kernel} needs {need}" for kernel, need in [*remembered.kept.items()][-_FEW:]]
            result.unread += tuple(Note(key.layer, line) for line in (bound, *needs))
    copying.copy(source, store, plan, result)
    for outcome in result.layers:
        outcome.sensitive = source.layers[outcome.layer].about.reveals if outcome.placed else None
    return result


def _push_to_file(
    stack: LayerSet,
    file: Path,
    of_file: tuple[Layer, Path],
    selection: Selection,
    besides: copying.Keys | None,
) -> Transfer:
    """Add the entries that belong to a database file, by changing a copy of the file."""
    (layer, inside), result, target = of_file, Transfer(str(file)), file.resolve()
    outcome = result.layer(layer.name)
    with contextlib.ExitStack() as block:
        if target.exists():
            place.lock(target, block.enter_context(open(target, "rb")))
            # A log or a journal would not fit the replaced file.
            for companion in (database.companion(target, suffix) for suffix in database.COMPANIONS):
                if os.path.lexists(companion):
                    reason = f"{printable(companion.name)} exists, so a program uses it, or was killed while using it"
                    message = f"cannot write {printable(target)}: {reason}; end the program, or push to a new FILE"
                    raise place.TransferFailed(message)
        before = _stamp_of(target)
        copies, copied = block.enter_context(copying.layer_with_file(stack.environment, layer, target, inside))
        source = copying.LayerCollection([layer], prefix=inside.as_posix())
        plan = copying.missing(source, copies, [wire.StoreKey(layer.name)], result, selection, besides=besides)
        copying.copy(source, copies, plan, result)
        if outcome.placed:
            flat = copied.with_name(f"{copied.name}.flat")
            copying.copy_database(copied, flat)
            if _stamp_of(target) != before:
                raise place.Changed(str(file))
            try:
                atomic.replace_file(target, [flat.read_bytes()], new=before is None)
            except FileExistsError as error:
                raise place.Changed(str(file)) from error
            except OSError as error:
                raise place.TransferFailed(f"cannot write {printable(file)}: {reason_of(error)}") from error
            outcome.sensitive = layer.about.reveals
            result.moved = file.stat().st_size
    return result


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    with contextlib.suppress(FileNotFoundError):
        return database.file_stamp(file)
    return None


# ---------------------------------------------------------------------- pull


def pull(
    stack: LayerSet,
    sources: str | Path | Sequence[str],
    trust: trusting.Trust | None = None,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: copying.Keys | None = None,
    dry_run: bool = False,
    deadline: float | None = None,
) -> Transfer:
    """Place the selected entries that are missing here. After an error, nothing of that source was written.

    :param sources: stores, isolated roots, or database files of a product
    :param trust: why stores are trusted; not needed for this user's roots and files that no other user can write to
    :param layers: names; none means every clearable layer
    :param besides: keys to exclude, by layer
    :param dry_run: only return what would be placed
    :param deadline: a moment of :func:`time.monotonic`; entries that are not placed by then are failures
    :raises Untrusted: if nothing new can be trusted
    :raises BadStore: if something needed is damaged or missing
    :raises Missing: if there is no store
    :raises TransferFailed: if it cannot be reached, or has not sent what is needed by the deadline
    :raises OSError: as :class:`TransferFailed`, for a folder or a file
    """
    names = [os.fspath(sources)] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not names:
        raise BadRequest("name a SOURCE: a bundle FILE, a folder, a URL, or an isolated root")
    named = tuple(layers)
    pulling = _Pull(stack, named, stack.chosen(named), trust, selection, besides, dry_run, deadline)
    result = pulling.take(names[0])
    for name in names[1:]:
        result.add(pulling.take(name))
    return result


class _Pull(NamedTuple):
    """The arguments of :func:`pull`."""

    stack: LayerSet
    named: Sequence[str]
    chosen: Sequence[Layer]
    trust: trusting.Trust | None
    selection: Selection
    besides: copying.Keys | None
    dry_run: bool
    deadline: float | None

    def take(self, name: str) -> Transfer:
        """Pull from one source."""
        here = self.stack.environment
        # A URL or the stream is neither a file nor a folder, like the null device.
        is_path = name and name != place.STREAM and not place.is_url(name)
        path = here.expand(name) if is_path else Path(os.devnull)
        if path.is_file() and (of_file := copying.place_of_file(self.stack.named(self.named), path)) is not None:
            self._require_trusted(path)
            with copying.layer_with_file(here, of_file[0], path, of_file[1]) as (source, _):
                return self._from_layers(source, name)
        is_root = path.is_dir() and not (path / "index").is_dir()
        if is_root and (within := copying.root_of(here, path)) is not None:
            sources = [within[layer.name] for layer in self.chosen if layer.name in within]
            self._require_trusted(path, copying.folders_of(sources))
            return self._from_layers(copying.LayerCollection(sources, below=path), name)
        if self.trust is None:
            raise BadRequest(trusting.UNTRUSTED)
        return self._from_store(name, self.trust)

    def _require_trusted(self, path: Path, folders: Iterable[Path] = ()) -> None:
        if self.trust is None:
            copying.require_own(path, (folder for folder in folders if folder.is_relative_to(path)))
        elif not self.trust.trust:
            message = f"{printable(path)} is not a store, so it has neither signature nor digest; use --trust"
            raise BadRequest(message)

    def _from_layers(self, source: copying.LayerCollection, name: str) -> Transfer:
        reason = "no other user can write to it" if self.trust is None else _SAID
        result = Transfer(printable(name), dry_run=self.dry_run, trusted=(reason,))
        here = copying.LayerCollection(self.stack[layer] for layer in source.layers)
        keys = [
            wire.StoreKey(layer.name)
            for layer in here.layers.values()
            if source.layers[layer.name].abilities()[Ability.GET] is None and layer.abilities()[Ability.PUT] is None
        ]
        plan = copying.missing(source, here, keys, result, self.selection, besides=self.besides)
        copying.copy(source, here, plan, result)
        result.layers = tuple(outcome for outcome in result.layers if outcome.placed or outcome.there or outcome.failed)
        return result

    def _from_store(self, name: str, trust: trusting.Trust) -> Transfer:
        """Place what is missing here, after all of it was downloaded and verified."""
        environment = self.stack.environment
        with (
            trusting.allowed_list(environment, None, trust.allowed_signers) as allowed,
            bundle.unnamed_file(environment.temporary) as file,
        ):
            with contextlib.closing(place_of(name, environment, deadline=self.deadline)) as where:
                store = StoreCollection(where, environment, allowed, deadline=self.deadline)
                plan, result = store.settled(partial(self._downloaded, store, trust, file), attempts=_PULLS)
            copying.copy(store, copying.LayerCollection(self.chosen), plan, result)
        if not self.dry_run:
            store.memory.save(store.files, store.trusted, afresh=trust.digest is not None)
        said = _SAID if trust.digest is None else "it has the given digest"
        signers = {said if signer is None else f"signed by {signer}" for signer in store.trusted.values()}
        result.trusted, result.moved = tuple(sorted(signers)), store.fetched
        result.left_out = tuple(Note(name, reason) for name, reason in store.left_out.items())
        return result

    def _downloaded(
        self, store: StoreCollection, trust: trusting.Trust, file: BinaryIO
    ) -> tuple[copying.CopyPlan, Transfer]:
        """Return the plan, downloaded unless this is a dry run, and the result so far."""
        store.require_store()
        shown, digest = store.place.shown, store.digest
        if trust.digest is None:
            self._require_new(store)
        elif digest != trust.digest.lower():
            message = f"its digest is {digest}, not {trust.digest.lower()[:16]}…; somebody pushed to it, or changed it"
            raise trusting.OtherDigest(f"{shown}: {message}")
        result = Transfer(shown, digest, dry_run=self.dry_run)
        keys, here = self._keys(store, result), copying.LayerCollection(self.chosen)
        plan = copying.missing(store, here, keys, result, self.selection, besides=self.besides)
        if store.left_out and not store.trusted:
            what = "; ".join(f"{name}: {reason}" for name, reason in list(store.left_out.items())[:3])
            message = f"{shown}: no part of its index that is needed here is trusted ({what})"
            raise trusting.Untrusted(message)
        # An earlier attempt may have written to it.
        file.seek(0)
        for key, entries in plan:
            wanted = self._foreseen(key, entries, result)
            if self.dry_run:
                entries[:] = [stored.entry for stored in wanted]
            else:
                entries[:] = store.download(wanted, file, self.stack.environment.temporary)
        return plan, result

    def _require_new(self, store: StoreCollection) -> None:
        """Raise :class:`Untrusted` if the store is older than when this machine last read it, or another one."""
        newest, store.gone = store.memory.seen()
        if store.parts and not store.files.issuperset(newest):
            made, shown = wire.made_of(newest[0]), store.place.shown
            if not any(store.usable(name) for name in reversed(store.parts) if wire.made_of(name) > made):
                older = f"{shown} is older than this machine has seen it ({moment_text(made)}), or another store"
                raise trusting.Untrusted(f"{older}; cachectl pull {shown} --digest {store.digest} accepts it")

    def _keys(self, store: StoreCollection, result: Transfer) -> Iterator[wire.StoreKey]:
        """Yield the portability keys whose entries may be hit here, and note why others are not pulled."""
        chosen = {layer.name: layer for layer in self.chosen}
        for key in store.portability_keys():
            if (layer := chosen.get(key.layer)) is not None:
                denied = portability.why_not(layer.about.portability, self._differing(key))
                reason = layer.abilities()[Ability.PUT] if denied is None else denied.words
            elif key.layer in self.stack:
                reason = "this layer is pulled only if it is named"
            else:
                reason = "there is no layer with this name here"
            if reason is None:
                yield key
                continue
            number = plural(sum(wire.key_of(name) == key.name for name in store.parts), "part")
            result.unread += (Note(key.layer, f"{number} of the index not pulled: {reason}"),)

    def _differing(self, key: wire.StoreKey) -> Sequence[portability.Difference]:
        about = self.stack[key.layer].about
        return portability.differences(about.portability, key.facts, self.stack.environment)

    def _foreseen(
        self, key: wire.StoreKey, entries: Sequence[wire.StoredEntry], result: Transfer
    ) -> Iterator[wire.StoredEntry]:
        """Count the outlook of each entry, and yield those that can or may be hit."""
        declared, differing = self.stack[key.layer].about.portability, self._differing(key)
        outcome = result.layer(key.layer)
        # Looking up installed packages is slow.
        known: dict[tuple[object, ...], Outlook] = {}
        for stored in entries:
            versions = stored.entry.details.versions
            about = (stored.entry.details.device, *sorted(versions.items()))
            if about not in known:
                known[about] = portability.outlook(declared, versions, key.facts, self.stack.environment, differing)
            outcome.outlooks[known[about]] += 1
            if known[about].hits is False:
                outcome.cannot_hit += 1
            else:
                yield stored


# ---------------------------------------------------------------------- around a command


class RunStore(NamedTuple):
    """A shared store of a run: pulled before the command, and in the mode ``"rw"`` pushed to after it.

    ``trust`` says why it is trusted, and ``sign`` is an OpenSSH key for what is pushed. The pull and the push can each
    take ``wait`` seconds, by default :data:`place.PATIENCE`.
    """

    source: str
    trust: trusting.Trust
    mode: str = "rw"
    wait: float | None = None
    sign: str | None = None


@contextlib.contextmanager
def shared_around(
    stack: LayerSet,
    store: RunStore,
    notice: Callable[[str], None],
    layers: Sequence[str] = (),
    besides: copying.Keys | None = None,
) -> Iterator[None]:
    """Pull into the caches of ``stack``, run the block, and, in the mode ``"rw"``, push what the store lacks.

    The block runs in any case. ``notice`` gets a line for each layer with pulled or pushed entries, and for each
    problem. If the store is damaged, untrusted, too slow or cannot be reached, nothing is pulled or pushed. ``besides``
    are keys, by layer, that are neither pulled nor pushed. Raises :class:`BadRequest` before the block for an invalid
    option, including the digest of another store.
    """
    url, trust, mode, wait, sign = store
    if url == place.STREAM:
        raise BadRequest("the command uses the standard streams; name a store")
    writes, patience = mode == "rw", place.PATIENCE if wait is None else wait

    def say(transfer: Callable[..., Transfer], verb: str, failed: str) -> bool:
        try:
            outcome = transfer(layers=layers, besides=besides, deadline=time.monotonic() + patience)
        except Exception as error:
            # Whatever a server answers, the command runs; with an invalid option it does not.
            if verb == "pulled" and isinstance(error, (BadRequest, trusting.OtherDigest)):
                raise BadRequest(str(error)) from error
            # The push will make the store.
            if writes and verb == "pulled" and isinstance(error, place.Missing):
                return True
            reason = str(error) if isinstance(error, CachectlError) else f"{type(error).__name__}: {error}"
            notice(f"--store {printable(place.without_secrets(url))}: {failed}: {printable(reason)}")
            return False
        for layer in outcome.layers:
            if layer.placed:
                notice(f"store: {layer.layer}: {layer.placed:,} {verb}")
            copying.say_failed(layer.layer, f"not {verb}", layer.failed, notice)
        return True

    failed = "nothing is pulled or pushed" if writes else "nothing was pulled"
    usable = say(partial(pull, stack, url, trust), "pulled", failed)
    yield
    if usable and writes:
        from cachectl.watching.portable import remember

        with contextlib.suppress(CachectlError):
            remember(stack.environment)
        pushing = partial(push, stack, url, sign=sign, allowed_signers=trust.allowed_signers)
        say(pushing, "pushed", "nothing was pushed")
