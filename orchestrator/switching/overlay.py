"""Settings applied to a running process, and removed again in any order.

Blocks may nest, overlap in several threads and end by exceptions. So a hold does not save the previous values: the
original values are saved once, and the remaining holds are applied to them again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from cachectl.layers import core

#: The value of an attribute that does not exist.
MISSING = object()
#: The value of an attribute of a module that is not loaded: nothing to read or restore.
_UNLOADED = object()


class Slot(NamedTuple):
    """An environment variable of this process (no module), or an attribute of a module, or of a class in it.

    The value of a variable that is not set is ``None``.
    """

    name: str
    module: str | None = None
    owner: str | None = None

    def read(self) -> object:
        """Return the value now; :data:`MISSING` if there is no such attribute."""
        if self.module is None:
            return core.process_variable(self.name)
        target = self.target()
        return _UNLOADED if target is None else vars(target).get(self.name, MISSING)

    def write(self, value: object) -> None:
        """Set the value; :data:`MISSING` removes it. Does nothing if the module is, or was, not loaded."""
        if self.module is None:
            core.set_process_variable(self.name, None if value is None else str(value))
            return
        target = self.target()
        if target is None or value is _UNLOADED:
            return
        if value is not MISSING:
            setattr(target, self.name, value)
        elif self.name in vars(target):
            delattr(target, self.name)

    def target(self) -> object | None:
        """Return the module or the class that has the attribute; ``None`` if it is not loaded."""
        module = sys.modules.get(self.module or "")
        return module if module is None or self.owner is None else getattr(module, self.owner, None)


_LOCK = threading.RLock()
#: All holds of this process, and the original value of each slot that one of them has.
_HOLDS: list[Mapping[Slot, object]] = []
_GROUND: dict[Slot, object] = {}


@contextmanager
def applied(settings: Mapping[Slot, object], absent: Mapping[Slot, object] | None = None) -> Iterator[None]:
    """Apply settings to the process for a block; those of other blocks stay.

    ``absent`` has the values to leave in a module that is not loaded yet and is loaded in the block.
    """
    # A copy, because equal holds are distinguished by identity.
    hold = dict(settings)
    with _LOCK:
        for slot in hold:
            if slot not in _GROUND:
                value = slot.read()
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
    return {Slot(name): value for name, value in changes.items()}


def _lay(slots: Mapping[Slot, object]) -> None:
    for slot in slots:
        wanted = [hold[slot] for hold in _HOLDS if slot in hold]
        slot.write(wanted[-1] if wanted else _GROUND[slot])
