"""cachectl: see, clear, switch and prove every kernel cache of the OpenCL stack.

Importing this package is cheap: each public name is loaded when it is first used.
"""

from __future__ import annotations

# Importing typing would double the cost of importing this package; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cachectl.config import Limits
    from cachectl.exchange.place import BadStore, TransferFailed
    from cachectl.exchange.push_pull import RunStore
    from cachectl.exchange.trust import Trust, Untrusted
    from cachectl.layers.base.errors import *
    from cachectl.layers.core.selection import Selection
    from cachectl.stack import Stack
    from cachectl.switching.disabled import StillOn, disabled, isolated
    from cachectl.watching.portable import portable
    from cachectl.watching.trace import traced

__version__ = "0.1.0"
__all__ = [
    "BadRequest",
    "BadStore",
    "Busy",
    "CachectlError",
    "Damaged",
    "EntryExists",
    "LayerError",
    "Limits",
    "NoRoom",
    "Pending",
    "Refused",
    "RunStore",
    "Selection",
    "Stack",
    "StillOn",
    "TransferFailed",
    "Trust",
    "UnknownFormat",
    "Unreachable",
    "Unsettled",
    "Untrusted",
    "__version__",
    "disabled",
    "isolated",
    "portable",
    "traced",
]

#: The modules that define public names; the other names are errors of the layers.
_HOMES = {
    "BadStore": "exchange.place",
    "Limits": "config",
    "RunStore": "exchange.push_pull",
    "Selection": "layers.core.selection",
    "Stack": "stack",
    "StillOn": "switching.disabled",
    "TransferFailed": "exchange.place",
    "Trust": "exchange.trust",
    "Untrusted": "exchange.trust",
    "disabled": "switching.disabled",
    "isolated": "switching.disabled",
    "portable": "watching.portable",
    "traced": "watching.trace",
}


def load_ipython_extension(shell: object) -> None:
    """Register the cell magics ``%%disabled``, ``%%isolated`` and ``%%traced``: ``%load_ext cachectl``."""
    from importlib import import_module

    import_module("cachectl.notebook").load(shell)


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    import sys
    from importlib import import_module

    current_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if current_shell is not None and (shell := current_shell()) is not None:
        import_module("cachectl.notebook").show_results(shell)
    return getattr(import_module(f"cachectl.{_HOMES.get(name, 'layers.base.errors')}"), name)


def __dir__() -> list[str]:
    return __all__
