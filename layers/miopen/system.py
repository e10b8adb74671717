"""The layers ``miopen-system`` and ``miopen-system-tuning``: what came with MIOpen, which is only read.

Sources: ``src/binary_cache.cpp`` (``ComputeSysCachePath``, ``GetDb``), ``src/include/miopen/db.hpp`` (``MultiFileDb``:
the user's file first), ``src/sqlite_db.cpp``; ``src/find_db.cpp``, ``execution_context.hpp`` (names).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged
from cachectl.layers.base.facts import Entry, Found, Root, Scope, Severity
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.host.hardware import Gpu, amd_gpus
from cachectl.layers.miopen.databases import DatabaseFile, MIOpenLayer
from cachectl.layers.miopen.kernels import KernelDatabases, MIOpenKernels
from cachectl.layers.miopen.places import SYSTEM_KERNELS, SYSTEM_TUNING
from cachectl.layers.miopen.tuning import MIOpenTuning, TuningDatabases
from cachectl.layers.stores.database import is_wal

#: MIOpen ignores smaller files: empty ones, and pointers of git-lfs.
_LEAST: Final = 512


class SystemKernelDatabases(KernelDatabases):
    """Rows of sqlite files beside the library, opened read-only."""

    asked_first = "miopen"

    def list_file(self, file: DatabaseFile, template: Entry) -> Iterator[Found]:
        """Yield the rows of a file that MIOpen does not ignore."""
        return super().list_file(file, template) if _counts(file) else iter(())

    def is_made(self, file: DatabaseFile) -> bool:
        """Return whether there is a table that MIOpen uses; it makes none there."""
        if not _counts(file):
            return False
        if not super().is_made(file):
            raise Damaged(self.name, "has no table kern_db", file.path)
        return True

    def verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every row, and the header, which decides whether MIOpen and other users can open the file."""
        place = self.name, root.path, file.relative
        if not _counts(file):
            message = "is smaller than 512 bytes, a git-lfs pointer perhaps: MIOpen takes it for missing"
            yield facts.Finding(*place, Severity.RECOMPILES, "too-small", message, self.fix(file.path, ""))
            return
        yield from super().verify_file(root, file)
        # An unreadable file has a finding.
        with suppress(OSError):
            if is_wal(read_plain(file.path, limit=_LEAST)):
                message = "is in WAL mode: only users who can write beside it can open it"
                fix = f"as its owner: sqlite3 {shlex.quote(str(file.path))} 'pragma journal_mode=delete'"
                yield facts.Finding(*place, Severity.FAILS, "wal", message, fix)


def _counts(file: DatabaseFile) -> bool:
    return file.path.stat().st_size >= _LEAST


class MIOpenSystemKernels(MIOpenLayer):
    """Compiled kernels that came with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    places = SYSTEM_KERNELS
    switch = MIOpenKernels.switch
    scope = Scope.SYSTEM
    store = SystemKernelDatabases()
    on_network = None
    among_ranks = None
    when_closed = None

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and each GPU without a database."""
        yield from super().diagnose()
        roots = self.roots()
        present = [file for root in roots for file in self.store.present(root)]
        for gpu in amd_gpus(self.environment) if roots else ():
            if not any(_serves(file, gpu) for file in present):
                names = " nor ".join(f"{stem}.kdb" for stem in (*gpu.bases, gpu.arch))
                message = f"no system kernels for the GPU {gpu.arch}, neither {names}: each is compiled when first used"
                package = f"miopen-hip-{gpu.arch}kdb"
                fix = f"sudo apt-get install {package} || sudo dnf install {package}"
                yield facts.Finding(self.name, roots[0].path, None, Severity.RECOMPILES, "no-database", message, fix)


def _serves(file: DatabaseFile, gpu: Gpu) -> bool:
    """Return whether MIOpen looks for a file on a GPU, whose mode is not known here."""
    name = file.name
    plain = name.base if name.device is None else f"{name.arch}{name.base.removeprefix(name.device)}"
    return not {gpu.arch, *gpu.bases}.isdisjoint((name.base, plain))


class SystemTuningDatabases(TuningDatabases):
    """The find-db and perf-db of the package."""

    asked_first = "miopen-tuning"
    kinds = ("fdb.txt", "db.txt", "cd.pdb.txt")
    counted = ("db",)


class MIOpenSystemTuning(MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    places = SYSTEM_TUNING
    scope = Scope.SYSTEM
    precious = False
    store = SystemTuningDatabases()
    on_network = None
    among_ranks = None
    when_closed = None

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        yield from MIOpenLayer.diagnose(self)
