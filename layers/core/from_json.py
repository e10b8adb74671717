"""Facts from JSON that others can write: each field has to have the type that its class declares."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Fact = TypeVar("_Fact")
#: No time, count or size is larger, so that no sum of those that fit is infinite.
_LARGEST_NUMBER = 1 << 62


def read_fact(kind: Callable[..., _Fact], fields: Mapping[str, Any]) -> _Fact:
    """Return a fact of a class, a NamedTuple, by the names of its fields; others are ignored.

    A field that has a default may be missing, or null. A field that is a NamedTuple itself takes its own fields from
    ``fields``, unless these have one of its name. Raises one of ``PARSE_ERRORS`` for anything else.
    """
    values: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if fields.get(name) is not None:
            values[name] = _read(hint, fields[name])
        elif hasattr(hint, "_fields"):
            values[name] = read_fact(hint, fields)
    return kind(**values)


@cache
def _hints(kind: Callable[..., object]) -> dict[str, Any]:
    """Return the type of each field of a class, without its ``None``."""
    hints = get_type_hints(kind)
    for name, hint in hints.items():
        if isinstance(hint, UnionType):
            hints[name] = next(option for option in get_args(hint) if option is not NoneType)
    return hints


def _read(hint: Any, value: object) -> Any:  # noqa: ANN401 - a type, and its value
    """Return a value of JSON as a type wants it; a NamedTuple may be a list of its fields."""
    if hint is str and isinstance(value, str) and "\0" not in value:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float) and isinstance(value, int | float):
        if type(value) in (int, hint) and 0 <= value <= _LARGEST_NUMBER:
            return value
        raise ValueError(f"{value!r:.80} is out of range, or no number of its kind")
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if hasattr(kind, "_fields") and isinstance(value, dict | list):
        return read_fact(kind, value if isinstance(value, dict) else dict(zip(kind._fields, value, strict=False)))
    if kind in (tuple, list) and isinstance(value, list):
        hints = inner[:1] * len(value) if kind is list or inner[1:] == (...,) else inner
        return kind(_read(*pair) for pair in zip(hints, value, strict=True))
    if kind in (dict, abc.Mapping) and isinstance(value, dict):
        return {_read(inner[0], name): _read(inner[1], item) for name, item in value.items()}
    raise TypeError(f"{value!r:.80} is no {hint}")
