"""Pickles read as structure: opcodes are walked, nothing is imported, called or built.

A class, a call or a state in the stream becomes an inert :class:`Thing`, so a planted pickle can do no more
here than be listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final


@dataclass(eq=False, slots=True)
class Thing:
    """A container, class or object of a pickle; ``items`` are its parts, ``state`` what was set on it.

    ``kind`` is ``tuple``, ``list``, ``dict`` (items alternate key and value), ``set``, ``frozenset``,
    ``global`` (items are module and name) or ``object`` (items are what it was made from).
    """

    kind: str
    # The representation leaves parts out: shared parts would make it exponentially long.
    items: list[object] = field(default_factory=list, repr=False)
    state: object = field(default=None, repr=False)


_PROTOCOLS: Final = (b"\x80\x04", b"\x80\x05")
_FRAME: Final = b"\x95"
_FRAME_LENGTH: Final = 8
_STOP: Final = b"."
#: More opcodes than any row of a cache has.
_MOST: Final = 5_000_000
_MARK: Final = Thing("mark")
_CONSTANTS: Final[dict[str, object]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Final = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_FROM_MARK: Final = {"TUPLE": "tuple", "LIST": "list", "DICT": "dict", "FROZENSET": "frozenset", "OBJ": "object"}
_FROM_TOP: Final = {"TUPLE1": ("tuple", 1), "TUPLE2": ("tuple", 2), "TUPLE3": ("tuple", 3),
                    "STACK_GLOBAL": ("global", 2), "REDUCE": ("object", 2), "NEWOBJ": ("object", 2),
                    "NEWOBJ_EX": ("object", 3), "BINPERSID": ("object", 1)}  # fmt: skip
_MADE_OF_ARGUMENT: Final = {"GLOBAL": "global", "PERSID": "object", "EXT1": "object", "EXT2": "object",
                            "EXT4": "object", "NEXT_BUFFER": "object"}  # fmt: skip
_INTO_CONTAINER: Final = {"APPEND": 1, "SETITEM": 2}
_INTO_CONTAINER_FROM_MARK: Final = {"APPENDS", "SETITEMS", "ADDITEMS"}
_NOTHING: Final = {"PROTO", "FRAME", "READONLY_BUFFER"}


def is_framed(data: bytes) -> bool:
    """Return quickly whether a pickle's frames reach from its beginning to its end.

    Such a pickle has not been cut, and nothing stands behind it; what is in its frames is not looked at. ``False`` says
    nothing: it may have no frames, or hold large values between them. Source: PEP 3154, framing.
    """
    position = len(_PROTOCOLS[0])
    if data[:position] not in _PROTOCOLS or len(data) <= position:
        return False
    while data[position : position + 1] == _FRAME:
        start = position + 1 + _FRAME_LENGTH
        position = start + int.from_bytes(data[position + 1 : start], "little")
    return position == len(data) and data.endswith(_STOP)


def walk(data: bytes) -> tuple[object, int]:
    """Read one pickle; return its structure and the number of bytes it took.

    Raises :class:`ValueError` where the opcodes, or the stack they work on, do not hold together.
    """
    import pickletools

    machine = _Machine()
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count > _MOST:
                message = f"more than {_MOST} opcodes"
                raise ValueError(message)
            if opcode.name == "STOP":
                return machine.pop(), (position or 0) + 1
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, UnicodeError, OverflowError) as error:
        message = f"broken pickle: {error}"
        raise ValueError(message) from error
    message = "broken pickle: no end"
    raise ValueError(message)


def complaint(data: bytes) -> str | None:
    """Return what is wrong with bytes that should be exactly one pickle, ``None`` where nothing is."""
    try:
        _, length = walk(data)
    except ValueError as error:
        return str(error)
    return None if length == len(data) else f"{len(data) - length} bytes follow the end of the pickle"


def is_foreign(data: bytes) -> bool:
    """Return whether a pickle names a protocol that this Python does not know."""
    import pickle

    return data[:1] == _PROTOCOLS[0][:1] and data[1:2] > bytes([pickle.HIGHEST_PROTOCOL])


def things(top: object) -> Iterator[Thing]:
    """Yield every thing reachable from a structure once, in any order."""
    seen: set[int] = set()
    waiting = [top]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Thing) and id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            waiting.extend(thing.items)
            waiting.append(thing.state)


def attributes(thing: Thing) -> dict[str, object]:
    """Return the attributes that a pickle sets on an object, by name.

    The state is a dict, or, with ``__slots__``, a tuple of two of them.
    """
    states = [thing.state]
    if isinstance(thing.state, Thing) and thing.state.kind == "tuple":
        states = thing.state.items
    found: dict[str, object] = {}
    for state in states:
        if isinstance(state, Thing) and state.kind == "dict":
            pairs = zip(state.items[::2], state.items[1::2], strict=False)
            found.update((key, value) for key, value in pairs if isinstance(key, str))
    return found


class _Machine:
    """The pickle machine, which imports and calls nothing."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.special: dict[str, Callable[[object], None]] = {
            "MARK": lambda _: self.stack.append(_MARK),
            "POP": lambda _: self._drop(),
            "POP_MARK": lambda _: self._discard(self.from_mark()),
            "DUP": lambda _: self.stack.append(self.stack[-1]),
            "BUILD": lambda _: self._build(),
            "INST": lambda argument: self.stack.append(Thing("object", [argument, *self.from_mark()])),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            **dict.fromkeys(_NOTHING, self._discard),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self._recall),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda slot: self._remember(int(str(slot)))),
        }

    def step(self, name: str, argument: object) -> None:
        if name in self.special:
            self.special[name](argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _INTO_CONTAINER:
            self._extend(self.from_top(_INTO_CONTAINER[name]))
        elif name in _INTO_CONTAINER_FROM_MARK:
            self._extend(self.from_mark())
        else:
            self.stack.append(self._made(name, argument))

    def _made(self, name: str, argument: object) -> object:
        if name in _EMPTY:
            return Thing(_EMPTY[name])
        if name in _FROM_MARK:
            return Thing(_FROM_MARK[name], self.from_mark())
        if name in _FROM_TOP:
            kind, count = _FROM_TOP[name]
            return Thing(kind, self.from_top(count))
        if name in _MADE_OF_ARGUMENT:
            return Thing(_MADE_OF_ARGUMENT[name], [argument])
        # Every other opcode pushes its literal: a number, a string or bytes.
        return argument

    def pop(self) -> object:
        top = self.stack.pop()
        if top is _MARK:
            message = "a mark where a value was due"
            raise ValueError(message)
        return top

    def from_top(self, count: int) -> list[object]:
        return [self.pop() for _ in range(count)][::-1]

    def from_mark(self) -> list[object]:
        items: list[object] = []
        while (top := self.stack.pop()) is not _MARK:
            items.append(top)
        return items[::-1]

    def _drop(self) -> None:
        self.stack.pop()

    def _discard(self, value: object) -> None:
        del value

    def _recall(self, slot: object) -> None:
        self.stack.append(self.memo[int(str(slot))])

    def _extend(self, items: list[object]) -> None:
        container = self.stack[-1]
        if isinstance(container, Thing) and container is not _MARK:
            container.items.extend(items)

    def _build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, Thing) and target is not _MARK:
            target.state = state

    def _remember(self, slot: int) -> None:
        top = self.stack[-1]
        if top is _MARK:
            message = "a mark was memoised"
            raise ValueError(message)
        self.memo[slot] = top
