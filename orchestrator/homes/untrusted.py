"""JSON of a process that another user controls: only what a fact declares, of its types, with escaped texts.

What a document may contain follows from the dataclass of its verb (:mod:`cachectl.layers.base.as_json`).
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, Union, get_args, get_origin, get_type_hints

from cachectl.layers.base.as_json import declared, members
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.limits import LONGEST_KEY
from cachectl.layers.base.texts import printable

#: Lists, objects and their items: what bounds the memory that a document takes.
_MOST_VALUES: Final = 4_000_000
_LONGEST_TEXT: Final = 2 * LONGEST_KEY
_MOST_NUMBER: Final = 1 << 63
_MOST_DIGITS: Final = 20

Hints = dict[str, tuple[Any, bool]]


class BadAnswer(CachectlError):
    """A document that is not as its verb writes it."""


def document_of(kind: type, data: bytes) -> dict[str, Any]:
    """Return a document of a verb as plain JSON values, without keys that its class does not declare.

    Control characters in texts are escaped. Raises :class:`BadAnswer`.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > _MOST_VALUES:
        _refuse(f"has more than {_MOST_VALUES:,} values")
    try:
        document = json.loads(data, parse_int=_whole, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        message = "is no JSON" if isinstance(error, ValueError) else "is nested too deeply"
        raise BadAnswer(f"its answer {message}") from error
    if not isinstance(document, dict) or document.get("schema") != declared(kind).schema:
        _refuse(f"is no document {declared(kind).schema}")
    return {"schema": declared(kind).schema, **_object(kind, document)}


def _refuse(what: str) -> NoReturn:
    raise BadAnswer(f"its answer {what}")


def _no_number(name: str) -> NoReturn:
    _refuse(f"has {name} for a number")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        _refuse("has a number out of range")
    return int(digits)


def _object(kind: type, value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if not isinstance(value, dict):
        _refuse(f"has no {kind.__name__} where one belongs")
    found: dict[str, Any] = {}
    for key, (hint, optional) in _keys(kind).items():
        if key in value:
            found[key] = _value(hint, value[key], key)
        elif not optional:
            _refuse(f"lacks {key!r} of a {kind.__name__}")
    return found


@cache
def _keys(kind: type) -> Hints:
    """Return the keys of a class of facts, each with its type, and whether it may be missing."""
    return dict(_iter_keys(kind))


def _iter_keys(kind: type) -> Iterator[tuple[str, tuple[Any, bool]]]:
    # Their modules are imported for type checkers only.
    from cachectl.inspecting.by_python import PythonShare
    from cachectl.layers.host.neighbours import Neighbour

    hints = get_type_hints(kind, localns={"Neighbour": Neighbour, "PythonShare": PythonShare})
    for member in members(kind):
        own = getattr(kind, member.attribute, None)
        hint = get_type_hints(own.fget)["return"] if isinstance(own, property) else hints[member.attribute]
        if member.flat:
            yield from _iter_keys(hint)
        else:
            yield member.key, (hint | None if member.blank_is_null else hint, member.optional)


def _value(hint: Any, value: Any, key: str) -> Any:  # noqa: ANN401 - JSON
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (one for one in arguments if one is not type(None))
        return _value(hint, value, key)
    if origin in (tuple, list) and isinstance(value, list):
        return [_value(arguments[0], one, key) for one in value]
    if origin is Mapping and isinstance(value, dict):
        return {_text(name, key): _value(arguments[1], one, key) for name, one in value.items()}
    if isinstance(hint, type):
        return _single(hint, value, key)
    _refuse(f"has a wrong value of {key!r}")


def _single(hint: type, value: Any, key: str) -> Any:  # noqa: ANN401 - JSON
    if is_dataclass(hint):
        return _object(hint, value)
    if hint in (str, Path) and isinstance(value, str):
        return _text(value, key)
    if hint in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(hint, value, key)
    if hint is bool and isinstance(value, bool):
        return value
    if issubclass(hint, Enum) and value in [one.value for one in hint]:
        return value
    _refuse(f"has a wrong value of {key!r}")


def _text(value: str, key: str) -> str:
    if len(value) > _LONGEST_TEXT:
        _refuse(f"has a text of more than {_LONGEST_TEXT:,} characters in {key!r}")
    return printable(value)


def _number(kind: type, value: float, key: str) -> float:
    is_whole = isinstance(value, int)
    if (kind is int and not (is_whole and value >= 0)) or not math.isfinite(value) or abs(value) >= _MOST_NUMBER:
        _refuse(f"has a number out of range in {key!r}")
    return value
