"""A command in changed variables: with caches off, or on in an isolated root; and the signals that reach it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.switching import isolated


def _signals(*names: str) -> frozenset[int]:
    """Return the signals of these names that the platform has."""
    return frozenset(getattr(signal, name) for name in names if hasattr(signal, name))


#: Signals of keys, which a terminal sends to every process in the foreground; those that ask a program to end; and all
#: that are passed on to the command.
_TYPED: Final = _signals("SIGINT", "SIGQUIT")
_ENDING: Final = _TYPED | _signals("SIGTERM", "SIGHUP")
_FORWARDED: Final = _ENDING | _signals("SIGUSR1", "SIGUSR2")


class CannotStart(errors.CachectlError, OSError):
    """The command could not be started; ``status`` is what a shell would give (126, 127)."""

    def __init__(self, command: str, error: OSError) -> None:
        self.status = 127 if isinstance(error, FileNotFoundError) else 126
        super().__init__(f"cannot start {command!r}: {error.strerror}")


def variables_off(layers: Iterable[Layer], stack: LayerSet, folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are off; ``None`` unsets one.

    Layers are both switched off and moved to a temporary folder: some libraries write although they are off, and
    pytools has no switch. Layers that share a variable with them are not moved. Raises :class:`Refused` if a layer can
    then be neither switched nor moved.
    """
    chosen = tuple(layers)
    changes = merged(layer.disable() for layer in chosen if isolated.can_switch(layer))
    along = isolated.companions(chosen, stack, folder)
    staying = {variable for name in along for variable in stack[name].relocate(folder).set}
    for layer in chosen:
        moved = layer.relocate(folder).set if layer.abilities()[facts.Ability.RELOCATE] is None else {}
        if not staying & moved.keys():
            changes.update(moved)
        elif layer.disable().patches:
            others = ", ".join(along)
            raise errors.Refused(layer.name, f"has no switch, and shares its folder with {others}; name these too")
    return changes


def variables_isolated(layers: Iterable[Layer], folder: Path) -> dict[str, str | None]:
    """Return the variables for a child in which the given layers are on and use ``folder``.

    Makes the folders there that a library would not make itself.
    """
    switches = _on_below(tuple(layers), folder)
    isolated.make_folders(switches)
    return merged(switches)


def environment_below(environment: Environment, folder: str) -> Environment:
    """Return the environment of a program that ``run --isolated`` or ``env --root`` started with a folder.

    Nothing is made. Raises :class:`BadRequest` if there is no such folder.
    """
    root = environment.expand(folder)
    if not root.is_dir():
        raise errors.BadRequest(f"--root {folder!r} is not a directory")
    return environment_of(environment, root.resolve())


def environment_of(environment: Environment, root: Path) -> Environment:
    """Return the environment of a program whose layers are all below a root, as its path is written."""
    return environment.with_variables(merged(_on_below(LayerSet(environment), root)))


def _on_below(layers: Iterable[Layer], root: Path) -> list[facts.Switch]:
    enabled = [layer.enable() for layer in layers if isolated.can_switch(layer)]
    return [*enabled, *isolated.relocations(layers, root).values()]


def left_alone(layers: Iterable[Layer], *, off: bool) -> dict[str, str]:
    """Return the layers that can be neither moved nor, if ``off``, switched off; each with the reason.

    A child uses them unchanged.
    """
    reasons = {}
    for layer in layers:
        abilities = layer.abilities()
        reason = abilities[facts.Ability.RELOCATE]
        if off and reason is not None:
            reason = abilities[facts.Ability.DISABLE]
        if reason is not None:
            reasons[layer.name] = reason
    return reasons


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


def merged(switches: Iterable[facts.Switch]) -> dict[str, str | None]:
    """Return the variables of several switches; ``None`` unsets one."""
    changes: dict[str, str | None] = {}
    for switch in switches:
        changes.update(switch.set)
        changes.update(dict.fromkeys(switch.unset, None))
    return changes
