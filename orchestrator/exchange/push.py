"""Push: add to a store, or to a database file of a product, what it lacks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachectl.exchange import copying, portability, trust
from cachectl.exchange.format import StoreKey
from cachectl.exchange.place import Changed, Deadline, TransferFailed, in_time, is_url, without_secrets
from cachectl.exchange.store import StoreCollection, place_of
from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk import atomic, handles
from cachectl.layers.stores import database
from cachectl.transfer import Transfer

#: How often a push starts again because another command has written the bundle meanwhile.
_AGAIN: Final = 100


def push(
    stack: LayerSet,
    target: str | Path,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] | None = None,
    sign: str | None = None,
    allowed_signers: str | None = None,
    force: bool = False,
    own: Environment | None = None,
    deadline: Deadline | None = None,
) -> Transfer:
    """Add the selected entries of the named layers, or of every clearable layer, that the store at a target lacks.

    ``besides`` are keys, by layer, that are left out. ``sign`` is an OpenSSH key. An entry counts as present if a part
    lists it that ``sign`` or a signer of ``allowed_signers`` has signed; without both, if any part does. ``force``
    replaces a file that is not a bundle. ``own`` is the environment that keeps index parts for the next command, by
    default that of ``stack``. Raises :class:`BadStore` if the store is damaged, :class:`TransferFailed` or
    :class:`OSError` if it cannot be reached or written, also by ``deadline``, and :class:`BadRequest` if the key cannot
    sign.
    """
    named = tuple(layers)
    chosen = stack.chosen(named)
    here = own or stack.environment
    name = os.fspath(target)
    file = None if is_url(name) else here.expand(name)
    of_file = None if file is None else copying.place_of_file(chosen, file)
    with trust.allowed_lists(here, sign, allowed_signers) as allowed:

        def to_store() -> Transfer:
            place = place_of(target, here, writes=True, force=force)
            store = StoreCollection(place, here, allowed, key=sign, deadline=deadline)
            result = push_layers(stack, store, chosen, selection, besides, named=bool(named))
            store.finish()
            result.digest, result.moved = store.digest, store.written
            return result

        for _ in range(_AGAIN):
            # Another command may have written the file meanwhile.
            with suppress(Changed):
                if file is not None and of_file is not None:
                    return _push_to_file(stack, file, *of_file, selection)
                return in_time(deadline, to_store)
    raise Changed(errors.printable(without_secrets(name)))


def push_layers(
    stack: LayerSet,
    store: StoreCollection,
    chosen: Iterable[Layer],
    selection: Selection = ALL,
    besides: Mapping[str, Collection[str]] | None = None,
    *,
    named: bool = False,
) -> Transfer:
    """Write the selected entries of layers that a store lacks; a layer that cannot be read is a failure if named."""
    result = Transfer(store.place.shown)
    source = copying.LayerCollection(
        sorted(chosen, key=lambda layer: layer.name), describes=not selection.needs_contents
    )
    keys = []
    for name, layer in source.layers.items():
        done = result.layer(name)
        if (reason := layer.abilities()[facts.Ability.GET]) is None:
            keys.append(StoreKey(name, portability.portability_key(layer.about.portability, stack.environment)))
        elif named:
            done.failed.append(facts.Note("*", f"cannot get: {reason}"))
    copying.copy(source, store, copying.missing(source, store, keys, selection, result, besides=besides))
    for done in result.layers:
        done.sensitive = source.layers[done.layer].about.reveals if done.placed else None
    return result


def _push_to_file(stack: LayerSet, file: Path, layer: Layer, place: Path, selection: Selection) -> Transfer:
    """Add to a database file the entries of its layer that belong to it, through a copy of the file."""
    result, target = Transfer(str(file)), file.resolve()
    done = result.layer(layer.name)
    with _locked(target) as before, copying.layers_with_file(stack.environment, layer, target, place) as (at, copied):
        source, copies = (
            copying.LayerCollection([layer], prefix=place.as_posix()),
            copying.LayerCollection([at[layer.name]]),
        )
        plan = copying.missing(source, copies, [StoreKey(layer.name, {})], selection, result)
        copying.copy(source, copies, plan)
        if done.placed:
            flat = copied.with_name(f"{copied.name}.flat")
            copying.copy_database(copied, flat)
            if _state_of(target) != before:
                raise Changed(str(file))
            try:
                atomic.replace_file(target, [flat.read_bytes()], new=before is None)
            except FileExistsError as error:
                raise Changed(str(file)) from error
            except OSError as error:
                raise TransferFailed(f"cannot write {errors.printable(file)}: {error.strerror or error}") from error
            done.sensitive = layer.about.reveals
            result.moved = file.stat().st_size
    return result


@contextmanager
def _locked(file: Path) -> Iterator[tuple[int, ...] | None]:
    """Yield the state of a database file while no other push changes it; ``None`` if there is no file.

    Raises :class:`TransferFailed` for a database with a log or a journal: it belongs to the file that is replaced.
    """
    try:
        opened = open(file, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        yield None
        return
    with opened:
        handles.take_flock(opened.fileno(), wait=True)
        if not handles.is_same_file(file, opened.fileno()):
            raise Changed(str(file))
        for suffix in database.COMPANIONS:
            if os.path.lexists(beside := database.companion(file, suffix)):
                why = f"a program uses it, or was killed while it did: {errors.printable(beside.name)} is there"
                raise TransferFailed(
                    f"cannot write {errors.printable(file)}: {why}; end the program, or push to a new FILE"
                )
        yield _state_of(file)


def _state_of(file: Path) -> tuple[int, ...] | None:
    with suppress(FileNotFoundError):
        status = os.stat(file)
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return None
