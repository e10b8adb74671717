"""Isolated roots and database files of a product, whose layers are collections too."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cachectl.exchange.trust import Untrusted
from cachectl.layer_set import LayerSet
from cachectl.layers.base import environment as environments
from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Ability
from cachectl.layers.base.layer import Layer
from cachectl.layers.disk import trust
from cachectl.switching import isolated, run

_SQLITE: Final = b"SQLite format 3\0"


def root_of(environment: Environment, folder: Path) -> LayerSet | None:
    """Return the layers of an isolated root, of a folder for ``XDG_CACHE_HOME``, or of a home; ``None`` for others."""
    # What cachectl remembers stays with the user: a source is only read.
    state = {"XDG_STATE_HOME": str(environments.user_state_folder(environment).parent)}
    bare = _bare(environment).with_variables(state)
    below_home = replace(bare.with_variables({"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}), home=folder)
    in_cache, in_home = _folders(bare)
    if (folder / "xdg").is_dir():
        changes: dict[str, str] = {}
        for switch in isolated.relocations(LayerSet(bare), folder).values():
            changes.update(switch.set)
        return LayerSet(bare.with_variables(changes))
    if any((folder / name).is_dir() for name in in_cache):
        # Layers below the home find nothing, because such a folder contains no home.
        return LayerSet(below_home)
    if any((folder / name).is_dir() for name in in_home):
        return LayerSet(replace(bare.with_variables({"HOME": str(folder)}), home=folder))
    return None


def _folders(bare: Environment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the folders that layers keep in a user cache folder, and in a home folder."""
    cache, home = Path("/cache"), Path("/home")
    environment = replace(bare.with_variables({"XDG_CACHE_HOME": str(cache), "HOME": str(home)}), home=home)
    places = [root.path for layer in LayerSet(environment).clearable() for root in layer.roots()]
    found = ([path.relative_to(top).parts[0] for path in places if top in path.parents] for top in (cache, home))
    in_cache, in_home = (tuple(dict.fromkeys(names)) for names in found)
    # Without the variable, a cache folder lies in the home.
    return in_cache, tuple(dict.fromkeys((".cache", *in_home)))


def _bare(environment: Environment) -> Environment:
    """Drop every variable that moves a layer, or switches one off: they are meant for other folders."""
    layers = tuple(LayerSet(environment))
    switches = [layer.disable() for layer in layers if layer.abilities()[Ability.DISABLE] is None]
    names = {name for switch in (*switches, *isolated.relocations(layers, Path("/")).values()) for name in switch.set}
    return environment.with_variables(dict.fromkeys(names))


def require_own(path: Path, folders: Iterable[Path] = ()) -> None:
    """Raise :class:`Untrusted` if another user could have written to a database file, or to a root.

    ``folders`` are those of the root's layers; whatever lies in them counts.
    """
    owner = trust.deciding_owner(path)
    folder, names = (path, ()) if path.is_dir() else (path.parent, (path.name,))
    reason = trust.shared_because(folder, names)
    if owner is not None:
        reason = f"it belongs to {environments.user_name(owner.st_uid)}"
    for one in folders if reason is None else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            reason = reason or trust.shared_within(one)
    if reason is not None:
        message = (
            f"{errors.printable(path)}: another user can write it ({reason}); pass --trust if you trust its content"
        )
        raise Untrusted(message)


def place_of_file(layers: Iterable[Layer], file: Path) -> tuple[Layer, Path] | None:
    """Return the layer of a database file, and where the file belongs in its first root; ``None`` for other files."""
    for layer in layers:
        if (place := layer.place_of_file(file)) is not None:
            return layer, place
    return None


@contextmanager
def layers_with_file(
    environment: Environment, layer: Layer, file: Path, place: Path
) -> Iterator[tuple[LayerSet, Path]]:
    """Yield the layers of a temporary root with a copy of a database file in its place, and that copy's path."""
    with isolated.isolated_root(environment) as root:
        stack = LayerSet(run.environment_of(environment, root.resolve()))
        copied = stack[layer.name].roots()[0].path / place
        copied.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            copy_database(file, copied)
        yield stack, copied


def copy_database(source: Path, target: Path) -> None:
    """Copy a database file, in sqlite with what is only in its log. Raises :class:`OSError`."""
    with open(source, "rb") as file:
        is_sqlite = file.read(len(_SQLITE)) == _SQLITE
        file.seek(0)
        if not is_sqlite:
            target.write_bytes(file.read())
            return
    try:
        there = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        with closing(there), closing(sqlite3.connect(target)) as here:
            there.backup(here)
            here.execute("pragma journal_mode=delete")
    except sqlite3.Error as error:
        raise errors.LayerError("sqlite", f"cannot be read: {error}", source) from error
    os.chmod(target, 0o600)
