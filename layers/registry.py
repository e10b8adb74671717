"""The registry of layers: a table of the built-in ones, and an entry-point group for plug-ins.

A layer's class is imported when the layer is first created, which keeps the import of this table fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import reason_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import COMMON
from cachectl.layers.core.finding import Code
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.store import Store
from cachectl.layers.disk.distributions import entry_points

#: The entry-point group under which a distribution offers a layer class.
GROUP = "cachectl.layers"

#: Every built-in layer, in the order in which a kernel passes through them.
BUILT_IN: dict[str, str] = {
    "loopy": "cachectl.layers.pytools:LoopyDictionaries",
    "pyopencl-invoker": "cachectl.layers.pyopencl:PyOpenCLInvoker",
    "pytools": "cachectl.layers.pytools:PytoolsDictionaries",
    "pyopencl": "cachectl.layers.pyopencl:PyOpenCLBinaries",
    "pocl": "cachectl.layers.pocl:PoclKernels",
    "mesa": "cachectl.layers.mesa.cache:MesaShaderCache",
    "cuda": "cachectl.layers.cuda:CudaComputeCache",
    "neo": "cachectl.layers.neo:NeoCompilerCache",
    "comgr": "cachectl.layers.comgr:ComgrCache",
    "miopen": "cachectl.layers.miopen:MIOpenKernels",
    "miopen-system": "cachectl.layers.miopen:MIOpenSystemKernels",
    "miopen-tuning": "cachectl.layers.miopen:MIOpenTuning",
    "miopen-system-tuning": "cachectl.layers.miopen:MIOpenSystemTuning",
}

#: Layer names cannot be mistaken for options or paths.
_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: A plug-in that could not be loaded: its ``name`` and the reason (``why``).
Broken = Mapping[str, str]


def built_in_layer(name: str, environment: Environment) -> Layer:
    """Create the built-in layer with this name."""
    module, _, attribute = BUILT_IN[name].partition(":")
    layer: Layer = getattr(import_module(module), attribute)(environment)
    return layer


def catalogue() -> tuple[Code, ...]:
    """Return every code: the common ones, then those of each layer."""
    layers = (built_in_layer(name, Environment({}, Path("/"))) for name in BUILT_IN)
    return tuple(dict.fromkeys((*COMMON.values(), *(code for layer in layers for code in layer.about.codes))))


def plugged_in(environment: Environment) -> Iterator[Layer | Broken]:
    """Create every layer that an installed distribution offers; yield :data:`Broken` for one that fails."""
    for point in entry_points(GROUP):
        try:
            layer = point.load()(environment)
            reason = None
            if not isinstance(layer, Layer):
                reason = "is not a cachectl layer"
            elif not isinstance(layer.name, str) or not _NAME.fullmatch(layer.name):
                reason = f"has the invalid name {layer.name!r}; use letters, digits, dots and dashes"
            elif layer.name in BUILT_IN:
                reason = f"has the name of the built-in layer {layer.name}"
            elif not isinstance(layer.title, str) or not isinstance(layer.store, Store):
                reason = "has no title, or no store"
        except KeyboardInterrupt:
            raise
        # SystemExit, Rust panics and pytest skips are not subclasses of Exception.
        except BaseException as error:  # noqa: BLE001 - a plug-in must not stop the others
            reason = f"failed: {reason_of(error)}"
        yield layer if reason is None else {"name": point.name, "why": f"{point.value} {reason}"}
