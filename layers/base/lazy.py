"""Data classes and patterns that cost next to nothing until they are used.

Each start of the program defines many more classes and patterns than it uses. :mod:`dataclasses` compiles about six
methods for each class when it is defined, and takes as long to import as Python takes to start. The versions here take
the same arguments and compile at the first use. A type checker sees those of the standard library.
"""

# As in the standard library, most of this is about objects of any class.
# ruff: noqa: ANN001, ANN003, ANN201, ANN401

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass, field, replace
    from re import compile as regex

    __all__ = ["dataclass", "field", "regex", "replace"]

_NONE: Final[Any] = object()
#: The modules for which :func:`module` has returned a stand-in.
STOOD_IN_FOR: Final[list[str]] = []


class _Field:
    def __init__(self, default: Any = _NONE, default_factory: Any = _NONE, *, repr: bool = True) -> None:  # noqa: A002
        self.default, self.factory, self.shown = default, default_factory, repr


class _OnDemand:
    """An attribute of a class that other code reads rarely; it is made when it is first read."""

    def __init__(self, make: Callable[[type], object]) -> None:
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, kind: type) -> object:
        owner = next(one for one in kind.__mro__ if vars(one).get(self.name) is self)
        made = self.make(owner)
        setattr(owner, self.name, made)
        return made


def _standard(kind: type) -> type:
    """Return a class of :mod:`dataclasses` that has the fields of one of these."""
    from dataclasses import field, make_dataclass

    specification: dict[str, tuple[str, _Field]] = vars(kind)["_specification"]
    shown: list[Any] = []
    for name, (hint, one) in specification.items():
        if one.factory is not _NONE:
            shown.append((name, hint, field(default_factory=one.factory)))
        else:
            shown.append((name, hint) if one.default is _NONE else (name, hint, field(default=one.default)))
    return make_dataclass(kind.__name__, shown, frozen="__setattr__" in vars(kind))


def _signature(kind: type) -> object:
    import inspect

    _, *others = inspect.signature(_initializer(kind)).parameters.values()
    hints = {name: hint for name, (hint, _) in vars(kind)["_specification"].items()}
    return inspect.Signature([one.replace(annotation=hints[one.name]) for one in others], return_annotation=None)


def _initializer(kind: type) -> Any:
    known: dict[str, object] = {"_set": object.__setattr__, "_NONE": _NONE}
    arguments, body = [], []
    for name, (_, one) in vars(kind)["_specification"].items():
        value = name
        if one.factory is not _NONE:
            known[f"_new_{name}"] = one.factory
            value = f"_new_{name}() if {name} is _NONE else {name}"
        known[f"_default_{name}"] = one.default
        required = one.default is _NONE and one.factory is _NONE
        arguments.append(name if required else f"{name}=_default_{name}")
        body.append(f' _set(self, "{name}", {value})\n')
    if hasattr(kind, "__post_init__"):
        body.append(" self.__post_init__()\n")
    made: dict[str, Any] = {}
    # As in the standard library; the text holds names of fields alone.
    exec(f"def __init__(self, {', '.join(arguments)}):\n{''.join(body) or ' pass'}", known, made)  # noqa: S102
    method = made["__init__"]
    method.__qualname__ = f"{kind.__qualname__}.__init__"
    return method


def _members(kind: type, specification: dict[str, tuple[str, _Field]], *, frozen: bool, eq: bool) -> dict[str, object]:
    """Return the methods that a data class has unless it defines its own."""
    names = tuple(specification)
    shown = [name for name, (_, one) in specification.items() if one.shown]
    values = attrgetter(*names)
    members: dict[str, object] = {
        "_specification": specification,
        "__match_args__": names,
        "__dataclass_fields__": _OnDemand(lambda owner: cast("Any", _standard(owner)).__dataclass_fields__),
        "__dataclass_params__": _OnDemand(lambda owner: cast("Any", _standard(owner)).__dataclass_params__),
        "__signature__": _OnDemand(_signature),
    }

    def method(made: Callable[..., object]) -> None:
        made.__qualname__ = f"{kind.__qualname__}.{made.__name__}"
        members[made.__name__] = made

    @method
    def __repr__(self: object) -> str:  # noqa: N807
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    if eq:

        @method
        def __eq__(self: object, other: object) -> bool:  # noqa: N807
            return bool(values(self) == values(other)) if type(other) is type(self) else NotImplemented

        members["__hash__"] = None

    if frozen:
        members.update(__setattr__=_refuse, __delattr__=_refuse, __getstate__=_state, __setstate__=_set_state)

    if frozen and eq:

        @method
        def __hash__(self: object) -> int:  # noqa: N807
            return hash(values(self))

    return members


