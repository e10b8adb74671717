"""The JSON form of facts: fields by their names, with the exceptions that a class declares.

Every fact is a dataclass. The command line writes JSON from :func:`members`, and the published JSON Schemas are made
from the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")


class AsJson:
    """The differences between the fields of a class of facts and its JSON, in the class attribute ``as_json``.

    ``schema`` is the name of a document (``cachectl/report/1``). ``also`` lists properties to include, ``hidden``
    fields to leave out, ``flat`` fields that are replaced by their own keys, ``optional`` those left out if ``None``,
    ``blank_is_null`` texts that are ``null`` if empty. ``names`` maps attributes to keys.
    """

    # Plain classes, because every program start makes them and making a dataclass takes a millisecond.
    def __init__(
        self,
        schema: str | None = None,
        *,
        also: tuple[str, ...] = (),
        hidden: Container[str] = (),
        flat: Container[str] = (),
        optional: Container[str] = (),
        blank_is_null: Container[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.schema = schema
        self.also = also
        self.hidden = hidden
        self.flat = flat
        self.optional = optional
        self.blank_is_null = blank_is_null
        self.names = {} if names is None else names


class Member:
    """One key of a fact in JSON, and its attribute; a flat one is replaced by the keys of the fact it holds."""

    def __init__(self, attribute: str, declared: AsJson) -> None:
        self.attribute = attribute
        self.key = declared.names.get(attribute, attribute)
        self.flat = attribute in declared.flat
        self.optional = attribute in declared.optional
        self.blank_is_null = attribute in declared.blank_is_null


_AS_IT_IS: Final = AsJson()
#: Cached results of :func:`members`, by class.
_KNOWN: Final[dict[type, tuple[Member, ...]]] = {}


def declared(kind: type) -> AsJson:
    """Return the JSON declaration of a class of facts."""
    found: AsJson = getattr(kind, "as_json", _AS_IT_IS)
    return found


def members(kind: type) -> tuple[Member, ...]:
    """Return the keys of a class of facts, in JSON order."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    say = declared(kind)
    shown = [name for name in _fields(kind) if name not in say.hidden]
    _KNOWN[kind] = tuple(Member(name, say) for name in (*shown, *say.also))
    return _KNOWN[kind]


def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a data class."""
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
                sums[member.key] += _amount(getattr(part, member.attribute))
    return kind(**sums)


def _amount(value: Any) -> int:  # noqa: ANN401 - a number, or a sequence
    return value if isinstance(value, int) else len(value)
