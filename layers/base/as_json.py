"""How a fact is written as JSON: its fields by their names, and what a class declares to be different.

Every fact is a dataclass. The command line writes JSON from :func:`members`, and the documentation publishes JSON
Schemas made from the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")


class AsJson:
    """What JSON shows of a class of facts beside its fields; the class attribute ``as_json`` holds one.

    ``schema`` is the name of a document (``cachectl/report/1``). ``also`` lists properties that JSON shows, ``hidden``
    fields that it does not, ``flat`` fields whose own keys stand in their place, ``optional`` what is left out where it
    is ``None``, ``blank_is_null`` texts that are ``null`` where they are empty. ``names`` maps attributes to keys.
    """

    # Plain classes: every start of the program makes them, and a dataclass takes a millisecond to make.
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
    """One key of a fact in JSON, and the attribute it shows; a flat one has the keys of the fact it holds."""

    def __init__(self, attribute: str, declared: AsJson) -> None:
        self.attribute = attribute
        self.key = declared.names.get(attribute, attribute)
        self.flat = attribute in declared.flat
        self.optional = attribute in declared.optional
        self.blank_is_null = attribute in declared.blank_is_null


_AS_IT_IS: Final = AsJson()
#: What :func:`members` has returned for each class.
_KNOWN: Final[dict[type, tuple[Member, ...]]] = {}


def declared(kind: type) -> AsJson:
    """Return what a class of facts declares about its JSON."""
    found: AsJson = getattr(kind, "as_json", _AS_IT_IS)
    return found


def members(kind: type) -> tuple[Member, ...]:
    """Return the keys of a class of facts, in the order in which JSON has them."""
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
    """Return a fact that has, for each of its fields, the sum of what the parts have by that key in JSON.

    A number counts as it is, a tuple or list by its length.
    """
    sums = dict.fromkeys(_fields(kind), 0)
    for part in parts:
        for member in members(type(part)):
            if member.key in sums:
                sums[member.key] += _amount(getattr(part, member.attribute))
    return kind(**sums)


def _amount(value: Any) -> int:  # noqa: ANN401 - a number, or a sequence
    return value if isinstance(value, int) else len(value)
