"""What is wrong, how much harm it does, and the command that fixes it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.core.entry import Entry
from cachectl.layers.core.json_form import as_json


class Severity(Enum):
    """The effect of a problem on programs, worst first."""

    UNSAFE = "lets others run code as you"
    FAILS = "fails every run"
    RISKS = "may fail a run"
    RECOMPILES = "recompiles every run"
    HEALS = "recompiles once"
    WASTES = "wastes space"
    HARMLESS = "harmless"


UNSAFE, FAILS, RISKS, RECOMPILES, HEALS, WASTES, HARMLESS = Severity


class Hazard(NamedTuple):
    """A severity, and what happens."""

    severity: Severity
    message: str


#: The prefixes of fixes that another account must run, or that are not commands.
_OF_OTHERS = ("sudo ", "as ", "wait ")


@as_json(hidden=("thing",), optional=("layers",))
class Finding(NamedTuple):
    """A problem, and the command that fixes it; ``code`` is its name in the catalogue.

    ``layer`` is the layer that it harms most; if it affects several, ``layers`` lists them all. ``thing`` is what
    ``purge --damaged`` removes: the damaged entry, or (as an orphan) a whole file that its library cannot open. It is
    ``None`` if removing something would not help. ``fix_tested`` says whether a test runs this fix in a shell and sees
    the library work afterwards; otherwise the fix is advice.
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
    """A kind of problem in the catalogue, from which the page about troubleshooting is generated.

    ``severities`` are those that it can have, starting with the usual one. ``meaning`` and ``cure`` are sentences in
    Markdown. ``symptoms`` are parts of the messages by which users recognise it. ``advice`` is why no test runs the
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
        """Return a finding of this kind, by default with the usual severity."""
        is_tested = not self.advice and not fix.startswith(_OF_OTHERS)
        return Finding(layer, root, key, severity or self.severities[0], self.name, message, fix, item, is_tested)
