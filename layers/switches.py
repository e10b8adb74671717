"""Boolean variables, read the way each library reads them."""

from __future__ import annotations

from typing import Final

from cachectl.layers.environment import Environment
from cachectl.layers.facts import Condition, State

_TRUE: Final = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE: Final = frozenset({"n", "no", "f", "false", "off", "0"})


def strtobool(value: str) -> bool | None:
    """Read a value as ``pytools.strtobool`` does; ``None`` where that raises (also for the empty string)."""
    lowered = value.lower()
    if lowered in _TRUE:
        return True
    return False if lowered in _FALSE else None


def switched_off(environment: Environment, distribution: str, variables: tuple[str, ...]) -> State | None:
    """Judge variables that a library reads with ``pytools.strtobool`` when it is imported; ``None`` if none is off."""
    for variable in variables:
        value = environment.get(variable)
        if value is None:
            continue
        verdict = strtobool(value)
        if verdict is None:
            why = f"{variable}={value!r} is not a boolean: import {distribution} raises ValueError; use 1, or unset it"
            return State(Condition.DISABLED, why)
        if verdict:
            return State(Condition.DISABLED, f"{variable}={value}")
    return None
