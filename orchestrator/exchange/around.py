"""What surrounds a command: a store to pull from and push to, and a read-only base to start from.

A base is laid out as the folder of ``run --isolated=DIR``. What the own root lacks is copied from it; the base never
changes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cachectl.exchange import copying
from cachectl.exchange.format import StoreKey
from cachectl.exchange.place import STREAM, Deadline, Missing, without_secrets
from cachectl.exchange.pull import pull
from cachectl.exchange.push import push
from cachectl.exchange.trust import Trust
from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment, own_roots_folder
from cachectl.layers.base.facts import Ability
from cachectl.layers.base.selection import ALL
from cachectl.layers.disk import private_folders
from cachectl.layers.disk.trust import open_to_others
from cachectl.switching import isolated
from cachectl.switching.run import environment_of
from cachectl.transfer import Transfer

#: Seconds that a store may delay a command, by default.
PATIENCE: Final = 30.0
#: Reasons of failures that are named for a layer.
_REASONS: Final = 3


@dataclass(frozen=True, slots=True)
class StoreUse:
    """A shared store around a command: why it is trusted, and whether new entries are pushed, signed by a key.

    ``seconds`` is how long it may delay the command, and how long the push after it may take.
    """

    url: str
    trust: Trust
    writes: bool = True
    sign: str | None = None
    seconds: float = PATIENCE

    def __post_init__(self) -> None:
        if self.url == STREAM:
            raise errors.BadRequest("the standard streams are the command's; name a store")


@contextmanager
def shared_around(
    stack: LayerSet,
    use: StoreUse,
    notice: Callable[[str], None],
    *,
    layers: Sequence[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    own: Environment | None = None,
) -> Iterator[None]:
    """Pull into the caches of ``stack``, run the block, and push what the store lacks.

    ``notice`` gets a line for each layer of which entries were pulled or pushed, and for each thing that went wrong:
    the block runs in any case. If the store is damaged, not trusted, too slow or cannot be reached, nothing is pulled
    or pushed. ``besides`` are the keys, by layer, that are neither pulled nor pushed. ``own`` is the environment that
    keeps what this machine remembers of stores, by default that of ``stack``.
    """
    writes = use.writes

    def say(transfer: Callable[[], Transfer], verb: str, failed: str) -> bool:
        try:
            done = transfer()
        except Exception as error:  # noqa: BLE001 - whatever a server answers, the command runs
            # The push will make the store.
            if writes and verb == "pulled" and isinstance(error, Missing):
                return True
            reason = str(error) if isinstance(error, errors.CachectlError) else f"{type(error).__name__}: {error}"
            notice(f"--store {errors.printable(without_secrets(use.url))}: {failed}: {errors.printable(reason)}")
            return False
        for layer in done.layers:
            if layer.placed:
                notice(f"store: {layer.layer}: {layer.placed:,} {verb}")
            _say_failed(layer.layer, f"not {verb}", layer.failed, notice)
        return True

    given: dict[str, Any] = {"layers": layers, "besides": besides, "own": own}
    pulling = partial(pull, stack, use.url, use.trust, deadline=Deadline(use.seconds), **given)
    usable = say(pulling, "pulled", "nothing is pulled or pushed" if writes else "nothing was pulled")
    yield
    if usable and writes:
        given |= {"sign": use.sign, "allowed_signers": use.trust.allowed_signers}
        pushing = partial(push, stack, use.url, deadline=Deadline(use.seconds), **given)
        say(pushing, "pushed", "nothing was pushed")


def _say_failed(layer: str, what: str, failed: Sequence[facts.Note], notice: Callable[[str], None]) -> None:
    """Give a line for each reason, not for each entry: a read-only home may refuse thousands."""
    first = {note.because: note.key for note in reversed(failed)}
    for because, number in Counter(note.because for note in failed).most_common(_REASONS):
        notice(f"{layer}: {number:,} {what} ({first[because]}{', …' if number > 1 else ''}): {because}")


# ---------------------------------------------------------------------- bases


def own_root(environment: Environment, base: Path) -> Path:
    """Return the own root of a base, existing or not: a folder of the user cache folder named by the base's path.

    Links on the path are not resolved: if ``/site/current`` leads to a new release, the own entries stay in use.
    """
    name = hashlib.sha256(os.fsencode(base)).hexdigest()[:16]
    return own_roots_folder(environment) / name


def make_own_root(environment: Environment, base: Path) -> Path:
    """Make the own root of a base if it is missing; return it, or the private folder in it.

    See :func:`~cachectl.layers.disk.private_folders.private_folder`. Raises :class:`NoRoot`, also if another user could
    replace what is in it.
    """
    root = own_root(environment, base)
    try:
        return private_folders.private_folder(root, make=True)
    except (private_folders.NotPrivate, OSError) as error:
        reason = (
            str(error)
            if isinstance(error, private_folders.NotPrivate)
            else f"{errors.printable(root)}: {errors.reason_of(error)}"
        )
        message = f"cannot make the own root: {reason}; --isolated=OWN names another one, for env --root OWN"
        raise isolated.NoRoot(message) from error


def base_at(environment: Environment, folder: str | Path) -> Path:
    """Return the absolute path of a base. Raises :class:`BadRequest` if there is no such folder."""
    base = Path(os.path.normpath(environment.expand(os.fspath(folder))))
    if not folder or not base.is_dir():
        raise errors.BadRequest(f"--base {os.fspath(folder)!r} is not a directory")
    return base


def start_from(
    environment: Environment,
    base: Path,
    root: Path | None = None,
    *,
    layers: Iterable[str] = (),
    notice: Callable[[str], None],
) -> Path:
    """Copy what an own root lacks from a base, of the named layers or of all; return the own root.

    Without ``root`` it is that of :func:`make_own_root`. ``notice`` gets a line for each layer that the base has
    entries of, for each kind of failure, for a base without entries, and if other users can write to it. Raises
    :class:`BadRequest` if one folder is in the other, and :class:`OSError` if the own root cannot be made.
    """
    root = make_own_root(environment, base) if root is None else root
    there, here = base.resolve(), root.resolve()
    if there == here or there in here.parents or here in there.parents:
        raise errors.BadRequest(f"the base {base} and the own root {root} must not contain one another")
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (place := next(open_to_others(base), None)) is not None:
        notice(f"base: other users can write to {place}, and programs run what is in a base")
    source, own = LayerSet(environment_of(environment, base)), LayerSet(environment_of(environment, here))
    keys = []
    for name in tuple(layers) or tuple(layer.name for layer in own):
        abilities = own[name].abilities()
        if name in source and abilities[Ability.RELOCATE] is None and abilities[Ability.PUT] is None:
            keys.append(StoreKey(name, {}))
    result, whole, part = Transfer(str(base)), copying.Layers(source), copying.Layers(own)
    copying.copy(whole, part, copying.missing(whole, part, keys, ALL, result))
    for done in result.layers:
        said = {"copied": done.placed, "there before": done.there}
        if words := ", ".join(f"{number:,} {word}" for word, number in said.items() if number):
            notice(f"base: {done.layer}: {words}")
        _say_failed(f"base: {done.layer}", "left", done.failed, notice)
    if not any(done.placed or done.there or done.failed for done in result.layers):
        notice(f"base: {base} has no entry of any layer; cachectl run --isolated={base} -- COMMAND makes some")
    return here


def base_keys(environment: Environment, base: Path, layers: Iterable[str] = ()) -> Mapping[str, frozenset[str]]:
    """Return the keys of the entries of a base, by layer: what an own root has from it, or need not have."""
    names = tuple(layers)
    source = LayerSet(environment_of(environment, base))
    return {layer.name: copying.keys_of(layer) for layer in source if not names or layer.name in names}
