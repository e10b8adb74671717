"""The layer ``cuda``: the ComputeCache that the CUDA JIT and NVIDIA's OpenCL share.

Sources: the CUDA programming guide (variables), and the behaviour of driver 580.159.04 on an H200 (all else).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layers.base import declarations, facts, parts, switches
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import Condition, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import later
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.host.drivers import driver_files
from cachectl.layers.host.hardware import nvidia_driver, nvidia_gpus

LIBRARIES: Final = ("libcuda.so", "libnvidia-opencl.so")
_DRIVER: Final = "NVIDIA driver"
_KERNEL_MODULE: Final = Path("/proc/driver/nvidia")
_MAKERS: Final = ("NVIDIA",)
#: The driver's default limit in bytes, and the highest that can be set.
_DEFAULT_CAP: Final = 1 << 30
_HIGHEST_CAP: Final = 1 << 32
_SETTINGS: Final = (
    switches.Setting("CUDA_CACHE_DISABLE", "1", "0", Severity.HARMLESS, "is not 1, so it does nothing"),
)


class CudaPortability(parts.Portability):
    """The driver writes its version and the architecture into its keys."""

    deciding: ClassVar[Mapping[str, str]] = {_DRIVER: "the driver's version is part of every key"}
    needed = (_DRIVER, "GPUs")

    def facts(self, environment: Environment) -> parts.Facts:
        """Return the version of the driver that the kernel has loaded, and the models of the GPUs."""
        gpus = ", ".join(sorted(set(nvidia_gpus(environment)))) or None
        return {_DRIVER: nvidia_driver(environment), "GPUs": gpus}

    def outlook(
        self, versions: Mapping[str, str], there: parts.Facts, environment: Environment
    ) -> parts.Outlook | None:
        """Judge an entry that another driver has compiled than the one of the place it comes from."""
        version, here = versions.get("driver"), nvidia_driver(environment)
        if version in (None, there.get(_DRIVER), here) or here is None:
            return None
        return parts.Outlook(False, f"compiled by driver {version}, here {here}")  # noqa: FBT003


class CudaLookups(parts.Lookups):
    """The driver opens the file of an entry to read it, and writes a new one in place."""

    files = parts.EntryFiles()
    mapped = LIBRARIES

    def difference(self, alike: Sequence[facts.Entry], event: Mapping[str, Any]) -> str:
        """Compare keys, which are plain text, with that of the nearest entry of the same half."""
        here = _parts(event["root"], event["key"]) if "key" in event else {}
        there = [key for entry in alike if (key := _parts(entry.root, entry.key)).keys() == here.keys()]
        named = [words for key in there if (words := parts.named_parts(key, here)) is not None]
        if not here or not named:
            return super().difference(alike, event)
        return f"an entry of the same kernel is there, but it {min(named, key=len)}"


def _parts(root: str | Path, key: str) -> Mapping[str, str]:
    from cachectl.layers.formats import compute_cache

    try:
        text = compute_cache.key_of(read_plain(Path(root, key)))
    except OSError:
        text = None
    return {} if text is None else compute_cache.parts(text)


class CudaComputeCache(Layer):
    """Programs compiled by the CUDA driver: a front-end and a back-end entry for each OpenCL program."""

    name = "cuda"
    title = "CUDA ComputeCache"
    about = parts.About(
        on_network=facts.Hazard(
            Severity.RISKS,
            "programs of all nodes wait for one lock on its index, and read entries that are half written",
        ),
        among_ranks=facts.Hazard(
            Severity.RISKS, "they wait for one lock on its index, and may miss files that another is just replacing"
        ),
        reveals="source text of your kernels, in keys",
        portability=CudaPortability(),
        lookups=CudaLookups(),
        # A front end's key holds the source, a back end's names its constants.
        tagging=parts.Tagging(("libnvidia-opencl.so",), ("NVIDIA CUDA",)),
    )
    # A relative or empty path leaves the driver without a cache.
    places = declarations.Rules(
        "CUDA_CACHE_PATH",
        linux=(
            declarations.Rule("CUDA_CACHE_PATH", empty=declarations.Odd.NOWHERE, relative=declarations.Odd.NOWHERE),
            declarations.Rule(
                "HOME",
                ".nv/ComputeCache",
                empty=declarations.Odd.NOWHERE,
                relative=declarations.Odd.NOWHERE,
                source="default (HOME)",
            ),
        ),
        windows=(
            declarations.Rule("CUDA_CACHE_PATH", empty=declarations.Odd.NOWHERE, relative=declarations.Odd.NOWHERE),
            declarations.Rule("APPDATA", "NVIDIA/ComputeCache"),
        ),
    )
    # The driver reads it once, when it starts.
    switch = declarations.EnvSwitch("CUDA_CACHE_DISABLE", off="1", read=declarations.at_load(*LIBRARIES))
    store: Any = later("cachectl.layers.cuda.entries", "ComputeCache")

    def state(self) -> State:
        """Read the variables: the value 1 switches the cache off, and so does a path that cannot be used."""
        environment = self.environment
        switch, named = environment.get("CUDA_CACHE_DISABLE"), environment.get("CUDA_CACHE_PATH")
        if switch == "1":
            return State(Condition.DISABLED, "CUDA_CACHE_DISABLE=1")
        if named is not None and not Path(named).is_absolute():
            return State(Condition.DISABLED, f"CUDA_CACHE_PATH={named!r} is not absolute: every run compiles")
        limit = environment.get("CUDA_CACHE_MAXSIZE")
        if limit is not None and switches.leading_number(limit) == 0:
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
        yield from switches.diagnosed_settings(self, _SETTINGS)
        yield from self._placeless()
        limit = self.environment.get("CUDA_CACHE_MAXSIZE")
        held = None if limit is None else switches.leading_number(limit)
        if limit is not None and not switches.is_number(limit):
            outcome = f"is no number of bytes: the driver takes it for {held}"
            yield switches.misread(self, "CUDA_CACHE_MAXSIZE", Severity.RECOMPILES, outcome)
        elif held == 0:
            yield switches.off(self, "CUDA_CACHE_MAXSIZE")
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
            yield switches.misread(self, "CUDA_CACHE_PATH", Severity.RECOMPILES, outcome, fix)
        elif not self.roots() and environment.platform != "win32" and self._driver_is_here():
            fix = f"export HOME={shlex.quote(str(environment.home))}"
            yield switches.misread(
                self, "HOME", Severity.RECOMPILES, "is no absolute folder: the driver keeps nothing", fix
            )

    def _driver_is_here(self) -> bool:
        return bool(driver_files(self.environment, _MAKERS)) or _KERNEL_MODULE.exists()

    def _nearly_full(self, limit: int) -> Iterator[facts.Finding]:
        held = 0
        # Report names a root that cannot be read.
        with suppress(LayerError, OSError):
            held = sum(self.store.usage(root).bytes or 0 for root in self.roots())
        said = "CUDA_CACHE_MAXSIZE" if self.environment.get("CUDA_CACHE_MAXSIZE") else "the driver's default"
        fix = f"export CUDA_CACHE_MAXSIZE={min(max(2 * limit, 2 * held), _HIGHEST_CAP)}"
        if limit >= _HIGHEST_CAP:
            fix = f"cachectl prune --max-size {limit // 2}B cuda"
        message = f"holds {held:,} of at most {limit:,} bytes ({said}): the driver drops entries to make room"
        yield from switches.nearly_full(self, held, limit, message, fix)
