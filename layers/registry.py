"""Which layers there are: the built-in ones by a table, other people's by the entry-point group.

A class is imported when its layer is first made, so that a table costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cachectl.layers.environment import Environment
from cachectl.layers.layer import Layer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The entry-point group under which a distribution offers a layer class.
GROUP: Final = "cachectl.layers"

#: Every built-in layer, in the order in which one kernel passes through them.
BUILT_IN: Final[dict[str, str]] = {
    "loopy": "cachectl.layers.loopy_dictionaries:LoopyDictionaries",
    "pyopencl-invoker": "cachectl.layers.pyopencl_invoker:PyOpenCLInvoker",
    "pytools": "cachectl.layers.pytools_dictionaries:PytoolsDictionaries",
    "pyopencl": "cachectl.layers.pyopencl_binaries:PyOpenCLBinaries",
    "pocl": "cachectl.layers.pocl_kernels:PoclKernels",
    "cuda": "cachectl.layers.cuda_compute_cache:CudaComputeCache",
    "miopen": "cachectl.layers.miopen_kernels:MIOpenKernels",
    "miopen-system": "cachectl.layers.miopen_system:MIOpenSystemKernels",
    "miopen-tuning": "cachectl.layers.miopen_tuning:MIOpenTuning",
    "miopen-system-tuning": "cachectl.layers.miopen_system_tuning:MIOpenSystemTuning",
}


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that gave no layer, and why."""

    name: str
    why: str


def built_in(environment: Environment) -> Iterator[Layer]:
    """Make every built-in layer."""
    for path in BUILT_IN.values():
        module, _, attribute = path.partition(":")
        yield getattr(import_module(module), attribute)(environment)


def plugged_in(environment: Environment) -> Iterator[Layer | Broken]:
    """Make every layer that an installed distribution offers; one that fails is named, not fatal."""
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        yield _plugged(point, environment)


def _plugged(point: EntryPoint, environment: Environment) -> Layer | Broken:
    try:
        layer = point.load()(environment)
    except Exception as error:  # noqa: BLE001 - whatever a stranger's code raises must not stop the others
        return Broken(point.name, f"{point.value} failed: {type(error).__name__}: {error}")
    if not isinstance(layer, Layer):
        return Broken(point.name, f"{point.value} is no cachectl layer")
    if layer.name in BUILT_IN:
        return Broken(point.name, f"{point.value} takes the name of the built-in layer {layer.name}")
    return layer
