"""The layer ``miopen-system-tuning``: the find-db and perf-db that came with MIOpen, read only.

Sources: ``src/find_db.cpp``, ``src/include/miopen/execution_context.hpp`` (names), ``src/db_path.cpp.in``.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachectl.layers.facts import Orphan, Root
from cachectl.layers.miopen import DatabaseFile, Packaged, system_roots
from cachectl.layers.miopen_tuning import MIOpenTuning


class MIOpenSystemTuning(Packaged, MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    instead = "miopen-tuning"
    precious = False
    texts = ("fdb.txt", "db.txt", "cd.pdb.txt")
    tables = ("db",)

    def roots(self) -> tuple[Root, ...]:
        """Resolve relative to each libMIOpen that can be found."""
        return system_roots(self.environment, tilde=False)

    def _scan_strays(self, root: Root) -> Iterator[Orphan]:
        # Nobody rewrites these files; what lies beside them is the package's own.
        del root
        return iter(())

    def _fix(self, file: DatabaseFile, own: str) -> str:
        del own
        return f"reinstall the package that {file.path} belongs to"
