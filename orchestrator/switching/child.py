"""Running a command with caches off or in an isolated root: its variables, its root, and its signals.

In an isolated root every layer is below one folder, and everything else stays in place. ``XDG_CACHE_HOME`` moves
several layers, but also the caches of other programs. So the root contains a folder of links to everything in the real
user cache folder, except the entries of the moved layers: large caches of other programs need not be filled again. What
programs add to the folder itself, or replace in it, stays in the root.

A temporary isolated root is where no other user can write (:mod:`cachectl.layers.disk.temporaries`), because a program
may outlive its command and still use the path. A killed command leaves its folder behind; the next one removes it.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cachectl import layer_set
from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.errors import FAILURES, BadRequest, CachectlError, Refused, reason_of
from cachectl.layers.base.text import printable
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Scope
from cachectl.layers.core.switch import Ability, Switch
from cachectl.layers.disk import atomic, temporaries, trust

T = TypeVar("T")

#: The end of a line about an error that is caused neither by the system nor by the user.
FAULT = "this is a bug in cachectl, please report it"
_ANOTHER_TEMPORARY = "to use another folder: TMPDIR=/var/tmp cachectl …"
_ANOTHER_ROOT = "name another folder with --isolated=DIR"

#: Variables that move several layers, and the caches of other programs.
_SHARED = frozenset({"XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"})


def _signals(*names: str) -> frozenset[int]:
    """Return the signals with these names that the platform has."""
    return frozenset(getattr(signal, name) for name in names if hasattr(signal, name))


#: Signals of keys, which a terminal sends to all foreground processes; signals that ask a program to end; and all
#: signals that are forwarded to the command.
_TYPED = _signals("SIGINT", "SIGQUIT")
_ENDING = _TYPED | _signals("SIGTERM", "SIGHUP")
_FORWARDED = _ENDING | _signals("SIGUSR1", "SIGUSR2")


# ---------------------------------------------------------------------- extras and requests


def try_extra(what: str, step: Callable[[], T], notice: Callable[[str], None]) -> T | None:
    """Do a step that the command does not need; return its result.

    After any exception, ``notice`` gets one line that begins with ``what``, and the result is ``None``.
    """
    try:
        return step()
    except KeyboardInterrupt:
        raise
    # Layers of plug-ins may raise anything.
    except BaseException as error:  # noqa: BLE001
        notice(f"{what}: {_reason(error)}")
        return None


@contextmanager
def needed(place: Path, *, kept: Path | None = None) -> Iterator[None]:
    """Do a step in a folder that the command needs: an error names the folder, and how to use another one.

    ``kept`` is a root that the user named. Raises :class:`CachectlError`.
    """
    try:
        yield
    except CachectlError:
        raise
    except Exception as error:
        instead = _ANOTHER_TEMPORARY if kept is None else _ANOTHER_ROOT
        raise CachectlError(f"{_reason(error, place)}; {instead}") from error


def _reason(error: BaseException, place: Path | None = None) -> str:
    """Return an error in one line, with its path, else with the place."""
    if isinstance(error, CachectlError):
        return str(error)
    path = getattr(error, "filename", None) or place
    where = "" if path is None else f"{printable(os.fsdecode(path))}: "
    return f"{where}{reason_of(error)}{'' if isinstance(error, (OSError, MemoryError)) else f'; {FAULT}'}"


# ---------------------------------------------------------------------- isolated roots


def make_kept_root(folder: Path, mode: int = 0o777) -> None:
    """Make a kept isolated root, if missing. Raises :class:`CachectlError`."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the root {printable(folder)}: {error.strerror}; {_ANOTHER_ROOT}"
        raise CachectlError(message) from error


def say_shared(folder: Path, what: str, notice: Callable[[str], None]) -> None:
    """Give a line if another user could write to an existing folder whose content programs run."""
    if (reason := trust.shared_because(folder)) is not None:
        shown = printable(folder)
        notice(f"{what} {shown}: another user can write to it ({reason}), and programs run its content")


@contextmanager
def isolated_root(
    environment: Environment, folder: Path | None = None, notice: Callable[[str], None] = layer_set.warn_user
) -> Iterator[Path]:
    """Yield ``folder``, made if missing, or an empty temporary folder that is removed when the block ends.

    Leftovers of killed commands are removed first. A forked child removes nothing. ``notice`` gets a line for each
    problem. Raises :class:`CachectlError` if there is no private folder, or nothing can be made in it.
    """
    if folder is not None:
        make_kept_root(folder)
        say_shared(folder, "--isolated", notice)
        yield folder.resolve()
        return
    failure = "temporary folders of killed commands were not removed"
    try_extra(failure, lambda: temporaries.remove_abandoned(environment), notice)
    with ExitStack() as block:
        with needed(environment.temporary):
            root = block.enter_context(temporaries.temporary_folder(environment, notice))
        yield root


