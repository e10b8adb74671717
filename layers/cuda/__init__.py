"""The layer ``cuda``: the ComputeCache that the CUDA JIT and NVIDIA's OpenCL share.

Sources: the CUDA programming guide (variables), the behaviour of driver 580.159.04 on an H200 (everything else).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.declarations import NOWHERE, EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import RISKS, Hazard
from cachectl.layers.core.parts import About, Facts, Lookups, Outlook, Portability
from cachectl.layers.core.store import Store
from cachectl.layers.host import drivers

LIBRARIES = ("libcuda.so", "libnvidia-opencl.so")
_DRIVER = "NVIDIA driver"
_KERNEL_MODULE = Path("/proc/driver/nvidia")
#: A relative or empty path leaves the driver without a cache.
_NAMED = Rule("CUDA_CACHE_PATH", empty=NOWHERE, relative=NOWHERE)


def _facts(environment: Environment) -> Facts:
    """Return the version of the loaded kernel driver, and the models of the GPUs."""
    from cachectl.layers.host import hardware

    gpus = ", ".join(sorted(set(hardware.nvidia_gpus(environment)))) or None
    return {_DRIVER: hardware.nvidia_driver(environment), "GPUs": gpus}


def _outlook(versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
    """Judge an entry that was compiled by neither this driver nor that of the place it comes from."""
    from cachectl.layers.host import hardware

    version, here = versions.get("driver"), hardware.nvidia_driver(environment)
    if version in (None, there.get(_DRIVER), here) or here is None:
        return None
    return Outlook(False, f"compiled by driver {version}, here {here}")  # noqa: FBT003


class CudaComputeCache(drivers.DriverLayer):
    """Programs compiled by the CUDA driver: a front-end and a back-end entry for each OpenCL program."""

    name = "cuda"
    title = "CUDA ComputeCache"
    about = About(
        on_network=Hazard(
            RISKS, "programs of all nodes wait for one lock on its index, and read entries that are half written"
        ),
        among_ranks=Hazard(
            RISKS, "they wait for one lock on its index, and may miss files that another rank is replacing"
        ),
        reveals="source text of your kernels, in keys",
        # The driver writes its version and the architecture into its keys.
        portability=Portability(
            _facts, {_DRIVER: "the driver's version is part of every key"}, (_DRIVER, "GPUs"), outlook=_outlook
        ),
        # The driver opens the file of an entry to read it, and writes a new one in place.
        lookups=Lookups(mapped=LIBRARIES, files=True),
        # A front end's key holds the source, a back end's names its constants.
        finds_tags=True,
        libraries=("libnvidia-opencl.so",),
        platforms=("NVIDIA CUDA",),
    )
    places = Places(
        "CUDA_CACHE_PATH",
        linux=(_NAMED, Rule("HOME", ".nv/ComputeCache", empty=NOWHERE, relative=NOWHERE, source="default (HOME)")),
        windows=(_NAMED, Rule("APPDATA", "NVIDIA/ComputeCache")),
    )
    # Programs have their own variables that begin with CUDA.
    family = Family("CUDA_(?:COMPUTE_?|JIT_|DISABLE_|NO_)?CACHE.*", "CUDA_CACHE_MAXSIZE")
    makers = ("NVIDIA",)
    limit_variable, limit_highest, zero_limit_is_off = "CUDA_CACHE_MAXSIZE", 1 << 32, True
    # The driver reads it once, when it starts.
    switch = EnvSwitch("CUDA_CACHE_DISABLE", "1", "0", outcome="is not 1, so it does nothing", read=at_load(*LIBRARIES))

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.cuda.entries import ComputeCache

        return ComputeCache()

    def is_here(self) -> bool:
        """Return whether there is a driver, even one without OpenCL, or a cache."""
        return _KERNEL_MODULE.exists() or super().is_here()
