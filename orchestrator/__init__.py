"""cachectl: see, clear, switch and prove every kernel cache of the OpenCL stack.

Importing this package costs next to nothing; each public name is loaded when it is first used.
"""

from __future__ import annotations

# Importing typing would double what importing this package costs; checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cachectl.stack import Stack
    from cachectl.switching.disabled import disabled, isolated
    from cachectl.watching.trace import traced

__version__ = "0.1.0"
__all__ = ["Stack", "__version__", "disabled", "isolated", "traced"]

_HOMES = {
    "Stack": "cachectl.stack",
    "disabled": "cachectl.switching.disabled",
    "isolated": "cachectl.switching.disabled",
    "traced": "cachectl.watching.trace",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
