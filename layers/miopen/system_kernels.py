"""The layer ``miopen-system``: the compiled kernels that came with MIOpen, and the lookup in both layers.

Sqlite files beside the library, opened read-only. Sources: ``src/binary_cache.cpp`` (``ComputeSysCachePath``,
``GetDb``), ``src/include/miopen/db.hpp`` (``MultiFileDb``: the user's file first), ``src/sqlite_db.cpp``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged
from cachectl.layers.base.facts import Ability, Root, Severity
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.host.hardware import Gpu, amd_gpus
from cachectl.layers.miopen.databases import MIOpenLookups
from cachectl.layers.miopen.kernels import SWITCH, KernelDatabases, MIOpenKernels
from cachectl.layers.miopen.names import parse_base, version_numbers
from cachectl.layers.miopen.places import (
    SEPARATOR,
    DatabaseFile,
    Databases,
    Packaged,
    diagnosed_flag,
    kernel_key,
    read_only,
    system_roots,
)
from cachectl.layers.stores.rows import Schema

#: MIOpen ignores smaller files: empty ones, and pointers of git-lfs.
_LEAST: Final = 512
_WAL_MODE: Final = b"\x02\x02"


class SystemKernelDatabases(KernelDatabases):
    """Rows of sqlite files beside the library."""

    forms = ("miopen-kernel/1",)
    kinds = ("kdb",)
    shapes = ()

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse every change."""
        return {**super().refusals(), **read_only("miopen")}

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

    def _inspect(self, root: Root, file: DatabaseFile) -> tuple[Schema | None, tuple[facts.Finding, ...]]:
        try:
            head = read_plain(file.path, limit=_LEAST)
        except OSError as error:
            message = f"cannot be read: {error.strerror}; MIOpen takes it for missing"
            return None, (self._header_finding(root, file, Severity.RECOMPILES, "unreadable", message),)
        if len(head) < _LEAST:
            message = f"has {len(head)} bytes, a git-lfs pointer perhaps: MIOpen takes it for missing"
            return None, (self._header_finding(root, file, Severity.RECOMPILES, "too-small", message),)
        schema, findings = super()._inspect(root, file)
        if head[18:20] == _WAL_MODE:
            message = "is in WAL mode: only users who can write beside it can open it"
            findings += (self._header_finding(root, file, Severity.FAILS, "wal", message),)
        return schema, findings

    def _header_finding(
        self, root: Root, file: DatabaseFile, severity: Severity, code: str, message: str
    ) -> facts.Finding:
        fix = (
            f"as its owner: sqlite3 {shlex.quote(str(file.path))} 'pragma journal_mode=delete'"
            if code == "wal"
            else self._file_fix(file)
        )
        return facts.Finding(self.name, root.path, file.relative, severity, code, message, fix)

    def _row_fix(self, file: DatabaseFile, key: str) -> str:
        del key
        return self._file_fix(file)

    def _file_fix(self, file: DatabaseFile) -> str:
        return f"reinstall the package that {file.path} belongs to"


class MIOpenSystemKernels(Packaged, MIOpenKernels):
    """Compiled kernels that came with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    store = SystemKernelDatabases()
    on_network = None
    among_ranks = None
    when_closed = None

    @property
    def lookups(self) -> MIOpenLookups:
        """How the lookups of a run are observed."""
        return MIOpenLookups()

    def roots(self) -> tuple[Root, ...]:
        """Resolve relative to each libMIOpen that is found."""
        return system_roots(self.environment, tilde=True)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and each GPU without a database."""
        yield from diagnosed_flag(self, SWITCH)
        roots = self.roots()
        if not roots:
            return
        present = [
            file for root in roots for file in self.store.databases(root).files() if isinstance(file, DatabaseFile)
        ]
        for gpu in amd_gpus(self.environment):
            if not any(_serves(file, gpu) for file in present):
                yield self._missing(roots[0], gpu, present)

    def _missing(self, root: Root, gpu: Gpu, present: list[DatabaseFile]) -> facts.Finding:
        """Name the nearest database: by compute units of the same architecture, else by the most similar name."""
        names = " nor ".join(f"{stem}.kdb" for stem in (*gpu.bases, gpu.arch))
        package = f"miopen-hip-{gpu.arch}kdb"
        fix = f"sudo apt-get install {package} || sudo dnf install {package}"
        nearest = min(present, key=lambda file: _distance(file, gpu), default=None)
        if nearest is None:
            near = "there is no other"
        elif nearest.name.base.arch != gpu.arch:
            near = f"the nearest is {nearest.path.name}, whose code does not run on it"
        else:
            near = f"the nearest is {nearest.path.name}, whose code runs on it but which MIOpen does not look for"
            to = nearest.path.with_name(f"{gpu.arch}.kdb" if len(gpu.bases) > 1 else f"{gpu.bases[0]}.kdb")
            # The folder belongs to a package.
            sudo = "" if os.access(to.parent, os.W_OK) else "sudo "
            fix = f"{sudo}cp {shlex.quote(str(nearest.path))} {shlex.quote(str(to))}"
        message = f"no system kernels for the GPU {gpu.arch}, neither {names}: each is compiled when first used; {near}"
        return facts.Finding(self.name, root.path, None, Severity.RECOMPILES, "no-database", message, fix)


def _serves(file: DatabaseFile, gpu: Gpu) -> bool:
    """Return whether MIOpen looks for a file on a GPU, whose mode is not known here."""
    base = file.name.base
    plain = base.raw if base.device is None else f"{base.arch}{base.raw.removeprefix(base.device)}"
    return {gpu.arch, *gpu.bases} & {base.raw, plain} != set()


def _distance(file: DatabaseFile, gpu: Gpu) -> tuple[int, int]:
    base = file.name.base
    if base.arch == gpu.arch:
        return 0, min(abs((base.units or 0) - units) for units in gpu.units)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(base.raw, gpu.arch, strict=False))
    return 1, -len(list(alike))


def lookup(user: MIOpenKernels, system: MIOpenSystemKernels, base: str, name: str, args: str) -> facts.Artifact | None:
    """Find a kernel as MIOpen does: in the user's file, the device's ``.kdb``, or the architecture's if it is missing.

    ``base`` is device and compute units as in file names (``gfx90a6e``). Raises :class:`Damaged` for a damaged file:
    MIOpen throws, and looks no further.
    """
    for root in user.roots():
        files = [file for file in user.store.databases(root).files() if isinstance(file, DatabaseFile)]
        mine = [file for file in files if file.name.base.raw == base]
        for file in sorted(mine, key=lambda file: version_numbers(file.folder or "0"), reverse=True):
            artifact = user.store.read(root, SEPARATOR.join((file.relative, kernel_key(name, args))))
            if artifact is not None:
                return artifact
    for root in system.roots():
        for stem in dict.fromkeys((base, parse_base(base).device or base)):
            if system.store.databases(root).find(f"{stem}.kdb") is not None:
                return system.store.read(root, SEPARATOR.join((f"{stem}.kdb", kernel_key(name, args))))
    return None
