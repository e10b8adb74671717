"""Settings that are applied to a running process, and can be removed in any order.

Blocks can nest, overlap in several threads and end with exceptions. So a block does not save the previous values: the
original values are saved once, and the remaining blocks are applied to them again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from cachectl.layers.host.variables import process_variable, set_process_variable

#: A module, a class in it or ``None``, and the name of an attribute. Without a module it is an environment variable of
#: this process, whose value is ``None`` if it is not set.
Slot = tuple[str | None, str | None, str]
#: The value of an attribute that does not exist.
MISSING = object()
#: The value of an attribute of a module that is not loaded: nothing to read or restore.
_UNLOADED = object()


def read(slot: Slot) -> object:
    """Return the current value; :data:`MISSING` if there is no such attribute."""
    module, owner, name = slot
    if module is None:
        return process_variable(name)
    target = owner_of(module, owner)
    return _UNLOADED if target is None else vars(target).get(name, MISSING)


def owner_of(module: str, owner: str | None) -> object | None:
    """Return a module, or a class in it; ``None`` if it is not loaded."""
    loaded = sys.modules.get(module)
    return loaded if loaded is None or owner is None else getattr(loaded, owner, None)


_LOCK = threading.RLock()
#: The settings of all blocks, and the original value of each slot in them.
_HOLDS: list[Mapping[Slot, object]] = []
_GROUND: dict[Slot, object] = {}


@contextmanager
def applied(settings: Mapping[Slot, object], absent: Mapping[Slot, object] | None = None) -> Iterator[None]:
    """Apply settings to the process for a block; those of other blocks remain.

    ``absent`` has the values to leave in modules that are first loaded in the block.
    """
    # A copy, because equal settings are distinguished by identity.
    hold = dict(settings)
    with _LOCK:
        for slot in hold:
            if slot not in _GROUND:
                value = read(slot)
                _GROUND[slot] = (absent or {}).get(slot, value) if value is _UNLOADED else value
        _HOLDS.append(hold)
        _lay(hold)
    try:
        yield
    finally:
        with _LOCK:
            _HOLDS[:] = [other for other in _HOLDS if other is not hold]
            _lay(hold)
            for slot in hold:
                if not any(slot in other for other in _HOLDS):
                    _GROUND.pop(slot, None)


def variables(changes: Mapping[str, str | None]) -> dict[Slot, object]:
    """Return the settings of environment variables; ``None`` unsets one."""
    return {(None, None, name): value for name, value in changes.items()}


def _lay(slots: Iterable[Slot]) -> None:
    """Give each slot the value of the last block that has it, else its original one."""
    for slot in slots:
        values = [hold[slot] for hold in _HOLDS if slot in hold]
        value, (module, owner, name) = values[-1] if values else _GROUND[slot], slot
        if module is None:
            set_process_variable(name, None if value is None else str(value))
        elif (target := owner_of(module, owner)) is None or value is _UNLOADED:
            # The module is not, or was not, loaded.
            pass
        elif value is not MISSING:
            setattr(target, name, value)
        elif name in vars(target):
            delattr(target, name)
