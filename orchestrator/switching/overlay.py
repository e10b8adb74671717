"""Settings applied to a running process, and removed again in any order.

Blocks may nest, overlap in several threads and end by exceptions. So a hold does not save the previous values: the
original values are saved once, and the remaining holds are applied to them again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from cachectl.layers.base.environment import process_variable, set_process_variable


class NoValue:
    """The value of an attribute that does not exist."""


MISSING: Final = NoValue()
#: The value of an attribute of a module that is not loaded: nothing to read or restore.
UNLOADED: Final = NoValue()


class Slot(NamedTuple):
    """An environment variable of this process (no module), or an attribute of a module, or of a class in it.

    The value of a variable that is not set is ``None``.
    """

    name: str
    module: str | None = None
    owner: str | None = None

    def read(self) -> object:
        """Return the value now, :data:`UNLOADED` or :data:`MISSING` if an attribute has none."""
        if self.module is None:
            return process_variable(self.name)
        target = self._target()
        return UNLOADED if target is None else vars(target).get(self.name, MISSING)

    def write(self, value: object) -> None:
        """Set the value; :data:`MISSING` removes it. Does nothing if the module is, or was, not loaded."""
        if self.module is None:
            set_process_variable(self.name, None if value is None else str(value))
            return
        target = self._target()
        if target is None or value is UNLOADED:
            return
        if not isinstance(value, NoValue):
            setattr(target, self.name, value)
        elif self.name in vars(target):
            delattr(target, self.name)

    def _target(self) -> object | None:
        module = sys.modules.get(self.module or "")
        return module if module is None or self.owner is None else getattr(module, self.owner, None)


class Overlay:
    """All holds of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holds: list[Mapping[Slot, object]] = []
        self._ground: dict[Slot, object] = {}

    def push(self, settings: Mapping[Slot, object], absent: Mapping[Slot, object]) -> Mapping[Slot, object]:
        """Apply settings to the process; return the hold, the argument of :meth:`pop`.

        ``absent`` has the values to leave in a module that is not loaded yet and is loaded before the hold ends.
        """
        # A copy, because equal holds are distinguished by identity.
        hold = dict(settings)
        with self._lock:
            for slot in hold:
                if slot not in self._ground:
                    value = slot.read()
                    self._ground[slot] = absent.get(slot, value) if value is UNLOADED else value
            self._holds.append(hold)
            self._lay(hold)
        return hold

    def pop(self, hold: Mapping[Slot, object]) -> None:
        """Remove one hold; the settings of the others stay."""
        with self._lock:
            self._holds = [other for other in self._holds if other is not hold]
            self._lay(hold)
            held = {slot for other in self._holds for slot in other}
            self._ground = {slot: value for slot, value in self._ground.items() if slot in held}

    def _lay(self, slots: Mapping[Slot, object]) -> None:
        for slot in slots:
            wanted = [hold[slot] for hold in self._holds if slot in hold]
            slot.write(wanted[-1] if wanted else self._ground[slot])


#: The one overlay of this process.
PROCESS: Final = Overlay()
