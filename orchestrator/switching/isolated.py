"""Isolated roots: every layer moved under one folder, everything else left in place.

A temporary isolated root lies where no other user can write (:mod:`cachectl.layers.disk.private_folders`), because a
program may outlive its command and go on using the path. A killed command leaves its folder; the next one removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.facts import Ability, Orphan, Switch
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.atomic import place_new
from cachectl.layers.disk.copies import PREFIX, abandoned_copies, stage_in, user_cache_home
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.disk.private_folders import temporary_parent, temporary_parents
from cachectl.layers.disk.temporaries import TEMPORARY, Abandoned, Owned, abandoned_in

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

#: Variables that move several layers, and caches of other programs.
_SHARED: Final = frozenset({"XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"})
#: Temporary folders that still hold something that could not be moved home.
_KEPT: Final[set[Path]] = set()
#: The temporary folders that this process has made and not yet removed.
_OWNED: Final[dict[Path, Owned]] = {}


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=2)


class NoRoot(CachectlError, OSError):
    """An isolated root that is kept cannot be made."""


def make_kept_root(folder: Path, mode: int = 0o777) -> None:
    """Make an isolated root that is kept, if it is missing. Raises :class:`NoRoot`."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the root {printable(folder)}: {error.strerror}; --isolated=DIR names another folder"
        raise NoRoot(message) from error


@contextmanager
def isolated_root(
    environment: Environment, folder: Path | None = None, notice: Callable[[str], None] = _warn
) -> Iterator[Path]:
    """Yield ``folder``, created if missing, or a temporary one that is removed when the block ends.

    A temporary one stays if :func:`overlay_cache_home` could not move all files home. A forked child does not remove
    it. ``notice`` gets a line for each problem.
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


def make_isolated_root(environment: Environment, notice: Callable[[str], None] = _warn) -> Path:
    """Make an empty isolated root in a private folder of this user, and remove those of killed commands there.

    Raises :class:`CachectlError` if there is no private folder, :class:`OSError` if nothing can be made in it.
    """
    remove_abandoned(environment, notice)
    parent, elsewhere = temporary_parent(environment)
    if elsewhere is not None:
        notice(elsewhere)
    return make_isolated_root_in(parent, environment)


def make_isolated_root_in(parent: Path, environment: Environment, prefix: str = TEMPORARY) -> Path:
    """Make an empty isolated root in ``parent``, a private folder of this user. Raises :class:`OSError`."""
    owned = Owned.make(parent, prefix, environment)
    _OWNED[owned.folder] = owned
    return owned.folder


def remove_isolated_root(root: Path) -> None:
    """Delete an isolated root, unless it still holds something that could not be moved home."""
    if root not in _KEPT:
        _remove(root)
    owned = _OWNED.pop(root, None)
    if owned is not None:
        owned.forget()


def remove_abandoned(
    environment: Environment, notice: Callable[[str], None], parents: Iterable[Path] | None = None
) -> int:
    """Remove the temporary folders that killed commands left in ``parents``; return the number removed.

    ``parents`` are private folders of this user, by default those that :func:`make_isolated_root` uses. User cache
    files of other programs in an abandoned isolated root are moved home first. ``notice`` gets a line for each file
    that cannot be moved; the root stays.
    """
    removed = 0
    for parent in temporary_parents(environment) if parents is None else parents:
        for left in abandoned_in(parent, environment):
            stuck = list(_bring_home_of(left))
            for line in stuck:
                notice(line)
            if not stuck:
                _remove(left.folder)
                removed += not left.folder.exists()
    return removed


def _bring_home_of(left: Abandoned) -> Iterator[str]:
    try:
        home = left.record["home"]
        overlay = _CacheHomeOverlay(Path(home["real"]), left.folder / "xdg")
        linked = {name: None if sign is None else tuple(sign) for name, sign in home["linked"].items()}
        hidden = frozenset(home["hidden"])
    except (KeyError, TypeError, ValueError, AttributeError):
        # No command ran there with a cache-home overlay.
        return
    yield from overlay.bring_home(hidden, linked)


def _remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if not root.exists():
        return
    # Some programs make their cache folders read-only.
    for folder, names, _ in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(root, ignore_errors=True)


def can_switch(layer: Layer) -> bool:
    """Return whether anything switches the layer."""
    return layer.abilities()[Ability.DISABLE] is None


def relocations(layers: Iterable[Layer], folder: Path) -> dict[str, Switch]:
    """Return, for each layer that can be moved, how to move it under the folder."""
    return {layer.name: layer.relocate(folder) for layer in layers if layer.abilities()[Ability.RELOCATE] is None}


def make_folders(switches: Iterable[Switch]) -> None:
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


# ---------------------------------------------------------------------- cache-home overlay


@contextmanager
def overlay_cache_home(
    environment: Environment, layers: Iterable[Layer], folder: Path, notice: Callable[[str], None] = _warn
) -> Iterator[None]:
    """Overlay the user cache folder: show everything there except the entries of the given layers.

    Other programs and layers that stay also follow ``XDG_CACHE_HOME`` and must not notice. The overlay links to their
    files; files that they make or replace are moved home when the block ends. Files that cannot be moved stay in the
    overlay, and ``notice`` gets a line for each.
    """
    overlay = _CacheHomeOverlay(user_cache_home(environment), folder / "xdg")
    if overlay.real.resolve() == overlay.folder.resolve():
        # Nested block in the same folder: it is already empty, or warm on purpose.
        yield
        return
    hidden = _hidden(layers, overlay.real, folder)
    overlay.folder.mkdir(parents=True, exist_ok=True)
    linked = overlay.link(hidden)
    if folder in _OWNED:
        # If this process is killed, a later command moves the new files home.
        _OWNED[folder].note(home={"real": str(overlay.real), "hidden": sorted(hidden), "linked": linked})
    owner = os.getpid()
    remove_copies(environment)
    try:
        yield
    finally:
        if os.getpid() == owner:
            for line in overlay.bring_home(hidden, linked):
                _KEPT.add(folder)
                notice(line)


def link_cache_home(environment: Environment, layers: Iterable[Layer], folder: Path) -> None:
    """Make the same overlay as :func:`overlay_cache_home`, but move nothing home."""
    overlay = _CacheHomeOverlay(user_cache_home(environment), folder / "xdg")
    overlay.folder.mkdir(parents=True, exist_ok=True)
    overlay.link(_hidden(layers, overlay.real, folder))


def _hidden(layers: Iterable[Layer], real: Path, folder: Path) -> frozenset[str]:
    """Return the names that the shared variable moves; a layer with a variable of its own needs no hiding."""
    names: set[str] = set()
    for layer in layers:
        if layer.abilities()[Ability.RELOCATE] is None and _SHARED & layer.relocate(folder).set.keys():
            names.update(root.path.relative_to(real).parts[0] for root in layer.roots() if real in root.path.parents)
    return frozenset(names)


#: Version stamp of a file: device, inode, size and time of change; ``None`` for anything else.
_Identity = tuple[int, int, int, int]


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _CacheHomeOverlay:
    """The real user cache folder, and its overlay."""

    real: Path
    folder: Path

    def link(self, hidden: frozenset[str]) -> dict[str, _Identity | None]:
        """Link every name that is not hidden; return the version stamp of each link's target."""
        self._prune(hidden)
        linked: dict[str, _Identity | None] = {}
        for name in _names(self.real):
            # An overlay within the real folder must not link to itself.
            if name in hidden or (self.real / name) in (self.folder, *self.folder.parents):
                continue
            with suppress(FileExistsError):
                os.symlink(self.real / name, self.folder / name)
            if self._ours(name):
                linked[name] = _identity(self.real / name)
        return linked

    def _prune(self, hidden: frozenset[str]) -> None:
        """Remove links of an earlier run that are broken or now hidden."""
        for name in _names(self.folder):
            if self._ours(name) and (name in hidden or not os.path.lexists(self.real / name)):
                with suppress(FileNotFoundError):
                    (self.folder / name).unlink()

    def _ours(self, name: str) -> bool:
        try:
            return os.readlink(self.folder / name) == str(self.real / name)
        except OSError:
            return False

    def bring_home(self, hidden: frozenset[str], linked: Mapping[str, _Identity | None]) -> Iterator[str]:
        """Move home new files and files that replaced a link; yield a line for each that could not be moved."""
        for name in _names(self.folder):
            if name in hidden or self._ours(name):
                continue
            home = self.real / name
            replaces = name in linked and linked[name] is not None and linked[name] == _identity(home)
            try:
                _move_home(self.folder / name, home, replaces=replaces)
            except OSError as error:
                yield f"{self.folder / name} stays: cannot move it to {home}: {error.strerror or error}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith((STAGE, PREFIX)))
    except OSError:
        return []