def copy_isolated_root(source: Path, target: Path) -> None:
    """Copy the content of one isolated root into another, with links as links, and without pipes and sockets."""

    def special(folder: str, names: list[str]) -> list[str]:
        # Opening these could block forever.
        modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
        return [name for name, mode in modes if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))]

    shutil.copytree(source, target, symlinks=True, ignore=special, dirs_exist_ok=True)


def can_switch(layer: Layer) -> bool:
    """Return whether the layer can be switched off."""
    return layer.abilities()[Ability.DISABLE] is None


def relocations(layers: Iterable[Layer], folder: Path) -> dict[str, Switch]:
    """Return, for each layer that can be moved, how to move it below the folder."""
    return {layer.name: layer.relocate(folder) for layer in layers if layer.abilities()[Ability.RELOCATE] is None}


def make_folders(switches: Iterable[Switch]) -> None:
    """Make the folders that moved libraries need but do not make."""
    for switch in switches:
        for folder in switch.makes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def companions(layers: Iterable[Layer], everything: Iterable[Layer], folder: Path) -> dict[str, Switch]:
    """Return the other layers that move too, because they share a variable with the given layers, and how."""
    moved = relocations(layers, folder)
    shared = merged(moved.values()).keys() & _SHARED
    return {
        name: switch
        for name, switch in relocations(everything, folder).items()
        if name not in moved and shared & switch.set.keys()
    }


def link_cache_home(environment: Environment, layers: Iterable[Layer], folder: Path) -> None:
    """Link everything in the user cache folder below an isolated root, except the entries of the given layers."""
    own, links = user_cache_folder(environment, "any")[0], folder / "xdg"
    # On Windows an application's folder is any/any/Cache.
    real = own.parents[2] if environment.platform == "win32" else own.parent
    if real.resolve() == links.resolve():
        # A nested block in the same root, which is already set up.
        return
    links.mkdir(parents=True, exist_ok=True)
    hidden: set[str] = set()
    layers = tuple(layers)
    moved = relocations(layers, folder)
    for layer in layers:
        # The entries of a layer with its own variable need not be hidden.
        if layer.name in moved and _SHARED & moved[layer.name].set.keys():
            with suppress(*FAILURES):
                paths = [root.path for root in layer.roots()]
                hidden.update(path.relative_to(real).parts[0] for path in paths if real in path.parents)
    for name in _names(links):
        # Links of an earlier run may be broken, or must now be hidden.
        is_ours = os.path.islink(links / name) and os.readlink(links / name) == str(real / name)
        if is_ours and (name in hidden or not os.path.lexists(real / name)):
            atomic.remove_file(links / name)
    for name in _names(real):
        # A root in the real folder must not link to itself.
        if name not in hidden and (real / name) not in (links, *links.parents):
            with suppress(FileExistsError):
                os.symlink(real / name, links / name)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---------------------------------------------------------------------- variables


def merged(switches: Iterable[Switch]) -> dict[str, str | None]:
    """Return the variables of several switches; ``None`` unsets one."""
    changes: dict[str, str | None] = {}
    for switch in switches:
        changes.update(switch.set)
        changes.update(dict.fromkeys(switch.unset, None))
    return changes


def variables_off(
    layers: Iterable[Layer], stack: layer_set.LayerSet, folder: Path, *, proved: bool = False
) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are off; ``None`` unsets one.

    Layers are both switched off and moved to a temporary folder: some libraries write even when off, and pytools has no
    switch. Layers that share a variable with others are not moved. Raises :class:`Refused` if a layer can then be
    neither switched nor moved, or if its isolation is to be ``proved``, and its files are opened even when it is off.
    """
    chosen = tuple(layers)
    changes = merged(layer.disable() for layer in chosen if can_switch(layer))
    along = companions(chosen, stack, folder)
    staying = merged(along.values()).keys()
    for name, switch in relocations(chosen, folder).items():
        if not staying & switch.set.keys():
            changes.update(switch.set)
        elif stack[name].disable().patches:
            raise Refused(name, f"has no switch, and shares its folder with {', '.join(along)}; name these layers too")
        elif proved and stack[name].about.opens_while_off:
            rest = [layer.name for layer in chosen if not layer.about.opens_while_off]
            without = f", or only --layer {','.join(rest)}" if rest else ""
            listed = ",".join([*(layer.name for layer in chosen), *along])
            reason = f"cannot be proved: its files are opened while it is off, in a folder of {', '.join(along)} too"
            raise Refused(name, f"{reason}; write --layer {listed}{without}")
    return changes


def variables_isolated(layers: Iterable[Layer], folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are on and use ``folder``.

    Makes the folders there that libraries do not make.
    """
    switches = switches_on(tuple(layers), folder)
    make_folders(switches)
    return merged(switches)


