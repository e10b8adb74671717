"""The JSON of classes of facts: the keys are the fields, except where a class declares otherwise."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
#: Results of :func:`json_keys`, by class.
_KEYS: dict[type, Mapping[str, str]] = {}


class AsJson(NamedTuple):
    """The differences between the fields of a class of facts and its JSON, which :func:`as_json` declares.

    ``schema`` names a document (``cachectl/report/1``). ``also`` lists properties to include, ``hidden`` fields to
    omit, ``flat`` fields to replace by their own keys, and ``optional`` fields to omit if they are ``None``. ``names``
    maps attributes to keys. ``sums`` are what :func:`total` sums over layers.
    """

    schema: str | None = None
    also: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    flat: Container[str] = ()
    optional: Container[str] = ()
    names: Mapping[str, str] = {}
    sums: tuple[str, ...] = ()


def as_json(schema: str | None = None, **differences: Any) -> Callable[[type[_T]], type[_T]]:  # noqa: ANN401 - fields of AsJson
    """Declare the JSON of a class of facts, by the fields of :class:`AsJson`."""

    def declare(kind: type[_T]) -> type[_T]:
        setattr(kind, "json_form", AsJson(schema, **differences))  # noqa: B010 - no field of the class
        return kind

    return declare


def declared(kind: type) -> AsJson:
    """Return the JSON declaration of a class of facts."""
    declaration: AsJson = getattr(kind, "json_form", AsJson())
    return declaration


def json_keys(kind: Any) -> Mapping[str, str]:  # noqa: ANN401 - a class of facts
    """Return the JSON key of each attribute that is shown, in order."""
    if kind not in _KEYS:
        form = declared(kind)
        shown = (*(name for name in kind.__match_args__ if name not in form.hidden), *form.also)
        _KEYS[kind] = {name: form.names.get(name, name) for name in shown}
    return _KEYS[kind]


def total(document: Any) -> SimpleNamespace:  # noqa: ANN401 - a fact with layers
    """Return the declared sums over a document's layers; a tuple or list counts by its length."""
    sums = dict.fromkeys(declared(type(document)).sums, 0)
    for layer in document.layers:
        for name in sums:
            value = getattr(layer, name)
            sums[name] += value if isinstance(value, int) else len(value)
    return SimpleNamespace(**sums)
