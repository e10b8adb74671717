"""The four layers of MIOpen: compiled kernels and tuning results, the user's and those shipped with MIOpen.

Before MIOpen 3.6.1 nothing turns a perf-db off. Sources: ``src/include/miopen/env.hpp`` (variables),
``src/include/miopen/db_disable.hpp`` (those of 3.6.1), ``src/binary_cache.cpp`` (lookups),
``src/include/miopen/db.hpp`` (``MultiFileDb``: the user's file first).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.environment import Environment, answered_once
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import CLOSED
from cachectl.layers.core.declarations import EnvSwitch, Family, Places, at_load
from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, RECOMPILES, RISKS, Finding, Hazard
from cachectl.layers.core.layer import Layer, faults_of, first_place, misread
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.root import ABSENT, ENABLED, Root, Scope, State
from cachectl.layers.core.store import Store
from cachectl.layers.disk import distributions, plain, trust
from cachectl.layers.disk.place import Use, is_writable
from cachectl.layers.host.drivers import find_library, other_pythons
from cachectl.layers.miopen import codes

if TYPE_CHECKING:
    from cachectl.layers.miopen.databases import MIOpenDatabases

#: MIOpen reads each variable once, when it first needs it.
LIBRARIES = ("libMIOpen",)
PACKAGED = "these files belong to the package that MIOpen came with"
_KERNELS, _TUNING, SYSTEM = "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_SYSTEM_DB_PATH"
_UNMOVED = f"{PACKAGED}; MIOpen finds them next to its library, or through {SYSTEM}"
#: What MIOpen since ROCm 5.7 considers a network file system, on which it does not use the home
#: (``src/expanduser.cpp``, ``IsNetworked``): not FUSE mounts, GPFS, BeeGFS or 9p.
_NETWORK = frozenset({"nfs", "nfs4", "smbfs", "cifs", "smb3", "coda", "ocfs2", "afs", "lustre", "ceph"})
#: The role of roots in a temporary folder, to which other users write too.
TEMPORARY = "temporary"
UNREAD = "a usual place, without a library next to it"
#: Folders with databases below the prefix of a library; up to ROCm 5.1 each library had a folder.
_DATABASES = ("share/miopen/db", "miopen/share/miopen/db")
#: It hides user and system kernels alike. Since ROCm 6.1 MIOpen throws unless it is a boolean.
_DISABLES = EnvSwitch(
    "MIOPEN_DISABLE_CACHE",
    "1|enable|enabled|yes|on|true",
    "0|disable|disabled|no|off|false",
    FAILS,
    "is not a boolean: MIOpen throws (ignores it before ROCm 6.1)",
    disables=True,
    read=at_load(*LIBRARIES),
    value="1",
)
#: ``MIOPEN_CACHE_DIR`` is only an option of its build.
_FAMILY = Family(
    "MIOPEN_(?!DEBUG_|EMBED_|DRIVER_|FIND_|VERIFY_|USE_)(?:.*_)?(?:CACHE|DB)(?:_.*)?",
    "MIOPEN_DEBUG_DISABLE_FIND_DB MIOPEN_DEBUG_DISABLE_USER_DB MIOPEN_DEBUG_DISABLE_SYSTEM_DB "
    "MIOPEN_CUSTOM_CACHE_DIR MIOPEN_USER_DB_PATH MIOPEN_FIND_ENFORCE MIOPEN_DEBUG_PERFDB_OVERRIDE",
)
#: The values that earlier versions know; they ignore any other.
_ALWAYS_KNOWN = frozenset({"1", "enable", "enabled", "yes", "true"})
_ENFORCE = "MIOPEN_FIND_ENFORCE"
#: Its values, and the effects of some in every run.
_ACTIONS = {"NONE": "1", "DB_UPDATE": "2", "SEARCH": "3", "SEARCH_DB_UPDATE": "4", "DB_CLEAN": "5"}
_ENFORCED = {
    "2": (HARMLESS, "a search that a program requests is repeated even if its result is known"),
    "3": (HARMLESS, "everything that has not been tuned is tuned, which takes long"),
    "4": (RECOMPILES, "everything is tuned again in every run"),
    "5": (RECOMPILES, "every run erases the tuning results that it reads"),
}
#: Other variables of a tuning session, and their effects.
_LEFT_SET = {
    "MIOPEN_DEBUG_FIND_ONLY_SOLVER": (HARMLESS, "no other solver is used, even while tuning"),
    "MIOPEN_DEBUG_PERFDB_OVERRIDE": (HARMLESS, "tuning results are ignored"),
}
#: The beginnings of the names of databases, of version folders and of cachectl's own folders.
_BEGINNINGS = ("gfx", "batchnorm_gfx", ".cachectl-", *"0123456789")


class TemporaryFolder(Root):
    """A folder of temporary files as a root, which is read only if a name in it may be MIOpen's."""

    @property
    def may_exist(self) -> bool:
        """Return whether it may hold something of MIOpen's."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            return not plain.means_absent(error)
        return any(name.startswith(_BEGINNINGS) for name in names)


def _user_roots(variable: str, home_folder: str, profile_folder: str, environment: Environment) -> tuple[Root, ...]:
    """Return the user's folder, and those that MIOpen uses if the home is on a network file system or missing."""
    if named := environment.get(variable):
        return (Root(expand(environment, named), Scope.USER, variable),)
    if environment.platform == "win32":
        home = environment.get("USERPROFILE") or environment.home
        return (Root(Path(home, profile_folder), Scope.USER, "default (USERPROFILE)"),)
    temporary = environment.named_temporary
    home = environment.get("HOME") or "/"
    reason = "HOME is not set, empty or /" if home == "/" else "where the home is on a network file system"
    fallbacks = (
        Root(temporary / home_folder, Scope.USER, f"MIOpen 3.5's fallback ({reason})", TEMPORARY),
        TemporaryFolder(temporary, Scope.USER, f"the fallback of MIOpen up to 3.3 ({reason})", TEMPORARY),
    )
    if home == "/":
        return fallbacks
    first = Root(environment.absolute(home) / home_folder, Scope.USER, "default")
    return (first, *(root for root in fallbacks if root.path != first.path))