def _move_home(path: Path, home: Path, *, replaces: bool) -> None:
    """Move a file or folder beside its place, then into it. Nothing there is overwritten or entered.

    With ``replaces`` a file there is overwritten: this one was made from it.
    """
    mode = path.lstat().st_mode
    is_file = stat.S_ISREG(mode)
    if not (is_file or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        # Sockets and pipes are useless without the program that made them.
        return
    if os.path.lexists(home) and not (is_file and replaces):
        # Another program made it meanwhile: both are kept and the error is reported.
        raise FileExistsError(errno.EEXIST, "another program has put a file there", str(home))
    home.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(path), home)
        path.unlink()
        return
    # A link that the user made to the file stays a link.
    place = Path(os.path.realpath(home)) if replaces else home
    same = place.parent.stat().st_dev == home.parent.stat().st_dev
    # A copy left in the user cache folder is found by remove_copies.
    _carry(path, place, replaces=replaces, stages=home.parent if same else place.parent)


def _carry(path: Path, place: Path, *, replaces: bool, stages: Path) -> None:
    """Move to a place atomically; from another file system, through a copy in the folder ``stages``."""
    try:
        _place(path, place, replaces=replaces)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        return
    with stage_in(stages) as stage:
        copy = stage / "copy"
        try:
            _copy(path, copy)
            _place(copy, place, replaces=replaces)
        finally:
            _discard(copy)
    _discard(path)


def remove_copies(environment: Environment) -> tuple[Orphan, ...]:
    """Remove the copies that killed commands left in the user cache folder; return the removed ones.

    The superuser removes none from another user's home.
    """
    left = abandoned_copies(environment) or ()
    if left and environment.superuser and left[0].root.stat().st_uid != 0:
        return ()
    for copy in left:
        _remove(copy.root / copy.key)
    return tuple(copy for copy in left if not (copy.root / copy.key).exists())


def _place(stage: Path, place: Path, *, replaces: bool) -> None:
    if replaces or stage.is_dir():
        # Rename refuses to put a folder over a file or a folder that is not empty.
        os.rename(stage, place)
        return
    place_new(stage, place)


def _copy(path: Path, copy: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True, ignore=_special)
    else:
        shutil.copy2(path, copy)


def _special(folder: str, names: list[str]) -> list[str]:
    """Return the names that are neither file, folder nor link: opening one to copy it could block for ever."""
    modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
    return [name for name, mode in modes if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))]


def _discard(path: Path) -> None:
    if path.is_dir():
        _remove(path)
    else:
        path.unlink(missing_ok=True)
