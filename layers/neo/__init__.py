"""The layer ``neo``: the places and variables of the program cache of Intel's compute-runtime (NEO) and ``ocloc``.

Sources, in intel/compute-runtime: ``programmers-guide/COMPILER_CACHE.md`` and
``shared/source/compiler_interface/{default_cache_config,compiler_cache,compiler_interface}.cpp`` with
``linux/{compiler_cache_linux,os_compiler_cache_helper}.cpp``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.core.declarations import EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import RECOMPILES, Code
from cachectl.layers.core.layer import Fault, misread
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.root import DISABLED, UNKNOWN
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import Switch
from cachectl.layers.host import drivers

#: The drivers of OpenCL and Level Zero, and the stand-alone compiler.
LIBRARIES = ("libigdrcl.so", "libze_intel_gpu.so", "libocloc.so")
_LEAF = "neo_compiler_cache"
FOLDER = Code(
    "folder",
    (RECOMPILES,),
    "Intel's driver makes no folder above its own, so it keeps nothing.",
    "`mkdir -p` it.",
    advice="the driver needs an Intel GPU, which the tests do not have",
)


class NeoCompilerCache(drivers.DriverLayer):
    """Programs compiled by Intel's driver for OpenCL or Level Zero, one file each."""

    name = "neo"
    title = "Intel NEO compiler cache"
    makers = ("Intel NEO",)
    # The driver reads it once for each device.
    switch = EnvSwitch(
        "NEO_CACHE_PERSISTENT",
        r"\s*0\s*",
        r"\s*[+-]?0*[1-9].*",
        RECOMPILES,
        "is no number: the driver takes it for 0, and keeps nothing",
        "export NEO_CACHE_PERSISTENT=1",
        disables=True,
        read=at_load(*LIBRARIES),
        value="0",
    )
    limit_variable = "NEO_CACHE_MAX_SIZE"
    family = Family("NEO_(?:COMPILER_|DISABLE_|NO_)?CACHE.*", "NEO_CACHE_MAX_SIZE NEO_CACHE_STATS")
    # An empty variable counts as not set.
    places = Places(
        "NEO_CACHE_DIR",
        linux=(
            Rule("NEO_CACHE_DIR"),
            Rule("XDG_CACHE_HOME", _LEAF),
            Rule("HOME", f".cache/{_LEAF}", source="default (HOME)"),
        ),
        windows=(Rule("NEO_CACHE_DIR"), Rule("LOCALAPPDATA", f"NEO/{_LEAF}")),
        macos=(),
    )
    # The driver opens the file of an entry to read it, and renames a temporary to a new one.
    about = About(lookups=Lookups(mapped=LIBRARIES, files=True), codes=(FOLDER,))

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.neo.entries import NeoPrograms

        return NeoPrograms()

    def faults(self) -> Iterator[Fault]:
        """Add a missing folder, and variables of the compiler."""
        yield from super().faults()
        for root in self.roots():
            # The driver makes its own folder, and on Linux .cache above it, but none that a variable names.
            above = {"NEO_CACHE_DIR": 0, "XDG_CACHE_HOME": 1}.get(root.source, 2)
            folder = (root.path, *root.path.parents)[above]
            if not folder.is_dir():
                message = f"{folder} is not there ({root.source}): the driver keeps nothing, and every run compiles"
                fix = f"mkdir -p {shlex.quote(str(folder))}"
                found = FOLDER.finding(self.name, folder, message, fix)
                yield DISABLED, found
        for variable in sorted(name for name in self.environment.variables if name.startswith("IGC_"))[:1]:
            outcome = "switches the cache off in compute-runtime 25.31 to 26.31, and is in no key of earlier ones"
            yield UNKNOWN, misread(self, variable, RECOMPILES, outcome)

    def relocate(self, folder: Path) -> Switch:
        """Return the path, and the folder to make first: the driver keeps nothing in a missing folder."""
        place = folder / "neo"
        return Switch(self.name, {"NEO_CACHE_DIR": str(place)}, read_at_load=LIBRARIES, makes=(place,))