def _system_roots(environment: Environment, *, expands: bool) -> tuple[Root, ...]:
    """Return the folder of the databases shipped with MIOpen: the named one, or one for each library found."""
    if named := environment.get(SYSTEM):
        path = expand(environment, named) if expands else environment.absolute(named)
        literal = "" if "~" not in named or expands else " (its ~ is taken literally)"
        return (Root(path, Scope.SYSTEM, SYSTEM + literal),)
    sources: dict[str, str] = {}
    for library in libraries(environment):
        sources.setdefault(os.path.realpath(library.parent.parent / _DATABASES[0]), f"next to {library}")
    for folder in (Path(prefix, below) for prefix in (*_prefixes(environment), "/usr") for below in _DATABASES):
        if folder.is_dir():
            sources.setdefault(os.path.realpath(folder), UNREAD)
    return tuple(Root(Path(path), Scope.SYSTEM, source) for path, source in sources.items())


#: Up to MIOpen 3.3 the variable names the folder itself; MIOpen 3.5 makes its version folder in it.
KERNELS = Places(
    _KERNELS, find=partial(_user_roots, _KERNELS, ".cache/miopen", ".miopen/cache"), below="miopen", expands_home=True
)
TUNING = Places(
    _TUNING, find=partial(_user_roots, _TUNING, ".config/miopen", ".miopen/db"), below="miopen-db", expands_home=True
)
SYSTEM_KERNELS = Places(SYSTEM, find=partial(_system_roots, expands=True), unmoved=_UNMOVED, expands_home=True)
SYSTEM_TUNING = Places(SYSTEM, find=partial(_system_roots, expands=False), unmoved=_UNMOVED)


