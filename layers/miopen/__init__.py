"""The four layers of MIOpen: compiled kernels and tuning results, the user's and those that came with MIOpen.

Nothing turns the user's perf-db off before MIOpen 3.5 (``MIOPEN_DEBUG_DISABLE_USER_DB``). Sources:
``src/include/miopen/env.hpp`` (variables), ``src/binary_cache.cpp`` (lookups), ``src/include/miopen/db.hpp``
(``MultiFileDb``: the user's file first).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layers.base import declarations, errors, facts, layer, lazy, parts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Condition, Hazard, Scope, Severity
from cachectl.layers.miopen import places as where

#: Boolean values in lower case, since ROCm 6.1; MIOpen throws for any other, also for the empty text.
_VALUES: Final = {
    **dict.fromkeys(("1", "enable", "enabled", "yes", "on", "true"), True),
    **dict.fromkeys(("0", "disable", "disabled", "no", "off", "false"), False),
}
_NO_FLAG: Final = "is not a boolean: MIOpen throws (ignores it before ROCm 6.1)"
#: Those that earlier versions know, in lower case only; they ignore any other value.
_ALWAYS_KNOWN: Final = _VALUES.keys() - {"on", "off"}
_ENFORCE: Final = "MIOPEN_FIND_ENFORCE"
#: Its values, and the effects of some on every run.
_ACTIONS: Final = {"NONE": "1", "DB_UPDATE": "2", "SEARCH": "3", "SEARCH_DB_UPDATE": "4", "DB_CLEAN": "5"}
_ENFORCED: Final = {
    "2": (Severity.HARMLESS, "a search that a program requests is repeated although its result is known"),
    "3": (Severity.HARMLESS, "everything that has not been tuned is tuned, which takes long"),
    "4": (Severity.RECOMPILES, "everything is tuned again in every run"),
    "5": (Severity.RECOMPILES, "every run erases the tuning results that it reads"),
}
#: Other variables of a tuning session, and their effects.
_LEFT_SET: Final = {
    "MIOPEN_DEBUG_FIND_ONLY_SOLVER": (Severity.HARMLESS, "no other solver is used, also while tuning"),
    "MIOPEN_DEBUG_PERFDB_OVERRIDE": (Severity.HARMLESS, "tuning results are ignored"),
}


#: Databases hold many entries; old versions have a file for each kernel.
_FILES: Final = parts.EntryFiles(
    lazy.regex(r".*\.(?:u?kdb|u?db|txt)"), "no event says which records are read, or whether a lookup found one"
)


def read_flag(value: str) -> bool | None:
    """Read a boolean as MIOpen does since ROCm 6.1; ``None`` where that throws (also for the empty string)."""
    return _VALUES.get(value.lower())


class KernelLookups(parts.Lookups):
    """The database is opened for each lookup and each store, ``src/binary_cache.cpp`` (``LoadBinary``, ``SaveBinary``).

    So the openings count the lookups, except where packaged kernels answer what the user's database cannot.
    """

    files = _FILES

    def by_openings(self, openings: int, stores: int, environment: Environment) -> tuple[int, int] | None:
        """Take each store for a miss, and the openings beyond these lookups and stores for hits."""
        packaged = (file for root in where.SYSTEM_KERNELS.roots(environment) for file in root.path.glob("*.kdb"))
        if openings < 2 * stores or any(True for _ in packaged):
            return None
        return openings - 2 * stores, stores


def place_of_file(layer: Any, file: Path) -> Path | None:  # noqa: ANN401 - a layer that is defined below
    """Return the place of a database by its name: that of the newest file of the user for the same device.

    Without one, kernels belong to the version of MIOpen that the file's folder names, or to the newest known one.
    """
    named, roots, store = where.parse_name(file.name), layer.roots(), layer.store
    if named is None or not roots:
        return None
    if named.kind in store.kinds and not store.folders:
        return Path(file.name)
    installed = where.installed_names(named)[0]
    has_version = where.VERSION_FOLDER.fullmatch(file.parent.name) is not None
    alike = [found for found in store.present(roots[0]) if installed in where.installed_names(found)]
    if alike and not has_version:
        return Path(max(alike, key=lambda found: where.version_numbers(found.version or "0")).relative)
    if not store.folders or not installed.endswith(".kdb"):
        return None
    version = file.parent.name if has_version else store.newest(roots[0])
    if version is None:
        why = "name the version of MIOpen by the file's folder, such as 3.3.0.a85ca8a54"
        raise errors.BadRequest(f"{errors.printable(file)}: no MIOpen has kept kernels here; {why}")
    return Path(version, f"{installed.removesuffix('kdb')}ukdb")


class MIOpenLayer(layer.Layer):
    """A layer of MIOpen's databases: its place and its variable are declared.

    Nothing is foreseen of its entries elsewhere: only MIOpen itself sees which device it would name.
    """

    store: Any
    places: ClassVar[where.UserPlace | where.SystemPlace]
    switch: ClassVar[declarations.EnvSwitch]
    #: What the switch turns off, if it is not the whole layer.
    switched_part: ClassVar[str | None] = None
    about = parts.About(lookups=parts.Lookups(files=_FILES), place_of_file=place_of_file)

    def state(self) -> facts.State:
        """Read the switch. In a temporary folder only a database shows that MIOpen was there."""
        variable, value = self.switch.variable, self.environment.get(self.switch.variable)
        verdict = False if value is None else read_flag(value)
        if verdict is None:
            return facts.State(Condition.DISABLED, f"{variable}={value!r} {_NO_FLAG}; use 1, or unset it")
        if verdict:
            hint = "" if value in _ALWAYS_KNOWN else " (MIOpen before ROCm 6.1 ignores this value; use 1)"
            return facts.State(Condition.DISABLED, f"{variable}={value}{hint}")
        used = (
            root.exists and (root.role != where.TEMPORARY or any(True for _ in self.store.files(root)))
            for root in self.roots()
        )
        if not where.libraries(self.environment) and not any(used):
            return facts.State(Condition.ABSENT, "no libMIOpen is found here, and none has left a file")
        return facts.State(Condition.ENABLED, "on by default" if value is None else f"{variable}={value}")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch."""
        variable, value = self.switch.variable, self.environment.get(self.switch.variable)
        verdict = False if value is None else read_flag(value)
        if verdict is None:
            yield layer.misread(self, variable, Severity.FAILS, _NO_FLAG)
        elif verdict:
            if value not in _ALWAYS_KNOWN:
                outcome = "is ignored by MIOpen before ROCm 6.1, which reads a few words in lower case"
                yield layer.misread(self, variable, Severity.HARMLESS, outcome, f"export {variable}=1")
            yield layer.off(self, variable, self.switched_part)


