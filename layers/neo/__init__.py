"""The layer ``neo``: the program cache of Intel's compute-runtime (NEO) and ``ocloc``.

Sources, in intel/compute-runtime: ``programmers-guide/COMPILER_CACHE.md`` and
``shared/source/compiler_interface/{default_cache_config,compiler_cache,compiler_interface}.cpp`` with
``linux/{compiler_cache_linux,os_compiler_cache_helper}.cpp``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.environment import Environment, answered_once
from cachectl.layers.core.declarations import EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import HARMLESS, RECOMPILES, Code
from cachectl.layers.core.layer import Fault, misread
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.root import DISABLED, ENABLED, UNKNOWN, Root, Scope, State
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import Switch
from cachectl.layers.disk.plain import read_installed
from cachectl.layers.host import drivers

#: The drivers of OpenCL and Level Zero, and the stand-alone compiler.
LIBRARIES = ("libigdrcl.so", "libze_intel_gpu.so", "libocloc.so")
_LEAF = "neo_compiler_cache"
#: Releases before 24.22 keep a cache in the folder that this variable names, else in this folder of the working
#: directory, if it exists. Those before 23.22 have no other.
_OLD, _OLD_FOLDER = "cl_cache_dir", "cl_cache"
_OLD_SOURCES = (_OLD, f"./{_OLD_FOLDER}")
#: A folder that cannot be made.
_NOWHERE = f"/dev/null/{_OLD_FOLDER}"
FOLDER = Code(
    "folder",
    (RECOMPILES,),
    "Intel's driver does not make the folder above its own, so it keeps nothing.",
    "`mkdir -p` it.",
    advice="the driver needs an Intel GPU, which the tests do not have",
)


@answered_once
def _variables_read(environment: Environment) -> frozenset[str]:
    """Return which variables for folder and switch the registered drivers contain, and so read."""
    names: set[str] = set()
    for library in drivers.driver_libraries(environment, "Intel NEO"):
        with suppress(OSError):
            content = read_installed(library)
            names.update(name for name in (_OLD, "NEO_CACHE_PERSISTENT") if f"{name}\0".encode() in content)
    return frozenset(names)


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
        "is not a number: the driver reads it as 0, and keeps nothing",
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

    @property
    def is_old(self) -> bool:
        """Whether all drivers here are of releases before 23.22."""
        return _variables_read(self.environment) == {_OLD}

    def roots(self) -> tuple[Root, ...]:
        """Add the place of older releases."""
        environment, roots = self.environment, self.places.roots(self.environment)
        if not self.drivers() and not environment.get(_OLD):
            return roots
        if self.is_old:
            roots = tuple(root for root in roots if root.exists)
        named = environment.get(_OLD)
        folder, source = environment.absolute(named or _OLD_FOLDER), _OLD_SOURCES[not named]
        if named == _NOWHERE or not (named or (_OLD in _variables_read(environment) and folder.is_dir())):
            return roots
        old = Root(folder, Scope.USER, source)
        return (old, *roots) if self.is_old else (*roots, old)

    def state(self) -> State:
        """Return the state; older releases have no switch, but keep nothing without their folder."""
        state = super().state()
        if not state.drivers or _OLD not in _variables_read(self.environment):
            return state
        old = next((root for root in self.roots() if root.source in _OLD_SOURCES and root.path.is_dir()), None)
        if old is None:
            return state
        return State(ENABLED, f"a release before 24.22 keeps a cache in {old.source}", state.drivers)

    def faults(self) -> Iterator[Fault]:
        """Add a missing folder, and variables of the compiler."""
        yield from super().faults()
        for root in self.roots():
            # The driver makes its own folder, and on Linux .cache above it, but not one that a variable names.
            above = {"NEO_CACHE_DIR": 0, **dict.fromkeys(_OLD_SOURCES, 0), "XDG_CACHE_HOME": 1}.get(root.source, 2)
            folder = (root.path, *root.path.parents)[above]
            if not folder.is_dir():
                message = f"{folder} is missing ({root.source}): the driver keeps nothing, and every run compiles"
                fix = f"mkdir -p {shlex.quote(str(folder))}"
                yield DISABLED, FOLDER.finding(self.name, folder, message, fix)
        if self.is_old and not any(root.source in _OLD_SOURCES for root in self.roots()):
            message = f"this release keeps a cache only in ./{_OLD_FOLDER}, or where {_OLD} names a folder"
            fix = f'mkdir -p "$HOME/.cache/{_OLD_FOLDER}"; export {_OLD}="$HOME/.cache/{_OLD_FOLDER}"'
            yield DISABLED, FOLDER.finding(self.name, self.environment.absolute(_OLD_FOLDER), message, fix)
        if self.environment.get(_OLD) and (read := _variables_read(self.environment)) and _OLD not in read:
            yield None, misread(self, _OLD, HARMLESS, "is read by releases before 24.22 only; this one is newer")
        for variable in sorted(name for name in self.environment.variables if name.startswith("IGC_"))[:1]:
            outcome = "switches the cache off in compute-runtime 25.31 to 26.31, and is in no key of earlier releases"
            yield UNKNOWN, misread(self, variable, RECOMPILES, outcome)

    def disable(self) -> Switch:
        """Add the variable that leaves older releases without a folder."""
        switch = super().disable()
        is_read = _OLD in {*_variables_read(self.environment), *self.environment.variables}
        return switch._replace(set={**switch.set, **({_OLD: _NOWHERE} if is_read else {})})

    def enable(self) -> Switch:
        """Undo what :meth:`disable` sets."""
        switch = super().enable()
        is_off = self.environment.get(_OLD) == _NOWHERE
        return switch._replace(unset=switch.unset | {_OLD}) if is_off else switch

    def relocate(self, folder: Path) -> Switch:
        """Return the path, and the folder to make first: the driver keeps nothing in a missing folder."""
        place = folder / "neo"
        variables = {"NEO_CACHE_DIR", *_variables_read(self.environment) & {_OLD}}
        return Switch(self.name, dict.fromkeys(variables, str(place)), read_at_load=LIBRARIES, makes=(place,))
