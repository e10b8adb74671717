"""Patterns and objects that cost next to nothing until they are used.

Each start of the program defines many more patterns than it uses, and imports readers of bytes that ``report`` never
asks. A type checker sees the pattern of the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from re import compile as regex
    from typing import Any

    __all__ = ["bound", "later", "made", "regex"]


class _Lazy:
    """Stands in for an object that is made when an attribute is first read."""

    def __init__(self, make: Callable[[], Any], **known: Any) -> None:  # noqa: ANN401 - of any kind
        self.__dict__.update(known, _make=make)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the object has
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(made(self), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:

    def regex(text, flags=0):  # noqa: ANN001, ANN201 - a type checker sees the standard library's
        """Return a regular expression that is compiled at its first use."""
        return _Lazy(partial(re.compile, text, flags), pattern=text, flags=flags)


def later(module: str, maker: str, *arguments: object) -> Any:  # noqa: ANN401 - stands in for any object
    """Return a stand-in for what a class of a module makes of arguments; neither is loaded before it is used."""
    return _Lazy(lambda: getattr(import_module(module), maker)(*arguments))


def bound(thing: Any, **attributes: object) -> Any:  # noqa: ANN401 - of any kind
    """Return a copy of an object with other attributes; of a stand-in, once the object is made."""
    if isinstance(thing, _Lazy):
        return _Lazy(lambda: bound(made(thing), **attributes))
    clone = object.__new__(type(thing))
    clone.__dict__.update(thing.__dict__, **attributes)
    return clone


def made(thing: Any) -> Any:  # noqa: ANN401 - of any kind
    """Return the object that a stand-in stands for; any other object as it is."""
    if not isinstance(thing, _Lazy):
        return thing
    if "_made" not in thing.__dict__:
        thing.__dict__["_made"] = thing._make()
    return thing.__dict__["_made"]
