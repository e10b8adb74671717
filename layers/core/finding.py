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


#: How fixes begin that another account has to run, or that are no command.
_OF_OTHERS = ("sudo ", "as ", "wait ")


@as_json(hidden=("thing",), optional=("layers",))
class Finding(NamedTuple):
    """One state of the world, with the command that fixes it; ``code`` names the state in the catalogue.

    ``layers`` are all layers that it stops, if they are several; ``layer`` is the one that it harms most. ``thing`` is
    what ``purge --damaged`` removes: the damaged entry, or (as an orphan) a whole file that its library cannot open.
    It is ``None`` if removing something would not fix the problem. ``fix_tested`` says whether a test runs the fix of
    this state in a shell and sees the library work afterwards; otherwise it is advice.
    """

    layer: str
    root: Path
    key: str | None
    severity: Severity
    code: str
    message: str
    fix: str
    thing: Entry | None = None
    fix_tested: bool = False
    layers: tuple[str, ...] | None = None


class Code(NamedTuple):
    """One state of the world in the catalogue, from which the page about troubleshooting is made.

    ``severities`` are those that it can have, the usual one first. ``meaning`` and ``cure`` are sentences in Markdown.
    ``symptoms`` are the beginnings or parts of the messages by which users know it. ``advice`` is why no test runs the
    fix; it is empty if one does.
    """

    name: str
    severities: tuple[Severity, ...]
    meaning: str
    cure: str
    symptoms: tuple[str, ...] = ()
    advice: str = ""

    def finding(
        self,
        layer: str,
        root: Path,
        message: str,
        fix: str,
        *,
        key: str | None = None,
        severity: Severity | None = None,
        item: Entry | None = None,
    ) -> Finding:
        """Return the finding that something is in this state, by default as serious as it usually is."""
        is_tested = not self.advice and not fix.startswith(_OF_OTHERS)
        return Finding(layer, root, key, severity or self.severities[0], self.name, message, fix, item, is_tested)
