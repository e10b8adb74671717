"""The JSON form of facts: fields by their names, with the exceptions that a class declares.

Every fact is a dataclass. The command line writes JSON from :func:`members`, and the published JSON Schemas are made
from the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")


class AsJson(NamedTuple):
    """The differences between the fields of a class of facts and its JSON, in the class attribute ``as_json``.

    ``schema`` is the name of a document (``cachectl/report/1``). ``also`` lists properties to include, ``hidden``
    fields to leave out, ``flat`` fields that are replaced by their own keys, ``optional`` those left out if ``None``,
    ``blank_is_null`` texts that are ``null`` if empty. ``names`` maps attributes to keys.
    """

    schema: str | None = None
    also: tuple[str, ...] = ()
    hidden: Container[str] = ()
    flat: Container[str] = ()
    optional: Container[str] = ()
    blank_is_null: Container[str] = ()
    names: Mapping[str, str] = MappingProxyType({})


class JsonKey(NamedTuple):
    """One key of a fact in JSON, and its attribute; a flat one is replaced by the keys of the fact it holds."""

    attribute: str
    key: str
    flat: bool
    optional: bool
    blank_is_null: bool


#: Cached results of :func:`members`, by class.
_KNOWN: Final[dict[type, tuple[JsonKey, ...]]] = {}


def declared(kind: type) -> AsJson:
    """Return the JSON declaration of a class of facts."""
    declaration: AsJson = getattr(kind, "as_json", AsJson())
    return declaration


def members(kind: type) -> tuple[JsonKey, ...]:
    """Return the keys of a class of facts, in JSON order."""
    if kind not in _KNOWN:
        say = declared(kind)
        shown = (*(name for name in _fields(kind) if name not in say.hidden), *say.also)
        _KNOWN[kind] = tuple(
            JsonKey(name, say.names.get(name, name), name in say.flat, name in say.optional, name in say.blank_is_null)
            for name in shown
        )
    return _KNOWN[kind]


def _fields(kind: type) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return names


def total(kind: type[T], parts: Iterable[object]) -> T:
    """Return a fact whose fields are the sums of the parts' values for the same JSON keys.

    A tuple or list counts by its length.
    """
    sums = dict.fromkeys(_fields(kind), 0)
    for part in parts:
        for member in members(type(part)):
            if member.key in sums:
                value: Any = getattr(part, member.attribute)
                sums[member.key] += value if isinstance(value, int) else len(value)
    return kind(**sums)
