"""The layer ``mesa``: OpenCL programs compiled by Rusticl and by the Mesa drivers that it uses.

Sources: ``src/util/disk_cache.c`` and ``disk_cache_os.c`` (places, switches, sizes), ``src/util/u_debug.c`` (booleans).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.lazy import regex
from cachectl.layers.core.declarations import NOWHERE, EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import HARMLESS, RECOMPILES, Finding, Hazard
from cachectl.layers.core.layer import Fault, faults_of, misread
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.root import ABSENT, ENABLED, Root, Scope, State
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import Switch
from cachectl.layers.disk.place import why_closed
from cachectl.layers.host import drivers

if TYPE_CHECKING:
    from cachectl.layers.mesa.store import ShaderCache

#: What every process with an open store maps, whichever driver it uses.
OPENED = ("mesa_shader_cache",)
MULTI_FILE = "multi-file"
SINGLE_FILE = "single-file"
DATABASE = "database"
FOLDERS = {MULTI_FILE: "mesa_shader_cache", SINGLE_FILE: "mesa_shader_cache_sf", DATABASE: "mesa_shader_cache_db"}
_SELECTORS = {SINGLE_FILE: "MESA_DISK_CACHE_SINGLE_FILE", DATABASE: "MESA_DISK_CACHE_DATABASE"}
#: The first variable of a group that is set counts, even if it is empty; second names are old.
_PLACES = ("MESA_SHADER_CACHE_DIR", "MESA_GLSL_CACHE_DIR", "XDG_CACHE_HOME")
_OLD = "MESA_GLSL_CACHE_"
_BY_HOME = "default (HOME)"
_BY_ACCOUNT = "default (home folder)"
_SWITCHES = ("MESA_SHADER_CACHE_DISABLE", "MESA_GLSL_CACHE_DISABLE")
_SIZES = ("MESA_SHADER_CACHE_MAX_SIZE", "MESA_GLSL_CACHE_MAX_SIZE")
_DEFAULT_CAP = 1 << 30
_LIMIT = regex(r"\s*([+-]?\d{1,18})(.?)", re.ASCII | re.DOTALL)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: Booleans, in either case.
_TRUE = "1|t|true|y|yes"
_FALSE = "0|f|false|n|no"
_ALSO_READ = "names files from which programs also take entries: these are neither listed nor purged"
_IGNORED = "is not a boolean that Mesa knows, so it does nothing"
#: Settings with unexpected effects. The first two name further, read-only files of a single-file store
#: (``src/util/fossilize_db.c``).
_SURPRISES = (
    EnvSwitch("MESA_DISK_CACHE_READ_ONLY_FOZ_DBS", "(?!)", "", outcome=_ALSO_READ),
    EnvSwitch("MESA_DISK_CACHE_READ_ONLY_FOZ_DBS_DYNAMIC_LIST", "(?!)", "", outcome=_ALSO_READ),
    EnvSwitch(
        "MESA_GLSL_DISABLE_IO_OPT",
        "(?!)",
        f"(?!(?:{_TRUE})\\Z).*",
        RECOMPILES,
        "switches the cache off in releases since 2025",
    ),
)

#: Names of files that hold many entries.
_SHARED = regex(r"foz_cache(?:_idx)?\.foz|mesa_cache\.(?:db|idx)")


class MesaShaderCache(drivers.DriverLayer):
    """Kernels, and their machine code, in the shader cache of Mesa."""

    if TYPE_CHECKING:
        store: ShaderCache

    name = "mesa"
    title = "Mesa shader cache (Rusticl)"
    about = About(
        on_network=Hazard(
            HARMLESS, "every lookup goes over the network, and the size is counted in a file that programs map"
        ),
        among_ranks=Hazard(
            HARMLESS, "if several compile one program at once, one stores it; they lock a single file or a database"
        ),
        # Mesa opens the file of an entry to read it, and renames a temporary to a new one.
        lookups=Lookups(
            mapped=OPENED,
            files=True,
            platforms=("rusticl", "Clover"),
            # Rusticl compiles a kernel when it is launched.
            saves=("compile", "launch"),
            shared=_SHARED,
            # Who stores an entry looks whether its file is there. Source: disk_cache_write_item_to_disk in
            # src/util/disk_cache_os.c.
            openings_of_miss=2,
            otherwise="Mesa keeps it open, and no event says which of its entries are read",
        ),
    )
    makers = ("Rusticl", "Mesa Clover")
    # Mesa reads them when a device is first opened: the current name, then the old one.
    switch, _old_switch = (
        EnvSwitch(name, _TRUE, _FALSE, outcome=_IGNORED, read=at_load(*OPENED), value="true") for name in _SWITCHES
    )
    # As of Mesa's docs/envvars.rst.
    family = Family(
        "(?:MESA|RUSTICL)_(?:SHADER_|DISK_|DISABLE_|NO_)*CACHE.*",
        "MESA_SHADER_CACHE_MAX_SIZE MESA_DISK_CACHE_SINGLE_FILE MESA_DISK_CACHE_DATABASE MESA_DISK_CACHE_MULTI_FILE "
        "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS MESA_DISK_CACHE_READ_ONLY_FOZ_DBS_DYNAMIC_LIST",
    )
    placeless = Hazard(RECOMPILES, "is empty: Mesa has no folder and keeps nothing")
    places = Places(
        _PLACES[0],
        linux=(
            *(Rule(variable, empty=NOWHERE) for variable in _PLACES),
            Rule("HOME", ".cache", source=_BY_HOME),
            Rule("", ".cache", source=_BY_ACCOUNT),
        ),
    )

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.mesa.store import ShaderCache

        return ShaderCache()

    def roots(self) -> tuple[Root, ...]:
        """Resolve as Mesa does, the form in use first; releases before 2025 use the account's home, not ``HOME``."""
        values = ((form, self.environment.get(variable) or "") for form, variable in _SELECTORS.items())
        selected = (form for form, value in values if re.fullmatch(_TRUE, value, re.IGNORECASE | re.ASCII))
        used = next(selected, MULTI_FILE)
        return tuple(
            Root(base / FOLDERS[role], Scope.USER, source, role)
            for base, source in self._bases()
            for role in sorted(FOLDERS, key=lambda role: role != used)
        )

    def _bases(self) -> list[tuple[Path, str]]:
        place, account = self.places.place(self.environment), self.environment.home / ".cache"
        if place is None or place[1] != _BY_HOME:
            return [] if place is None else [place]
        if place[0] == account:
            return [(account, _BY_ACCOUNT)]
        return [place, (account, "default of older Mesa (account)")]

    def _first(self, variables: tuple[str, ...]) -> tuple[str | None, str]:
        """Return the first of these variables that is set, and its value."""
        values = ((variable, self.environment.get(variable)) for variable in variables)
        return next(((variable, value) for variable, value in values if value is not None), (None, ""))

    def state(self) -> State:
        """Return the state, with a note if Rusticl may have no device."""
        if self.environment.platform == "win32":
            return State(ABSENT, "Mesa keeps no cache on Windows")
        state = super().state()
        if state.condition is not ENABLED or not state.drivers or self.environment.get("RUSTICL_ENABLE"):
            return state
        return state._replace(why=f"{state.why}; RUSTICL_ENABLE names no device, so there may be none")

    def enable(self) -> Switch:
        """Unset the old name of the variable too."""
        return super().enable()._replace(unset=frozenset(_SWITCHES))

    def relocate(self, folder: Path) -> Switch:
        """Return the folder itself: older releases append theirs to it, and make only that one."""
        return self.switch.read._replace(layer=self.name, set={_PLACES[0]: str(folder)})

    def faults(self) -> Iterator[Fault]:
        """Yield problems with the first switch that is set, with the folder, and with surprising variables."""
        is_old = self._first(_SWITCHES)[0] == self._old_switch.variable
        yield from faults_of(self, (self._old_switch if is_old else self.switch,))
        yield from self._place_faults()
        (variable, value), bases, home = self._first(_PLACES), self._bases(), self.environment.home_folder
        place = Path(value)
        if len(bases) > 1 and why_closed(bases[0][0], home) is None:
            account = self.environment.home
            severity, outcome = HARMLESS, f"is not the home of the account, {account}, which releases before 2025 use"
            if why_closed(account / ".cache", account) is not None:
                severity, outcome = RECOMPILES, f"{outcome}: they cannot write there, and keep nothing"
            fix = f"export {_PLACES[0]}={shlex.quote(str(bases[0][0]))}"
            yield None, misread(self, "HOME", severity, outcome, fix)
        elif variable and place.is_absolute() and not place.parent.is_dir() and why_closed(place, home) is None:
            outcome = "has no parent folder, and releases before 2024 make only the last folder: they keep nothing"
            yield None, misread(self, variable, RECOMPILES, outcome, f"mkdir -p {shlex.quote(value)}")
        variable, value = self._first(_SIZES)
        if variable is not None and not read_limit(value)[1]:
            outcome = f"means {read_limit(value)[0]:,} bytes to Mesa: any unit but K or M counts as gigabytes"
            yield None, misread(self, variable, HARMLESS, outcome, f"export {variable}=1G")
        yield from faults_of(self, _SURPRISES)
        for names in (_PLACES, _SIZES):
            variable, value = self._first(names)
            if variable is not None and variable.startswith(_OLD):
                fix = f"unset {variable}; export {names[0]}={shlex.quote(value)}"
                yield None, misread(self, variable, HARMLESS, "is an old name, of which Mesa warns in every run", fix)

    @property
    def limit(self) -> int:
        """The limit in bytes: that of the variable, or the default."""
        return read_limit(self._first(_SIZES)[1])[0]

    def diagnose(self) -> Iterator[Finding]:
        """Add that the cache is nearly full."""
        yield from super().diagnose()
        limit = self.limit
        fix = f"export {_SIZES[0]}={max(2, 2 * (limit >> 30))}G"
        for root in self.roots():
            # The judge of places reports an index that cannot be read.
            with suppress(OSError):
                counted = self.store.rest.indexed_bytes(root) if root.role == MULTI_FILE else 0
                message = f"counts {counted:,} of at most {limit:,} bytes: Mesa drops entries to make room"
                yield from self.near_limit(counted, limit, message, fix, root.path)


def read_limit(value: str) -> tuple[int, bool]:
    """Return a size in bytes as Mesa reads it (0 is the default), and whether its unit is known, else gigabytes."""
    match = _LIMIT.match(value)
    if match is None:
        return _DEFAULT_CAP, False
    unit = match[2].lower()
    amount = max(0, int(match[1])) * _UNITS.get(unit, 1 << 30)
    return amount or _DEFAULT_CAP, unit in _UNITS
