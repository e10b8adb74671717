"""The layer ``pyopencl``: the places and switch of PyOpenCL's cache of program binaries.

Sources: ``pyopencl/cache.py`` (places, locks), ``pyopencl/__init__.py`` (when the cache is bypassed).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.base import facts
from cachectl.layers.base.facts import Condition, Hazard, Root, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.switches import diagnosed, relative_cache_home, switched_off
from cachectl.layers.host.drivers import find_drivers
from cachectl.layers.pyopencl.parts import BinaryLookups, BinaryPortability, BinaryTagging
from cachectl.layers.pyopencl.programs import STALE_LOCK, ProgramFolders, bypassed_on
from cachectl.layers.pyopencl_invoker import VARIABLE, no_cache_switch
from cachectl.layers.pytools import relocate_user_cache, user_cache_roots


class PyOpenCLBinaries(Layer):
    """Programs that PyOpenCL has built from source, with the binaries that the driver returned."""

    name = "pyopencl"
    title = "PyOpenCL program binaries"
    distributions = ("pyopencl",)
    reveals = "source text of your kernels, paths of included headers"
    on_network = Hazard(
        Severity.RISKS,
        "its one lock is a file, which a program killed on any node leaves behind; then every build waits a minute "
        "and fails",
    )
    among_ranks = Hazard(
        Severity.RISKS,
        "one lock file serves them all, and if one of them is killed while it holds it, the builds of the others fail",
    )
    when_closed = Hazard(Severity.FAILS, "every build fails, after a minute where its lock cannot be made")
    store = ProgramFolders()

    # ------------------------------------------------------------------ where and whether

    @property
    def portability(self) -> Portability:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return BinaryPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return BinaryLookups()

    @property
    def tagging(self) -> Tagging:
        """How entries of tagged builds are recognised."""
        return BinaryTagging(self.store)

    def roots(self) -> tuple[Root, ...]:
        """Return the folder above the per-Python caches; a context's own ``cache_dir`` cannot be known."""
        return user_cache_roots(self.environment, "pyopencl")

    def state(self) -> State:
        """Read the variable, then the drivers: PyOpenCL does not use this cache on PoCL and NVIDIA."""
        if (off := switched_off(self.environment, "pyopencl", (VARIABLE,))) is not None:
            return off
        if self.environment.installed("pyopencl") is None and not self.roots()[0].exists:
            return State(Condition.ABSENT, "pyopencl is not installed here and has left no binaries")
        found = find_drivers(self.environment)
        drivers = tuple(dict.fromkeys(driver.maker for driver in found))
        others = bypassed_on(self.environment)
        bypassed = [driver for driver in drivers if driver in others]
        if not drivers:
            return State(Condition.UNKNOWN, "no OpenCL driver is registered here")
        if len(bypassed) == len(drivers):
            return State(Condition.BYPASSED, f"PyOpenCL leaves {' and '.join(bypassed)} to the driver's own cache")
        used = [driver for driver in drivers if driver not in others]
        why = f"on for {' and '.join(used)}" + (f", but not {' and '.join(bypassed)}" if bypassed else "")
        files = dict.fromkeys(driver.file for driver in found if driver.maker in used)
        return State(Condition.ENABLED, why, tuple(files))

    def switched(self, *, on: bool) -> facts.Switch:
        """Return the switch that PyOpenCL reads at every build."""
        return no_cache_switch(self.name, on=on)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the user cache folder, which PyOpenCL resolves at every build."""
        return relocate_user_cache(self, folder)

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the variables, and locks that have lost their holders."""
        yield from diagnosed(self, "pyopencl", (VARIABLE,))
        yield from relative_cache_home(self)
        for root in self.roots():
            for lock in self.store.locks(root):
                yield from self._stale_lock(root, lock)

    def _stale_lock(self, root: Root, lock: Path) -> Iterator[facts.Finding]:
        try:
            age = self.environment.clock() - lock.lstat().st_mtime
        except OSError:
            # It was released meanwhile.
            return
        if age <= STALE_LOCK:
            return
        consulted = self.state().condition in (Condition.ENABLED, Condition.UNKNOWN)
        outcome = "every build waits a minute for it, and fails" if consulted else "no build of this set-up asks for it"
        severity, fix = Severity.FAILS, f"rm {shlex.quote(str(lock))}"
        holder = self.store.possible_holder(lock)
        if holder is None:
            message = f"an abandoned lock, {age:.0f} s old; PyOpenCL holds it for milliseconds"
        else:
            message = f"a lock has been held for {age:.0f} s, perhaps by {holder} (stopped?)"
            severity, fix = Severity.RISKS, f"end {holder}, then: {fix}"
        severity = severity if consulted else Severity.HARMLESS
        key = str(lock.relative_to(root.path))
        yield facts.Finding(self.name, root.path, key, severity, "lock", f"{message}: {outcome}", fix)