_PACKAGED: Final = MIOpenLayer.about._replace(scope=Scope.SYSTEM, on_network=None, among_ranks=None, when_closed=None)


class MIOpenKernels(MIOpenLayer):
    """Kernels compiled by MIOpen."""

    name = "miopen"
    title = "MIOpen user kernels"
    places = where.KERNELS
    # It hides user and system kernels alike.
    switch = declarations.EnvSwitch("MIOPEN_DISABLE_CACHE", off="1", read=declarations.at_load(*where.LIBRARIES))
    about = MIOpenLayer.about._replace(
        on_network=Hazard(
            Severity.RISKS,
            "sqlite's WAL mode fails there, and databases were damaged; MIOpen since ROCm 5.7 uses the temporary "
            "folder instead, unless MIOPEN_CUSTOM_CACHE_DIR names this one",
        ),
        among_ranks=Hazard(
            Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait, up to half a minute"
        ),
        when_closed=Hazard(Severity.FAILS, "MIOpen throws, even where it only looks up"),
        lookups=KernelLookups(),
    )
    store: Any = lazy.later("cachectl.layers.miopen.kernels", "UserKernelDatabases")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and a place where anybody can write."""
        from cachectl.layers.host import mounts

        yield from super().diagnose()
        environment, variable = self.environment, where.KERNELS.variable
        if environment.get(variable) or environment.platform == "win32" or not where.libraries(environment):
            return
        # MIOpen takes kernels from a temporary folder because it cannot use the home folder.
        first, folder = self.roots()[0], where.temporary_folder(environment)
        kind = mounts.network_file_system(first.path, mounts=environment.mounts)
        is_open = False
        with suppress(OSError):
            is_open = bool(folder.stat().st_mode & stat.S_IWOTH)
        if is_open and (first.role == where.TEMPORARY or kind is not None):
            why = "HOME names no folder" if kind is None else f"the home is on {kind}"
            message = f"as {why}, MIOpen up to 3.3 takes kernels from {folder} itself, where anybody may have put them"
            fix = f'export {variable}="$(mktemp -d)"'
            yield facts.Finding(self.name, folder, None, Severity.UNSAFE, "fallback", message, fix)


class MIOpenSystemKernels(MIOpenLayer):
    """Compiled kernels that came with MIOpen."""

    name = "miopen-system"
    title = "MIOpen system kernels"
    places = where.SYSTEM_KERNELS
    switch = MIOpenKernels.switch
    about = _PACKAGED
    store: Any = lazy.later("cachectl.layers.miopen.kernels", "KernelDatabases", "miopen")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and each GPU without a database."""
        from cachectl.layers.host import hardware

        yield from super().diagnose()
        roots = self.roots()
        present = {base for root in roots for file in self.store.present(root) for base in file.bases}
        for arch, databases in hardware.amd_gpus(self.environment) if roots else ():
            looked_for = (*databases, arch)
            if present.isdisjoint(looked_for):
                files = " nor ".join(f"{stem}.kdb" for stem in looked_for)
                message = f"no system kernels for the GPU {arch}, neither {files}: each is compiled when first used"
                package = f"miopen-hip-{arch}kdb"
                fix = f"sudo apt-get install {package} || sudo dnf install {package}"
                place = self.name, roots[0].path, None
                yield facts.Finding(*place, Severity.RECOMPILES, "no-database", message, fix)


