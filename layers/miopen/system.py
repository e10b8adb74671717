"""The layers ``miopen-system`` and ``miopen-system-tuning``: what came with MIOpen, which is only read.

Sources: ``src/binary_cache.cpp`` (``ComputeSysCachePath``, ``GetDb``), ``src/include/miopen/db.hpp`` (``MultiFileDb``:
the user's file first), ``src/sqlite_db.cpp``; ``src/find_db.cpp``, ``execution_context.hpp`` (names).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from itertools import takewhile
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

_PACKAGED: Final = MIOpenLayer.about._replace(scope=Scope.SYSTEM, on_network=None, among_ranks=None, when_closed=None)
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
        """Check the header, which decides whether MIOpen and other users can open the file, then every row."""
        severity, fix = Severity.RECOMPILES, self.fix(file.path, "")
        try:
            head = read_plain(file.path, limit=_LEAST)
        except OSError as error:
            code, message = "unreadable", f"cannot be read: {error.strerror}; MIOpen takes it for missing"
        else:
            code, message = (
                "too-small",
                f"has {len(head)} bytes, a git-lfs pointer perhaps: MIOpen takes it for missing",
            )
            if len(head) >= _LEAST:
                yield from super().verify_file(root, file)
                code = ""
            if is_wal(head):
                code, message = "wal", "is in WAL mode: only users who can write beside it can open it"
                severity = Severity.FAILS
                fix = f"as its owner: sqlite3 {shlex.quote(str(file.path))} 'pragma journal_mode=delete'"
        if code:
            yield facts.Finding(self.name, root.path, file.relative, severity, code, message, fix)


def _counts(file: DatabaseFile) -> bool:
    return file.path.stat().st_size >= _LEAST


class MIOpenSystemKernels(MIOpenLayer):
    """Compiled kernels that came with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    places = SYSTEM_KERNELS
    switch = MIOpenKernels.switch
    about = _PACKAGED
    store = SystemKernelDatabases()

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and each GPU without a database."""
        yield from super().diagnose()
        roots = self.roots()
        present = [file for root in roots for file in self.store.present(root)]
        for gpu in amd_gpus(self.environment) if roots else ():
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
        elif nearest.name.arch != gpu.arch:
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
    name = file.name
    plain = name.base if name.device is None else f"{name.arch}{name.base.removeprefix(name.device)}"
    return not {gpu.arch, *gpu.bases}.isdisjoint((name.base, plain))


def _distance(file: DatabaseFile, gpu: Gpu) -> tuple[int, int]:
    if file.name.arch == gpu.arch:
        return 0, min(abs((file.name.units or 0) - units) for units in gpu.units)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(file.name.base, gpu.arch, strict=False))
    return 1, -len(list(alike))


class SystemTuningDatabases(TuningDatabases):
    """The find-db and perf-db of the package."""

    asked_first = "miopen-tuning"
    texts = ("fdb.txt", "db.txt", "cd.pdb.txt")
    tables = ("db",)
    kinds = texts + tables


class MIOpenSystemTuning(MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    places = SYSTEM_TUNING
    about = _PACKAGED
    store = SystemTuningDatabases()

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        yield from MIOpenLayer.diagnose(self)
