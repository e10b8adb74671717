"""The variables of this process. No other module uses :data:`os.environ`."""

from __future__ import annotations

import os


def process_variables() -> dict[str, str]:
    """Return all variables of this process as they are now."""
    return dict(os.environ)


def process_variable(name: str) -> str | None:
    """Return a variable of this process as it is now."""
    return os.environ.get(name)


def set_process_variable(name: str, value: str | None) -> None:
    """Set a variable of this process and its later children; ``None`` removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
