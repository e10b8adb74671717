"""A command run with its caches off, or on in empty roots."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from cachectl.layers.base.errors import CachectlError, Refused
from cachectl.layers.base.facts import Ability, Scope, Switch
from cachectl.switching.isolated import can_switch, companions, make_folders, relocations

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer


#: What ends or tells a program something; not every platform has all of them.
_FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
#: What asks for an end.
_ENDING: Final = {getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT") if hasattr(signal, name)}
#: What keys send, to every process in the foreground.
_TYPED: Final = {getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name)}


class CannotStart(CachectlError, OSError):
    """The command could not be started; ``status`` is what a shell would give (126, 127)."""

    def __init__(self, command: str, error: OSError) -> None:
        self.line = f"cannot start {command!r}: {error.strerror}"
        self.status = 127 if isinstance(error, FileNotFoundError) else 126
        super().__init__(self.line)

    def __str__(self) -> str:
        return self.line


def variables_off(layers: Iterable[Layer], stack: LayerSet, folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are off; ``None`` unsets one.

    They are both switched off and moved to a folder to throw away: some libraries write although they are
    off, and pytools has no switch. Layers that would only move along stay where they are. Raises
    :class:`Refused` where that leaves a layer neither switched nor moved.
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
    """Return the variables for a child in which the given layers are on, and keep everything in a folder.

    Folders that a library would not make there itself are made.
    """
    chosen = tuple(layers)
    changes = _merged(layer.enable() for layer in chosen if can_switch(layer))
    moved = relocations(chosen, folder).values()
    make_folders(moved)
    changes.update(_merged(moved))
    return changes


def left_alone(layers: Iterable[Layer], *, off: bool) -> dict[str, str]:
    """Say of each layer that a child would go on using as it is, why nothing can be done about that."""
    return {
        layer.name: reason
        for layer in layers
        if layer.scope is Scope.USER and (reason := out_of_reach(layer, off=off)) is not None
    }


def out_of_reach(layer: Layer, *, off: bool) -> str | None:
    """Say why a layer can be neither moved nor, where that would do, switched off; ``None`` where it can."""
    abilities = layer.abilities()
    reason = abilities[Ability.RELOCATE]
    return abilities[Ability.DISABLE] if off and reason is not None else reason


class Signals:
    """Signals that are meant for a child, while there is none, one, and none any more."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []
        self.taken: list[int] = []

    def take(self, number: int, _: object) -> None:
        """Hand a signal on, or note it until there is a child."""
        self.taken.append(number)
        if self.child is None:
            self.early.append(number)
        elif not (number in _TYPED and _in_foreground()):
            # What is typed at the terminal has reached the child already; twice is once too often for some.
            self.child.send_signal(number)

    def ending(self) -> int:
        """Return 128+n where a signal n has asked for an end, whatever a child made of it; else 0."""
        return next((128 + number for number in self.taken if number in _ENDING), 0)


@contextmanager
def signals_held() -> Iterator[Signals]:
    """Let no signal end this process while it has a child to wait for, and a scratch folder to clean up."""
    signals = Signals()
    before: dict[int, Any] = {}
    for number in _FORWARDED:
        # What our own caller ignores (nohup), the child is to ignore too.
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
    """Run a command to its end; return its exit status, 128+n where signal n ended it.

    With ``quiet`` it is given nothing to read, what it prints is dropped, and what it complains of goes to that file.
    Raises :class:`CannotStart` where there is no such command.
    """
    unset = frozenset(name for name, value in changes.items() if value is None)
    put = {name: value for name, value in changes.items() if value is not None}
    variables = dict(environment.with_variables(put, unset).variables)
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
    """Tell whether this process has a terminal, and gets what is typed there."""
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
    """Return the variables that switch layers on or off, or move them to ``root``; and what they cannot do.

    Folders below ``root`` that a library would not make itself are made.
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