def _refuse(_: object, name: str, *_value: object) -> None:
    from dataclasses import FrozenInstanceError

    message = f"cannot assign to field {name!r}"
    raise FrozenInstanceError(message)


def _state(self: Any) -> list[object]:
    return [getattr(self, name) for name in self.__match_args__]


def _set_state(self: Any, state: list[object]) -> None:
    for name, value in zip(self.__match_args__, state, strict=True):
        object.__setattr__(self, name, value)


def _own_fields(kind: type) -> dict[str, tuple[str, _Field]]:
    found: dict[str, tuple[str, _Field]] = {}
    for name, hint in kind.__annotations__.items():
        if not hint.startswith("ClassVar"):
            value = vars(kind).get(name, _NONE)
            found[name] = (hint, value if isinstance(value, _Field) else _Field(value))
    return found


def _with_slots(kind: type, names: tuple[str, ...], members: dict[str, object]) -> type:
    rest = {name: value for name, value in members.items() if name not in ("__dict__", "__weakref__")}
    made = type(kind)(kind.__name__, kind.__bases__, {**rest, "__slots__": names})
    made.__qualname__ = kind.__qualname__
    return made


def _in_place(kind: type, own: dict[str, tuple[str, _Field]], members: dict[str, object]) -> type:
    for name, (_, one) in own.items():
        if one.default is not _NONE:
            setattr(kind, name, one.default)
        elif name in vars(kind):
            delattr(kind, name)
    for name, member in members.items():
        setattr(kind, name, member)
        if isinstance(member, _OnDemand):
            member.__set_name__(kind, name)
    return kind


def _made(kind: type, *, frozen: bool, slots: bool, eq: bool) -> type:
    own = _own_fields(kind)
    specification: dict[str, tuple[str, _Field]] = {}
    for base in reversed(kind.__mro__[1:]):
        specification.update(vars(base).get("_specification", {}))
    specification.update(own)
    members = _members(kind, specification, frozen=frozen, eq=eq)
    mine = {name: value for name, value in vars(kind).items() if name not in own}
    if "__eq__" not in vars(kind) and mine.get("__hash__", _NONE) is None:
        del mine["__hash__"]
    members = {name: value for name, value in members.items() if name not in mine}
    made = _with_slots(kind, tuple(own), {**mine, **members}) if slots else _in_place(kind, own, members)

    def __init__(self: object, *arguments: object, **named: object) -> None:  # noqa: N807
        method = _initializer(made)
        cast("Any", made).__init__ = method
        method(self, *arguments, **named)

    if "__init__" not in mine:
        cast("Any", made).__init__ = __init__
    return made


class _Module:
    """A module that is imported when an attribute is first read."""

    def __init__(self, name: str) -> None:
        self.module = name
        STOOD_IN_FOR.append(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.module), name)


class _Pattern:
    """A regular expression that is compiled when it is first asked for a match."""

    def __init__(self, text: Any, flags: int) -> None:
        self.pattern, self.flags = text, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(re.compile(self.pattern, self.flags), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:

    def dataclass(kind=None, /, *, frozen=False, slots=False, eq=True):
        """Make a class a data class, as :func:`dataclasses.dataclass` does."""
        if kind is not None:
            return _made(kind, frozen=frozen, slots=slots, eq=eq)
        return lambda kind: _made(kind, frozen=frozen, slots=slots, eq=eq)

    field = _Field

    def replace(fact, /, **changes):
        """Return a data class with some fields changed, as :func:`dataclasses.replace` does."""
        return type(fact)(**{name: getattr(fact, name) for name in fact.__match_args__} | changes)

    def regex(text, flags=0):
        """Return a regular expression that is compiled at its first use."""
        return _Pattern(text, flags)


def module(name: str) -> Any:
    """Return a stand-in for a module that is imported when an attribute is first read."""
    return _Module(name)
