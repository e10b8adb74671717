"""A read-only base: every layer starts warm from a folder that nobody may write, and keeps new entries in an own root.

The base is laid out as the folder of ``run --isolated=DIR``. Each layer's store says how its entries get into the own
root; the base never changes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import user_cache_folder
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Ability, Brought, Entry, Note
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.private_folders import NotPrivate, private_folder
from cachectl.layers.disk.trust import open_to_others
from cachectl.switching.isolated import NoRoot
from cachectl.switching.run import environment_of

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

#: The folder of own roots in the user cache folder of cachectl.
_BASES: Final = "bases"
#: Reasons of failures that are named.
_FEW: Final = 10


@dataclass(frozen=True, slots=True)
class LayerStart:
    """How the entries of one layer came from a base into the own root."""

    layer: str
    brought: Brought

    @property
    def words(self) -> str:
        """Return it as text; empty if the base has nothing of the layer."""
        named = {
            "linked": self.brought.linked,
            "cloned": self.brought.cloned,
            "copied": self.brought.copied,
            "there before": self.brought.present,
            "links dropped": self.brought.dropped,
        }
        counts = [f"{number:,} {word}" for word, number in named.items() if number]
        return f"{self.layer}: {', '.join(counts)}" if counts else ""


@dataclass(frozen=True, slots=True)
class Start:
    """A base, the own root that was started from it, and what each layer brought."""

    base: Path
    root: Path
    layers: tuple[LayerStart, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a line for each layer that the base has entries of, and for each failure."""
        said = [f"base: {layer.words}" for layer in self.layers if layer.words]
        first = {(layer.layer, note.because): note.key for layer in self.layers for note in layer.brought.failed}
        count = Counter((layer.layer, note.because) for layer in self.layers for note in layer.brought.failed)
        failed = [f"base: {name}: {count[name, why]:,} left ({first[name, why]}, …): {why}" for name, why in first]
        return (*said, *failed[:_FEW])


def own_root(environment: Environment, base: Path) -> Path:
    """Return the own root of a base, existing or not: a folder of the user cache folder named by the base's path.

    Links on the path are not resolved: if ``/site/current`` leads to a new release, the own entries stay in use.
    """
    name = hashlib.sha256(os.fsencode(base)).hexdigest()[:16]
    return user_cache_folder(environment, "cachectl")[0] / _BASES / name


def make_own_root(environment: Environment, base: Path) -> Path:
    """Make the own root of a base if it is missing; return it, or the private folder in it.

    See :func:`~cachectl.layers.disk.private_folders.private_folder`. Raises :class:`NoRoot`, also if another user could
    replace what is in it.
    """
    root = own_root(environment, base)
    try:
        return private_folder(root, make=True)
    except (NotPrivate, OSError) as error:
        reason = str(error) if isinstance(error, NotPrivate) else f"{printable(root)}: {reason_of(error)}"
        message = f"cannot make the own root: {reason}; --isolated=OWN names another one, for env --root OWN"
        raise NoRoot(message) from error


def base_at(environment: Environment, folder: str | Path) -> Path:
    """Return the absolute path of a base. Raises :class:`BadRequest` if there is no such folder."""
    base = Path(os.path.normpath(environment.expand(os.fspath(folder))))
    if not folder or not base.is_dir():
        raise BadRequest(f"--base {os.fspath(folder)!r} is no folder")
    return base


def start_from(
    environment: Environment,
    base: Path,
    root: Path | None = None,
    *,
    layers: Iterable[str] = (),
    notice: Callable[[str], None],
) -> Start:
    """Bring the entries of a base into an own root, which is made if missing; of the named layers, or of all.

    Without ``root`` it is that of :func:`make_own_root`. Raises :class:`BadRequest` if one folder is in the other, and
    :class:`OSError` if the own root cannot be made.
    ``notice`` gets a line if other users can write to the base.
    """
    root = make_own_root(environment, base) if root is None else root
    there, here = base.resolve(), root.resolve()
    if there == here or there in here.parents or here in there.parents:
        raise BadRequest(f"the base {base} and the own root {root} must not contain one another")
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (place := next(open_to_others(base), None)) is not None:
        notice(f"base: other users can write to {place}, and programs run what is in a base")
    own = LayerSet(environment_of(environment, here))
    names = tuple(layers)
    chosen = [layer for layer in own if (not names or layer.name in names) and _can_start(layer)]
    return Start(base, here, tuple(LayerStart(layer.name, _brought(layer, base, here)) for layer in chosen))


def _can_start(layer: Layer) -> bool:
    abilities = layer.abilities()
    return abilities[Ability.RELOCATE] is None and abilities[Ability.PUT] is None


def _brought(layer: Layer, base: Path, root: Path) -> Brought:
    """Ask one layer; its failure must not stop the others."""
    try:
        return layer.bring_from(base, root)
    except FAILURES as error:
        return Brought(failed=(Note(str(base), reason_of(error)),))


def base_keys(environment: Environment, base: Path, layers: Iterable[str] = ()) -> Mapping[str, frozenset[str]]:
    """Return the keys of the entries of a base, by layer: what an own root has from it, or need not have.

    A root that was started from the base has more keys than these exactly if programs have stored new entries.
    """
    names = tuple(layers)
    return {
        layer.name: frozenset(_keys(layer, base))
        for layer in LayerSet(environment_of(environment, base))
        if not names or layer.name in names
    }


def _keys(layer: Layer, base: Path) -> Iterator[str]:
    for root in layer.roots():
        # What cannot be read is not brought either, as the start from the base says.
        with suppress(*FAILURES):
            if base in root.path.parents:
                yield from (found.key for found in layer.scan(root, contents=False) if isinstance(found, Entry))
