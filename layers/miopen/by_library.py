"""What each libMIOpen looks for among the databases shipped with it, and what is there.

Sources: ``src/binary_cache.cpp`` (``GetDb``: the first file that exists is opened), ``src/find_db.cpp`` and
``src/include/miopen/execution_context.hpp`` (names of tuning results).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers import miopen
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.finding import Finding
from cachectl.layers.disk import place
from cachectl.layers.host import hardware
from cachectl.layers.miopen import codes, databases, kernels

#: The GPUs for whose kernels AMD has packages, in ROCm 6.3.4 and 7.0.2, and the folder that these install to
#: (``repo.radeon.com/rocm/apt/7.0.2/pool/main/m``). The core SDK has none.
_PACKAGED_FOR = frozenset({"gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030"})
_PACKAGED_INTO = regex(r"/opt/rocm(?:-[^/]+)?/share/miopen/db")
#: What follows the device in the names of files, by their kind. Older versions have a perf-db in sqlite.
_ENDINGS = {"kdb": (".kdb",), "fdb.txt": (".HIP.fdb.txt",), "db.txt": (".db.txt", ".db")}


class Lookup(NamedTuple):
    """What ``reader`` (a library, or the variable for all) looks for in a folder: the first of ``names`` that exists.

    ``device`` is an architecture with its modes; ``words`` also say what exists, and ``is_hit`` whether it is opened.
    """

    reader: str
    folder: Path
    device: str
    names: tuple[str, ...]
    words: str
    is_hit: bool

    def find_fix(self, environment: Environment) -> str:
        """Return the command that gives the reader a database: from another folder, a package, or the user's."""
        for root in miopen.SYSTEM_KERNELS.roots(environment.with_variables({miopen.SYSTEM: None})):
            with suppress(OSError):
                if _look_up(root.path, self.names)[1]:
                    is_default = self.reader == miopen.SYSTEM and root.source != miopen.UNREAD
                    folder = shlex.quote(str(root.path))
                    return f"unset {miopen.SYSTEM}" if is_default else f"export {miopen.SYSTEM}={folder}"
        arch = self.device.partition("_")[0]
        if arch in _PACKAGED_FOR and _PACKAGED_INTO.fullmatch(str(self.folder)):
            return f"sudo apt-get install --reinstall miopen-hip-{arch}kdb || sudo dnf install miopen-hip-{arch}kdb"
        name, folder = shlex.quote(self.names[-1]), shlex.quote(str(self.folder))
        install = "install" if place.is_writable(self.folder) else "sudo install"
        return f"cachectl push {name} miopen && {install} -D -m 644 -t {folder} {name}"


def find_devices(environment: Environment) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the GPUs that MIOpen sees with the bases of their files; without any, those of the user's databases."""
    gpus = list(hardware.amd_gpus(environment))
    for made in () if gpus else (miopen.MIOpenKernels, miopen.MIOpenTuning):
        layer = made(environment)
        files = [file for root in layer.roots() for file in layer.store.tables.present(root)]
        gpus += [(file.device, (file.base,)) for file in files if file.device is not None]
    return tuple(dict.fromkeys(gpus))


def find_lookups(layer: miopen.MIOpenLayer) -> Iterator[Lookup]:
    """Yield what each library looks for, this Python's first, except in folders that cannot be listed."""
    devices = find_devices(layer.environment)
    for root in layer.roots():
        for device, bases in devices if root.source != miopen.UNREAD else ():
            for kind in filter(_ENDINGS.get, layer.store.tables.kinds):
                # Kernels may be for any number of compute units.
                stems = (*bases, device) if kind == "kdb" else bases
                names = tuple(stem + ending for stem in stems for ending in _ENDINGS[kind])
                with suppress(OSError):
                    reader, (outcome, is_hit) = root.source.removeprefix("next to "), _look_up(root.path, names)
                    words = f"{reader} looks for {' or '.join(names)} in {root.path}: {outcome}"
                    yield Lookup(reader, root.path, device, names, words, is_hit)


def _look_up(folder: Path, names: Iterable[str]) -> tuple[str, bool]:
    """Return what a folder has under one of these names, and whether MIOpen opens it. Raises :class:`OSError`."""
    present: dict[str, Path] = {}
    for file in sorted(os.listdir(folder)) if folder.is_dir() else ():
        # Links are followed. Variables may hide a GPU's modes, so those of a file do not count.
        if (named := databases.parse_name(file)) is not None and (folder / file).exists():
            present |= {file.replace(named.base, base, 1): folder / file for base in named.bases}
    path = next((present[name] for name in names if name in present), None)
    if path is None:
        return "not there", False
    is_large = path.suffix != ".kdb" or path.stat().st_size >= kernels.LEAST
    if is_large and os.access(path, os.R_OK):
        return f"{path.name} is there", True
    return f"{path.name} {'cannot be read' if is_large else 'counts as missing, as it has less than 512 bytes'}", False


def diagnose_lookups(layer: miopen.MIOpenLayer) -> Iterator[Finding]:
    """Yield each library that finds no kernels for a GPU. The layer reports a variable that names nothing."""
    for lookup in find_lookups(layer):
        if not lookup.is_hit and (lookup.reader != miopen.SYSTEM or lookup.folder.exists()):
            message = f"no system kernels for the GPU {lookup.device}: each is compiled at first use; {lookup.words}"
            yield codes.NO_DATABASE.finding(layer.name, lookup.folder, message, lookup.find_fix(layer.environment))
