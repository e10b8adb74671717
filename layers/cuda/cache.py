"""The layer ``cuda``: the ComputeCache that the CUDA JIT and NVIDIA's OpenCL share.

Sources: the CUDA programming guide (variables), and the behaviour of driver 580.159.04 on an H200 (all else).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import Condition, Hazard, Root, Scope, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.switches import first_place, misread, off
from cachectl.layers.cuda.entries import LIBRARIES, ComputeCache
from cachectl.layers.cuda.parts import CudaLookups, CudaPortability, CudaTagging
from cachectl.layers.host.drivers import driver_files

_KERNEL_MODULE: Final = Path("/proc/driver/nvidia")
_MAKERS: Final = ("NVIDIA",)
#: The driver's default limit in bytes, and the highest that can be set.
_DEFAULT_CAP: Final = 1 << 30
_HIGHEST_CAP: Final = 1 << 32
#: The part of the limit above which the driver is about to drop entries.
_NEARLY: Final = 0.9
#: A size as the driver reads it: units, and anything else after the digits, are ignored.
_LIMIT: Final = regex(r"\s*[+-]?\d{1,18}", re.ASCII)
_PLAIN_LIMIT: Final = regex(r"\s*[+-]?\d+\s*", re.ASCII)


class CudaComputeCache(Layer):
    """Programs compiled by the CUDA driver: a front-end and a back-end entry for each OpenCL program."""

    name = "cuda"
    title = "CUDA ComputeCache"
    reveals = "source text of your kernels, in keys"
    on_network = Hazard(
        Severity.RISKS, "programs of all nodes wait for one lock on its index, and read entries that are half written"
    )
    among_ranks = Hazard(
        Severity.RISKS, "they wait for one lock on its index, and may miss files that another is just replacing"
    )
    store = ComputeCache()

    # ------------------------------------------------------------------ where and whether

    @property
    def portability(self) -> Portability:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return CudaPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return CudaLookups()

    @property
    def tagging(self) -> Tagging:
        """How entries of tagged builds are recognised."""
        return CudaTagging(self.store)

    def roots(self) -> tuple[Root, ...]:
        """Resolve as the driver does when it starts; a relative or empty path leaves it without a cache."""
        environment = self.environment
        named = environment.get("CUDA_CACHE_PATH")
        if named is not None:
            return (Root(Path(named), Scope.USER, "CUDA_CACHE_PATH"),) if Path(named).is_absolute() else ()
        if environment.platform == "win32":
            base = environment.get("APPDATA")
            return (Root(Path(base, "NVIDIA", "ComputeCache"), Scope.USER, "APPDATA"),) if base else ()
        home = environment.get("HOME") or ""
        if not Path(home).is_absolute():
            return ()
        return (Root(Path(home, ".nv", "ComputeCache"), Scope.USER, "default (HOME)"),)

    def state(self) -> State:
        """Read the variables: the value 1 switches the cache off, and so does a path that cannot be used."""
        environment = self.environment
        switch, named = environment.get("CUDA_CACHE_DISABLE"), environment.get("CUDA_CACHE_PATH")
        if switch == "1":
            return State(Condition.DISABLED, "CUDA_CACHE_DISABLE=1")
        if named is not None and not Path(named).is_absolute():
            return State(Condition.DISABLED, f"CUDA_CACHE_PATH={named!r} is not absolute: every run compiles")
        limit = environment.get("CUDA_CACHE_MAXSIZE")
        if limit is not None and _read_limit(limit) == 0:
            hint = "" if limit == "0" else " (the driver takes it for 0)"
            return State(Condition.DISABLED, f"CUDA_CACHE_MAXSIZE={limit}: nothing is stored{hint}")
        roots = self.roots()
        if not roots:
            return State(Condition.DISABLED, "HOME is not set to an absolute folder: the driver keeps no cache")
        if not roots[0].exists and not self._driver_is_here():
            return State(Condition.ABSENT, "no NVIDIA driver is present, and none has left a cache")
        ignored = f"; CUDA_CACHE_DISABLE={switch!r} is not 1, so it does nothing" if switch not in (None, "0") else ""
        return State(Condition.ENABLED, f"on by default{ignored}", driver_files(environment, _MAKERS))

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the variables, and a cache that is nearly full."""
        value = self.environment.get("CUDA_CACHE_DISABLE")
        if value == "1":
            yield off(self, "CUDA_CACHE_DISABLE")
        elif value not in (None, "0"):
            yield misread(self, "CUDA_CACHE_DISABLE", Severity.HARMLESS, "is not 1, so it does nothing")
        yield from self._placeless()
        limit = self.environment.get("CUDA_CACHE_MAXSIZE")
        held = None if limit is None else _read_limit(limit)
        if limit is not None and not _PLAIN_LIMIT.fullmatch(limit):
            outcome = f"is no number of bytes: the driver takes it for {held}"
            yield misread(self, "CUDA_CACHE_MAXSIZE", Severity.RECOMPILES, outcome)
        elif held == 0:
            yield off(self, "CUDA_CACHE_MAXSIZE")
        elif held is None or held > 0:
            yield from self._nearly_full(_DEFAULT_CAP if held is None else min(held, _HIGHEST_CAP))

    def _placeless(self) -> Iterator[facts.Finding]:
        """Yield why the driver has no place for a cache."""
        environment = self.environment
        named = environment.get("CUDA_CACHE_PATH")
        if named is not None and not self.roots():
            path = shlex.quote(str(environment.absolute(named)))
            fix = f"export CUDA_CACHE_PATH={path}" if named else None
            outcome = "is not absolute: the driver keeps nothing, and every run compiles"
            yield misread(self, "CUDA_CACHE_PATH", Severity.RECOMPILES, outcome, fix)
        elif not self.roots() and environment.platform != "win32" and self._driver_is_here():
            fix = f"export HOME={shlex.quote(str(environment.home))}"
            yield misread(self, "HOME", Severity.RECOMPILES, "is no absolute folder: the driver keeps nothing", fix)

    def _driver_is_here(self) -> bool:
        return bool(driver_files(self.environment, _MAKERS)) or _KERNEL_MODULE.exists()

    def _nearly_full(self, limit: int) -> Iterator[facts.Finding]:
        held = 0
        # Report names a root that cannot be read.
        with suppress(LayerError, OSError):
            held = sum(self.usage(root).bytes or 0 for root in self.roots())
        if held < _NEARLY * limit:
            return
        said = "CUDA_CACHE_MAXSIZE" if self.environment.get("CUDA_CACHE_MAXSIZE") else "the driver's default"
        message = f"holds {held:,} of at most {limit:,} bytes ({said}): the driver drops entries to make room"
        fix = f"export CUDA_CACHE_MAXSIZE={min(max(2 * limit, 2 * held), _HIGHEST_CAP)}"
        if limit >= _HIGHEST_CAP:
            fix = f"cachectl prune --max-size {limit // 2}B cuda"
        yield facts.Finding(self.name, first_place(self), None, Severity.RECOMPILES, "cap", message, fix)

    def switched(self, *, on: bool) -> facts.Switch:
        """Return the variable, which the driver reads once, when it starts."""
        variables = {} if on else {"CUDA_CACHE_DISABLE": "1"}
        unset = frozenset({"CUDA_CACHE_DISABLE"} if on else ())
        return facts.Switch(self.name, variables, unset, read_at_load=LIBRARIES)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the path; the driver makes the folder."""
        return facts.Switch(self.name, {"CUDA_CACHE_PATH": str(folder / "cuda")}, read_at_load=LIBRARIES)


def _read_limit(value: str) -> int:
    """Read ``CUDA_CACHE_MAXSIZE`` as the driver does: ``1G`` is one byte, and a text without a leading number is 0."""
    match = _LIMIT.match(value)
    return 0 if match is None else int(match[0])
