"""The layer ``miopen-system``: the compiled kernels that came with MIOpen, and the lookup through both tiers.

Sqlite files beside the library, opened read-only. Sources: ``src/binary_cache.cpp`` (``ComputeSysCachePath``,
``GetDb``), ``src/include/miopen/db.hpp`` (``MultiFileDb``: the user's file first), ``src/sqlite_db.cpp``.
"""

from __future__ import annotations

from typing import Final

from cachectl.layers.errors import Damaged
from cachectl.layers.facts import Artifact, Finding, Root, Severity
from cachectl.layers.formats.miopen_names import parse_base, version_numbers
from cachectl.layers.miopen import SEPARATOR, DatabaseFile, Databases, Packaged, system_roots
from cachectl.layers.miopen_kernels import MIOpenKernels
from cachectl.layers.stores.rows import Schema

#: MIOpen takes a smaller file for a missing one: an empty file, or the pointer git-lfs leaves.
_LEAST: Final = 512
_WAL_MODE: Final = b"\x02\x02"


class MIOpenSystemKernels(Packaged, MIOpenKernels):
    """Compiled kernels that came with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    instead = "miopen"
    forms = ("miopen-kernel/1",)
    kinds = ("kdb",)
    shapes = ()

    def roots(self) -> tuple[Root, ...]:
        """Resolve relative to each libMIOpen that can be found."""
        return system_roots(self.environment, tilde=True)

    def databases(self, root: Root) -> Databases:
        """Return the database files of a root, which has no version folders."""
        return Databases(root, self.kinds)

    def _schema(self, file: DatabaseFile) -> Schema | None:
        if file.path.stat().st_size < _LEAST:
            return None
        schema = super()._schema(file)
        if schema is None:
            raise Damaged(self.name, "has no table kern_db", file.path)
        return schema

    def _inspect(self, root: Root, file: DatabaseFile) -> tuple[Schema | None, tuple[Finding, ...]]:
        try:
            with file.path.open("rb") as opened:
                head = opened.read(_LEAST)
        except OSError as error:
            message = f"cannot be read: {error.strerror}; MIOpen takes it for missing"
            return None, (self._header_finding(root, file, Severity.RECOMPILES, "unreadable", message),)
        if len(head) < _LEAST:
            message = f"has {len(head)} bytes, a git-lfs pointer perhaps: MIOpen takes it for missing"
            return None, (self._header_finding(root, file, Severity.RECOMPILES, "too-small", message),)
        schema, findings = super()._inspect(root, file)
        if head[18:20] == _WAL_MODE:
            message = "is in WAL mode: it opens only for those who may write beside it"
            findings += (self._header_finding(root, file, Severity.FAILS, "wal", message),)
        return schema, findings

    def _header_finding(self, root: Root, file: DatabaseFile, severity: Severity, code: str, message: str) -> Finding:
        fix = (
            f"as its owner: sqlite3 {file.path} 'pragma journal_mode=delete'" if code == "wal" else self._file_fix(file)
        )
        return Finding(self.name, root.path, file.relative, severity, code, message, fix)

    def _row_fix(self, file: DatabaseFile, key: str) -> str:
        del key
        return self._file_fix(file)

    def _file_fix(self, file: DatabaseFile) -> str:
        return f"reinstall the package that {file.path} belongs to"


def lookup(user: MIOpenKernels, system: MIOpenSystemKernels, base: str, name: str, args: str) -> Artifact | None:
    """Find a kernel as MIOpen does: the user's file, else the device's ``.kdb``, else the architecture's.

    ``base`` is device and compute units as files spell them (``gfx90a6e``). The last is asked only where the
    second does not exist. Raises :class:`Damaged` where a tier is: MIOpen throws, and asks no further one.
    """
    for root in user.roots():
        files = [file for file in user.databases(root).files() if isinstance(file, DatabaseFile)]
        mine = [file for file in files if file.name.base.raw == base]
        for file in sorted(mine, key=lambda file: version_numbers(file.folder or "0"), reverse=True):
            artifact = user.read(root, SEPARATOR.join((file.relative, name, args)))
            if artifact is not None:
                return artifact
    for root in system.roots():
        for stem in dict.fromkeys((base, parse_base(base).device or base)):
            if system.databases(root).find(f"{stem}.kdb") is not None:
                return system.read(root, SEPARATOR.join((f"{stem}.kdb", name, args)))
    return None
