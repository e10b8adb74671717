"""``cachectl run`` and ``cachectl env``: a command with caches off, or on in an isolated root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, Protocol, TypeVar

from cachectl.layer_set import LayerSet
from cachectl.layers.base.errors import BadRequest, CachectlError, Refused
from cachectl.layers.base.facts import Ability, Scope, Switch
from cachectl.switching.isolated import (
    can_switch,
    companions,
    isolated_root,
    link_cache_home,
    make_folders,
    relocations,
)

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

Proof_co = TypeVar("Proof_co", covariant=True)

#: Signals that are passed on to the command; not every platform has all of them.
_FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
#: Signals that ask a program to end.
_ENDING: Final = {getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT") if hasattr(signal, name)}
#: Signals of keys; a terminal sends them to every process in the foreground.
_TYPED: Final = {getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name)}


class CannotStart(CachectlError, OSError):
    """The command could not be started; ``status`` is what a shell would give (126, 127)."""

    def __init__(self, command: str, error: OSError) -> None:
        self.status = 127 if isinstance(error, FileNotFoundError) else 126
        super().__init__(f"cannot start {command!r}: {error.strerror}")


class Watching(Protocol[Proof_co]):
    """The real roots under watch, until :meth:`end` returns the proof."""

    def end(self) -> Proof_co:
        """Stop watching."""


@dataclass(frozen=True, slots=True)
class Ran(Generic[Proof_co]):
    """The exit status of a command, 128+n if signal n ended it, and the proof if one was asked for."""

    status: int
    proof: Proof_co | None


def run_command(
    stack: LayerSet,
    command: Sequence[str],
    *,
    no_cache: bool = False,
    isolated: Path | bool = False,
    layers: Sequence[str] = (),
    prepare: Callable[[Path, tuple[str, ...]], None] | None = None,
    watch: Callable[[tuple[Layer, ...], frozenset[str]], Watching[Proof_co]] | None = None,
    notice: Callable[[str], None],
) -> Ran[Proof_co]:
    """Run a command with the named layers (or all) off, or on in an empty root, or in the root ``isolated``.

    With neither, the command runs unchanged. ``prepare`` fills the isolated root, given the names of its layers.
    ``watch`` starts watching the real roots of the layers, except those of the given names. ``notice`` gets a line for
    each layer that stays as it is. Raises :class:`Refused` if such a layer was named, and :class:`CannotStart`.
    """
    chosen = stack.named(layers)
    environment = stack.environment
    if not no_cache and not isolated:
        with signals_held() as signals:
            watching = watch and watch(chosen, frozenset())
            status = run(command, {}, environment, signals)
            return Ran(status, watching.end() if watching else None)
    for name, why in left_alone(chosen, off=no_cache).items():
        if name in layers:
            raise Refused(name, f"stays as it is: {why}")
        notice(f"{name} stays as it is: {why}")
    folder = isolated if isinstance(isolated, Path) else None
    with signals_held() as signals, isolated_root(environment, folder, notice) as root:
        moved, changes = _moved(stack, chosen, root, off=no_cache, notice=notice)
        if prepare is not None:
            prepare(root, tuple(layer.name for layer in moved))
        link_cache_home(environment, moved, root)
        staying = frozenset(layer.name for layer in chosen if out_of_reach(layer, off=no_cache) is not None)
        watching = watch and watch(chosen, staying)
        status = run(command, changes, environment, signals)
        return Ran(status, watching.end() if watching else None)


def _moved(
    stack: LayerSet, layers: tuple[Layer, ...], root: Path, *, off: bool, notice: Callable[[str], None]
) -> tuple[tuple[Layer, ...], dict[str, str | None]]:
    if off:
        return layers, variables_off(layers, stack, root)
    along = companions(layers, stack, root)
    for name in along:
        notice(f"{name} keeps its entries in the same folder, so it is isolated too")
    return (*layers, *stack.named(along)) if along else layers, variables_isolated(layers, root)


def variables_off(layers: Iterable[Layer], stack: LayerSet, folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are off; ``None`` unsets one.

    Layers are both switched off and moved to a temporary folder: some libraries write although they are off, and
    pytools has no switch. Layers that share a variable with them are not moved. Raises :class:`Refused` if a layer can
    then be neither switched nor moved.
    """
    chosen = tuple(layers)
    changes = _merged(layer.disable() for layer in chosen if can_switch(layer))
    along = companions(chosen, stack, folder)
    staying = {variable for name in along for variable in stack[name].relocate(folder).set}
    for layer in chosen:
        moved = layer.relocate(folder).set if layer.abilities()[Ability.RELOCATE] is None else {}
        if not staying & moved.keys():
            changes.update(moved)
        elif layer.disable().patches:
            others = ", ".join(along)
            raise Refused(layer.name, f"has no switch, and shares its folder with {others}; name these too")
    return changes