def expand(environment: Environment, text: str) -> Path:
    """Expand a path as MIOpen does: every ``~`` in it means the home folder, except on Windows."""
    if environment.platform == "win32":
        return environment.absolute(text)
    home = environment.get("HOME") or "/"
    return environment.absolute(text.replace("~", str(environment.named_temporary) if home == "/" else home))


@answered_once
def libraries(environment: Environment) -> tuple[Path, ...]:
    """Return every libMIOpen that a program could load, once, with links resolved, in order of discovery."""
    named = filter(None, (environment.get("LD_LIBRARY_PATH") or "").split(":"))
    folders = [os.fspath(environment.absolute(folder)) for folder in named]
    folders += [f"{prefix}/lib" for prefix in _prefixes(environment)]
    linked = find_library("libMIOpen.so.1", environment._replace(variables={})) or ""
    # If the linker's rules are unknown, this is the bare name.
    folders += [os.path.dirname(linked)] if os.path.isabs(linked) else []
    paths = (
        os.path.realpath(os.path.join(folder, name))
        for folder in dict.fromkeys(folders)
        for name in distributions.names_in(folder, "libMIOpen.so", "MIOpen.dll")
    )
    return tuple(map(Path, dict.fromkeys(paths)))


def _prefixes(environment: Environment) -> Iterator[str]:
    others = (folder for _, folders in other_pythons(environment) for folder in folders)
    for site in map(os.fspath, (*environment.site, *others)):
        yield f"{site}/torch"
        yield from (f"{site}/{name}" for name in distributions.names_in(site, "_rocm_sdk_"))
    if rocm := environment.get("ROCM_PATH"):
        yield os.fspath(environment.absolute(rocm))
    yield "/opt/rocm"
    yield from (f"/opt/{name}" for name in distributions.names_in("/opt", "rocm-"))
    # ROCm's core SDK keeps its versions side by side.
    yield from (f"/opt/rocm/{name}" for name in distributions.names_in("/opt/rocm", "core-"))


#: Databases hold many entries; old versions have a file for each kernel.
_LOOKUPS = Lookups(
    files=True,
    shared=regex(r".*\.(?:u?kdb|u?db|txt)"),
    otherwise="no event says which records are read, or whether a lookup found one",
)


def _by_openings(openings: int, stores: int, environment: Environment) -> tuple[int, int] | None:
    """Return hits and misses: each store is a miss, and openings beyond these lookups and stores are hits.

    The database is opened for each lookup and each store (``src/binary_cache.cpp``, ``LoadBinary``, ``SaveBinary``).
    So openings count lookups, unless packaged kernels answer what the user's database cannot.
    """
    packaged = (file for root in SYSTEM_KERNELS.roots(environment) for file in root.path.glob("*.kdb"))
    if openings < 2 * stores or any(True for _ in packaged):
        return None
    return openings - 2 * stores, stores


def _place_of_file(layer: MIOpenLayer, file: Path) -> Path | None:
    roots = layer.roots()
    return layer.store.tables.place_of(roots[0], file) if roots else None


