"""Roots to throw away: every layer moved under one scratch folder, everything else left where it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.environment import Environment, user_cache_folder
from cachectl.layers.facts import Ability, Switch

if TYPE_CHECKING:
    from cachectl.layers.layer import Layer

#: Variables that move more than one layer, and much that is no layer at all.
_SHARED: Final = frozenset({"XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"})


@contextmanager
def scratch_folder(folder: Path | None = None) -> Iterator[Path]:
    """Yield a folder to keep (made if need be), or a temporary one that goes when the block ends."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cachectl-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def can_switch(layer: Layer) -> bool:
    """Tell whether anything switches the layer."""
    return layer.abilities()[Ability.DISABLE] is None


def relocations(layers: Iterable[Layer], folder: Path) -> dict[str, Switch]:
    """Return, for each layer that can be moved, how to move it under the folder."""
    return {layer.name: layer.relocate(folder) for layer in layers if layer.abilities()[Ability.RELOCATE] is None}


def companions(layers: Iterable[Layer], everything: Iterable[Layer], folder: Path) -> tuple[str, ...]:
    """Name the layers that move along because they follow a variable that moves one of the given layers."""
    moved = relocations(layers, folder)
    shared = {variable for switch in moved.values() for variable in switch.set} & _SHARED
    return tuple(
        name
        for name, switch in relocations(everything, folder).items()
        if name not in moved and shared & switch.set.keys()
    )


@contextmanager
def shadow_user_cache(environment: Environment, layers: Iterable[Layer], folder: Path) -> Iterator[None]:
    """Let the user cache folder's stand-in show everything but what the given layers keep there.

    Programs that are no layer follow ``XDG_CACHE_HOME`` too, and so do layers that stay: they must not
    notice. What they have there is linked; what they newly make there is moved home when the block ends.
    """
    real = user_cache_folder(environment, "any")[0].parent
    stand_in = folder / "xdg"
    stand_in.mkdir(parents=True, exist_ok=True)
    roots = [root.path for layer in layers for root in layer.roots() if real in root.path.parents]
    ours = {root.relative_to(real).parts[0] for root in roots}
    for name in _names(real):
        if name not in ours:
            with suppress(FileExistsError):
                os.symlink(real / name, stand_in / name)
    try:
        yield
    finally:
        for name in _names(stand_in):
            if name not in ours and not (stand_in / name).is_symlink():
                _move_home(stand_in / name, real / name)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _move_home(path: Path, home: Path) -> None:
    if os.path.lexists(home):
        # Another program made it meanwhile; what is a cache may be lost, what stands must not be.
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, home)
