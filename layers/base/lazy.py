"""Patterns and modules that cost next to nothing until they are used.

Each start of the program defines many more patterns than it uses, and imports readers of bytes that ``report`` never
asks. A type checker sees the pattern of the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from re import compile as regex

    __all__ = ["regex"]

#: The modules for which :func:`module` has returned a stand-in.
STOOD_IN_FOR: Final[list[str]] = []


class _Module:
    """A module that is imported when an attribute is first read."""

    def __init__(self, name: str) -> None:
        self.module = name
        STOOD_IN_FOR.append(name)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(import_module(self.module), name)


class _Pattern:
    """A regular expression that is compiled when it is first asked for a match."""

    def __init__(self, text: Any, flags: int) -> None:  # noqa: ANN401 - text or bytes
        self.pattern, self.flags = text, flags

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a pattern has
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(re.compile(self.pattern, self.flags), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:

    def regex(text, flags=0):  # noqa: ANN001, ANN201 - a type checker sees the standard library's
        """Return a regular expression that is compiled at its first use."""
        return _Pattern(text, flags)


def module(name: str) -> Any:  # noqa: ANN401 - stands in for any module
    """Return a stand-in for a module that is imported when an attribute is first read."""
    return _Module(name)


class _Object:
    """An object that is made when an attribute is first read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def bound(self, *arguments: object) -> _Object:
        """Bind it as :meth:`Store.bound` does, once it is made."""
        return _Object(lambda: self._make().bound(*arguments))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the object has
        if name.startswith("__"):
            raise AttributeError(name)
        made = self._make()
        self._make = lambda: made
        return getattr(made, name)


def later(module: str, maker: str, *arguments: object) -> Any:  # noqa: ANN401 - stands in for any object
    """Return a stand-in for what a class of a module makes of arguments; neither is loaded before it is used."""
    return _Object(lambda: getattr(import_module(module), maker)(*arguments))