class MIOpenLayer(Layer):
    """A layer of MIOpen's databases. Only MIOpen itself could predict hits on another machine."""

    if TYPE_CHECKING:
        store: MIOpenDatabases

    family = _FAMILY
    switch: ClassVar[EnvSwitch] = _DISABLES
    about = About(lookups=_LOOKUPS, place_of_file=_place_of_file)

    def state(self) -> State:
        """Read the switch, and add lookups of system databases. In a temporary folder only a database counts."""
        for condition, fault in faults_of(self, (self.switch,)):
            if condition is not None:
                return State(condition, fault.message)
        used = (
            root.exists and (root.role != TEMPORARY or (root.may_exist and any(self.store.tables.tables(root))))
            for root in self.roots()
        )
        if not libraries(self.environment) and not any(used):
            return State(ABSENT, "no libMIOpen is found here, and none has left a file")
        reason = [f"on unless {self.switch.variable} is true"]
        if self.about.scope is Scope.SYSTEM:
            from cachectl.layers.miopen.by_library import find_lookups

            reason += [lookup.words for lookup in find_lookups(self)]
        return State(ENABLED, "; ".join(reason))

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the switch, and with the folder that a variable names."""
        place, named = self.places.variable, self.environment.get(self.places.variable)
        if named and self.about.scope is Scope.SYSTEM and not self.roots()[0].exists:
            yield misread(self, place, HEALS, "names nothing: MIOpen does not use what it came with")
        elif named and self.about.scope is Scope.USER and not named.startswith(("/", "~")):
            outcome = "is not absolute: each folder in which a program is started gets its own databases"
            yield misread(self, place, RECOMPILES, outcome, f"export {place}={shlex.quote(str(first_place(self)))}")
        variable, value = self.switch.variable, self.environment.get(self.switch.variable)
        if self.switch.is_off(value) and value not in _ALWAYS_KNOWN:
            outcome = "is ignored by MIOpen before ROCm 6.1, which knows only a few words in lower case"
            yield misread(self, variable, HARMLESS, outcome, f"export {variable}=1")
        yield from (finding for _, finding in faults_of(self, (self.switch,)))


_PACKAGED = MIOpenLayer.about._replace(scope=Scope.SYSTEM, on_network=None, among_ranks=None, uses={})


class MIOpenKernels(MIOpenLayer):
    """Kernels compiled by MIOpen."""

    name = "miopen"
    title = "MIOpen user kernels"
    places = KERNELS
    about = MIOpenLayer.about._replace(
        on_network=Hazard(
            RISKS,
            "sqlite's WAL mode fails there, and databases were damaged; on NFS, SMB, Coda, OCFS2, AFS, Lustre and Ceph "
            "MIOpen since ROCm 5.7 uses the temporary folder, unless MIOPEN_CUSTOM_CACHE_DIR names this one",
        ),
        among_ranks=Hazard(
            HARMLESS, "sqlite lets one of them write at a time; the others wait, for up to half a minute"
        ),
        uses={
            Use.WRITE: Hazard(FAILS, "MIOpen throws, even when it only looks up"),
            Use.OPEN: Hazard(FAILS, "MIOpen throws, even when it only looks up"),
            Use.CHANGE: Hazard(RISKS, "MIOpen throws when it stores a kernel there"),
        },
        lookups=_LOOKUPS._replace(by_openings=_by_openings),
        codes=codes.OF_KERNELS,
    )

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.miopen.kernels import kernel_store

        return kernel_store()

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the switch, and with a temporary folder that MIOpen uses instead of the home."""
        from cachectl.layers.base import processes

        yield from super().diagnose()
        environment, variable, first = self.environment, KERNELS.variable, self.roots()[0]
        if environment.get(variable) or environment.platform == "win32" or not libraries(environment):
            return
        kind = processes.network_file_system(environment, first.path, _NETWORK)
        cause, temporary, last = f"the home is on {kind}", environment.named_temporary, None
        folders = [(temporary / ".cache/miopen", ""), (temporary, " up to 3.3")]
        if kind is None:
            # Without a home, all releases use the same folder.
            cause, folders = "HOME names no folder", [(first.path, "")] if first.role == TEMPORARY else []
        for folder, releases in folders:
            place = plain.nearest(folder, follow=False)
            with suppress(OSError):
                code, reason = codes.FALLBACK, trust.shared_because(place)
                if kind is not None and not is_writable(place):
                    code, reason = CLOSED, f"it throws, because you cannot write to {place}"
                if reason is not None and reason != last:
                    message = f"as {cause}, MIOpen{releases} takes kernels from {folder}: {reason}"
                    fix = f'export {variable}="$(mktemp -d)"'
                    yield code.finding(self.name, folder, message, fix, severity=FAILS if code is CLOSED else None)
                last = reason


