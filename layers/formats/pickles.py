"""Pickles read as structure: their opcodes are walked, but nothing is imported, called or built.

A class, a call or a state in the stream becomes an inert :class:`Thing`, so a malicious pickle is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from cachectl.layers.base.lazy import regex


class Thing:
    """A container, class or object of a pickle; ``items`` are its parts, and ``state`` is what was set on it.

    ``kind`` is ``tuple``, ``list``, ``dict`` (items alternate between keys and values), ``set``, ``frozenset``,
    ``global`` (items are module and name) or ``object`` (items are what it was made from).
    """

    __slots__ = __match_args__ = ("kind", "items", "state")

    def __init__(self, kind: str, items: list[object] | None = None) -> None:
        self.kind = kind
        self.items: list[object] = [] if items is None else items
        self.state: object = None

    def __repr__(self) -> str:
        # Shared parts would make it exponentially long.
        return f"Thing({self.kind!r})"


_PROTOCOLS = (b"\x80\x04", b"\x80\x05")
_FRAME = b"\x95"
_FRAME_LENGTH = 8
_STOP = b"."
#: A run of zeros that a page leaves which was never written, and that hardly any value contains.
_ZEROS = 256
#: A class or function: the string of its module, then that of its name or a reference to an earlier string.
_GLOBAL = regex(rb"\x8c(.)([A-Za-z_][\w.]*)\x94(?:\x8c.[A-Za-z_][\w.<>]*\x94|h.|j.{4})\x93", re.DOTALL)
#: More opcodes than any row of a cache has.
_MOST = 5_000_000
_MARK = Thing("mark")
#: Instead of a number of items: all above the last mark.
_FROM_MARK = -1
#: The kinds of things that opcodes make, and the number of items that each takes from the stack.
_COUNTS = {
    "tuple": {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": _FROM_MARK},
    "list": {"EMPTY_LIST": 0, "LIST": _FROM_MARK},
    "dict": {"EMPTY_DICT": 0, "DICT": _FROM_MARK},
    "set": {"EMPTY_SET": 0},
    "frozenset": {"FROZENSET": _FROM_MARK},
    "global": {"STACK_GLOBAL": 2},
    "object": {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "BINPERSID": 1, "OBJ": _FROM_MARK},
}
_MADE = {opcode: (kind, count) for kind, counts in _COUNTS.items() for opcode, count in counts.items()}
#: The kinds of things that opcodes make from their argument.
_MADE_OF_ARGUMENT = {"GLOBAL": "global", **dict.fromkeys(("PERSID", "EXT1", "EXT2", "EXT4"), "object")}
#: How many items an opcode adds to the container below them.
_ADDED = {"APPEND": 1, "SETITEM": 2, **dict.fromkeys(("APPENDS", "SETITEMS", "ADDITEMS"), _FROM_MARK)}
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def is_framed(data: bytes) -> bool:
    """Return quickly whether a pickle's frames extend exactly from its beginning to its end.

    Such a pickle is complete (PEP 3154). ``False`` says nothing: it may have no frames, or large values between them.
    """
    position = len(_PROTOCOLS[0])
    if data[:position] not in _PROTOCOLS or len(data) <= position:
        return False
    while data[position : position + 1] == _FRAME:
        start = position + 1 + _FRAME_LENGTH
        position = start + int.from_bytes(data[position + 1 : start], "little")
    return position == len(data) and data.endswith(_STOP)


def walk(data: bytes) -> tuple[object, int | None]:
    """Read one pickle; return its structure and its length in bytes.

    Both are ``None`` if it has too many opcodes. Raises :class:`ValueError` if opcodes and stack are inconsistent.
    """
    import pickletools

    machine = _Machine()
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count > _MOST:
                return None, None
            if opcode.name == "STOP":
                return machine.take(1)[0], (position or 0) + 1
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, UnicodeError, OverflowError) as error:
        raise ValueError(f"broken pickle: {error}") from error
    raise ValueError("broken pickle: no end")


def complaint(data: bytes) -> str | None:
    """Return why data cannot be unpickled; ``None`` if no reason was found, or there are too many opcodes to read.

    If the frames cover the data and nothing in them is zero-filled, the opcodes are not walked. What follows the end of
    a pickle does not matter: ``pickle.loads`` ignores it.
    """
    if is_framed(data) and bytes(_ZEROS) not in data:
        return None
    try:
        walk(data)
    except ValueError as error:
        return str(error)
    return None


def modules(data: bytes) -> set[str]:
    """Return the modules that a pickle imports, by a search without a walk, which can miss some."""
    matches = _GLOBAL.finditer(data)
    return {match[2].decode() for match in matches if match[1][0] == len(match[2])}


def is_foreign(data: bytes) -> bool:
    """Return whether a pickle has a protocol that this Python does not know."""
    import pickle

    return data[:1] == _PROTOCOLS[0][:1] and data[1:2] > bytes([pickle.HIGHEST_PROTOCOL])


def things(top: object) -> Iterator[Thing]:
    """Yield every thing reachable from a structure once, in any order."""
    visited: set[int] = set()
    waiting = [top]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Thing) and id(item) not in visited:
            visited.add(id(item))
            yield item
            waiting.extend(item.items)
            waiting.append(item.state)


def attributes(item: Thing) -> dict[str, object]:
    """Return the attributes that a pickle sets on an object, by a dict or, with ``__slots__``, by a tuple of two."""
    states = [item.state]
    if isinstance(item.state, Thing) and item.state.kind == "tuple":
        states = item.state.items
    attributes: dict[str, object] = {}
    for state in states:
        if isinstance(state, Thing) and state.kind == "dict":
            pairs = zip(state.items[::2], state.items[1::2], strict=False)
            attributes.update((key, value) for key, value in pairs if isinstance(key, str))
    return attributes


class _Machine:
    """A pickle machine that imports and calls nothing."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.special: dict[str, Callable[[object], object]] = {
            "MARK": lambda _: self.stack.append(_MARK),
            "POP": lambda _: self.stack.pop(),
            "POP_MARK": lambda _: self.take(_FROM_MARK),
            "DUP": lambda _: self.stack.append(self.stack[-1]),
            "BUILD": lambda _: self._build(),
            "INST": lambda argument: self.stack.append(Thing("object", [argument, *self.take(_FROM_MARK)])),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), lambda _: None),
            **dict.fromkeys(
                ("GET", "BINGET", "LONG_BINGET"), lambda slot: self.stack.append(self.memo[int(str(slot))])
            ),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda slot: self._remember(int(str(slot)))),
        }

    def step(self, name: str, argument: object) -> None:
        if name in self.special:
            self.special[name](argument)
        elif name in _MADE:
            kind, count = _MADE[name]
            self.stack.append(Thing(kind, self.take(count)))
        elif name in _ADDED:
            items, container = self.take(_ADDED[name]), self.stack[-1]
            if isinstance(container, Thing) and container is not _MARK:
                container.items.extend(items)
        elif name in _MADE_OF_ARGUMENT:
            self.stack.append(Thing(_MADE_OF_ARGUMENT[name], [argument]))
        else:
            # Every other opcode pushes its literal: a number, a string or bytes.
            self.stack.append(_CONSTANTS.get(name, argument))

    def take(self, count: int) -> list[object]:
        """Pop ``count`` items from the stack, or those above the last mark."""
        items: list[object] = []
        while len(items) != count:
            top = self.stack.pop()
            if top is not _MARK:
                items.append(top)
            elif count == _FROM_MARK:
                break
            else:
                raise ValueError("a mark in place of a value")
        return items[::-1]

    def _build(self) -> None:
        (state,), target = self.take(1), self.stack[-1]
        if isinstance(target, Thing) and target is not _MARK:
            target.state = state

    def _remember(self, slot: int) -> None:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark was memoised")
        self.memo[slot] = self.stack[-1]
