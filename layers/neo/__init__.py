"""The layer ``neo``: the places and variables of the program cache of Intel's compute-runtime (NEO) and ``ocloc``.

Sources, in intel/compute-runtime: ``programmers-guide/COMPILER_CACHE.md`` and
``shared/source/compiler_interface/{default_cache_config,compiler_cache,compiler_interface}.cpp`` with
``linux/{compiler_cache_linux,os_compiler_cache_helper}.cpp``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cachectl.layers.base import declarations, facts, parts, switches
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import later, regex
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.host import drivers
from cachectl.layers.host.driver_layers import DriverLayer, Limit

#: The drivers of OpenCL and Level Zero, and the stand-alone compiler.
LIBRARIES: Final = ("libigdrcl.so", "libze_intel_gpu.so", "libocloc.so")
STATISTICS: Final = "stats"
_MAKER: Final = "Intel NEO"
_LEAF: Final = "neo_compiler_cache"
#: The first and the last release in which any variable of the compiler switches the cache off.
_KILLED: Final = ((25, 31), (26, 31))
#: The driver's release, as it stands in the library.
_RELEASE: Final = regex(rb"\x00(\d\d)\.(\d\d?)\.\d{4,6}(?:\.\d+)?\x00")

# An empty variable counts as not set.
_PLACES: Final = declarations.Rules(
    "NEO_CACHE_DIR",
    linux=(
        declarations.Rule("NEO_CACHE_DIR"),
        declarations.Rule("XDG_CACHE_HOME", _LEAF),
        declarations.Rule("HOME", f".cache/{_LEAF}", source="default (HOME)"),
    ),
    windows=(declarations.Rule("NEO_CACHE_DIR"), declarations.Rule("LOCALAPPDATA", f"NEO/{_LEAF}")),
    macos=(),
)


class NeoLookups(parts.Lookups):
    """The driver opens the file of an entry to read it, and renames a temporary to a new one.

    From release 26.14 on, it also counts hits and misses in a file of the cache, if a variable says so.
    """

    files = parts.EntryFiles()
    mapped = LIBRARIES
    by = "the driver's own counters"
    variables: Mapping[str, str] = {"NEO_CACHE_STATS": "1"}

    def counters(self, environment: Environment) -> tuple[int, int] | None:
        """Return the hits and misses of the cache, if it has the file."""
        from cachectl.layers.formats import neo_binaries

        for root in _PLACES.roots(environment):
            with suppress(OSError):
                return neo_binaries.read_statistics(read_plain(root.path / STATISTICS, limit=64))
        return None


class NeoCompilerCache(DriverLayer):
    """Programs compiled by Intel's driver for OpenCL or Level Zero, one file each."""

    name = "neo"
    title = "Intel NEO compiler cache"
    makers = (_MAKER,)
    settings = (
        switches.Setting(
            "NEO_CACHE_PERSISTENT",
            r"\s*0\s*",
            r"\s*[+-]?0*[1-9].*",
            facts.Severity.RECOMPILES,
            "is no number: the driver takes it for 0, and keeps nothing",
            "export NEO_CACHE_PERSISTENT=1",
            disables=True,
        ),
    )
    limit = Limit("NEO_CACHE_MAX_SIZE")
    # The driver reads it once for each device.
    switch = declarations.EnvSwitch("NEO_CACHE_PERSISTENT", off="0", read=declarations.at_load(*LIBRARIES))
    places = _PLACES
    store: Any = later("cachectl.layers.neo.entries", "programs")
    about = parts.About(lookups=NeoLookups())

    def diagnose(self) -> Iterator[facts.Finding]:
        """Add several drivers."""
        yield from drivers.several_drivers(self, _MAKER)
        yield from super().diagnose()

    def faults(self) -> Iterator[switches.Fault]:
        """Add a missing folder, and variables of the compiler."""
        yield from super().faults()
        yield from self._folder_faults()
        yield from self._compiler_faults()

    def _folder_faults(self) -> Iterator[switches.Fault]:
        """Yield a missing folder: the driver makes its own, and on Linux .cache above it, but none that is named."""
        for root in self.roots():
            above = {"NEO_CACHE_DIR": 0, "XDG_CACHE_HOME": 1}.get(root.source, 2)
            folder = (root.path, *root.path.parents)[above]
            if not folder.is_dir():
                message = f"{folder} is not there ({root.source}): the driver keeps nothing, and every run compiles"
                severity, fix = facts.Severity.RECOMPILES, f"mkdir -p {shlex.quote(str(folder))}"
                found = facts.Finding(self.name, folder, None, severity, "folder", message, fix)
                yield facts.Condition.DISABLED, found

    def _compiler_faults(self) -> Iterator[switches.Fault]:
        variable = next((name for name in sorted(self.environment.variables) if name.startswith("IGC_")), None)
        release = None if variable is None else self._release()
        if variable is None or (release is not None and release > _KILLED[1]):
            return
        condition = facts.Condition.UNKNOWN if release is None else facts.Condition.DISABLED
        outcome = "switches the cache off in compute-runtime 25.31 to 26.31, as every IGC_ variable does"
        if release is None or release >= _KILLED[0]:
            yield condition, switches.misread(self, variable, facts.Severity.RECOMPILES, outcome)
        else:
            outcome = "is not in the keys of this release: entries compiled with another value are served"
            yield None, switches.misread(self, variable, facts.Severity.RISKS, outcome)

    def _release(self) -> tuple[int, int] | None:
        """Return the driver's release, read from its library, which is not loaded; ``None`` if it is not known."""
        import mmap

        if (library := drivers.only_library(self.environment, _MAKER)) is not None:
            # A library without a folder is found by the system's linker alone.
            with (
                suppress(OSError, ValueError),
                open(open_plain(library, follow=True), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                if (match := _RELEASE.search(content)) is not None:
                    return int(match[1]), int(match[2])
        return None

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the path, and the folder to make first: the driver keeps nothing in a missing folder."""
        place = folder / "neo"
        return facts.Switch(self.name, {"NEO_CACHE_DIR": str(place)}, read_at_load=LIBRARIES, makes=(place,))