class MIOpenSystemKernels(MIOpenLayer):
    """Compiled kernels shipped with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    places = SYSTEM_KERNELS
    about = _PACKAGED

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.miopen.kernels import kernel_store

        return kernel_store("miopen")

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the switch, and each library that finds no database for a GPU."""
        from cachectl.layers.miopen.by_library import diagnose_lookups

        yield from super().diagnose()
        yield from diagnose_lookups(self)

    def unexamined(self) -> Iterator[str]:
        """Yield that no GPU is known for which to look for databases."""
        from cachectl.layers.miopen.by_library import find_devices

        if not find_devices(self.environment):
            yield "whether your GPU has a database: no AMD GPU is visible here; run this on its node"


class MIOpenTuning(MIOpenLayer):
    """Results of MIOpen's tuning, which take hours to recompute."""

    name = "miopen-tuning"
    title = "MIOpen user tuning results"
    places = TUNING
    # It leaves the perf-db on; since MIOpen 3.6.1 each of the others switches off both of a kind (``db_disable.hpp``).
    switch = _DISABLES._replace(
        variable="MIOPEN_DEBUG_DISABLE_FIND_DB", what="MIOpen's find-db", also=("MIOPEN_DEBUG_DISABLE_USER_DB",)
    )
    about = MIOpenLayer.about._replace(
        precious=True,
        codes=(codes.TUNING, codes.QUOTED, *codes.OF_LINES),
        on_network=Hazard(
            RISKS,
            "up to MIOpen 3.3 the locks are in each node's temporary folder, so nodes overwrite each other's results",
        ),
        among_ranks=Hazard(
            RISKS, "a rewrite removes the file before it renames the new one, so the others may not find it"
        ),
        uses={
            **MIOpenLayer.about.uses,
            Use.MAKE: Hazard(FAILS, "MIOpen throws at each lookup"),
            Use.OWN: Hazard(RISKS, "MIOpen aborts when it adds a result, since it may not set the mode of the file"),
        },
    )

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.miopen.tuning import tuning_store

        return tuning_store("miopen-tuning" if self.about.scope is Scope.SYSTEM else "")

    def state(self) -> State:
        """Read the switches, which may leave the perf-db on."""
        state, switch, environment = super().state(), self.switch, self.environment
        reason = [state.why]
        if any(switch.is_off(environment.get(variable)) for variable in switch.also):
            reason.append("the perf-db stays on before MIOpen 3.6.1")
        elif switch.is_off(environment.get(switch.variable)):
            reason.append("the perf-db stays on")
        if self._enforced() == "5":
            reason.append(f"{_ENFORCE}={environment.get(_ENFORCE)} erases the user's results: unset it")
        return State(state.condition, "; ".join(reason))

    def _enforced(self) -> str:
        value = (self.environment.get(_ENFORCE) or "1").strip()
        return _ACTIONS.get(value.upper(), value)

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the switch, and for the user's results those with folders, locks and tuning variables."""
        yield from super().diagnose()
        if not self.about.precious:
            return
        if self.state().condition is not ABSENT and self.environment.platform != "win32":
            from cachectl.layers.miopen.tuning import diagnose_locks, diagnose_quoted

            with suppress(OSError):
                yield from diagnose_quoted(self.store.tables, self.roots()[0])
                yield from diagnose_locks(self.store.tables, self.roots()[0])
        action = self._enforced()
        effects = {_ENFORCE: _ENFORCED[action]} if action in _ENFORCED else {}
        if not effects and action != "1":
            yield misread(self, _ENFORCE, FAILS, "is not an action that MIOpen knows: it throws, or ignores it")
        for variable, (severity, effect) in {**effects, **_LEFT_SET}.items():
            if value := self.environment.get(variable):
                message, place = f"{variable}={value} is set: {effect}", first_place(self)
                yield codes.TUNING.finding(self.name, place, message, f"unset {variable}", severity=severity)


class MIOpenSystemTuning(MIOpenTuning):
    """Tuning results shipped with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    places = SYSTEM_TUNING
    switch = MIOpenTuning.switch._replace(also=("MIOPEN_DEBUG_DISABLE_SYSTEM_DB",))
    about = _PACKAGED