def variables_isolated(layers: Iterable[Layer], folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are on and use ``folder``.

    Makes the folders there that a library would not make itself.
    """
    chosen = tuple(layers)
    moved = relocations(chosen, folder).values()
    make_folders(moved)
    return _merged([*(layer.enable() for layer in chosen if can_switch(layer)), *moved])


def environment_below(environment: Environment, folder: str) -> Environment:
    """Return the environment of a program that ``run --isolated`` or ``env --root`` started with a folder.

    Nothing is made. Raises :class:`BadRequest` if there is no such folder.
    """
    root = environment.expand(folder)
    if not root.is_dir():
        raise BadRequest(f"--root {folder!r} is not a directory")
    return environment_of(environment, root.resolve())


def environment_of(environment: Environment, root: Path) -> Environment:
    """Return the environment of a program whose layers are all below a root, as its path is written."""
    layers = LayerSet(environment)
    enabled = [layer.enable() for layer in layers if can_switch(layer)]
    return environment.with_variables(_merged([*enabled, *relocations(layers, root).values()]))


def left_alone(layers: Iterable[Layer], *, off: bool) -> dict[str, str]:
    """Return the layers that a child would use unchanged, each with the reason."""
    return {
        layer.name: reason
        for layer in layers
        if layer.about.scope is Scope.USER and (reason := out_of_reach(layer, off=off)) is not None
    }


def out_of_reach(layer: Layer, *, off: bool) -> str | None:
    """Return why a layer can be neither moved nor, if ``off``, switched off; ``None`` if it can."""
    abilities = layer.abilities()
    reason = abilities[Ability.RELOCATE]
    return abilities[Ability.DISABLE] if off and reason is not None else reason


class Signals:
    """Signals for a child: held until it starts, then passed on."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []
        self.taken: list[int] = []

    def take(self, number: int, _: object) -> None:
        """Pass a signal on, or keep it until there is a child."""
        self.taken.append(number)
        if self.child is None:
            self.early.append(number)
        elif not (number in _TYPED and _in_foreground()):
            # The terminal has sent a typed signal to the child already; some programs count them.
            self.child.send_signal(number)

    def ending(self) -> int:
        """Return 128+n if signal n asked this process to end, even if the child ignored it; else 0."""
        return next((128 + number for number in self.taken if number in _ENDING), 0)


@contextmanager
def signals_held() -> Iterator[Signals]:
    """Keep signals from ending this process while it waits for a child and has a temporary folder to remove."""
    signals = Signals()
    before: dict[int, Any] = {}
    for number in _FORWARDED:
        # A signal that our caller ignores (nohup) stays ignored in the child.
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

    With ``quiet`` its standard input is empty, its standard output is dropped, and its standard error goes to that
    file. Raises :class:`CannotStart` if there is no such command.
    """
    variables = dict(environment.with_variables(changes).variables)
    if signals.early:
        return 128 + signals.early[0]
    try:
        child = subprocess.Popen(  # noqa: S603 - the user's own command
            list(command),
            env=variables,
            stdin=None if quiet is None else subprocess.DEVNULL,
            stdout=None if quiet is None else subprocess.DEVNULL,
            stderr=quiet,
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
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _merged(switches: Iterable[Switch]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for switch in switches:
        changes.update(switch.set)
        changes.update(dict.fromkeys(switch.unset, None))
    return changes


def variables_for(
    layers: Iterable[Layer], *, on: bool, root: Path | None = None
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the variables that switch layers on or off, or move them to ``root``; and the reasons why some cannot be.

    Makes the folders below ``root`` that a library would not make itself.
    """
    switches: list[Switch] = []
    notes: list[str] = []
    ability = Ability.DISABLE if root is None else Ability.RELOCATE
    for layer in layers:
        reason = layer.abilities()[ability]
        if reason is not None:
            notes.append(f"{layer.name} cannot {ability.value}: {reason}")
            continue
        switch = layer.relocate(root) if root is not None else layer.enable() if on else layer.disable()
        switches.append(switch)
        if switch.patches:
            notes.append(f"{layer.name}: no variable switches it off; cachectl run --no-cache does")
    try:
        make_folders(switches)
    except OSError as error:
        notes.append(f"{error.filename}: cannot be made ({error.strerror}); a layer that needs it keeps nothing")
    return _merged(switches), tuple(notes)
