"""``cachectl merge``: merge the folders of several ranks into one; every entry is placed once, as by ``put``.

A root is a folder given to ``run --isolated`` or ``env --root``, the value of ``XDG_CACHE_HOME``, or a home folder; its
content shows which. Any other folder is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.inspecting.entries import Trouble, listed
from cachectl.layer_set import LayerSet
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest, EntryExists, reason_of
from cachectl.layers.base.facts import Ability, Note
from cachectl.layers.base.selection import ALL
from cachectl.layers.base.texts import printable
from cachectl.switching.isolated import relocations
from cachectl.switching.run import variables_isolated

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass
class MergedLayer:
    """The result of a merge for one layer.

    ``there`` counts identical entries that were present already; ``kept`` lists different ones of a present key, which
    were not placed.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    kept: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MergedTotal:
    """The sums over all layers."""

    placed: int
    bytes: int
    there: int
    kept: int
    failed: int


@dataclass(frozen=True, slots=True)
class MergedRoots:
    """The result of a merge, for each layer that had an entry."""

    layers: tuple[MergedLayer, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/merge/1", also=("total",))

    @property
    def total(self) -> MergedTotal:
        """Return the sums over all layers."""
        return total(MergedTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether anything could not be read or placed."""
        return any(layer.failed for layer in self.layers)


def merge_roots(environment: Environment, roots: Sequence[Path], into: Path) -> MergedRoots:
    """Place every entry of the roots in ``into``, which has the layout of ``run --isolated`` and is made if missing.

    The roots are only read. Raises :class:`BadRequest` for a folder that is no root, before anything is written.
    """
    sources = [root_stack(environment, root) for root in roots]
    bare = _bare(environment)
    if into.exists() and (not into.is_dir() or (any(into.iterdir()) and not (into / "xdg").is_dir())):
        message = f"{printable(into)} is not empty and not a root; name a new folder, or one that run --isolated kept"
        raise BadRequest(message)
    into.mkdir(parents=True, exist_ok=True)
    changes = variables_isolated(LayerSet(bare).clearable(), into)
    target = LayerSet(_with(bare, changes))
    merged = [MergedLayer(layer.name) for layer in target.clearable()]
    for source in sources:
        for done in merged:
            if done.layer in source:
                _merge_layer(source[done.layer], target[done.layer], done)
    return MergedRoots(tuple(done for done in merged if done.placed or done.there or done.kept or done.failed))


def root_stack(environment: Environment, root: Path) -> LayerSet:
    """Return the layers of a root. Raises :class:`BadRequest` for any other folder."""
    bare = _bare(environment)
    in_cache, in_home = _folders(bare)
    if (root / "xdg").is_dir():
        layers = LayerSet(bare).clearable()
        changes: dict[str, str | None] = {}
        for switch in relocations(layers, root).values():
            changes.update(switch.set)
        return LayerSet(_with(bare, changes))
    if any((root / name).is_dir() for name in in_cache):
        # Layers below the home find nothing, because such a folder contains no home.
        return LayerSet(replace(_with(bare, {"XDG_CACHE_HOME": str(root), "HOME": str(root)}), home=root))
    if any((root / name).is_dir() for name in in_home):
        return LayerSet(replace(_with(bare, {"HOME": str(root)}), home=root))
    message = f"{printable(root)} is not a root: it contains neither xdg nor any of {', '.join((*in_cache, *in_home))}"
    raise BadRequest(message)


def _folders(bare: Environment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the folders that layers keep in a user cache folder, and in a home folder."""
    cache, home = Path("/cache"), Path("/home")
    environment = replace(_with(bare, {"XDG_CACHE_HOME": str(cache), "HOME": str(home)}), home=home)
    places = [root.path for layer in LayerSet(environment).clearable() for root in layer.roots()]
    found = ([path.relative_to(top).parts[0] for path in places if top in path.parents] for top in (cache, home))
    in_cache, in_home = (tuple(dict.fromkeys(names)) for names in found)
    # Without the variable, a cache folder lies in the home.
    return in_cache, tuple(dict.fromkeys((".cache", *in_home)))


def _bare(environment: Environment) -> Environment:
    """Drop every variable that moves a layer, or switches one off: they are meant for other folders."""
    layers = tuple(LayerSet(environment))
    switches = [layer.disable() for layer in layers if layer.abilities()[Ability.DISABLE] is None]
    names = {name for switch in (*switches, *relocations(layers, Path("/")).values()) for name in switch.set}
    return environment.with_variables({}, frozenset(names))


def _with(environment: Environment, changes: dict[str, str] | dict[str, str | None]) -> Environment:
    unset = frozenset(name for name, value in changes.items() if value is None)
    return environment.with_variables({name: value for name, value in changes.items() if value is not None}, unset)


def _merge_layer(source: Layer, target: Layer, done: MergedLayer) -> None:
    if source.abilities()[Ability.GET] is not None:
        return

    def notice(trouble: Trouble) -> None:
        if trouble.failed:
            done.failed.append(Note("*", trouble.message))

    for entry in listed((source,), ALL, notice):
        if entry.guest is None:
            _merge_entry(source, target, entry.key, done)


def _merge_entry(source: Layer, target: Layer, key: str, done: MergedLayer) -> None:
    try:
        artifact = source.get(key)
        if artifact is None:
            return
        there = target.get(key)
        if there is not None and there.data == artifact.data:
            done.there += 1
            return
        target.put(key, artifact)
    except EntryExists:
        done.kept.append(Note(key, "a different entry of this key was there first, and stays"))
    except FAILURES as error:
        done.failed.append(Note(key, reason_of(error)))
    else:
        done.placed += 1
        done.bytes += len(artifact.data)
