"""The layer ``miopen-system-tuning``: the find-db and perf-db that came with MIOpen, read only.

Sources: ``src/find_db.cpp``, ``src/include/miopen/execution_context.hpp`` (names), ``src/db_path.cpp.in``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cachectl.layers.base import facts
from cachectl.layers.base.facts import Ability, Orphan, Root
from cachectl.layers.miopen.places import DatabaseFile, Packaged, diagnosed_flag, read_only, system_roots
from cachectl.layers.miopen.tuning import FIND_DB, SWITCH, MIOpenTuning, TuningDatabases


class SystemTuningDatabases(TuningDatabases):
    """The find-db and perf-db of the package."""

    texts = ("fdb.txt", "db.txt", "cd.pdb.txt")
    tables = ("db",)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse every change."""
        return {**super().refusals(), **read_only("miopen-tuning")}

    def _scan_orphans(self, root: Root) -> Iterator[Orphan]:
        # Nothing rewrites these files. Other files beside them belong to the package.
        del root
        return iter(())

    def _fix(self, file: DatabaseFile, own: str) -> str:
        del own
        return f"reinstall the package that {file.path} belongs to"


class MIOpenSystemTuning(Packaged, MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    precious = False
    store = SystemTuningDatabases()
    on_network = None
    among_ranks = None
    when_closed = None

    def roots(self) -> tuple[Root, ...]:
        """Resolve relative to each libMIOpen that is found."""
        return system_roots(self.environment, tilde=False)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        yield from diagnosed_flag(self, SWITCH, FIND_DB)