def environment_below(environment: Environment, folder: str) -> Environment:
    """Return the environment of a program under ``run --isolated=FOLDER`` or ``env --root FOLDER``.

    Makes nothing. Raises :class:`BadRequest` if there is no such folder.
    """
    root = environment.expand(folder)
    if not root.is_dir():
        raise BadRequest(f"--root {folder!r} is not a directory")
    return environment_of(environment, root.resolve())


def environment_of(environment: Environment, root: Path) -> Environment:
    """Return the environment of a program whose layers are all below a root, whose path is not resolved."""
    return environment.with_variables(merged(switches_on(layer_set.LayerSet(environment), root)))


def switches_on(layers: Iterable[Layer], root: Path) -> list[Switch]:
    """Return the switches that turn layers on, and move those that can be moved below a root."""
    enabled = [layer.enable() for layer in layers if can_switch(layer)]
    return [*enabled, *relocations(layers, root).values()]


def unable(layers: Iterable[Layer], *abilities: Ability) -> dict[str, str]:
    """Return the layers that have none of the abilities, each with the reason why it lacks the last one."""
    reasons = {}
    for layer in layers:
        refusals = list(filter(None, map(layer.abilities().get, abilities)))
        if len(refusals) == len(abilities):
            reasons[layer.name] = refusals[-1]
    return reasons


def say_left_alone(
    layers: Sequence[Layer], named: Iterable[str], notice: Callable[[str], None], *, off: bool
) -> frozenset[str]:
    """Return the names of the layers that can be neither moved nor, if ``off``, switched off: a child uses them.

    Gives a line for each user layer among them. Raises :class:`Refused` if that was named.
    """
    staying = unable(layers, Ability.RELOCATE, *([Ability.DISABLE] if off else []))
    for layer in layers:
        if layer.name in staying and layer.about.scope is Scope.USER:
            if layer.name in named:
                raise Refused(layer.name, f"stays as it is: {staying[layer.name]}")
            notice(f"{layer.name} stays as it is: {staying[layer.name]}")
    return frozenset(staying)


# ---------------------------------------------------------------------- the command


class CannotStart(CachectlError, OSError):
    """The command could not be started; ``status`` is that of a shell (126 or 127)."""

    def __init__(self, command: str, error: OSError) -> None:
        self.status = 127 if isinstance(error, FileNotFoundError) else 126
        super().__init__(f"cannot start {command!r}: {error.strerror}")


class Signals:
    """Signals for a child: held until it starts, then forwarded."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []
        self.taken: list[int] = []

    def take(self, number: int, _: object) -> None:
        """Forward a signal, or keep it until there is a child."""
        self.taken.append(number)
        if self.child is None:
            self.early.append(number)
        elif not (number in _TYPED and _in_foreground()):
            # The terminal has already sent the signal of a key to the child, and some programs count them.
            self.child.send_signal(number)

    def ending(self) -> int:
        """Return 128+n if signal n asked this process to end, even if the child ignored it; otherwise 0."""
        return next((128 + number for number in self.taken if number in _ENDING), 0)


@contextmanager
def signals_held() -> Iterator[Signals]:
    """Keep signals from ending this process while it waits for a child and has temporary folders to remove."""
    signals = Signals()
    before: dict[int, Any] = {}
    for number in _FORWARDED:
        # The child must ignore a signal that our caller ignores (nohup).
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, signals.take)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    command: Sequence[str],
    changes: Mapping[str, str | None],
    environment: Environment,
    signals: Signals,
    *,
    quiet: BinaryIO | None = None,
) -> int:
    """Run a command to its end; return its exit status, 128+n if signal n ended it.

    With ``quiet``, standard input is empty, standard output is discarded, and standard error goes to that file. Raises
    :class:`CannotStart`.
    """
    variables = dict(environment.with_variables(changes).variables)
    unused = None if quiet is None else subprocess.DEVNULL
    if signals.early:
        return 128 + signals.early[0]
    try:
        child = subprocess.Popen(  # noqa: S603 - the user's own command
            list(command), env=variables, stdin=unused, stdout=unused, stderr=quiet
        )
    except OSError as error:
        raise CannotStart(os.fspath(command[0]), error) from error
    signals.child = child
    for number in signals.early:
        child.send_signal(number)
    status = child.wait()
    signals.child = None
    return status if status >= 0 else 128 - status


def _in_foreground() -> bool:
    with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
