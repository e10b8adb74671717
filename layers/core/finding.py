"""What is wrong, how much harm it does, and the command that fixes it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.core.entry import Entry
from cachectl.layers.core.json_form import as_json


class Severity(Enum):
    """The effect of a problem on programs, the worst first."""

    UNSAFE = "lets others run code as you"
    FAILS = "fails every run"
    RISKS = "may fail a run"
    RECOMPILES = "recompiles every run"
    HEALS = "recompiles once"
    WASTES = "wastes space"
    HARMLESS = "harmless"


UNSAFE, FAILS, RISKS, RECOMPILES, HEALS, WASTES, HARMLESS = Severity


class Hazard(NamedTuple):
    """The effect of a place or of concurrent users that the library does not support."""

    severity: Severity
    message: str


@as_json(hidden=("thing",))
class Finding(NamedTuple):
    """One problem, with the command that fixes it.

    ``thing`` is what ``purge --damaged`` removes: the damaged entry, or (as an orphan) a whole file that its library
    cannot open. It is ``None`` if removing something would not fix the problem.
    """

    layer: str
    root: Path
    key: str | None
    severity: Severity
    code: str
    message: str
    fix: str
    thing: Entry | None = None
