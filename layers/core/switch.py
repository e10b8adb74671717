"""The abilities of a layer, and the changes that turn it on or off, or move it."""

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


#: When a switch takes effect.
NOW, NEXT_IMPORT, NEXT_START = "now", "at the next import", "at the next driver start"
#: A method to replace while a layer is off, for a library without a switch: the module, the class (``None`` for a
#: function of the module), the name, and a function that makes the replacement from the original.
Patch = tuple[str, str | None, str, Callable[[Callable[..., object]], Callable[..., object]]]


class Switch(NamedTuple):
    """The changes that turn a layer on or off, as data.

    In this process: ``flags`` maps ``(module, attribute)`` to a value to set in loaded modules. ``patches`` replace
    methods of a library without a switch; ``memo_patches`` replace memoising methods in loaded modules.
    ``clear_functions`` are ``(module, function)`` pairs that clear caches in memory. ``reloads`` are ``(module,
    attribute)`` pairs: a module that was first imported while the layer was off lacks it, and is run again.

    For new programs: variables to ``set`` and ``unset``. They are read once, when a library whose file name has one of
    the prefixes ``read_at_load`` starts, or when one of ``read_at_import`` is imported. ``makes`` are folders that must
    exist before the library starts, because it makes none and without them stores nothing.
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
