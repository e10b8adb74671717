"""Caches off, or elsewhere, for a ``with`` block of a running process and the children it starts."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.errors import CachectlError
from cachectl.layers.facts import Condition, Switch
from cachectl.layers.processes import first_variables, loaded_here
from cachectl.overlay import PROCESS, Attribute, Missing, Slot, Variable
from cachectl.scratch import can_switch, relocations, remove_scratch, shadow_user_cache
from cachectl.stack import Stack

if TYPE_CHECKING:
    from cachectl.layers.layer import Layer


class StillOn(CachectlError, RuntimeError):
    """Some layers cannot be switched in this process any more; ``layers`` maps each to the reason."""

    def __init__(self, layers: Mapping[str, str]) -> None:
        self.layers = dict(layers)
        listed = "; ".join(f"{name}: {why}" for name, why in layers.items())
        super().__init__(f"cannot be switched in this process: {listed} (strict=False only warns)")


@dataclass(frozen=True, slots=True)
class Held:
    """One layer in a block: ``status`` is ``off`` or ``on``, and why."""

    status: str
    why: str


@contextmanager
def disabled(*layers: str, strict: bool = True) -> Iterator[Mapping[str, Held]]:
    """Switch the named layers, or all, off in this process and its children.

    Yields the truth about each layer. Raises :class:`StillOn` before anything is changed where a layer cannot
    be switched any more because its driver has started; ``strict=False`` warns instead. Leaving restores
    environment and switches exactly, and leaves modules that were imported meanwhile as they would be had the
    block not been there.
    """
    stack = Stack()
    chosen = [layer for layer in stack.named(layers) if can_switch(layer)]
    held = {layer.name: _judge(layer) for layer in chosen}
    _complain({name: hold.why for name, hold in held.items() if hold.status == "on"}, strict=strict)
    switches = [layer.disable() for layer in chosen if held[layer.name].status == "off"]
    held.update(_switched_along(stack, switches))
    for module in {patch.module for switch in switches for patch in switch.patches}:
        if find_spec(module.partition(".")[0]) is not None:
            import_module(module)
    for switch in switches:
        _drop_copies(switch)
    hold = PROCESS.push(_settings(switches), _flags_left_behind(chosen))
    try:
        yield held
    finally:
        PROCESS.pop(hold)
        for switch in switches:
            _mend_modules(switch)


@contextmanager
def isolated(folder: Path | str | None = None, *, strict: bool = True) -> Iterator[Path]:
    """Switch every layer on, in an empty scratch root: a cold run that can be repeated.

    Yields the root. A named one is kept. A temporary one goes when the block ends, or, where a library has
    opened its cache there meanwhile, when the process does: such a library goes on using it. Raises
    :class:`StillOn` before anything is changed where a library has opened its cache elsewhere already;
    ``strict=False`` warns instead.
    """
    stack = Stack()
    root = Path(tempfile.mkdtemp(prefix="cachectl-")) if folder is None else Path(folder).absolute()
    root.mkdir(parents=True, exist_ok=True)
    moved = relocations(stack, root)
    process = os.getpid()
    try:
        _complain({name: why for name, switch in moved.items() if (why := _latched(switch))}, strict=strict)
        switches = [*moved.values(), *(stack[name].enable() for name in moved if can_switch(stack[name]))]
        with shadow_user_cache(stack.environment, stack, root):
            hold = PROCESS.push(_settings(switches), _flags_left_behind(stack))
            try:
                yield root
            finally:
                PROCESS.pop(hold)
    finally:
        # A forked child leaves the block too; the root is its parent's.
        if folder is None and os.getpid() == process:
            opened = any((root / "xdg" / "pytools").glob("*.sqlite"))
            if opened or any(_latched(switch) for switch in moved.values()):
                atexit.register(_remove_in, process, root)
            else:
                remove_scratch(root)


def _remove_in(process: int, root: Path) -> None:
    if os.getpid() == process:
        remove_scratch(root)


def _judge(layer: Layer) -> Held:
    switch = layer.disable()
    why = _latched(switch)
    state = layer.state()
    if why is not None:
        return _judge_latched(layer, why)
    if state.condition is Condition.DISABLED:
        return Held("off", f"already off: {state.why}")
    if switch.patches:
        return Held("off", "switched off in this process; children it starts use it, for want of a variable")
    return Held("off", f"switched off {switch.takes_effect.value}")


def _judge_latched(layer: Layer, why: str) -> Held:
    """Tell whether a started driver was off from the first: only what the process began with proves that."""
    first = first_variables()
    if first is not None:
        began = type(layer)(replace(layer.environment, variables=first))
        if began.state().condition is Condition.DISABLED:
            return Held("off", f"off since the process began: {began.state().why}")
    return Held("on", why)


def _switched_along(stack: Stack, switches: Iterable[Switch]) -> dict[str, Held]:
    """Name the layers that a switch of another one turns off too: PyOpenCL has one for both of its caches."""
    ours = {name for switch in switches for name in switch.set}
    named = {switch.layer for switch in switches}
    others = [layer for layer in stack if layer.name not in named and can_switch(layer)]
    return {
        layer.name: Held("off", f"shares the switch of {', '.join(sorted(named))}")
        for layer in others
        if ours & layer.disable().set.keys()
    }


def _latched(switch: Switch) -> str | None:
    """Say why it is too late for the variables of a switch, or return ``None``."""
    loaded = [module for module in switch.latching_modules if module in sys.modules]
    if loaded:
        return f"{loaded[0]} is imported and has opened its dictionaries"
    if not switch.latches:
        return None
    started = loaded_here(switch.latches)
    if started is None and "pyopencl" in sys.modules:
        return "its driver may have started, which this platform does not show"
    return "its driver has started, and reads its variables only then" if started else None


def _complain(still_on: Mapping[str, str], *, strict: bool) -> None:
    if not still_on:
        return
    if strict:
        raise StillOn(still_on)
    for name, why in still_on.items():
        warnings.warn(f"{name} stays as it is: {why}", RuntimeWarning, stacklevel=4)


def _settings(switches: Iterable[Switch]) -> dict[Slot, object]:
    settings: dict[Slot, object] = {}
    for switch in switches:
        settings.update({Variable(name): value for name, value in switch.set.items()})
        settings.update({Variable(name): None for name in switch.unset})
        settings.update({Attribute(flag.module, None, flag.attribute): flag.value for flag in switch.flags})
        settings.update(_stand_ins(switch))
    return settings


def _stand_ins(switch: Switch) -> dict[Slot, object]:
    """Make the stand-ins of a switch, each around the method it stands in for; none where there is no library."""
    made: dict[Slot, object] = {}
    for patch in switch.patches:
        owner = getattr(sys.modules.get(patch.module), patch.owner, None)
        method = getattr(owner, patch.method, None)
        if method is not None:
            made[Attribute(patch.module, patch.owner, patch.method)] = patch.replacement(method)
    return made


def _flags_left_behind(layers: Iterable[Layer]) -> dict[Slot, object]:
    """Return the flags that modules imported in the block would have had without it."""
    left: dict[Slot, object] = {}
    for layer in layers:
        switch = layer.disable() if layer.state().condition is Condition.DISABLED else layer.enable()
        left.update({Attribute(flag.module, None, flag.attribute): flag.value for flag in switch.flags})
    return left


def _drop_copies(switch: Switch) -> None:
    for module, function in switch.drops:
        drop = getattr(sys.modules.get(module), function, None)
        if drop is not None:
            drop()


def _mend_modules(switch: Switch) -> None:
    """Execute again a module that made no dictionary because it was first imported while its layer was off."""
    off = {Attribute(flag.module, None, flag.attribute): flag.value for flag in switch.flags}
    if any(slot.read() == value for slot, value in off.items()):
        return
    for module, attribute in switch.reloads:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(Attribute(module, None, attribute).read(), Missing):
            reload(loaded)
