"""Isolated roots: every layer moved under one folder, everything else left in place.

``XDG_CACHE_HOME`` moves several layers, and the caches of other programs. So the root contains a folder of links to all
that the real user cache folder holds, except the entries of the moved layers: large caches of other programs are not
filled again. What programs add to the folder itself, or replace in it, stays in the root: these are caches.

A temporary isolated root lies where no other user can write (:mod:`cachectl.layers.disk.temporaries`), because a
program may outlive its command and go on using the path. A killed command leaves its folder; the next one removes it.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachectl.layer_set import warn_user
from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.layer import Layer
from cachectl.layers.disk import atomic, temporaries

#: Variables that move several layers, and caches of other programs.
_SHARED: Final = frozenset({"XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"})
#: The temporary folders that this process has made and not yet removed.
_OWNED: Final[dict[Path, temporaries.Owned]] = {}


def make_kept_root(folder: Path, mode: int = 0o777) -> None:
    """Make an isolated root that is kept, if it is missing. Raises :class:`CachectlError`."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        message = (
            f"cannot make the root {errors.printable(folder)}: {error.strerror}; --isolated=DIR names another folder"
        )
        raise errors.CachectlError(message) from error


@contextmanager
def isolated_root(
    environment: Environment, folder: Path | None = None, notice: Callable[[str], None] = warn_user
) -> Iterator[Path]:
    """Yield ``folder``, created if missing, or a temporary one that is removed when the block ends.

    A forked child does not remove it. ``notice`` gets a line for each problem.
    """
    if folder is not None:
        make_kept_root(folder)
        yield folder.resolve()
        return
    root = make_isolated_root(environment, notice)
    owner = os.getpid()
    try:
        yield root
    finally:
        if os.getpid() == owner:
            remove_isolated_root(root)


def copy_isolated_root(source: Path, target: Path) -> None:
    """Copy the content of one isolated root into another; links stay links, pipes and sockets are left out."""
    shutil.copytree(source, target, symlinks=True, ignore=_special, dirs_exist_ok=True)


def make_isolated_root(environment: Environment, notice: Callable[[str], None] = warn_user) -> Path:
    """Make an empty isolated root in a private folder of this user, and remove those of killed commands there.

    Raises :class:`CachectlError` if there is no private folder, :class:`OSError` if nothing can be made in it.
    """
    remove_abandoned(environment)
    parent, elsewhere = temporaries.temporary_parent(environment)
    if elsewhere is not None:
        notice(elsewhere)
    return make_isolated_root_in(parent, environment)


def make_isolated_root_in(parent: Path, environment: Environment, prefix: str = temporaries.TEMPORARY) -> Path:
    """Make an empty isolated root in ``parent``, a private folder of this user. Raises :class:`OSError`."""
    owned = temporaries.Owned.make(parent, prefix, environment)
    _OWNED[owned.folder] = owned
    return owned.folder


def remove_isolated_root(root: Path) -> None:
    """Delete an isolated root."""
    atomic.remove_tree(root)
    owned = _OWNED.pop(root, None)
    if owned is not None:
        owned.forget()


def remove_abandoned(environment: Environment, parents: Iterable[Path] | None = None) -> int:
    """Remove the temporary folders that killed commands left in ``parents``; return the number removed.

    ``parents`` are private folders of this user, by default those that :func:`make_isolated_root` uses.
    """
    removed = 0
    for parent in temporaries.temporary_parents(environment) if parents is None else parents:
        for folder in temporaries.abandoned_in(parent, environment):
            atomic.remove_tree(folder)
            removed += not folder.exists()
    return removed


def can_switch(layer: Layer) -> bool:
    """Return whether anything switches the layer."""
    return layer.abilities()[facts.Ability.DISABLE] is None


def relocations(layers: Iterable[Layer], folder: Path) -> dict[str, facts.Switch]:
    """Return, for each layer that can be moved, how to move it under the folder."""
    return {layer.name: layer.relocate(folder) for layer in layers if layer.abilities()[facts.Ability.RELOCATE] is None}


def make_folders(switches: Iterable[facts.Switch]) -> None:
    """Make the folders that moved libraries need and do not make themselves."""
    for switch in switches:
        for folder in switch.makes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def companions(layers: Iterable[Layer], everything: Iterable[Layer], folder: Path) -> tuple[str, ...]:
    """Return the names of layers that move too because they follow a variable that moves one of the given layers."""
    moved = relocations(layers, folder)
    shared = {variable for switch in moved.values() for variable in switch.set} & _SHARED
    return tuple(
        name
        for name, switch in relocations(everything, folder).items()
        if name not in moved and shared & switch.set.keys()
    )


def link_cache_home(environment: Environment, layers: Iterable[Layer], folder: Path) -> None:
    """Link everything in the user cache folder below an isolated root, except the entries of the given layers."""
    own, links = user_cache_folder(environment, "any")[0], folder / "xdg"
    # On Windows an application's folder is any/any/Cache.
    real = own.parents[2] if environment.platform == "win32" else own.parent
    if real.resolve() == links.resolve():
        # Nested block in the same folder: it is already empty, or warm on purpose.
        return
    links.mkdir(parents=True, exist_ok=True)
    hidden: set[str] = set()
    for layer in layers:
        # A layer with a variable of its own needs no hiding.
        if layer.abilities()[facts.Ability.RELOCATE] is None and _SHARED & layer.relocate(folder).set.keys():
            hidden.update(root.path.relative_to(real).parts[0] for root in layer.roots() if real in root.path.parents)
    for name in _names(links):
        # Links of an earlier run that are broken or now hidden.
        is_ours = os.path.islink(links / name) and os.readlink(links / name) == str(real / name)
        if is_ours and (name in hidden or not os.path.lexists(real / name)):
            atomic.remove_file(links / name)
    for name in _names(real):
        # A root within the real folder must not link to itself.
        if name not in hidden and (real / name) not in (links, *links.parents):
            with suppress(FileExistsError):
                os.symlink(real / name, links / name)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _special(folder: str, names: list[str]) -> list[str]:
    """Return the names that are neither file, folder nor link: opening one to copy it could block forever."""
    modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
    return [name for name, mode in modes if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))]
