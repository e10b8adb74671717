"""Layers of OpenCL drivers: their state and the problems with what they read, from one declaration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cachectl.layers.base import declarations, errors, facts, layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.host.drivers import driver_files

#: A number as ``atoll`` reads it.
_NUMBER: Final = regex(r"\s*[+-]?\d{1,18}", re.ASCII)
_PLAIN_NUMBER: Final = regex(r"\s*[+-]?\d+\s*", re.ASCII)
#: The part of a limit above which a library is about to drop entries.
_NEARLY: Final = 0.9


class Limit(NamedTuple):
    """A variable with the bytes above which a driver drops entries, and how the driver reads it."""

    variable: str
    default: int = 1 << 30
    #: The largest limit that can be set, if there is one.
    highest: int | None = None
    #: Whether the driver stores nothing if it is 0, which else is no limit.
    zero_is_off: bool = False


class DriverLayer(layer.Layer):
    """The cache of an OpenCL driver, which exists if the driver is registered, or has left a cache.

    Each problem is declared once: it is the reason of the state, and the finding.
    """

    #: The makers of the drivers.
    makers: ClassVar[tuple[str, ...]]
    places: ClassVar[declarations.Places]
    switch: ClassVar[declarations.EnvSwitch]
    #: Further variables whose values have outcomes that few expect.
    others: ClassVar[tuple[declarations.EnvSwitch, ...]] = ()
    limit: ClassVar[Limit | None] = None
    #: The effect of a variable that leaves the driver without a place.
    placeless: ClassVar[facts.Hazard] = facts.Hazard(
        facts.Severity.RECOMPILES, "is not absolute: the driver keeps nothing, and every run compiles"
    )

    def drivers(self) -> tuple[str, ...]:
        """Return the files that register the drivers."""
        return driver_files(self.environment, self.makers)

    def is_here(self) -> bool:
        """Return whether there is a driver or a cache."""
        return bool(self.drivers()) or any(root.exists for root in self.roots())

    def state(self) -> facts.State:
        """Return the condition of the first problem that has one: all but a switch count only with a driver."""
        faults = list(self.faults())
        condition, why = next(((known, fault) for known, fault in faults if known is not None), (None, None))
        if condition is not None and why is not None and (why.code == "off" or self.is_here()):
            return facts.State(condition, why.message, self.drivers())
        if not self.is_here():
            who = " or ".join(self.makers)
            return facts.State(facts.Condition.ABSENT, f"no driver of {who} is here, and none has left a cache")
        variable, odd = self.switch.variable, [fault.message for _, fault in faults if fault.code == "variable"]
        value = self.environment.get(variable)
        named = "on by default" if value is None or odd else f"{variable}={value}"
        return facts.State(facts.Condition.ENABLED, "; ".join((named, *odd)), self.drivers())

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield the problems, and a cache that is nearly full."""
        here = self.is_here()
        yield from (fault for _, fault in self.faults() if here or fault.code == "off")
        if here and self.limit is not None:
            yield from self._nearly_full(self.limit)

    def faults(self) -> Iterator[layer.Fault]:
        """Yield the problems with the variables, each with the condition that follows from it."""
        yield from layer.faults_of(self, (self.switch, *self.others))
        yield from self._place_faults()
        if self.limit is not None:
            yield from self._limit_faults(self.limit)

    def _place_faults(self) -> Iterator[layer.Fault]:
        environment, decided = self.environment, self.places.deciding(self.environment)
        if decided is None:
            rules = self.places.rules(environment.platform)
            if rules and not self.roots():
                message = f"{rules[-1].variable} is not set: the driver has no place for a cache"
                fix = f"export {rules[-1].variable}={shlex.quote(str(environment.home))}"
                found = facts.Finding(self.name, Path("*"), None, facts.Severity.RECOMPILES, "variable", message, fix)
                yield facts.Condition.DISABLED, found
            return
        rule, value, odd = decided
        home = environment.home if rule.variable == "HOME" else environment.absolute(value)
        absolute = f"export {rule.variable}={shlex.quote(str(home))}"
        fixes = absolute if value or rule.variable == "HOME" else None
        if odd is declarations.Odd.NOWHERE:
            yield facts.Condition.DISABLED, layer.misread(self, rule.variable, *self.placeless, fixes)
        elif odd is declarations.Odd.HERE and environment.platform != "win32":
            outcome = "is not absolute: each folder that a program is started from gets a cache of its own"
            yield None, layer.misread(self, rule.variable, facts.Severity.RECOMPILES, outcome, fixes)

    def _limit_faults(self, limit: Limit) -> Iterator[layer.Fault]:
        if (value := self.environment.get(limit.variable)) is None:
            return
        number = _leading_number(value)
        condition = facts.Condition.DISABLED if limit.zero_is_off and not number else None
        if not _PLAIN_NUMBER.fullmatch(value):
            outcome = f"is no number of bytes: the driver takes it for {number}"
            severity = facts.Severity.RECOMPILES if number or condition else facts.Severity.WASTES
            yield condition, layer.misread(self, limit.variable, severity, outcome)
        elif condition is not None:
            yield condition, layer.off(self, limit.variable)

    def _nearly_full(self, limit: Limit) -> Iterator[facts.Finding]:
        value = self.environment.get(limit.variable)
        number = limit.default if value is None else _leading_number(value)
        if number <= 0 or not (value is None or _PLAIN_NUMBER.fullmatch(value)):
            return
        most, held = min(number, limit.highest or number), 0
        # Report names a root that cannot be read.
        with suppress(errors.LayerError, OSError):
            held = sum(self.store.usage(root).bytes or 0 for root in self.roots())
        wanted = 2 * max(most, held)
        fix = f"export {limit.variable}={wanted}"
        if limit.highest is not None and wanted > limit.highest:
            fix = f"cachectl prune --max-size {most // 2}B {self.name}"
        said = "the default" if value is None else limit.variable
        message = f"holds {held:,} of at most {most:,} bytes ({said}): the driver drops entries to make room"
        yield from self.near_limit(held, most, message, fix, layer.first_place(self))

    def near_limit(self, held: int, limit: int, message: str, fix: str, place: Path) -> Iterator[facts.Finding]:
        """Yield a finding if so many bytes are close to the limit, above which the library drops entries."""
        if held >= _NEARLY * limit:
            yield facts.Finding(self.name, place, None, facts.Severity.RECOMPILES, "cap", message, fix)


def _leading_number(value: str) -> int:
    """Read a number as ``atoll`` does: ``1G`` is one, and a text without a leading number is 0."""
    return int(match[0]) if (match := _NUMBER.match(value)) else 0