class MIOpenTuning(MIOpenLayer):
    """Results of MIOpen's tuning, which take hours to make again."""

    name = "miopen-tuning"
    title = "MIOpen user tuning results"
    places: ClassVar[where.UserPlace | where.SystemPlace] = where.TUNING
    switch = declarations.EnvSwitch(
        "MIOPEN_DEBUG_DISABLE_FIND_DB", off="1", read=declarations.at_load(*where.LIBRARIES)
    )
    # The perf-db stays on.
    switched_part = "MIOpen's find-db"
    about = MIOpenLayer.about._replace(
        precious=True,
        on_network=Hazard(
            Severity.RISKS,
            "the locks of MIOpen up to 3.3 lie in each node's temporary folder, so nodes write over each other's "
            "results",
        ),
        among_ranks=Hazard(
            Severity.RISKS, "a rewrite removes the file before it renames the new one, so the others may not find it"
        ),
    )
    store: Any = lazy.later("cachectl.layers.miopen.tuning", "TuningDatabases")

    def state(self) -> facts.State:
        """Read the switch of the find-db; the perf-db stays on."""
        state = super().state()
        why = [state.why]
        if read_flag(self.environment.get(self.switch.variable) or ""):
            why.append("the find-db is off, the perf-db stays on")
        if self._enforced() == "5":
            why.append(f"{_ENFORCE}={self.environment.get(_ENFORCE)} erases the user's results: unset it")
        return facts.State(state.condition, "; ".join(why))

    def _enforced(self) -> str:
        value = (self.environment.get(_ENFORCE) or "1").strip()
        return _ACTIONS.get(value.upper(), value)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and for the user's results variables of a past tuning session."""
        yield from super().diagnose()
        if not self.about.precious:
            return
        action = self._enforced()
        effects = {_ENFORCE: _ENFORCED[action]} if action in _ENFORCED else {}
        if not effects and action != "1":
            outcome = "is no action that MIOpen knows: it throws, or ignores it"
            yield layer.misread(self, _ENFORCE, Severity.FAILS, outcome)
        for variable, (severity, effect) in {**effects, **_LEFT_SET}.items():
            if value := self.environment.get(variable):
                message, place = f"{variable}={value} is set: {effect}", layer.first_place(self)
                yield facts.Finding(self.name, place, None, severity, "tuning", message, f"unset {variable}")


class MIOpenSystemTuning(MIOpenTuning):
    """Tuning results that came with MIOpen."""

    name = "miopen-system-tuning"
    title = "MIOpen system tuning results"
    places = where.SYSTEM_TUNING
    about = _PACKAGED
    store: Any = lazy.later("cachectl.layers.miopen.tuning", "TuningDatabases", "miopen-tuning")
