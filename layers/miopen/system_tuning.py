"""The layer ``miopen-system-tuning``: the find-db and perf-db that came with MIOpen, read only.

Sources: ``src/find_db.cpp``, ``src/include/miopen/execution_context.hpp`` (names), ``src/db_path.cpp.in``.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachectl.layers.base import facts
from cachectl.layers.base.facts import Found, Root, Scope
from cachectl.layers.miopen.places import SYSTEM_TUNING, diagnosed_flag
from cachectl.layers.miopen.tuning import FIND_DB, MIOpenTuning, TuningDatabases


class SystemTuningDatabases(TuningDatabases):
    """The find-db and perf-db of the package."""

    asked_first = "miopen-tuning"
    texts = ("fdb.txt", "db.txt", "cd.pdb.txt")
    tables = ("db",)
    kinds = texts + tables

    def scan_others(self, root: Root, latest: str | None) -> Iterator[Found]:
        """Yield nothing: nothing rewrites these files, and others beside them belong to the package."""
        del root, latest
        yield from ()


class MIOpenSystemTuning(MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    place = SYSTEM_TUNING
    scope = Scope.SYSTEM
    precious = False
    store = SystemTuningDatabases()
    on_network = None
    among_ranks = None
    when_closed = None

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        yield from diagnosed_flag(self, self.variable, FIND_DB)
