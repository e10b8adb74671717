"""The facts that layers return: frozen data without access to the disk.

Sizes are bytes, times are epoch seconds. ``None`` is *unknown*; zero is zero.

A report needs no fact of ``changes``, and Python takes longer to make such a class than to import most modules. So
that module is imported when one of its facts is first used, as ``facts.Outcome``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cachectl.layers.base.facts.found import (
    Ability,
    Bulk,
    Condition,
    Counted,
    Entry,
    Found,
    Hazard,
    Housekeeping,
    Orphan,
    Problem,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Usage,
    When,
)

if TYPE_CHECKING:
    from cachectl.layers.base.facts.changes import (
        Artifact,
        Brought,
        Finding,
        Flag,
        Note,
        Outcome,
        Patch,
        Plan,
        Switch,
        note_of,
    )
else:

    def __getattr__(name):  # noqa: ANN001, ANN202 - a type checker sees the imports above
        # From now on it is found without this function.
        value = globals()[name] = getattr(import_module("cachectl.layers.base.facts.changes"), name)
        return value


__all__ = [
    "Ability",
    "Artifact",
    "Brought",
    "Bulk",
    "Condition",
    "Counted",
    "Entry",
    "Finding",
    "Flag",
    "Found",
    "Hazard",
    "Housekeeping",
    "Note",
    "Orphan",
    "Outcome",
    "Patch",
    "Plan",
    "Problem",
    "Removable",
    "Root",
    "Scope",
    "Severity",
    "State",
    "Switch",
    "Usage",
    "When",
    "note_of",
]
