"""What a layer can do, and the change that turns it on or off, or moves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Ability(Enum):
    """An operation of a layer."""

    GET = "get"
    PUT = "put"
    CLEAR = "clear"
    DISABLE = "disable"
    RELOCATE = "relocate"
    KERNELS = "kernels"


#: The moments when a switch takes effect.
NOW, NEXT_IMPORT, NEXT_START = "now", "at the next import", "at the next driver start"
#: A method to be replaced while a layer is off, for a library that has no switch of its own: the module, the class
#: (``None`` for a function of the module), the name, and what makes the replacement from the original.
Patch = tuple[str, str | None, str, Callable[[Callable[..., object]], Callable[..., object]]]


class Switch(NamedTuple):
    """The changes that turn a layer on or off, as data.

    In this process: ``flags`` are values by ``(module, attribute)``, to be set in modules that are loaded; ``patches``
    replace methods of a library without a switch; ``memo_patches`` replace methods that remember, in modules that are
    loaded; ``clear_functions`` are ``(module, function)`` pairs that empty copies in memory; ``reloads`` are
    ``(module, attribute)`` pairs: such a module, first imported while the layer was off, lacks the attribute and must
    be executed again.

    For programs that start: variables to ``set`` and ``unset``. They are read only once, when a library whose file name
    begins with one of ``read_at_load`` starts, or when one of ``read_at_import`` is imported. ``makes`` are folders
    that must exist before the library starts, since it makes none and keeps nothing without.
    """

    layer: str
    set: Mapping[str, str] = {}
    unset: frozenset[str] = frozenset()
    flags: Mapping[tuple[str, str], bool] = {}
    patches: tuple[Patch, ...] = ()
    memo_patches: tuple[Patch, ...] = ()
    clear_functions: tuple[tuple[str, str], ...] = ()
    reloads: tuple[tuple[str, str], ...] = ()
    read_at_load: tuple[str, ...] = ()
    read_at_import: tuple[str, ...] = ()
    makes: tuple[Path, ...] = ()
    takes_effect: str = NEXT_START
