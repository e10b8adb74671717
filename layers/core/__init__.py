"""The interface of layers: ``from cachectl.layers import core``, then ``core.Layer``, ``core.Entry``, ``core.Refused``.

Each module is loaded when the first of its names is used, so that ``cachectl --version`` and a traced program load two.
"""

from __future__ import annotations

from importlib import import_module

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cachectl.layers.core.declarations import *
    from cachectl.layers.core.environment import *
    from cachectl.layers.core.errors import *
    from cachectl.layers.core.facts import *
    from cachectl.layers.core.layer import *
    from cachectl.layers.core.lazy import *
    from cachectl.layers.core.parts import *
    from cachectl.layers.core.selection import *
    from cachectl.layers.core.store import *

#: Those that need fewest others first.
_MODULES = ("lazy", "errors", "facts", "environment", "selection", "parts", "declarations", "store", "layer")


def __getattr__(name: str) -> object:
    if not name.startswith("_") and name not in _MODULES:
        for module in _MODULES:
            loaded = import_module(f"{__name__}.{module}")
            if hasattr(loaded, name):
                globals()[name] = getattr(loaded, name)
                return globals()[name]
    raise AttributeError(name)
