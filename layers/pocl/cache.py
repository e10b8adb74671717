"""The layer ``pocl``: the switch of PoCL's kernel cache, and problems with its variables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.base import facts
from cachectl.layers.base.facts import Condition, Hazard, Root, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.switches import misread, off, strtobool
from cachectl.layers.disk.presence import is_there
from cachectl.layers.host.drivers import driver_files, several_drivers
from cachectl.layers.host.processes import using
from cachectl.layers.pocl.parts import PoclLookups, PoclPortability, PoclTagging
from cachectl.layers.pocl.programs import Programs
from cachectl.layers.pocl.roots import LIBRARIES, of_program, roots_in, switched_on


class PoclKernels(Layer):
    """Programs and work-group functions compiled by PoCL."""

    name = "pocl"
    title = "PoCL kernel cache"
    distributions = ("pocl-binary-distribution",)
    reveals = "paths of your home, in bitcode"
    on_network = Hazard(
        Severity.HARMLESS,
        "every lookup goes over the network, and some builds of PoCL load what another kind of processor compiled",
    )
    among_ranks = Hazard(
        Severity.RISKS,
        "PoCL before 6.0 removes a program before it replaces it, so those that build it at once may not find it",
    )
    when_closed = Hazard(Severity.FAILS, "PoCL can build no program")
    store = Programs()

    # ------------------------------------------------------------------ where and whether

    @property
    def portability(self) -> Portability:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return PoclPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return PoclLookups()

    @property
    def tagging(self) -> Tagging:
        """How entries of tagged builds are recognised."""
        return PoclTagging(self.store)

    def roots(self) -> tuple[Root, ...]:
        """Resolve as PoCL does when its first device is opened."""
        return roots_in(self.environment)

    def state(self) -> State:
        """Read the variables: only a value that begins with 1 means on."""
        environment = self.environment
        if environment.get("POCL_CACHE_DIR") == "":
            return State(Condition.DISABLED, "POCL_CACHE_DIR is set but empty: PoCL finds no device; unset it")
        if switched_on(environment) is False:
            value = environment.get("POCL_KERNEL_CACHE")
            hint = "" if value == "0" else " (only a value that begins with 1 means on)"
            return State(Condition.DISABLED, f"POCL_KERNEL_CACHE={value}{hint}")
        drivers = driver_files(environment, ("PoCL",))
        if not drivers and not any(root.exists for root in self.roots()):
            return State(Condition.ABSENT, "no PoCL driver is registered here, and none has left a cache")
        why = "on by default" if switched_on(environment) is None else "POCL_KERNEL_CACHE=1"
        return State(Condition.ENABLED, why, drivers)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the variables, and several drivers."""
        yield from several_drivers(self, "PoCL")
        yield from self._relative()
        value = self.environment.get("POCL_KERNEL_CACHE")
        if value is not None and not switched_on(self.environment):
            if strtobool(value) is False:
                yield off(self, "POCL_KERNEL_CACHE")
            else:
                outcome = "switches the cache off: only a value that begins with 1 means on"
                yield misread(self, "POCL_KERNEL_CACHE", Severity.RECOMPILES, outcome, "export POCL_KERNEL_CACHE=1")

    def _relative(self) -> Iterator[facts.Finding]:
        variable = "XDG_CACHE_HOME" if self.environment.get("POCL_CACHE_DIR") is None else "POCL_CACHE_DIR"
        value = self.environment.get(variable)
        if value == "" and variable == "POCL_CACHE_DIR":
            yield misread(self, variable, Severity.FAILS, "leaves PoCL without a device")
        elif value and self.environment.platform != "win32" and not Path(value).is_absolute():
            outcome = "is not absolute: PoCL makes a cache of its own in every folder it is started from"
            fix = f"export {variable}={shlex.quote(str(self.environment.absolute(value)))}"
            yield misread(self, variable, Severity.RECOMPILES, outcome, fix)

    def switched(self, *, on: bool) -> facts.Switch:
        """Return the variable, which PoCL reads once, when its first device is opened."""
        variables = {"POCL_KERNEL_CACHE": "1" if on else "0"}
        return facts.Switch(self.name, variables, read_at_load=LIBRARIES)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return PoCL's own variable; PoCL makes the folder."""
        return facts.Switch(self.name, {"POCL_CACHE_DIR": str(folder / "pocl")}, read_at_load=LIBRARIES)

    def required_roots(self) -> tuple[Root, ...]:
        """Return the folders that were removed while a running PoCL still uses them: its later builds would fail."""
        missing = [root for root in self.roots() if not is_there(root.path)]
        if not missing:
            return ()
        needed = {self.environment.absolute(root.path) for root in self._roots_of_programs()}
        return tuple(root for root in missing if root.path in needed)

    def _roots_of_programs(self) -> Iterator[Root]:
        """Yield the roots that running processes use, by the variables they were started with."""
        for number in using(LIBRARIES, processes=self.environment.processes) or ():
            program = of_program(number, self.environment)
            if program is not None:
                role, roots = "uncached" if switched_on(program) is False else "kcache", roots_in(program)
                yield from (root for root in roots if root.role == role or len(roots) == 1)
